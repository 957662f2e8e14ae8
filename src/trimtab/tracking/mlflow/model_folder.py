"""Convert a Hugging Face folder into a folder that MLflow loads and serves.

MLflow's own loader is used if it reproduces the trained model. If it does not (there are no pipelines for
encoder-decoders; an adapter may add a head or tokens to its base, or need a quantized base), MLflow serves the model
through trimtab, and a note says so. Weights are symlinked, so that they are read once, during the upload.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trimtab.checkpoint.export import FACTS, read_facts, read_quantization
from trimtab.errors import ModelError, UserError
from trimtab.log import quiet_package
from trimtab.model.hub import adapter_config_path, is_adapter, is_side_network, quiet_transformers
from trimtab.model.load import load_config, load_tokenizer, max_positions
from trimtab.model.quantization import Quantization

MODEL = "model"  # subfolder of an MLflow model with the Hugging Face files
_BASE, _TOKENIZER = "base", "components/tokenizer"  # subfolders that MLflow's loader reads
_OWN_LOADER = "trimtab.inference.served"  # stored in logged models: never rename that module
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_PIPELINES = {
    "classify": "text-classification",
    "regress": "text-classification",
    "causal-lm": "text-generation",
    "chat": "llm/v1/chat",
    "masked-lm": "fill-mask",
}
_AUTO_CLASSES = {"causal-lm": "AutoModelForCausalLM", "sequence-classification": "AutoModelForSequenceClassification"}
_MULTI_LABEL = "multi_label_classification"
_SEVERAL_LABELS = "its pipeline returns one label where the model has several"
_EXAMPLE = "a short text"
_NEW_TOKENS = 100  # number of tokens that a served model generates unless the request sets it


@dataclass(frozen=True)
class SourceModel:
    """A folder with a model or adapter, as known before anything is loaded.

    Attributes:
        folder: The folder.
        task: "classify", "regress", "causal-lm", "chat", "seq2seq" or "masked-lm".
        facts: Content of its `trimtab.json`.
        base: Base model of an adapter: an absolute path, or a name on the hub.
        obstacle: Why MLflow's own loader would not reproduce the trained model; None if it does.
        brings_head: Whether the labels of an adapter differ from those of its base.
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

    @property
    def quantization(self) -> Quantization | None:
        """How the base was quantized while the adapter was trained; None if it was not, or if it is not an adapter."""
        return read_quantization(self.facts)


