"""What a run keeps: its best model, its numbers, its states."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from trimtab.build.parts import Loaded, Tokens
from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
from trimtab.checkpoint.export import RetryingExport
from trimtab.checkpoint.mirror import Mirror, find_mirror
from trimtab.data.tokens import TokenDataset
from trimtab.engine.engine import Engine
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.optim.state_size import state_bytes
from trimtab.recipe.schema import Recipe
from trimtab.runs.plan import Plan
from trimtab.runs.run_folder import CHECKPOINTS, Folder
from trimtab.runs.tracking_file import TRACKING
from trimtab.techniques.optimizer_state import OptimizerState
from trimtab.training.checkpoints import Checkpoints, NoCheckpoints
from trimtab.training.run_writer import RunWriter
from trimtab.training.stopping import Best

# tracking.json before the numbers: what it says is sent is then in them
_MIRRORED = ("recipe.yaml", "plan.json", "run.json", TRACKING, "metrics.jsonl")


class BestModelWriter:
    """Writes the best model as a plain Hugging Face folder, and the numbers into the run's journal."""

    def __init__(
        self, folder: Folder, engine: Engine, loaded: Loaded, tokens: TokenDataset, card: dict[str, Any], best: Best
    ) -> None:
        self._folder, self._loaded, self._card, self._best = folder, loaded, card, best
        self._tokens = tokens
        self._export = RetryingExport(folder.best, engine.unwrap_model(loaded.model), loaded.tokenizer)
        self._facts: dict[str, Any] = {}

    @property
    def problem(self) -> CheckpointError | None:
        """Why the best model is not written yet."""
        return self._export.problem

    def write_best_model(self, step: int, metrics: dict[str, float]) -> str | None:
        """Write the model beside the one before, then take its place."""
        value = metrics.get(self._best.metric)
        self._facts = {
            "metric_name": self._best.metric,
            "higher_is_better": self._best.higher_is_better,
            "best_metric": value if value is not None and math.isfinite(value) else None,
            "best_step": step,
        }
        return self._written(self._export.write({**self._card, "step": step, "metrics": metrics}))

    def write_pending(self) -> str | None:
        """Try again to write a model for which there was no room."""
        return self._written(self._export.write_pending())

    def _written(self, is_written: bool) -> str | None:
        if not is_written:
            return None
        self._folder.update(**self._facts)
        return str(self._folder.best)

    def record(self, values: dict[str, Any], step: int) -> None:
        """Write a line of numbers."""
        self._folder.record(values, step)

    def position(self) -> int:
        """How far the journal has been written."""
        return self._folder.journal_position()

    def forget_best(self) -> None:
        """The best model so far is gone."""
        self._folder.update(best_metric=None, best_step=None, best_files=None)

    def write_bad_rows(self, step: int, rows: list[int]) -> str:
        """Write rows as the model saw them: their numbers in the data, their text, and what carries loss."""
        lines = []
        for row in rows:
            # a label of a row is a plain number
            fields = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in self._tokens[row].items()}
            text = self._loaded.tokenizer.decode(fields["input_ids"])
            lines.append(json.dumps({"row": row, "text": text, **fields}, ensure_ascii=False))
        name = f"bad-rows-step-{step}.jsonl"
        try:
            self._folder.write_text(name, "\n".join(lines) + "\n")
        except CheckpointError as error:  # what was wrong with the loss is the news, not the disk
            say(error.problem)
            return f"{self._folder.path / name} (which could not be written: they are rows {', '.join(map(str, rows))})"
        return str(self._folder.path / name)


class NoModelWriter:
    """Of several processes one writes; the others keep nothing."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    problem: CheckpointError | None = None

    def write_best_model(self, step: int, metrics: dict[str, float]) -> str | None:
        """Where the first process writes it."""
        return str(self._folder.best)

    def write_pending(self) -> str | None:
        """The first process does that."""
        return None

    def record(self, values: dict[str, Any], step: int) -> None:
        """The first process does that."""

    def position(self) -> int:
        """The first process knows it."""
        return 0

    def forget_best(self) -> None:
        """The first process does that."""

    def write_bad_rows(self, step: int, rows: list[int]) -> str:
        """Where the first process writes them."""
        return str(self._folder.path / f"bad-rows-step-{step}.jsonl")


def build_run_writer(
    folder: Folder, engine: Engine, loaded: Loaded, tokens: Tokens, card: dict[str, Any], best: Best
) -> RunWriter:
    """What keeps the best model; of several processes only the first one does."""
    if not engine.is_main_process:
        return NoModelWriter(folder)
    return BestModelWriter(folder, engine, loaded, tokens.train, card, best)


def build_checkpoints(recipe: Recipe, engine: Engine, folder: Folder, asked: Recipe) -> Checkpoints | NoCheckpoints:
    """What saves the state of a run, and with it the recipe that was asked for and what else `run.json` knows."""
    settings = recipe.checkpoint
    if settings.every is None or recipe.limits.fast_dev_run:
        return NoCheckpoints()
    mirror = None
    if settings.mirror is not None and engine.is_main_process:
        # experiment and name: several runs share a drive
        place = Path(settings.mirror, *folder.path.absolute().parts[-2:])
        known = find_mirror(folder.path)  # of a run that came back from its mirror to another place
        if known is not None and Path(settings.mirror).absolute() in known.parents:
            place = known
        mirror = Mirror(folder.path, place, files=_MIRRORED)
    shelf = CheckpointsFolder(folder.path / CHECKPOINTS, keep=settings.keep)
    settings_asked = asked.model_dump(mode="json")
    return Checkpoints(
        engine,
        shelf,
        mirror,
        on_saved=lambda step: folder.update(saved_step=step),
        facts=lambda: {"settings": settings_asked, "run": folder.facts_for_checkpoint()},
    )


def checkpoint_bytes(optimizer: Any, plan: Plan, momentum: float) -> int:
    """The size of a checkpoint once the optimizer has its state: what trains, and what is kept for it."""
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
