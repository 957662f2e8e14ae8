"""The protocol of trackers, and those that a loop of one's own chooses by name: the journal, and MLflow."""

import enum
from pathlib import Path
from typing import Any, Protocol

from trimtab.errors import RecipeError
from trimtab.runs.journal import Journal
from trimtab.tracking.mlflow.tracker import MlflowTracker


class Tracker(Protocol):
    """Takes the numbers of a run; any object with these verbs will do, and needs no other base.

    `Engine(log_with=[…])` takes such objects beside names. `init_trackers` calls `start`, `log` hands values on as they
    come, `end_training` calls `finish`; all on the main process alone. Values are numbers, texts or tensors of one
    number. An exception of a tracker reaches the loop: one that writes to a network had better keep what fails.

    TensorBoard::

        class TensorBoard:
            name = "tensorboard"

            def start(self, project_name, config):
                self._writer = SummaryWriter(f"runs/{project_name}")

            def log(self, values, step=None):
                for key, value in values.items():
                    self._writer.add_scalar(key, value, step)

            def finish(self):
                self._writer.close()

    Weights & Biases::

        class WeightsAndBiases:
            name = "wandb"

            def start(self, project_name, config):
                self._run = wandb.init(project=project_name, config=config)

            def log(self, values, step=None):
                self._run.log(values, step=step)

            def finish(self):
                self._run.finish()

    One that takes settings of `init_trackers(init_kwargs={NAME: {…}})` has a method `set_up` for them, which is called
    before `start`; without it, such settings are refused.
    """

    name: str

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """A run begins."""

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Values at a step."""

    def finish(self) -> None:
        """The run is over."""


def build_trackers(log_with: Any, folder: Path | None) -> list[Tracker]:
    """The trackers that `log_with` names: "journal", "mlflow", "all" of these, a tracker object, or a list of them."""
    if log_with is None:
        return []
    trackers: list[Tracker] = []
    for given in log_with if isinstance(log_with, list | tuple) else [log_with]:
        choice = given.value if isinstance(given, enum.Enum) else given  # Accelerate's LoggerType
        if not isinstance(choice, str) and all(hasattr(choice, verb) for verb in ("start", "log", "finish")):
            trackers.append(choice)
            continue
        if choice not in ("journal", "mlflow", "all"):
            raise RecipeError(
                f"log_with={choice!r} is not known",
                'use "mlflow", "journal" (a metrics.jsonl file), or an object with start, log and finish',
            )
        if choice in ("journal", "all"):
            trackers.append(Journal(folder or Path(".")))
        if choice in ("mlflow", "all"):
            trackers.append(MlflowTracker(folder))
    return trackers


def set_up(trackers: list[Tracker], settings: dict[str, Any] | None) -> None:
    """Give trackers what `init_kwargs` holds for them.

    Raises:
        RecipeError: There are settings that no tracker takes.
    """
    takers = {tracker.name: tracker for tracker in trackers if hasattr(tracker, "set_up")}
    given = {name: values for name, values in (settings or {}).items() if values}
    unknown = sorted(given.keys() - takers.keys())
    if unknown:
        raise RecipeError(
            f"init_kwargs has settings for {', '.join(unknown)}, which no tracker here takes",
            "leave it out, or give log_with a tracker object of your own that is set up already",
        )
    for name, values in given.items():
        takers[name].set_up(**values)
