"""`trimtab memory`: draws the memory of one training step, predicted and, on a GPU, measured."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import RecipeError
from trimtab.planner.memory_picture import page_of, predicted_record, predicted_snapshot
from trimtab.planner.survey import RecipeRows, planner_for
from trimtab.planner.target import known_target, target_here
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.recipe.schema import Recipe
from trimtab.report.memory_page import MemoryPage, describe_peak, describe_tensors, render_memory_page
from trimtab.report.step_record import StepRecord
from trimtab.training.garbage_collection import gc_disabled

_PROTOCOL = 4  # the newest that torch's viewer reads
_NUM_TENSORS = 3


@dataclass(frozen=True)
class MemoryPicture:
    """The memory of a step.

    Attributes:
        page: The page: the prediction, and the measurement if there is one.
        snapshot: The dictionary of `torch.cuda.memory._snapshot`: measured if possible, else predicted.
        fits: Whether the predicted step fits into the budget.
    """

    page: MemoryPage
    snapshot: dict[str, Any]
    fits: bool

    @property
    def records(self) -> Sequence[StepRecord]:
        """The predicted step, then the measured one."""
        return self.page.records

    def summary(self) -> list[str]:
        """The peak of each record and its largest tensors, in lines."""
        lines = []
        for record in self.records:
            peak = record.peak()
            where = f" on {record.device}" if record.device else ""
            lines.append(f"{record.source}{where}: {describe_peak(record, peak)}")
            lines += [f"  {describe_tensors(group)}" for group in record.largest(peak.change, _NUM_TENSORS)]
        return lines


@one_plan_at_a_time()
@gc_disabled()
def draw_memory(
    recipe: Recipe, *, gpu: str | None = None, device: str | None = None, length: int | None = None
) -> MemoryPicture:
    """Predict the memory of one step of the plan that a run would use.

    Args:
        recipe: The recipe.
        gpu: A known device that is not in this machine.
        device: The device in this machine, such as "cuda:1"; found if left out.
        length: Tokens of every row; no data is read then.
    """
    budget = recipe.memory.budget
    target = known_target(gpu, budget) if gpu is not None else target_here(device, budget)
    rows = None if length is not None else RecipeRows(recipe)
    planner = planner_for(recipe, target, rows, length)
    limit = planner.max_positions()
    if length is not None and limit is not None and length > limit:
        raise RecipeError(f"--length {length} is more than the model's {limit} positions", f"--length {limit}")
    ladder = planner.choose()
    row = ladder.chosen or ladder.smallest
    records = [predicted_record(planner, row.spec)]
    page = page_of(planner, row.spec, records)
    return MemoryPicture(page, predicted_snapshot(planner, row.spec), ladder.chosen is not None)


def write_page(page: MemoryPage, path: Path) -> None:
    """Write a page as HTML."""
    _write(path, render_memory_page(page).encode())


def write_snapshot(snapshot: dict[str, Any], path: Path) -> None:
    """Write the file that torch's memory viewer reads; it reads nothing but pickled dictionaries."""
    _write(path, pickle.dumps(snapshot, protocol=_PROTOCOL))


def _write(path: Path, contents: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror}", "choose another file") from error
