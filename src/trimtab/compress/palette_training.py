"""Train the palettes of a clustered model, with fixed indices, to reproduce the outputs of the original model.

The training loop is that of every run (`training.loop`): accumulation is exact, micro-batches shrink when memory runs
out, and steps that are not finite or a signal end it. No checkpoints are saved.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from trimtab.compress.calibration import Batch
from trimtab.compress.clustered_model import replace_modules
from trimtab.compress.clustered_modules import ClusteredModule
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.data.batching import LengthGroupedBatches
from trimtab.data.tokens import TokenDataset
from trimtab.engine.engine import Engine
from trimtab.errors import LossNotFinite, TrimtabError
from trimtab.hardware.memory import MemoryCap
from trimtab.model.forward import IGNORED, logits_of, run_model
from trimtab.model.freeze import Freezing
from trimtab.model.losses import StepLoss
from trimtab.optim.schedules import build_schedule
from trimtab.runs.journal import JournalMark
from trimtab.training.checkpoints import NoCheckpoints
from trimtab.training.loop import Trainer
from trimtab.training.memory_guard import MemoryGuard
from trimtab.training.progress import build_progress
from trimtab.training.progress_lines import Progress
from trimtab.training.run_state import FitResult
from trimtab.training.stopping import Best
from trimtab.training.trainer_parts import LoopSettings, ModelSelection, RunOutputs, TrainingParts
from trimtab.training.work_progress import work_mode
from trimtab.units import Every

_LEARNING_RATE = 3e-3  # fraction of the root mean square of a palette: Adam's steps have the size of the learning rate
_BATCH_SIZE = 16
_MAX_NORM = 1.0
_NUM_REPORTS = 5


def train_palettes(
    student: Any,
    teacher: Any,
    rows: TokenDataset,
    collate: Callable[..., Any],
    *,
    kind: str,
    num_steps: int,
    learning_rate: float = _LEARNING_RATE,
) -> FitResult:
    """Train all palettes of a model; nothing else changes.

    Args:
        student: A model with clustered modules.
        teacher: The original model, on the same device.
        rows: Rows with labels; positions of tokens without a label do not count.
        collate: Makes a batch of rows.
        kind: Kind of the loss of the task.
        num_steps: Steps of the optimizer, each on 16 rows.
        learning_rate: As a fraction of the root mean square of each palette; it falls linearly to 0.

    Raises:
        LossNotFinite: A step gave values that are not finite.
        TrimtabError: A signal stopped the training.
    """
    student.requires_grad_(False)
    palettes = {id(module.palettes): module.palettes for module in student.modules() if is_clustered_module(module)}
    groups = []
    for palette in palettes.values():
        palette.requires_grad_(True)
        groups.append({"params": [palette], "lr": learning_rate * palette.detach().square().mean().sqrt().item()})
    shown = build_progress(work_mode())
    trainer = _build_trainer(
        student, torch.optim.Adam(groups), _Divergence(teacher, kind), rows, collate, num_steps, shown
    )
    try:
        result = trainer.fit()
    except LossNotFinite as error:
        raise LossNotFinite("training the palettes gave non-finite values; remove --train-steps") from error
    finally:
        shown.close()
    if result.interruption:
        raise TrimtabError(
            f"{result.interruption}: stopped at step {result.step} of the palettes; nothing is written; run the "
            "command again, with fewer --train-steps to end sooner"
        )
    student.requires_grad_(False).eval()
    return result


def _build_trainer(
    student: Any,
    optimizer: torch.optim.Optimizer,
    loss: "_Divergence",
    rows: TokenDataset,
    collate: Callable[..., Any],
    num_steps: int,
    shown: Progress,
) -> Trainer:
    engine = Engine(device=student.device)
    batch_size = min(_BATCH_SIZE, len(rows))
    schedule = build_schedule("linear", optimizer, num_steps=num_steps, warmup_steps=0)
    batches = LengthGroupedBatches(rows.lengths, batch_size, batch_size, seed=0, group_by_length=False)
    loader: DataLoader[Any] = DataLoader(rows, batch_sampler=batches, collate_fn=collate)
    freezing = Freezing(student, {})
    model, optimizer, schedule, loader = engine.prepare(student, optimizer, schedule, loader)
    parts = TrainingParts(engine, model, optimizer, schedule, loader, loss)
    cap = MemoryCap(engine.device)
    guard = MemoryGuard(
        parts,
        evaluator=None,
        released_later=[],
        max_grad_norm=_MAX_NORM,
        cap=cap,
        rehearses=False,
        predicted_peak_bytes=None,
    )
    settings = LoopSettings(
        num_steps,
        steps_per_epoch=-(-len(rows) // batch_size),
        evaluate_every=Every(steps=num_steps),
        log_every=max(1, num_steps // _NUM_REPORTS),
        keeps_best=False,
        max_grad_norm=_MAX_NORM,
    )
    outputs = RunOutputs(_NoRunFolder(), NoCheckpoints(), shown, [])
    selection = ModelSelection(None, Best("loss", higher_is_better=False), None)
    return Trainer(parts, settings, selection, outputs, freezing=freezing, memory_guard=guard)


class _Divergence:
    """The loss of palettes. Both models are in eval mode: dropout would add noise to an exact target."""

    def __init__(self, teacher: Any, kind: str) -> None:
        self._teacher, self._kind = teacher.eval(), kind

    def __call__(self, model: nn.Module, batch: Batch) -> StepLoss:
        """Compute the divergence of a batch from the teacher's outputs."""
        with torch.no_grad():
            wanted = _outputs(self._teacher, batch)
        logits = _outputs(model.eval(), batch)
        value, num_items = divergence(logits, wanted, batch, self._kind)
        return StepLoss(value, num_items, logits.detach())