def inspect_model(folder: Path) -> SourceModel:
    """Read the small files of a model or adapter.

    Raises:
        UserError: There is no model, or it is an adapter whose base is unknown.
    """
    facts = read_facts(folder)
    if not is_adapter(folder):
        task = facts.get("task") or _task_of(str(folder))
        return SourceModel(folder, task, facts, obstacle=_obstacle(folder, task))
    settings = json.loads(adapter_config_path(folder).read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path") or facts.get("base")
    if base is None:
        raise ModelError(f"{folder} is an adapter for a model that was created from a config and not saved")
    if Path(base).is_dir():
        base = str(Path(base).absolute())
    source = SourceModel(folder, facts.get("task") or _task_of(base), facts, base)
    obstacle, brings_head = _adapter_obstacle(source)
    return SourceModel(folder, source.task, facts, base, obstacle, brings_head)


def write_mlflow_folder(source: SourceModel, target: Path, **ids: Any) -> str | None:
    """Write a model so that `mlflow.pyfunc` (and, where possible, `mlflow.transformers`) loads it from `target`.

    Args:
        source: The model.
        target: A folder that does not exist yet.
        ids: Arguments for MLflow's `Model`, such as run_id and model_id.

    Returns:
        A note for the user if MLflow needs trimtab to load the model; None if it does not.
    """
    from mlflow.models import Model

    mlflow_model = Model(**ids)
    with quiet_package("mlflow"), quiet_transformers():
        if source.obstacle is None and source.base is None:
            _write_pipeline(source, target, mlflow_model)
        else:
            _write_pyfunc(source, target, mlflow_model)
        _link_files(source.folder, target / MODEL, source.base)
        if source.task in ("causal-lm", "chat") and source.obstacle is None:
            _write_prompt_tokenizer(source, target / _TOKENIZER)
    if source.obstacle is None:
        return None
    cure = "mlflow.pyfunc.load_model and mlflow models serve (where trimtab is installed), or trimtab.best_model"
    return f"mlflow.transformers.load_model cannot be used: {source.obstacle}; use {cure}"


def write_plain_folder(folder: Path, target: Path, **ids: Any) -> None:
    """Write the files of a model that MLflow can store, but neither load nor serve; `ids` as above."""
    from mlflow.models import Model

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    _link_files(folder, target / MODEL, None)
    Model(**ids).save(str(target / "MLmodel"))


def _task_of(name: str) -> str:
    config = load_config(name)
    architecture = next(iter(getattr(config, "architectures", None) or []), "")
    if architecture.endswith("ForSequenceClassification"):
        return "regress" if config.problem_type == "regression" or config.num_labels == 1 else "classify"
    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    return "masked-lm" if architecture.endswith("ForMaskedLM") else "causal-lm"


def _obstacle(folder: Path, task: str) -> str | None:
    if task not in _PIPELINES:
        return f"transformers has no pipeline for {task}"
    return _SEVERAL_LABELS if getattr(load_config(str(folder)), "problem_type", None) == _MULTI_LABEL else None


def _adapter_obstacle(source: SourceModel) -> tuple[str | None, bool]:
    """Return the obstacle and `brings_head` of an adapter. MLflow's loader applies it to the unchanged base."""
    facts, base = source.facts, str(source.base)
    head = facts.get("head") or {}
    if is_side_network(source.folder):
        return "it cannot load side networks", False
    if json.loads(adapter_config_path(source.folder).read_text(encoding="utf-8")).get("num_virtual_tokens"):
        return "virtual tokens are not tested with it", False
    if source.task not in _PIPELINES or facts.get("kind") not in _AUTO_CLASSES:
        return f"it cannot load an adapter for {source.task}", False
    if source.quantization is not None:
        return "it would apply the adapter to a base that is not quantized, with other results", False
    if head.get("problem_type") == _MULTI_LABEL:
        return _SEVERAL_LABELS, False
    try:
        config = load_config(base)
    except UserError as error:
        return f"the base cannot be read: {error.problem}", False
    with quiet_transformers():
        num_tokens = len(load_tokenizer(str(source.folder)))
    if num_tokens > getattr(config.get_text_config(), "vocab_size", num_tokens):
        return "the adapter's tokenizer has more tokens than its base", False
    labels = {str(number): label for number, label in (getattr(config, "id2label", None) or {}).items()}
    brings_head = bool(head) and labels != {str(number): label for number, label in head["id2label"].items()}
    if brings_head and not any(Path(base).glob("*.safetensors")):
        return f"it would load {base} without the labels of the adapter", False
    return None, brings_head


def _write_pipeline(source: SourceModel, target: Path, mlflow_model: Any) -> None:
    """Save a whole model with MLflow's transformers flavour, which copies files; so weights are linked afterwards."""
    import mlflow.transformers

    light = target.with_name(f"{target.name}-without-weights")
    shutil.copytree(source.folder, light, ignore=shutil.ignore_patterns(*(f"*{suffix}" for suffix in _WEIGHTS)))
    mlflow.transformers.save_model(
        str(light),
        str(target),
        task=_PIPELINES[source.task],
        mlflow_model=mlflow_model,
        signature=None if source.task == "chat" else _signature(source),
        input_example=_example(source),
        pip_requirements=_requirements(source),
        model_config=_pipeline_settings(source),
    )
    shutil.rmtree(light)
    mlflow_model.flavors["transformers"]["source_model_name"] = str(source.folder.absolute())
    mlflow_model.save(str(target / "MLmodel"))
    (target / "LICENSE.txt").unlink(missing_ok=True)  # states that a local folder has no licence on the hub


def _write_pyfunc(source: SourceModel, target: Path, mlflow_model: Any) -> None:
    """Save an adapter, or a model that MLflow cannot load by itself."""
    import mlflow.pyfunc
    import transformers

    by_mlflow = source.obstacle is None
    mlflow.pyfunc.save_model(
        str(target),
        loader_module="mlflow.transformers" if by_mlflow else _OWN_LOADER,
        mlflow_model=mlflow_model,
        signature=_signature(source),
        input_example=_example(source),
        pip_requirements=_requirements(source),
        model_config=_pipeline_settings(source) if by_mlflow else None,
    )
    for name in ("uv.lock", "pyproject.toml"):  # MLflow would copy the files of the current directory
        (target / name).unlink(missing_ok=True)
    if by_mlflow:
        flavor = _adapter_flavor(source)
        mlflow_model.add_flavor("transformers", transformers_version=transformers.__version__, **flavor)
        load_tokenizer(str(source.folder)).save_pretrained(str(target / _TOKENIZER))
        if source.brings_head:
            _write_base(source, target / _BASE)
        if source.task == "chat":
            mlflow_model.metadata = {"task": _PIPELINES["chat"]}
    mlflow_model.save(str(target / "MLmodel"))


def _write_prompt_tokenizer(source: SourceModel, target: Path) -> None:
    """Write the tokenizer of MLflow's pipeline so that it encodes prompts as in training.

    A pipeline adds special tokens. A tokenizer that appends EOS would end each prompt, so that nothing is generated;
    and chat messages already have their special tokens from the template.
    """
    from tokenizers import processors

    tokenizer = load_tokenizer(str(source.folder))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    wanted = bare if source.task == "chat" else ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    if backend is None or ids == wanted:
        return
    first = [(tokenizer.convert_ids_to_tokens(number), number) for number in wanted[: len(wanted) - len(bare)]]
    single = " ".join([*(token for token, _ in first), "$A"])
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=first)
    tokenizer.save_pretrained(str(target))


