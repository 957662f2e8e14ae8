"""`trimtab.load`: load a trained model from a run, a folder or the Hub, ready for inference."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimtab.checkpoint.export import export_model, read_facts
from trimtab.compress.clustered_file import is_clustered
from trimtab.compress.clustered_model import load_clustered_model
from trimtab.compress.clustered_modules import ClusteredModule
from trimtab.compress.weight_formats import check_stored_formats
from trimtab.errors import DataError, ModelError, as_argument
from trimtab.inference.adapted import load_adapted_model, load_adapter_tokenizer, read_adapter_source
from trimtab.inference.model_kind import model_kind
from trimtab.inference.onnx_generator import load_onnx_model
from trimtab.inference.onnx_model import OnnxModel, is_onnx
from trimtab.model.adapters import adapter_of
from trimtab.model.hub import is_adapter, model_errors_explained
from trimtab.model.load import (
    is_quantized_config,
    is_quantized_model,
    load_config,
    load_model,
    load_tokenizer,
    max_positions,
    newly_initialized,
    resolve_source,
)
from trimtab.tracking.mlflow.registry import best_name, local_source

if TYPE_CHECKING:
    from trimtab.inference.classify import Text
    from trimtab.inference.evaluate import Evaluation
    from trimtab.inference.generate import Prompt


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, with its tokenizer.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        task_name: Its task: "classify", "regress", "causal-lm", "chat", "seq2seq" or "masked-lm".
        facts: The contents of trimtab.json; empty for models that trimtab did not train.
        source: What it was loaded from.
    """

    model: Any
    tokenizer: Any
    task_name: str
    facts: dict[str, Any] = field(default_factory=dict)
    source: str = "the model"

    def errors_explained(self) -> AbstractContextManager[None]:
        """Turn errors of other libraries, raised while the model is used, into ModelErrors."""
        cure = "check its config.json, generation_config.json and tokenizer: they may belong to other weights"
        return model_errors_explained(self.source, cure=cure, done="used")

    def __repr__(self) -> str:
        kind, count = type(self.model).__name__, sum(weight.numel() for weight in self.model.parameters())
        return f"LoadedModel({kind}, task_name={self.task_name!r}, {count:,} parameters, device={str(self.device)!r})"

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = self.model.device
        return device

    @property
    def max_length(self) -> int | None:
        """Maximum number of input tokens: that of training, limited by the model's positions; None if unlimited."""
        settings = (self.facts.get("recipe") or {}).get("data") or {}
        limits = [self.facts.get("max_length") or settings.get("max_length"), max_positions(self.model)]
        return min((limit for limit in limits if limit), default=None)

    @property
    def labels(self) -> list[str]:
        """Labels of a classifier, in the order of its outputs; empty for other tasks."""
        names = self.model.config.id2label if self.task_name == "classify" else {}
        return [str(names[index]) for index in range(len(names))]

    def predict(self, texts: "Sequence[Text]", batch_size: int = 32) -> list[Any]:
        """Predict the label of each text (all labels of a multi-label model), or its number if the model regresses.

        Args:
            texts: The texts; pairs of texts are tuples.
            batch_size: Texts per forward pass.

        Returns:
            One label, tuple of labels or number per text.

        Raises:
            ModelError: The model neither classifies nor regresses.
        """
        from trimtab.inference.classify import classify_texts, regress_texts

        if self.task_name == "regress":
            return list(regress_texts(self, texts, batch_size))
        return [prediction.label for prediction in classify_texts(self, texts, batch_size)]

    def predict_proba(self, texts: "Sequence[Text]", batch_size: int = 32) -> torch.Tensor:
        """Compute the probability of each label for each text.

        Args:
            texts: The texts; pairs of texts are tuples.
            batch_size: Texts per forward pass.

        Returns:
            A tensor of shape [texts, labels]; columns are in the order of `labels`.
        """
        from trimtab.inference.classify import classify_texts

        found = classify_texts(self, texts, batch_size)
        return torch.tensor([list(each.scores.values()) for each in found]).reshape(len(found), len(self.labels))

    def generate(
        self,
        prompts: "Prompt | Sequence[Prompt]",
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_p: float | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        stream: bool = False,
    ) -> Any:
        """Generate text.

        Args:
            prompts: A text, or for a chat model a conversation: a list of messages, each with `role` and `content`, or
                a dict with `messages` and `tools`. Several prompts are passed as a list.
            max_new_tokens: Maximum number of tokens to generate.
            temperature: 0 is greedy decoding; higher values sample.
            top_p: Sample only from the most likely tokens whose probabilities add up to this value; by default the
                value of the model's generation config.
            stop: Texts at which generation stops; the output ends before them.
            seed: Seed for sampling. The global random state is restored.
            stream: Whether to yield the text of a single prompt piece by piece while it is generated.

        Returns:
            The text for a single prompt; a list for a list of prompts; with `stream`, an iterator of pieces.
        """
        from trimtab.inference.generate import generate_texts, is_one_prompt
        from trimtab.inference.stream import stream_text

        options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "stop": stop, "seed": seed}
        is_one = is_one_prompt(prompts)
        several: Any = [prompts] if is_one else prompts
        if stream:
            if len(several) != 1:
                raise DataError(f"stream=True with {len(several)} prompts", "pass one prompt, or stream=False")
            return stream_text(self, several[0], max_new_tokens, **options)
        texts = generate_texts(self, several, max_new_tokens, **options)
        return texts[0] if is_one else texts

    def evaluate(
        self,
        data: Any,
        *,
        text: str | Sequence[str] | None = None,
        label: str | Sequence[str] | None = None,
        num_rows: int | None = None,
    ) -> "Evaluation":
        """Evaluate the model on labelled rows.

        Args:
            data: File, folder, glob or Hub name, or rows: a table, or a list of dicts.
            text: Text column; by default the one used in training, or guessed.
            label: Label column; by default the one used in training, or guessed.
            num_rows: Evaluate at most this number of rows, chosen at random.

        Returns:
            The metrics and the number of rows.
        """
        from trimtab.inference.evaluate import evaluate
        from trimtab.inference.held_out import read_held_out

        return evaluate(self, read_held_out(self, data, text=text, label=label, num_rows=num_rows))

    def save(self, folder: str | Path) -> Path:
        """Write model and tokenizer, or only the adapter if there is one, as a Hugging Face folder, atomically.

        Args:
            folder: The folder to write.

        Returns:
            The folder.
        """
        has_clusters = any(isinstance(module, ClusteredModule) for module in self.model.modules())
        is_quantized = is_quantized_model(self.model) and adapter_of(self.model) is None
        if has_clusters or is_quantized or isinstance(self.model, OnnxModel):
            raise ModelError("a clustered, quantized or ONNX model cannot be saved again", "copy its folder")
        facts = {name: value for name, value in self.facts.items() if name != "trimtab"}
        return export_model(folder, self.model, self.tokenizer, card=facts | {"task": self.task_name})