class _NoRunFolder:
    """Write nothing: the trained model is the result."""

    problem = None

    def write_best_model(self, step: int, metrics: dict[str, float]) -> str | None:
        """Do nothing."""
        return None

    def write_pending(self) -> str | None:
        """Do nothing."""
        return None

    def record(self, values: dict[str, Any], step: int) -> None:
        """Do nothing."""

    def journal_mark(self) -> JournalMark:
        """Return 0."""
        return JournalMark(0)

    def write_bad_rows(self, step: int, rows: list[int]) -> str:
        """Return the numbers of the rows."""
        return f"the calibration rows {', '.join(map(str, rows))}"

    def forget_best(self) -> None:
        """Do nothing."""


def is_clustered_module(module: nn.Module) -> bool:
    """Whether a module has palettes to train."""
    return isinstance(module, ClusteredModule)


def use_clustered(model: Any, weights: dict[str, ClusteredWeight]) -> None:
    """Replace the modules of a model by ones that hold its clustered weights; shared weights stay shared."""
    places: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            places.setdefault(id(weight), []).append(path)
    for name, weight in weights.items():
        replace_modules(model, places[id(model.get_parameter(name))], weight, torch.float32)


def divergence(logits: Tensor, wanted: Tensor, batch: Batch, kind: str) -> tuple[Tensor, int]:
    """Return the mean divergence of outputs from those of the original, and the number of items (rows or tokens).

    It is the KL divergence, or the squared difference of numbers.
    """
    if kind == "mse":
        return functional.mse_loss(logits, wanted), len(logits)
    if kind == "binary-cross-entropy":
        by_wanted = functional.binary_cross_entropy_with_logits(wanted, wanted.sigmoid())
        return functional.binary_cross_entropy_with_logits(logits, wanted.sigmoid()) - by_wanted, len(logits)
    if logits.dim() == 3 and batch["labels"].shape == logits.shape[:2]:
        # All tokens of the row count, for shifted labels too: the outputs before a label are those that predict it.
        mask = batch.get("attention_mask")
        is_used = (batch["labels"] != IGNORED) if mask is None or mask.shape != logits.shape[:2] else mask.bool()
        logits, wanted = logits[is_used], wanted[is_used]
    log_p, log_q = wanted.log_softmax(-1), logits.log_softmax(-1)
    apart = functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    return apart.mean(), apart.numel()


def _outputs(model: Any, batch: Batch) -> Tensor:
    logits = logits_of(run_model(model, batch))
    assert logits is not None  # the model of a task has a head
    return logits.float()
