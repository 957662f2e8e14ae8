"""The data classes that the stages of a run pass on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.data.sources import Rows
from trimtab.data.tasks.base import Task
from trimtab.data.tokens import TokenDataset
from trimtab.engine.engine import Engine
from trimtab.model.freeze import Freezing
from trimtab.recipe.schema import Recipe
from trimtab.runs.plan import Plan
from trimtab.tracking.mlflow.registry import TrackedModel


@dataclass(frozen=True)
class Data:
    """Rows and their task, with lines about what is unusual in the rows, and the weights of labels if they have any."""

    task: Task
    train: Rows
    eval: Rows | None
    notices: tuple[str, ...] = ()
    class_weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Tokens:
    """Rows as the model sees them."""

    train: TokenDataset
    eval: TokenDataset | None
    max_length: int


@dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer."""

    model: torch.nn.Module
    tokenizer: Any


@dataclass(frozen=True)
class ResolvedRun:
    """A recipe with everything that was decided, read and loaded for it, from which a trainer is built.

    Attributes:
        asked: The recipe as the user wrote it, with absolute paths; written to the run's folder.
        recipe: The same recipe, with the local folder of a model from a tracking server.
        engine: The engine.
        data: Rows and task.
        tokens: The rows as the model sees them.
        loaded: The model on its device, with its techniques, and its tokenizer.
        freezing: The frozen parameters, and when they are unfrozen.
        plan: Every decision, and the prediction.
        loss: A loss function passed by the user.
        tracked: The model on a tracking server that the recipe names.
        teacher: The teacher of a recipe with a `distill` section (`trimtab.build.teacher.Teacher`).
    """

    asked: Recipe
    recipe: Recipe
    engine: Engine
    data: Data
    tokens: Tokens
    loaded: Loaded
    freezing: Freezing
    plan: Plan
    loss: Callable[..., Any] | None = None
    tracked: TrackedModel | None = None
    teacher: Any = None


@dataclass(frozen=True)
class EndedRun:
    """What is left of a run after its training: it refers neither to the model nor to the optimizer.

    Attributes:
        recipe: As in `ResolvedRun`.
        engine: The engine.
        data: Rows and task.
        plan: Every decision, and the prediction.
        weights_bytes: Memory of the model's weights when it is loaded for inference (`weights_dtype`).
    """

    recipe: Recipe
    engine: Engine
    data: Data
    plan: Plan
    weights_bytes: int

    @classmethod
    def of(cls, run: ResolvedRun) -> "EndedRun":
        """Return what is left of a run, to release its model before the run is recorded as ended."""
        # others are loaded in fp32, also if half-precision copies were trained
        may_be_half = run.plan.precision == "bf16-pure" or run.recipe.adapter != "none"
        keeps_dtype = may_be_half and run.engine.device.type != "cpu"
        sizes = (
            weight.numel() * (4 if weight.is_floating_point() and not keeps_dtype else weight.element_size())
            for weight in run.loaded.model.parameters()
        )
        return cls(run.recipe, run.engine, run.data, run.plan, sum(sizes))
