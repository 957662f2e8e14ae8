"""A folder with a model, as Hugging Face writes it, becomes one that MLflow loads and serves.

MLflow's own loader is asked for wherever it answers as the model was trained. Where it would not (encoder-decoders have
no pipeline any more; an adapter may bring a head, tokens or 4 bits that its base does not have), MLflow serves the
model through trimtab, and a note says so. Weights are linked, not copied: what uploads the folder reads them once.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trimtab.checkpoint.export import FACTS, read_facts
from trimtab.errors import ModelError, UserError
from trimtab.model.hub import is_adapter, quiet_transformers
from trimtab.model.load import load_config, load_tokenizer, max_positions

MODEL = "model"  # the folder inside of an MLflow model that holds the Hugging Face files
_BASE, _TOKENIZER = "base", "components/tokenizer"  # where MLflow's loader looks for them
_OWN_LOADER = "trimtab.inference.served"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_PIPELINES = {
    "classify": "text-classification",
    "regress": "text-classification",
    "causal-lm": "text-generation",
    "chat": "llm/v1/chat",
    "masked-lm": "fill-mask",
}
_AUTO_CLASSES = {"causal-lm": "AutoModelForCausalLM", "sequence-classification": "AutoModelForSequenceClassification"}
_EXAMPLE = "a short text"
_NEW_TOKENS = 100  # that a served model writes, unless the request says otherwise


@dataclass(frozen=True)
class Kind:
    """What is known of a folder with a model before anything is loaded.

    Args:
        folder: Where it is.
        task: "classify", "regress", "causal-lm", "chat", "seq2seq" or "masked-lm".
        facts: What trimtab wrote about it.
        base: Of an adapter, the model that it belongs to: an absolute folder, or a name on the hub.
        obstacle: Why MLflow's own loader would not give the model that was trained; None where it does.
        brings_head: Whether an adapter has a head of other labels than its base.
    """

    folder: Path
    task: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    obstacle: str | None = None
    brings_head: bool = False

    @property
    def takes_pairs(self) -> bool:
        """Whether it was trained on pairs of texts."""
        return isinstance((self.facts.get("columns") or {}).get("text"), list)


def kind_of_folder(folder: Path) -> Kind:
    """Look at a folder with a model or an adapter; nothing but small files is read.

    Raises:
        UserError: If there is no such model, or it is an adapter whose base is gone.
    """
    facts = read_facts(folder)
    base: str | None = None
    if is_adapter(folder):
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = settings.get("base_model_name_or_path") or facts.get("base")
        if base is None:
            raise ModelError(f"{folder} is an adapter for a model that was made from a config and not kept")
        if Path(base).is_dir():
            base = str(Path(base).absolute())
    task = facts.get("task") or _task_of(folder if base is None else Path(base))
    kind = Kind(folder, task, facts, base)
    if base is None:
        return replace(kind, obstacle=_obstacle(kind))
    return _adapter_kind(kind)


def write_mlflow_folder(kind: Kind, place: Path, **about: Any) -> str | None:
    """Write a model so that `mlflow.pyfunc` (and `mlflow.transformers`, where it can) loads it from `place`.

    Args:
        kind: The model.
        place: A folder that is not there yet.
        about: For MLflow's `Model`: run_id, model_id and the like.

    Returns:
        What cannot be done with it by MLflow alone, and what can; None if there is no such thing.
    """
    from mlflow.models import Model

    mlflow_model = Model(**about)
    with quiet_mlflow(), quiet_transformers():
        if kind.obstacle is None and kind.base is None:
            _write_pipeline(kind, place, mlflow_model)
        else:
            _write_pyfunc(kind, place, mlflow_model)
        _link_files(kind.folder, place / MODEL, kind.base)
        if kind.task in ("causal-lm", "chat") and kind.obstacle is None:
            _leave_prompts_open(kind, place / _TOKENIZER)
    if kind.obstacle is None:
        return None
    cure = "mlflow.pyfunc.load_model and mlflow models serve (where trimtab is installed), or trimtab.best_model"
    return f"mlflow.transformers.load_model cannot be used: {kind.obstacle}; use {cure}"


def write_plain_folder(folder: Path, place: Path, **about: Any) -> None:
    """Write the files of a model that MLflow can keep, but neither load nor serve; `about` as above."""
    from mlflow.models import Model

    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    _link_files(folder, place / MODEL, None)
    Model(**about).save(str(place / "MLmodel"))


@contextmanager
def quiet_mlflow() -> Iterator[None]:
    """Inside, MLflow and what it stands on say nothing below an error: hints are for those who call it themselves."""
    logger = logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _task_of(folder: Path) -> str:
    config = load_config(str(folder))
    name = next(iter(getattr(config, "architectures", None) or []), "")
    if name.endswith("ForSequenceClassification"):
        return "regress" if config.problem_type == "regression" or config.num_labels == 1 else "classify"
    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    return "masked-lm" if name.endswith("ForMaskedLM") else "causal-lm"


def _obstacle(kind: Kind) -> str | None:
    if kind.task not in _PIPELINES:
        return f"transformers has no pipeline for {kind.task}"
    config = load_config(str(kind.folder))
    if getattr(config, "problem_type", None) == "multi_label_classification":
        return "its pipeline gives one label where the model gives several"
    return None


def _adapter_kind(kind: Kind) -> Kind:
    """What stands between an adapter and MLflow's loader, which takes the base as it is and lays the adapter on it."""
    facts, base = kind.facts, str(kind.base)
    head = facts.get("head") or {}
    if kind.task not in _PIPELINES or facts.get("kind") not in _AUTO_CLASSES:
        return replace(kind, obstacle=f"it has no way to load an adapter for {kind.task}")
    if (facts.get("adapter") or {}).get("nf4"):
        return replace(
            kind, obstacle="it would lay the adapter on a base that is not quantized, which answers otherwise"
        )
    if head.get("problem_type") == "multi_label_classification":
        return replace(kind, obstacle="its pipeline gives one label where the model gives several")
    try:
        config = load_config(base)
    except UserError as error:
        return replace(kind, obstacle=f"the base cannot be read from here: {error.problem}")
    with quiet_transformers():
        num_tokens = len(load_tokenizer(str(kind.folder)))
    if num_tokens > getattr(config.get_text_config(), "vocab_size", num_tokens):
        return replace(kind, obstacle="the adapter's tokenizer has more tokens than its base")
    labels = {str(number): label for number, label in (getattr(config, "id2label", None) or {}).items()}
    brings_head = bool(head) and labels != {str(number): label for number, label in head["id2label"].items()}
    if brings_head and not any(Path(base).glob("*.safetensors")):
        return replace(kind, obstacle=f"it would load {base} without the labels of the adapter")
    return replace(kind, brings_head=brings_head)


