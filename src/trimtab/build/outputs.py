"""The outputs of a run: best model, metrics and checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from trimtab.build.parts import Loaded, Tokens
from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
from trimtab.checkpoint.export import RetryingExport
from trimtab.checkpoint.mirror import Mirror, place_of_mirror
from trimtab.data.tokens import TokenDataset
from trimtab.engine.engine import Engine
from trimtab.errors import CheckpointError, RecipeError
from trimtab.log import say
from trimtab.optim.state_size import state_bytes
from trimtab.recipe.schema import Recipe
from trimtab.report.page.run_files import FACTS
from trimtab.runs.journal import JournalMark
from trimtab.runs.plan import Plan
from trimtab.runs.run_folder import CHECKPOINTS, Folder
from trimtab.runs.tracking_file import TRACKING
from trimtab.techniques.optimizer_state import OptimizerState
from trimtab.training.checkpoints import Checkpoints, NoCheckpoints
from trimtab.training.run_writer import RunWriter
from trimtab.training.stopping import Best

# tracking.json before the metrics, so that all metrics it lists as sent are in the copy
_MIRRORED = ("recipe.yaml", "plan.json", "run.json", FACTS, TRACKING, "metrics.jsonl")


class BestModelWriter:
    """Write the best model as a plain Hugging Face folder, and metrics to the journal."""

    def __init__(
        self, folder: Folder, engine: Engine, loaded: Loaded, tokens: TokenDataset, card: dict[str, Any], best: Best
    ) -> None:
        self._folder, self._loaded, self._card, self._best = folder, loaded, card, best
        self._tokens = tokens
        self._export = RetryingExport(folder.best, engine.unwrap_model(loaded.model), loaded.tokenizer)
        self._facts: dict[str, Any] = {}

    @property
    def problem(self) -> CheckpointError | None:
        """The error of the last attempt to write the best model; None if it succeeded."""
        return self._export.problem

    def write_best_model(self, step: int, metrics: dict[str, float]) -> str | None:
        """Write the model to a temporary folder, then replace the previous best."""
        self._folder.update(best_files=None)  # a resumed run writes the same step again, perhaps with other last bits
        value = metrics.get(self._best.metric)
        self._facts = {
            "metric_name": self._best.metric,
            "higher_is_better": self._best.higher_is_better,
            "best_metric": value if value is not None and math.isfinite(value) else None,
            "best_step": step,
        }
        return self._written(self._export.write({**self._card, "step": step, "metrics": metrics}))

    def write_pending(self) -> str | None:
        """Try again to write a model that failed because the disk was full."""
        return self._written(self._export.write_pending())

    def _written(self, is_written: bool) -> str | None:
        if not is_written:
            return None
        self._folder.update(**self._facts)
        return str(self._folder.best)

    def record(self, values: dict[str, Any], step: int) -> None:
        """Append a line of metrics to the journal."""
        self._folder.record(values, step)

    def journal_mark(self) -> JournalMark:
        """The current size and checksum of the journal."""
        return self._folder.journal_mark()

    def forget_best(self) -> None:
        """Record that there is no longer a best model."""
        self._folder.update(best_metric=None, best_step=None, best_files=None)

    def write_bad_rows(self, step: int, rows: list[int]) -> str:
        """Write the rows of a bad batch to a file: row number, text and all fields that the model got."""
        lines = []
        for row in rows:
            # a label of a row is a plain number
            fields = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in self._tokens[row].items()}
            text = self._loaded.tokenizer.decode(fields["input_ids"])
            lines.append(json.dumps({"row": row, "text": text, **fields}, ensure_ascii=False))
        name = f"bad-rows-step-{step}.jsonl"
        try:
            self._folder.write_text(name, "\n".join(lines) + "\n")
        except CheckpointError as error:  # the caller reports the bad loss; a full disk must not hide that
            say(error.problem)
            return f"{self._folder.path / name} (could not be written; the rows are {', '.join(map(str, rows))})"
        return str(self._folder.path / name)


class NoModelWriter:
    """The writer of all processes except the main process: writes nothing."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    problem: CheckpointError | None = None

    def write_best_model(self, step: int, metrics: dict[str, float]) -> str | None:
        """Return the path that the main process writes to."""
        return str(self._folder.best)

    def write_pending(self) -> str | None:
        """Do nothing: the main process does it."""
        return None

    def record(self, values: dict[str, Any], step: int) -> None:
        """Do nothing: the main process does it."""

    def journal_mark(self) -> JournalMark:
        """Always empty: only the main process has a journal."""
        return JournalMark(0)

    def forget_best(self) -> None:
        """Do nothing: the main process does it."""

    def write_bad_rows(self, step: int, rows: list[int]) -> str:
        """Return the path that the main process writes to."""
        return str(self._folder.path / f"bad-rows-step-{step}.jsonl")


def build_run_writer(
    folder: Folder, engine: Engine, loaded: Loaded, tokens: Tokens, card: dict[str, Any], best: Best
) -> RunWriter:
    """Build the writer of a run; only the main process writes."""
    if not engine.is_main_process:
        return NoModelWriter(folder)
    return BestModelWriter(folder, engine, loaded, tokens.train, card, best)


def build_checkpoints(recipe: Recipe, engine: Engine, folder: Folder, asked: Recipe) -> Checkpoints | NoCheckpoints:
    """Build the writer of a run's checkpoints, which also contain its original recipe and the facts of `run.json`."""
    settings = recipe.checkpoint
    if settings.every is None or recipe.limits.fast_dev_run:
        return NoCheckpoints()
    if settings.mirror is not None and Path(settings.mirror).is_file():
        raise RecipeError(f"checkpoint.mirror: {settings.mirror} is a file", "set it to a folder")
    mirror = None
    if settings.mirror is not None and engine.is_main_process:
        mirror = Mirror(folder.path, place_of_mirror(folder.path, settings.mirror), files=_MIRRORED)
    shelf = CheckpointsFolder(folder.path / CHECKPOINTS, keep=settings.keep)
    settings_asked, precision = asked.model_dump(mode="json"), engine.mixed_precision.replace("no", "fp32")
    return Checkpoints(
        engine,
        shelf,
        mirror,
        on_saved=lambda step: folder.update(saved_step=step),
        facts=lambda: {"settings": settings_asked, "run": folder.facts_for_checkpoint(), "precision": precision},
    )


def checkpoint_bytes(optimizer: Any, plan: Plan, momentum: float) -> int:
    """The size of a checkpoint: trainable parameters and their optimizer state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = (
        state_bytes(
            plan.spec[OptimizerState.key],
            parameter.shape,
            parameter.dtype,
            momentum=momentum,
            rounds_stochastically=plan.precision == "bf16-pure",
            device=parameter.device,
        )
        for parameter in parameters
    )
    weights: int = sum(p.numel() * p.element_size() for p in parameters)
    return weights + sum(size.num_bytes for size in kept)
