"""`trimtab memory`: draw the memory of one training step, predicted and, on a GPU, measured."""

import os
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.checkpoint.disk_errors import cure_for_os_error
from trimtab.checkpoint.folder import refuse_impossible, write_file
from trimtab.commands.measured_step import MeasuredStep, measure_step
from trimtab.commands.report import refuse_other_file
from trimtab.errors import DoesNotFit, RecipeError
from trimtab.garbage_collection import gc_disabled
from trimtab.hardware.inventory import find_device
from trimtab.hardware.memory import is_out_of_memory
from trimtab.log import muted
from trimtab.planner.decide import explain_failure
from trimtab.planner.memory_picture import page_of, predicted_record, predicted_snapshot
from trimtab.planner.survey import planner_on
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.recipe.schema import Recipe
from trimtab.report.memory_page import MemoryPage, describe_peak, describe_tensors, render_memory_page
from trimtab.report.step_record import StepRecord

_PROTOCOL = 4  # the newest pickle protocol that torch's viewer reads
_NUM_TENSORS = 3


@dataclass(frozen=True)
class MemoryPicture:
    """The memory of a step.

    Attributes:
        page: The page: the prediction, and the measurement if there is one.
        snapshot: The dictionary of `torch.cuda.memory._snapshot`: measured if possible, else predicted.
    """

    page: MemoryPage
    snapshot: dict[str, Any]

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


def draw_memory(
    recipe: Recipe,
    *,
    gpu: str | None = None,
    device: str | None = None,
    length: int | None = None,
    measures: bool | None = None,
) -> MemoryPicture:
    """Draw the memory of one step of the plan that a run would use: predicted, and measured if possible.

    Args:
        recipe: The recipe.
        gpu: A GPU of the catalog that is not in this machine.
        device: The device in this machine, such as "cuda:1"; by default an accelerator if there is one, else the CPU.
        length: Tokens of every row; then no data is read.
        measures: Whether to also load the model and run a few steps; None does so on a GPU in this machine.

    Raises:
        RecipeError: A step cannot be measured without its device or its rows.
    """
    if measures and (gpu is not None or length is not None):
        raise RecipeError(
            "only a step on a device of this machine, with real rows, can be measured",
            "leave out --gpu and --length, or --measure",
        )
    if measures is None:
        measures = gpu is None and length is None and find_device(device).type == "cuda"
    measured, problem = _measure(recipe, device) if measures else (None, "")
    return _picture(recipe, gpu, device, length, measured, problem)


def _measure(recipe: Recipe, device: str | None) -> tuple[MeasuredStep | None, str]:
    """The measured step, or the reason why there is none."""
    try:
        return measure_step(recipe, device), ""
    except Exception as error:
        if not (isinstance(error, DoesNotFit) or is_out_of_memory(error)):
            raise
        return None, "Not measured: the step does not fit into the memory of the device."


@one_plan_at_a_time()
@gc_disabled()
def _picture(
    recipe: Recipe,
    gpu: str | None,
    device: str | None,
    length: int | None,
    measured: MeasuredStep | None,
    problem: str,
) -> MemoryPicture:
    with nullcontext() if measured is None else muted():  # its log lines about the data have been shown already
        planner, _ = planner_on(recipe, recipe.memory.budget, gpu, device, length)
    if measured is None:
        ladder = planner.choose()
        spec, records, snapshot = (ladder.chosen or ladder.smallest).spec, [], None
        too_large = "" if ladder.chosen is not None else explain_failure(planner, ladder.smallest)
    else:
        spec, records, snapshot, too_large = measured.spec, [measured.record], measured.snapshot, ""
    page = page_of(planner, spec, [predicted_record(planner, spec), *records])
    page = replace(page, problem=too_large, notes=[problem, *page.notes] if problem else page.notes)
    return MemoryPicture(page, snapshot or predicted_snapshot(planner, spec))


def check_targets(page: Path, snapshot: Path | None) -> None:
    """Check that the files can be written, before anything is computed: the page replaces a page and nothing else.

    Raises:
        RecipeError: A file is a folder, cannot be written, or would replace something else.
    """
    refuse_other_file(page)
    for path, option in ((page, "--out"), (snapshot, "--snapshot")):
        if path is None:
            continue
        if path.is_dir():
            raise RecipeError(f"{path} is a folder", f"{option} takes the name of a file")
        nearest = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise RecipeError(
                f"{path} cannot be written: {nearest} is not a writable folder", f"choose another {option}"
            )


def write_page(page: MemoryPage, path: Path) -> None:
    """Write a page as HTML."""
    _write(path, render_memory_page(page).encode())


def write_snapshot(snapshot: dict[str, Any], path: Path) -> None:
    """Write the file that torch's memory viewer reads, which accepts only pickled dictionaries."""
    _write(path, pickle.dumps(snapshot, protocol=_PROTOCOL))


def _write(path: Path, contents: bytes) -> None:
    refuse_impossible(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, contents)
    except OSError as error:
        cure = cure_for_os_error(error, "choose another file")
        raise RecipeError(f"{path} cannot be written: {error.strerror or error}", cure) from error