def _write_pipeline(kind: Kind, place: Path, mlflow_model: Any) -> None:
    """A whole model, in MLflow's own way; it copies what it is given, so the weights come afterwards."""
    import mlflow.transformers

    light = place.with_name(f"{place.name}-without-weights")
    shutil.copytree(kind.folder, light, ignore=lambda _, names: [n for n in names if n.endswith(_WEIGHTS)])
    chats = kind.task == "chat"
    mlflow.transformers.save_model(
        str(light),
        str(place),
        task=_PIPELINES[kind.task],
        mlflow_model=mlflow_model,
        signature=None if chats else _signature(kind),
        input_example=_example(kind),
        pip_requirements=_requirements(kind),
        model_config=_settings(kind),
    )
    shutil.rmtree(light)
    mlflow_model.flavors["transformers"]["source_model_name"] = str(kind.folder.absolute())
    mlflow_model.save(str(place / "MLmodel"))
    (place / "LICENSE.txt").unlink(missing_ok=True)  # it says that a local folder has no licence on the hub


def _write_pyfunc(kind: Kind, place: Path, mlflow_model: Any) -> None:
    """An adapter, or a model that MLflow cannot load by itself."""
    import mlflow.pyfunc
    import transformers

    by_mlflow = kind.obstacle is None
    mlflow.pyfunc.save_model(
        str(place),
        loader_module="mlflow.transformers" if by_mlflow else _OWN_LOADER,
        mlflow_model=mlflow_model,
        signature=_signature(kind),
        input_example=_example(kind),
        pip_requirements=_requirements(kind),
        model_config=_settings(kind) if by_mlflow else None,
    )
    for name in ("uv.lock", "pyproject.toml"):  # MLflow takes those of the folder in which it happens to run
        (place / name).unlink(missing_ok=True)
    if by_mlflow:
        mlflow_model.add_flavor("transformers", transformers_version=transformers.__version__, **_adapter_flavor(kind))
        load_tokenizer(str(kind.folder)).save_pretrained(str(place / _TOKENIZER))
        if kind.brings_head:
            _write_base(kind, place / _BASE)
    if by_mlflow and kind.task == "chat":
        mlflow_model.metadata = {"task": _PIPELINES["chat"]}
    mlflow_model.save(str(place / "MLmodel"))


def _leave_prompts_open(kind: Kind, place: Path) -> None:
    """Write the tokenizer that MLflow's pipeline uses so that it asks as the model was trained.

    A pipeline lets the tokenizer add its special tokens. One that ends every text would end prompts, too, and nothing
    would be written after them; and the messages of a chat have theirs already, from the template.
    """
    from tokenizers import processors

    tokenizer = load_tokenizer(str(kind.folder))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    wanted = bare if kind.task == "chat" else ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    if backend is None or ids == wanted:
        return
    first = [(tokenizer.convert_ids_to_tokens(number), number) for number in wanted[: len(wanted) - len(bare)]]
    single = " ".join([*(token for token, _ in first), "$A"])
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=first)
    tokenizer.save_pretrained(str(place))


