"""The tracker protocol, and the trackers that `Engine(log_with=…)` accepts by name: journal, MLflow and TensorBoard."""

import enum
from pathlib import Path
from typing import Any, Protocol

from trimtab.errors import RecipeError
from trimtab.runs.journal import Journal
from trimtab.tracking.mlflow.tracker import MlflowTracker
from trimtab.tracking.tensorboard import TensorBoardTracker


class Tracker(Protocol):
    """Receives the metrics of a run; any object with these methods can be used.

    Pass it as `Engine(log_with=[…])`. On the main process, `init_trackers` calls `start`, `Engine.log` calls `log` and
    `end_training` calls `finish`. Values are numbers, texts or one-element tensors. Exceptions reach the training loop.
    A tracker with a method `set_up` receives `init_trackers(init_kwargs={NAME: {…}})` through it before `start`.
    docs/tracking.md has an example for Weights & Biases.
    """

    name: str

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """Start a run."""

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log values of a step."""

    def finish(self) -> None:
        """End the run."""


def build_trackers(log_with: Any, folder: Path | None) -> list[Tracker]:
    """Build the trackers for `log_with`: a name ("all" is the journal and MLflow), a tracker object, or a list."""
    if log_with is None:
        return []
    trackers: list[Tracker] = []
    for given in log_with if isinstance(log_with, list | tuple) else [log_with]:
        choice = given.value if isinstance(given, enum.Enum) else given  # Accelerate's LoggerType
        if not isinstance(choice, str) and all(hasattr(choice, method) for method in ("start", "log", "finish")):
            trackers.append(choice)
            continue
        if choice not in ("journal", "mlflow", "tensorboard", "all"):
            raise RecipeError(
                f"log_with={choice!r} is not valid",
                'use "mlflow", "tensorboard", "journal" (a metrics.jsonl file), or an object with start, log, finish',
            )
        if choice in ("journal", "all"):
            trackers.append(Journal(folder or Path(".")))
        if choice in ("mlflow", "all"):
            trackers.append(MlflowTracker(folder))
        if choice == "tensorboard":
            trackers.append(TensorBoardTracker(folder))
    return trackers


def set_up(trackers: list[Tracker], settings: dict[str, Any] | None) -> None:
    """Pass the settings of `init_kwargs` to the trackers that they name.

    Raises:
        RecipeError: There are settings that no tracker accepts.
    """
    takers = {tracker.name: tracker for tracker in trackers if hasattr(tracker, "set_up")}
    given = {name: values for name, values in (settings or {}).items() if values}
    unknown = sorted(given.keys() - takers.keys())
    if unknown:
        raise RecipeError(
            f"init_kwargs has settings for {', '.join(unknown)}, which no tracker here takes",
            "leave them out, or pass a tracker object with these settings as log_with",
        )
    for name, values in given.items():
        takers[name].set_up(**values)