def _adapter_flavor(source: SourceModel) -> dict[str, Any]:
    """Return what MLflow's loader reads: the base, which is named and not copied, and the adapter."""
    is_chat = source.task == "chat"
    return {
        "code": None,
        "task": "text-generation" if is_chat else _PIPELINES[source.task],
        "instance_type": "Pipeline",
        "pipeline_model_type": _AUTO_CLASSES[source.facts["kind"]],
        "source_model_name": source.base,
        "peft_adaptor": MODEL,
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        "torch_dtype": None,
        **({"model_binary": _BASE} if source.brings_head else {"local_base_model_path": source.base}),
        **({"inference_task": _PIPELINES["chat"]} if is_chat else {}),
    }


def _write_base(source: SourceModel, target: Path) -> None:
    """Write a base with the labels of the adapter: a config, and an index that refers to the base's own weight files.

    MLflow's loader uses the base unchanged, and has no argument for the number of labels.
    """
    from safetensors import safe_open

    base = Path(str(source.base))
    config, head = load_config(str(base)), source.facts["head"]
    config.num_labels = head["num_labels"]  # first: setting it resets the label names
    config.id2label = {int(number): label for number, label in head["id2label"].items()}
    config.label2id, config.problem_type = head["label2id"], head.get("problem_type")
    config.save_pretrained(target)
    files: dict[str, str] = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), str(path.resolve()))
    index = {"metadata": {}, "weight_map": files}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _link_files(folder: Path, target: Path, base: str | None) -> None:
    target.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and not (target / path.name).exists():
            (target / path.name).symlink_to(path.resolve())
    config = adapter_config_path(target)
    if base is not None and config.exists():  # make a relative path of the base absolute
        settings = json.loads(config.read_text(encoding="utf-8"))
        config.unlink()
        config.write_text(json.dumps(settings | {"base_model_name_or_path": base}, indent=2), encoding="utf-8")


def _signature(source: SourceModel) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA
    from mlflow.types.schema import ColSpec, Schema

    if source.task == "chat" and source.obstacle is None:
        return ModelSignature(inputs=CHAT_MODEL_INPUT_SCHEMA, outputs=CHAT_MODEL_OUTPUT_SCHEMA)
    text = ColSpec("string")
    inputs: list[Any] = [ColSpec("string", "text"), ColSpec("string", "text_pair")] if source.takes_pairs else [text]
    if source.task in ("classify", "regress"):
        return ModelSignature(Schema(inputs), Schema([ColSpec("string", "label"), ColSpec("double", "score")]))
    return ModelSignature(inputs=Schema(inputs), outputs=Schema([text]))


def _example(source: SourceModel) -> Any:
    if source.task == "chat" and source.obstacle is None:
        return {"messages": [{"role": "user", "content": _EXAMPLE}]}
    if source.takes_pairs:
        return {"text": _EXAMPLE, "text_pair": "another text"}
    if source.task == "masked-lm":
        return [f"a short text with one {load_tokenizer(str(source.folder)).mask_token}"]
    return [_EXAMPLE]


def _pipeline_settings(source: SourceModel) -> dict[str, Any] | None:
    """Return the arguments that MLflow passes to the pipeline of a served model."""
    positions = max_positions(load_config(source.base or str(source.folder)))
    longest = min((limit for limit in (source.facts.get("max_length"), positions) if limit), default=None)
    if source.task in ("classify", "regress"):
        return {"truncation": True} | ({} if longest is None else {"max_length": longest})
    new_tokens = _NEW_TOKENS if positions is None else min(_NEW_TOKENS, positions // 2)
    return {"causal-lm": {"max_new_tokens": new_tokens}, "chat": {"max_tokens": new_tokens}}.get(source.task)


def _requirements(source: SourceModel) -> list[str]:
    """Pin the installed versions; MLflow would find them by loading the model in another process."""
    names = ["mlflow", "transformers", "torch", "accelerate"]
    names += [] if source.base is None else ["peft"]
    names += [source.quantization.package] if source.quantization and source.quantization.package else []
    names += [] if source.obstacle is None else ["trimtab"]
    pinned = []
    for name in names:
        try:
            pinned.append(f"{name}=={version(name).partition('+')[0]}")  # PyPI has no local versions such as +cpu
        except PackageNotFoundError:
            continue
    return pinned


def fingerprint(folder: Path) -> str:
    """Identify a model by its `trimtab.json` and the sizes of its files."""
    sizes = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    facts = (folder / FACTS).read_bytes() if (folder / FACTS).is_file() else b""
    return hashlib.sha256(json.dumps(sizes).encode() + os.linesep.encode() + facts).hexdigest()
