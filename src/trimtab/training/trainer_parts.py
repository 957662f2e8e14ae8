"""The arguments of `Trainer`, in groups."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trimtab.engine.engine import Engine
from trimtab.model.losses import Loss
from trimtab.techniques.base import Trial
from trimtab.training.checkpoints import Checkpoints, NoCheckpoints
from trimtab.training.evaluate import Evaluator
from trimtab.training.progress_lines import Progress
from trimtab.training.run_writer import RunWriter
from trimtab.training.stopping import Best, EarlyStopping
from trimtab.units import Every


@dataclass(frozen=True)
class TrainingParts:
    """The parts that compute an optimizer step. All except the loss are prepared by `engine`.

    Techniques may wrap the function that computes gradients (`window_gradients`), run micro-batches of all sizes before
    the first step, and have a state that is saved with that of the loop.
    """

    engine: Engine
    model: torch.nn.Module
    optimizer: Any
    scheduler: Any  # of the learning rate
    batches: Any  # the loader of micro-batches; its sampler knows how many make up a batch
    loss: Loss
    wrap_step: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda compute_gradients: compute_gradients
    warm_up: Callable[[Callable[[], Sequence[Trial]]], None] = lambda find_trials: None
    technique_states: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoopSettings:
    """The length of a run, its intervals, and the treatment of gradients."""

    num_steps: int
    steps_per_epoch: int
    evaluate_every: Every
    save_every: Every | None = None
    log_every: int = 10
    max_seconds: float | None = None
    evaluate_at_start: bool = False
    keeps_best: bool = True  # False keeps the last model instead
    max_grad_norm: float | None = 1.0
    on_nan: str = "stop"  # or "skip", "rewind"


@dataclass(frozen=True)
class ModelSelection:
    """How models are evaluated and compared."""

    evaluator: Evaluator | None  # None without held-out rows
    best: Best
    early_stopping: EarlyStopping | None


@dataclass(frozen=True)
class RunOutputs:
    """The outputs of a run: progress, files and callbacks."""

    writer: RunWriter
    checkpoints: Checkpoints | NoCheckpoints
    progress: Progress
    callbacks: list[object]