def load(
    source: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    decode: str = "once",
) -> LoadedModel:
    """Load a model and its tokenizer, ready for inference.

    Args:
        source: A run folder (its best model is loaded), the folder of a model or adapter, a `.gguf` file, a Hub name,
            or a model on a tracking server: best:EXPERIMENT, models:/NAME@best. The base of an adapter is loaded from
            the path that it was trained with.
        device: The device of the model; by default an accelerator if there is one, else the CPU.
        dtype: The dtype of the weights; for an adapter, of its base. By default fp32, or 4 bits for an adapter that was
            trained on a 4-bit base. A quantized model is always loaded in its own format.
        trust_remote_code: Whether Python code in the model's folder may run.
        decode: For a clustered model: "once" decodes all weights now (fast); "on-use" decodes each weight in each
            forward pass (less memory).

    Returns:
        The model in eval mode on its device, with its tokenizer and its task.

    Raises:
        ModelError: The model does not exist, or has no head for a task.

    Example:
        loaded = load("runs/reviews/first")
        loaded.predict(["a film that stays with you"])
    """
    name = local_source(str(source))
    folder = resolve_source(name, adapters=True)
    place = Path(folder).parent if folder.endswith(".gguf") else Path(folder)
    facts = read_facts(place) if place.is_dir() else {}
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    request = _Request(name, folder, torch.device(device), dtype, trust_remote_code, decode, facts.get("task"))
    if decode != "once" and not is_clustered(folder):
        raise ModelError(f"decode={decode!r} is for clustered models, and {name} is not one", "leave decode out")
    load_form = next(load_form for is_form, load_form in _FORMS if is_form(folder))
    with model_errors_explained(name, folder=folder):
        model, tokenizer, task_name = load_form(request)
        loaded = LoadedModel(model, tokenizer, facts.get("task", task_name), facts, name)
        _ = loaded.labels, loaded.max_length, loaded.device  # read from its files
    return loaded


