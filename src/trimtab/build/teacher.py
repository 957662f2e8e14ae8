"""The teacher of a recipe with a `distill` section, and the loss of its student."""

import hashlib
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from trimtab.build.data import texts_of
from trimtab.build.parts import Data, Loaded, Tokens
from trimtab.build.teacher_outputs import TeacherOutputs, build_outputs
from trimtab.checkpoint.tensor_checksum import checksums_of
from trimtab.compress.layer_cut import cut_layers
from trimtab.engine.engine import Engine
from trimtab.errors import CheckpointError, ModelError, RecipeError
from trimtab.inference.adapted import read_adapter_source
from trimtab.inference.load import load
from trimtab.log import say
from trimtab.model.attention_kernels import use_attention
from trimtab.model.distillation import DistillationLoss, DistillTerms, LayerTerm
from trimtab.model.hub import is_adapter
from trimtab.model.load import load_skeleton, resolve_source
from trimtab.model.losses import Loss
from trimtab.recipe.schema import DistillSettings, ModelSettings, Recipe
from trimtab.techniques.base import LossRequest
from trimtab.tracking.mlflow.registry import local_source

_MODEL_KINDS = {
    "classify": "sequence-classification",
    "causal-lm": "causal-lm",
    "chat": "causal-lm",
    "seq2seq": "seq2seq-lm",
    "masked-lm": "masked-lm",
}
_NUM_TEXTS_COMPARED = 64


@dataclass
class Teacher:
    """The frozen model that a student learns from; its state is a checksum, so a resumed run needs the same teacher.

    Attributes:
        model: The model, in eval mode; None if its outputs are cached.
        name: Its name in the recipe.
        checksum: Checksum of its weights.
        outputs: Its outputs for all training rows, if they are cached.
    """

    model: torch.nn.Module | None
    name: str
    checksum: str
    outputs: TeacherOutputs | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the checksum of the weights."""
        return {"checksum": self.checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the run was started with these weights."""
        if state["checksum"] != self.checksum:
            raise CheckpointError(
                f"the teacher {self.name} has changed since the start of the run: its weights differ",
                "restore them, or start a new run from the model: model: RUN",
            )


def build_teacher(recipe: Recipe, data: Data, tokens: Tokens, student: Loaded, engine: Engine) -> Teacher | None:
    """Load the teacher of a recipe to the device of the run, or compute its outputs; None if it has none.

    Its weights have the dtype of the run's matrix products.

    Raises:
        UserError: The teacher does not suit the task, or its tokenizer or labels differ from the student's.
    """
    settings = recipe.distill
    if settings is None:
        return None
    dtype, is_cached = engine.compute_dtype or torch.float32, settings.cache == "disk"
    device = torch.device("cpu") if is_cached else engine.device
    loaded = load(settings.teacher, device=device, dtype=dtype, trust_remote_code=_trusts(recipe))
    if _MODEL_KINDS.get(loaded.task_name) != data.task.model_kind:
        raise ModelError(
            f"distill.teacher {settings.teacher} is a model for {loaded.task_name}, but the task is {data.task.name}",
            "choose a teacher for this task, or train one first: trimtab train",
        )
    _require_same_labels(settings.teacher, loaded.model, data)
    _require_same_tokenizer(settings.teacher, loaded.tokenizer, student.tokenizer, data)
    model = prepare_teacher(loaded.model, settings)
    if settings.attention["weight"]:
        use_plain_attention(student.model)
    checksum = checksum_of_weights(model)
    if not is_cached:
        return Teacher(model, settings.teacher, checksum)
    if data.task.name == "masked-lm":
        raise RecipeError(
            "distill.cache: disk does not work with masked-lm, whose masks change in every epoch", "distill.cache: none"
        )
    of_rows = [data.task.name, data.task.settings, data.train, student.tokenizer, tokens.max_length]
    key = [*of_rows, "teacher", checksum, settings.temperature, settings.top_k, str(dtype)]
    outputs = build_outputs(model, student.model, engine.device, data, tokens, terms_of(settings), key)
    return Teacher(None, settings.teacher, checksum, outputs)


