"""Measure the memory of one training step of a recipe, on the device of a run and with its builders.

Nothing is written: the weights that two or three steps change are discarded.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from trimtab.build.engine import build_engine
from trimtab.build.training import build_parts
from trimtab.optim.preallocation import preallocate_state
from trimtab.planner.resolve import resolve_run
from trimtab.recipe.schema import Recipe
from trimtab.report.anatomy import MemoryWatch
from trimtab.report.step_record import StepRecord
from trimtab.techniques.apply import captures
from trimtab.techniques.base import StepSpec
from trimtab.techniques.compilation import Compilation
from trimtab.training.rehearsal import worst_batch
from trimtab.training.step import take_step, window_gradients
from trimtab.training.trainer_parts import TrainingParts

_NUM_BEFORE = 2  # steps before the one that is measured: libraries allocate workspaces, compiled code is compiled


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran.

    Attributes:
        spec: Its specification, which a run of the recipe would use.
        record: Its allocations.
        snapshot: The result of `torch.cuda.memory._snapshot`; None on other devices.
    """

    spec: StepSpec
    record: StepRecord
    snapshot: dict[str, Any] | None


def measure_step(recipe: Recipe, device: str | None) -> MeasuredStep:
    """Resolve a recipe, load its model and run steps with its largest micro-batch; the last one is recorded.

    Args:
        recipe: The recipe.
        device: The device, such as "cuda:1"; by default an accelerator if there is one, else the CPU.
    """
    engine = build_engine(recipe, device)
    run = resolve_run(recipe, engine, None)
    parts, spec = build_parts(run), run.plan.spec
    parts.model.train()
    parameters = [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]
    preallocate_state(parts.optimizer.optimizer, parameters)
    is_named = spec[Compilation.key] == Compilation.off
    watch = MemoryWatch(parts.model, parts.optimizer, engine.device, names_modules=is_named)
    num_micro = min(2, math.ceil(recipe.train.batch_size / run.plan.global_micro_batch))
    step = partial(_step, parts, num_micro, recipe.train.max_grad_norm, is_captured=captures(spec))
    for _ in range(_NUM_BEFORE):
        step()
    with _stderr_discarded():  # torch's profiler prints its starts, stops and blocks that it does not know
        watch.start()
        step()
        record = watch.stop_and_record()
    engine.free_memory()
    return MeasuredStep(spec, record, None if watch.history is None else dict(watch.history.snapshot))


@contextlib.contextmanager
def _stderr_discarded() -> Iterator[None]:
    """Discard what C++ code writes to stderr."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _step(parts: TrainingParts, num_micro: int, max_grad_norm: float | None, *, is_captured: bool) -> None:
    """Run one optimizer step. A captured step runs as during its capture, because a replay allocates nothing."""
    compute = window_gradients if is_captured else parts.wrap_step(window_gradients)
    batches = (worst_batch(parts.batches, parts.engine) for _ in range(num_micro))
    result = compute(parts.engine, parts.model, parts.loss, batches, num_micro, max_grad_norm)
    take_step(parts.optimizer, parts.scheduler, result)