def best_model(experiment: str, metric: str | None = None, *, uri: str | None = None, **options: Any) -> LoadedModel:
    """Load the best model of an experiment from its tracking server, ready for inference.

    Args:
        experiment: Name of the experiment.
        metric: Metric to rank by, such as "accuracy"; by default the one that selected the models.
        uri: Tracking URI; by default MLFLOW_TRACKING_URI, or the store in `runs`.
        options: Other arguments of `load`.

    Returns:
        The model, as from `load`.

    Raises:
        RecipeError: The experiment or metric does not exist; the message lists similar names.
    """
    return load(local_source(best_name(experiment, metric), uri), **options)


@dataclass(frozen=True)
class _Request:
    """Which model to load, and how. `name` was resolved to `folder`; `task` is the task of its training."""

    name: str
    folder: str
    device: torch.device
    dtype: torch.dtype | None
    trust_remote_code: bool
    decode: str
    task: str | None

    @property
    def config(self) -> Any:
        return load_config(self.name, trust_remote_code=self.trust_remote_code)

    @property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.name, trust_remote_code=self.trust_remote_code)


_Found = tuple[Any, Any, str]  # model, tokenizer, name of the task


def _load_adapter(request: _Request) -> _Found:
    trusted = {"trust_remote_code": request.trust_remote_code}
    adapter = read_adapter_source(request.folder, **trusted)
    tokenizer = load_adapter_tokenizer(adapter, **trusted)
    model: Any = load_adapted_model(adapter, tokenizer, request.device, dtype=request.dtype, **trusted)
    model.to(request.device)
    return model, tokenizer, task_name_of(adapter.kind, model.config, tokenizer)


def _load_clustered(request: _Request) -> _Found:
    config, tokenizer = request.config, request.tokenizer
    kind = model_kind(request.name, config, request.task)
    model: Any = load_clustered_model(
        request.folder,
        kind,
        dtype=request.dtype or torch.float32,
        decode=request.decode,
        trust_remote_code=request.trust_remote_code,
    )
    return model.to(request.device), tokenizer, task_name_of(kind, config, tokenizer)


def _load_onnx(request: _Request) -> _Found:
    model, tokenizer = load_onnx_model(request.folder), request.tokenizer
    return model, tokenizer, task_name_of(model_kind(request.name, model.config, request.task), model.config, tokenizer)


def _load_whole(request: _Request) -> _Found:
    name, config, tokenizer = request.name, request.config, request.tokenizer
    kind = model_kind(name, config, request.task)
    task_name = task_name_of(kind, config, tokenizer)
    form: dict[str, Any] = {"dtype": request.dtype or torch.float32}
    if is_quantized_config(config) and not name.endswith(".gguf"):
        if request.dtype is not None:
            raise ModelError(f"{name} is quantized and cannot be loaded in {request.dtype}", "leave dtype out")
        check_stored_formats(name, config.quantization_config, request.device)
        form = {"dtype": None, "device": request.device}
    model: Any = load_model(name, kind, {}, tokenizer, trust_remote_code=request.trust_remote_code, **form)
    if newly_initialized(model):
        parts = ", ".join(sorted(newly_initialized(model))[:2])
        raise ModelError(
            f"{name} is not trained for {task_name}: it has no weights for {parts}",
            f"trimtab train --model {as_argument(name)} --data FILE",
        )
    if not is_quantized_model(model):  # loaded to its device
        model.to(request.device)
    return model, tokenizer, task_name


# How to recognize each stored form of a model, and the function that loads it.
_FORMS: tuple[tuple[Callable[[str], bool], Callable[[_Request], _Found]], ...] = (
    (is_adapter, _load_adapter),
    (is_clustered, _load_clustered),
    (is_onnx, _load_onnx),
    (lambda _: True, _load_whole),
)


def task_name_of(kind: str, config: Any, tokenizer: Any) -> str:
    """Return the task of a model without a run, from its kind (as in `load_model`), its head and its chat template."""
    if kind == "causal-lm":
        return "chat" if tokenizer.chat_template else "causal-lm"
    if kind == "sequence-classification":
        regresses = config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1)
        return "regress" if regresses else "classify"
    return "seq2seq" if kind == "seq2seq-lm" else "masked-lm"