def _adapter_flavor(kind: Kind) -> dict[str, Any]:
    """What MLflow's loader reads: the base, which is named and not copied, and the adapter beside it."""
    chats = kind.task == "chat"
    return {
        "code": None,
        "task": "text-generation" if chats else _PIPELINES[kind.task],
        "instance_type": "Pipeline",
        "pipeline_model_type": _AUTO_CLASSES[kind.facts["kind"]],
        "source_model_name": kind.base,
        "peft_adaptor": MODEL,
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        "torch_dtype": None,
        **({"model_binary": _BASE} if kind.brings_head else {"local_base_model_path": kind.base}),
        **({"inference_task": _PIPELINES["chat"]} if chats else {}),
    }


def _write_base(kind: Kind, place: Path) -> None:
    """The base with the head of the adapter: its config, and an index that says in which of its own files weights are.

    MLflow's loader takes a base as it is, and cannot be told how many labels its head should have.
    """
    from safetensors import safe_open

    base = Path(str(kind.base))
    config, head = load_config(str(base)), kind.facts["head"]
    config.num_labels = head["num_labels"]  # first: it resets the names where the number changes
    config.id2label = {int(number): label for number, label in head["id2label"].items()}
    config.label2id, config.problem_type = head["label2id"], head.get("problem_type")
    config.save_pretrained(place)
    files: dict[str, str] = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), str(path.resolve()))
    index = {"metadata": {}, "weight_map": files}
    (place / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _link_files(folder: Path, place: Path, base: str | None) -> None:
    place.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and not (place / path.name).exists():
            (place / path.name).symlink_to(path.resolve())
    config = place / "adapter_config.json"
    if base is not None and config.exists():  # a relative folder means nothing elsewhere
        settings = json.loads(config.read_text(encoding="utf-8"))
        config.unlink()
        config.write_text(json.dumps(settings | {"base_model_name_or_path": base}, indent=2), encoding="utf-8")


def _signature(kind: Kind) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA
    from mlflow.types.schema import ColSpec, Schema

    if kind.task == "chat" and kind.obstacle is None:
        return ModelSignature(inputs=CHAT_MODEL_INPUT_SCHEMA, outputs=CHAT_MODEL_OUTPUT_SCHEMA)
    text = ColSpec("string")
    inputs: list[Any] = [ColSpec("string", "text"), ColSpec("string", "text_pair")] if kind.takes_pairs else [text]
    if kind.task in ("classify", "regress"):
        return ModelSignature(Schema(inputs), Schema([ColSpec("string", "label"), ColSpec("double", "score")]))
    return ModelSignature(inputs=Schema(inputs), outputs=Schema([text]))


def _example(kind: Kind) -> Any:
    if kind.task == "chat" and kind.obstacle is None:
        return {"messages": [{"role": "user", "content": _EXAMPLE}]}
    if kind.takes_pairs:
        return {"text": _EXAMPLE, "text_pair": "another text beside it"}
    if kind.task == "masked-lm":
        return [f"a short text with one {load_tokenizer(str(kind.folder)).mask_token}"]
    return [_EXAMPLE]


def _settings(kind: Kind) -> dict[str, Any] | None:
    """What MLflow hands to the pipeline of a served model."""
    positions = max_positions(load_config(kind.base or str(kind.folder)))
    longest = min((limit for limit in (kind.facts.get("max_length"), positions) if limit), default=None)
    if kind.task in ("classify", "regress"):
        return {"truncation": True} | ({} if longest is None else {"max_length": longest})
    new_tokens = _NEW_TOKENS if positions is None else min(_NEW_TOKENS, positions // 2)
    return {"causal-lm": {"max_new_tokens": new_tokens}, "chat": {"max_tokens": new_tokens}}.get(kind.task)


def _requirements(kind: Kind) -> list[str]:
    """What has to be installed to serve it, as it is here; to find out by loading it would take a second process."""
    names = ["mlflow", "transformers", "torch", "accelerate"]
    if kind.base is not None:
        names.append("peft")
        names += ["bitsandbytes"] if (kind.facts.get("adapter") or {}).get("nf4") else []
    if kind.obstacle is not None:
        names.append("trimtab")
    found = {}
    for name in names:
        try:
            found[name] = version(name).partition("+")[0]  # a build such as +cpu is no release
        except PackageNotFoundError:
            continue
    return [f"{name}=={number}" for name, number in found.items()]


def fingerprint(folder: Path) -> str:
    """Tells whether a folder holds the model that was logged before: its facts, and the sizes of its files."""
    import hashlib

    sizes = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    facts = (folder / FACTS).read_bytes() if (folder / FACTS).is_file() else b""
    return hashlib.sha256(json.dumps(sizes).encode() + os.linesep.encode() + facts).hexdigest()