def prepare_teacher(model: Any, settings: DistillSettings) -> Any:
    """Freeze a teacher, on a device or on `meta`.

    Flash attention is preferred to cuDNN, which torch would choose for masks on Hopper GPUs: batches are padded to many
    lengths, and cuDNN would build a plan for each of them, with workspaces that no trace shows.
    """
    if settings.attention["weight"]:
        use_plain_attention(model)
    else:
        use_attention(model, "flash")
    return model.eval().requires_grad_(False)


def use_plain_attention(model: Any) -> None:
    """Compute attention with matrix products: other kernels return no probabilities."""
    model.set_attn_implementation("eager")


def cut_student(recipe: Recipe, model: Any) -> None:
    """Remove the layers that the recipe leaves out from a model, with weights or on `meta`."""
    if recipe.distill is None or recipe.distill.student is None:
        return
    kept = cut_layers(model, recipe.distill.student["layers"])
    if next(model.parameters()).device.type != "meta":
        say(f"student: layers {' and '.join(', '.join(map(str, part)) for part in kept)}")


def student_loss(recipe: Recipe, request: LossRequest, teacher: torch.nn.Module | None) -> Loss:
    """The loss of a recipe with a `distill` section."""
    assert recipe.distill is not None
    return DistillationLoss(
        request.kind,
        shifts_labels=request.shifts_labels,
        label_smoothing=request.label_smoothing,
        terms=terms_of(recipe.distill),
        teacher=teacher,
    )


def terms_of(settings: DistillSettings) -> DistillTerms:
    """The terms of the loss in a recipe."""
    hidden, attention = (
        LayerTerm(term["weight"], None if term["layers"] == "auto" else term["layers"])
        for term in (settings.hidden, settings.attention)
    )
    return DistillTerms(settings.temperature, settings.alpha, hidden, attention, settings.top_k)


def teacher_skeleton(recipe: Recipe, kind: str, head: dict[str, Any], dtype: torch.dtype) -> Any:
    """The teacher on `meta`; for a teacher with an adapter, only its base, which is nearly all of it."""
    assert recipe.distill is not None
    name = local_source(recipe.distill.teacher)
    folder = resolve_source(name, adapters=True)
    if is_adapter(folder):
        name = read_adapter_source(folder, trust_remote_code=_trusts(recipe)).base
    model = load_skeleton(name, kind, head, None, trust_remote_code=_trusts(recipe), dtype=dtype)
    return prepare_teacher(model, recipe.distill)


def checksum_of_weights(model: torch.nn.Module) -> str:
    """A checksum of all weights of a model and their names."""
    weights = model.state_dict()
    sums = checksums_of(list(weights.values()))
    text = "\n".join(f"{name} {one}" for name, one in zip(weights, sums, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()


def _trusts(recipe: Recipe) -> bool:
    return isinstance(recipe.model, ModelSettings) and recipe.model.trust_remote_code


def _require_same_labels(name: str, teacher: Any, data: Data) -> None:
    wanted = {int(index): str(label) for index, label in (data.task.head().get("id2label") or {}).items()}
    found = {int(index): str(label) for index, label in (teacher.config.id2label or {}).items()} if wanted else {}
    if wanted != found:
        ours, theirs = (", ".join(list(labels.values())[:5]) for labels in (wanted, found))
        raise ModelError(
            f"distill.teacher {name} has the labels {theirs}, but the data has {ours}",
            "choose a teacher that was trained on these labels, in this order",
        )


def _require_same_tokenizer(name: str, teacher: Any, student: Any, data: Data) -> None:
    is_same = teacher.get_vocab() == student.get_vocab()
    for text in islice(texts_of(data), _NUM_TEXTS_COMPARED if is_same else 0):
        ours, theirs = (each(text, verbose=False)["input_ids"] for each in (student, teacher))  # texts may be long
        is_same = is_same and ours == theirs
    if not is_same:
        raise RecipeError(
            f"distill.teacher {name} has a different tokenizer from the student's, so their tokens cannot be compared",
            "choose a student with the teacher's tokenizer, or cut it out of the teacher: distill.student: "
            "{layers: half}, without model",
        )
