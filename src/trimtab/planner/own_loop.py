"""`Engine(memory_budget=…)`: keep a user's own loop within a budget; the decision is made in `Engine.prepare`.

The step is traced on a copy of the user's model without weights (`trace/own_step.py`), with the largest batch of the
loader. Exact techniques are searched first; techniques that change results slightly are used only if these do not fit.
Every decision is logged.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader

from trimtab.engine.engine import Engine
from trimtab.engine.prepared_optimizer import PreparedOptimizer
from trimtab.errors import DoesNotFit, RecipeError, summarize_error
from trimtab.hardware.memory import (
    MemoryCap,
    cap_memory,
    expected_non_allocator_memory,
    memory_in_use,
    non_allocator_memory,
    peak_memory,
    prefer_expandable_segments,
    resolve_budget,
    total_memory,
)
from trimtab.log import muted, say
from trimtab.optim.eight_bit import eight_bit_obstacle
from trimtab.planner.decide import choose_row
from trimtab.planner.explain import Change, gib, words_of
from trimtab.planner.largest_batch import LargestBatch, NoBatch, largest_batch
from trimtab.planner.memory import Prediction, predict, predict_captured
from trimtab.planner.search import Estimate, Ladder, Row, Space, largest, search
from trimtab.planner.target import SPARE, Target, target_here
from trimtab.planner.time import step_seconds
from trimtab.planner.trace.own_step import OwnStep
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.apply import axes_of, change_model, change_optimizer, loads_kernels
from trimtab.techniques.base import Accelerator, Case, Site, StepSpec
from trimtab.techniques.optimizer_state import OptimizerState
from trimtab.units import format_bytes, parse_bytes

_LENGTH_STEP = 64  # of the search for shorter rows
_STEPS_UNTIL_STEADY = 2  # an optimizer creates its state in the first step
_ALLOWANCES = ("8bit",)


@dataclass(frozen=True)
class Chosen:
    """The decision for a loop.

    Attributes:
        spec: The specification of its step.
        allocated_bytes: The predicted peak of allocated tensors, including those that existed before.
        total_bytes: The predicted memory needed on the device.
    """

    spec: StepSpec
    allocated_bytes: int
    total_bytes: int


class OwnLoop:
    """The memory planner of a user's loop. Once it is created, the process is limited to the budget.

    Args:
        budget: A size such as "8GiB"; "auto" uses the free memory of the device.
        allow: "8bit" allows the optimizer to keep its state in 8 bits.
        device: The device whose memory is limited.

    Raises:
        RecipeError: The device has less memory than the budget, or `allow` contains an unknown technique.
    """

    def __init__(self, budget: str | int, allow: Sequence[str], device: torch.device) -> None:
        unknown = set([allow] if isinstance(allow, str) else allow) - set(_ALLOWANCES)
        if isinstance(allow, str) or unknown:
            raise RecipeError(f"memory_allow={allow!r} is not valid", 'memory_allow=["8bit"]')
        self._allow = frozenset(allow)
        self._device, self._budget = device, _in_bytes(budget, device)
        if device.type == "cuda":
            prefer_expandable_segments()
        self._cap = self._hold(0)
        self._is_decided = False
        self.chosen: Chosen | None = None

    def fit_to_budget(self, engine: Engine, parts: tuple[Any, ...], splits_batches: bool) -> tuple[Any, ...]:
        """Decide for the first model that is prepared, with its optimizer and its loader.

        Raises:
            DoesNotFit: Nothing fits into the memory of a GPU.
        """
        models = [part for part in parts if isinstance(part, torch.nn.Module)]
        if self._is_decided or not models:
            return parts
        self._is_decided = True

        def decide() -> Chosen | str | None:
            try:
                return self._choose(engine, parts, splits_batches)
            except DoesNotFit as error:
                return str(error)
            except (NoBatch, RecipeError) as error:
                say(f"memory_budget: no prediction, nothing is changed: {error}; {self._held}")
            except Exception as error:  # a model that cannot be traced may still train
                what = summarize_error(error)
                say(f"memory_budget: the step cannot be traced ({what}), nothing is changed; {self._held}")
            return None

        found = engine.decide_on_main_process(decide)
        if isinstance(found, str):
            raise DoesNotFit(found)
        self.chosen = found
        self._cap = self._hold(expected_non_allocator_memory(found is not None and loads_kernels(found.spec)))
        return parts if found is None else self._apply(engine, found, parts)

    @one_plan_at_a_time()
    def _choose(self, engine: Engine, parts: tuple[Any, ...], splits_batches: bool) -> Chosen:
        model, optimizer, loader = _trained(parts)
        num_parts = engine.num_processes if splits_batches else 1
        batch = largest_batch(loader, num_parts)
        target = self._target(model)
        captures = engine.captures_micro_batches and not target.is_cpu
        step = OwnStep(model, optimizer, engine.gradient_accumulation_steps, target, is_captured=captures)
        precision = engine.mixed_precision.replace("no", "fp32")
        accelerator = replace(target.accelerator, is_here=True)
        case = Case(model, accelerator, precision, None, self._allow, optimizer=optimizer)
        planner = _LoopPlanner(step, case, target, batch, num_parts, _other_bytes(engine.device, model, parts))
        if target.is_cpu:  # modules that tracing imports belong to the process from then on
            planner.prediction(planner.space.reference())
            planner.target = self._target(model)
        try:
            row = choose_row(planner, always_explains=True, prefix=f"memory_budget ({batch}): ")
        except DoesNotFit as error:
            raise DoesNotFit(str(error).replace("\n", f" ({batch})\n", 1)) from None
        found, first = planner.prediction(row.spec), planner.space.reference()
        before = "" if row.spec == first else f"; {_words(first)} would need {gib(planner.total_bytes(first))}"
        asked = f"{precision}, {row.spec[OptimizerState.key]}, {batch}"
        say(
            f"memory_budget {gib(self._budget)} ({target.name}): {_words(row.spec)}, "
            f"predicted {gib(planner.total_bytes(row.spec))}{before} ({asked})"
        )
        say(f"memory_budget: {'; '.join(self._limits(engine, step, optimizer, target))}")
        return Chosen(row.spec, found.allocated + planner.other_bytes, planner.total_bytes(row.spec))

    def _target(self, model: torch.nn.Module) -> Target:
        target = target_here(self._device, f"{self._budget}B")
        return target.without_loaded(model) if target.is_cpu else target

    def _limits(self, engine: Engine, step: OwnStep, optimizer: torch.optim.Optimizer, target: Target) -> Iterator[str]:
        """Limits of the prediction, for the log."""
        yield "the loop's own micro-batch size is kept"
        if step.has_loss:
            yield "only model(**batch).loss is predicted, not other computation in the loop, nor evaluation"
        else:
            yield "the loss, which the model does not compute from these batches, and evaluation are not predicted"
        if step.is_captured:
            yield (
                "CUDA graphs are predicted for the largest batch and the model's own loss; batches of several sizes "
                "may need more"
            )
        if step.compared_rows is not None:
            yield (
                f"the loss compares the rows of a batch with each other ({step.compared_rows}), so smaller batches "
                "are another loss, also with gradient accumulation"
            )
            if engine.num_processes > 1:
                yield "every process compares its own rows only"
        if step.recomputes_already:
            yield "the model's own gradient checkpointing is kept"
        reason = eight_bit_obstacle(optimizer) if self._allow else None
        if reason is not None:
            yield f"8-bit optimizer state is not possible: {reason}"
        if engine.num_processes > 1:
            yield "communication between processes is not predicted"
        if target.note:
            yield target.note
        yield self._held

    # ------------------------------------------------------------------ apply the decision

    def _apply(self, engine: Engine, chosen: Chosen, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        model, optimizer, _ = _trained(parts)
        change_model(model, chosen.spec, Site(self._device, Accelerator.of(self._device), engine.compute_dtype))
        changed = change_optimizer(optimizer, chosen.spec, optimizer.param_groups)
        if changed is not optimizer:
            _tell_schedules(optimizer, changed)
        self._watch(changed, chosen)
        return tuple(changed if part is optimizer else part for part in parts)

    def _hold(self, outside_bytes: int) -> MemoryCap:
        return cap_memory(self._device, self._budget, max(outside_bytes, non_allocator_memory(self._device)))

    @property
    def _held(self) -> str:
        if self._device.type == "cuda":
            return f"the process is capped at {format_bytes(self._budget)}"
        return f"{self._device} cannot be capped at {format_bytes(self._budget)}: exceeding it is only reported"

    def _watch(self, optimizer: torch.optim.Optimizer, chosen: Chosen) -> None:
        """Log the measured peak once; if memory cannot be limited, log when the budget is exceeded."""
        device, num_steps = self._device, 0

        def stepped(*_: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            if device.type != "cuda":
                self._cap.share(memory_in_use(device))
            if num_steps == _STEPS_UNTIL_STEADY:
                measured = peak_memory(device)
                predicted = chosen.total_bytes if device.type == "cpu" else chosen.allocated_bytes
                say(
                    f"memory_budget: the measured peak so far is {format_bytes(measured)}, "
                    f"{measured / predicted - 1:+.1%} from the predicted {format_bytes(predicted)}"
                )

        optimizer.register_step_post_hook(stepped)


class _LoopPlanner:
    """Predict and search the steps of a loop; see `trimtab.planner.decide.StepPlanner`."""

    def __init__(
        self, step: OwnStep, case: Case, target: Target, batch: LargestBatch, num_parts: int, other_bytes: int
    ) -> None:
        self._step, self._case, self.target, self._batch = step, case, target, batch
        self._num_parts, self.other_bytes = num_parts, other_bytes
        self._known: dict[Any, Prediction] = {}

    @cached_property
    def space(self) -> Space:
        """All specifications, including those that change results slightly."""
        return Space((self._batch.rows,), self._case.precision, axes_of(self._case))

    def choose(self, *, thorough: bool = False) -> Ladder:
        """Search exact techniques first, and those that change results slightly only if none of the exact ones fits."""
        room, axes = self.target.room(SPARE), self.space.axes
        exact = [replace(a, values=a.values[:1]) if a.technique.effect == "rounding" else a for a in axes]
        found = search(replace(self.space, axes=tuple(exact)), self._estimate, room=room)
        return found if found.chosen is not None else search(self.space, self._estimate, room=room)

    def _estimate(self, spec: StepSpec) -> Estimate | None:
        found = self.prediction(spec)
        seconds = step_seconds(found.trace.ops, self.target.device).seconds
        fits = self.target.fits(found, SPARE)
        return Estimate(fits, found.allocated, found.outside, found.parts, seconds, 0.0)

    def prediction(self, spec: StepSpec, batch: LargestBatch | None = None) -> Prediction:
        """The memory of a step; each step is traced once."""
        batch = batch or self._batch
        key = spec, batch.rows, batch.length
        if key not in self._known:
            with muted():
                trace = self._step.trace(spec, batch)
            predicted = predict_captured if self._step.is_captured else predict
            self._known[key] = predicted(trace, with_kernels=loads_kernels(spec))
        found = self.target.as_here(self._known[key])
        return replace(found, outside=found.outside + self.other_bytes)

    def needed_bytes(self, row: Row) -> int:
        """The smallest allocator limit under which a row runs."""
        return self.target.needed_bytes(self.prediction(row.spec))

    def total_bytes(self, spec: StepSpec, batch: LargestBatch | None = None) -> int:
        """All bytes needed on the device."""
        found = self.prediction(spec, batch)
        return self.target.needed_bytes(found) + found.outside

    # ------------------------------------------------------------------ changes that would fit

    def changes(self, row: Row) -> Iterator[Change]:
        """Changes to the loop that may make it fit, smallest change first."""
        spec, batch = row.spec, self._batch
        if batch.rows > 1:
            rows = self._largest(spec, lambda rows: batch.resized(rows=rows), batch.rows)
            if rows is not None:
                words = f"DataLoader(batch_size={rows * self._num_parts}), {self._same_batch}"
                yield self._change(words, spec, batch.resized(rows=rows))
        for technique in TECHNIQUES:
            for suggestion in technique.suggest(spec, self._case):
                yield self._change(suggestion.words, suggestion.spec)
        native = self.target.precision("auto")
        if spec.precision == "fp32" and native != "fp32":
            yield self._change(f'mixed_precision="{native}"', replace(spec, precision=native))
        if batch.length is not None and batch.length > 1:
            step = min(_LENGTH_STEP, batch.length - 1)
            length = self._largest(spec, lambda length: batch.resized(length=length), batch.length, step)
            if length is not None:
                yield self._change(f"rows of at most {length} tokens", spec, batch.resized(length=length))

    @property
    def _same_batch(self) -> str:
        if self._step.compared_rows is not None:
            return "which is another loss: fewer rows are compared"
        return "with gradient_accumulation_steps for the same batch"

    def _change(self, words: str, spec: StepSpec, batch: LargestBatch | None = None) -> Change:
        fits = self.target.fits(self.prediction(spec, batch), SPARE)
        return Change(words, self.total_bytes(spec, batch), fits)

    def _largest(self, spec: StepSpec, resized: Callable[[int], LargestBatch], now: int, step: int = 1) -> int | None:
        def measure(size: int) -> tuple[int, bool]:
            found = self.prediction(spec, resized(size))
            return found.allocated + found.outside, self.target.fits(found, SPARE)

        return largest(measure, self.target.room(SPARE), first=max(1, now // 2), most=now - 1, step=step)


def _words(spec: StepSpec) -> str:
    words = words_of(spec).split(", ", 1)
    return words[1] if len(words) > 1 else "nothing recomputed"


# ---------------------------------------------------------------------- the user's parts


def _in_bytes(budget: str | int, device: torch.device) -> int:
    if budget == "auto":
        found = resolve_budget("auto", device)
        if found is None:
            raise RecipeError(f"the free memory of {device} is unknown", 'memory_budget="8GiB"')
        return found
    wanted, total = parse_bytes(budget), total_memory(device)
    if total and wanted > total:
        raise RecipeError(
            f"memory_budget is {format_bytes(wanted)}, but {device} has {format_bytes(total)}",
            'memory_budget="auto" uses the free memory',
        )
    return wanted


def _trained(parts: tuple[Any, ...]) -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Find the trained model, its optimizer, and the first loader among prepared parts.

    Raises:
        NoBatch: One is missing, or there are several optimizers or trained models.
    """
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    loaders = [part for part in parts if isinstance(part, DataLoader)]
    missing = [word for word, found in (("optimizer", optimizers), ("DataLoader", loaders)) if not found]
    if missing:
        raise NoBatch(f"prepare was given a model without {' and '.join(missing)}; one call with all of them is needed")
    if len(optimizers) > 1:
        raise NoBatch(f"prepare was given {len(optimizers)} optimizers; one is supported")
    (optimizer,) = optimizers
    if isinstance(optimizer, PreparedOptimizer):
        raise NoBatch("the optimizer was prepared before its model")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    models = [part for part in parts if isinstance(part, torch.nn.Module)]
    training = [model for model in models if any(id(parameter) in held for parameter in model.parameters())]
    if len(training) != 1:
        raise NoBatch(f"the optimizer trains {len(training) or 'none'} of the models that prepare was given")
    return training[0], optimizer, loaders[0]


def _other_bytes(device: torch.device, model: torch.nn.Module, parts: tuple[Any, ...]) -> int:
    """Bytes on a GPU, now or later, except the trained model's; 0 on a CPU, where process memory includes them."""
    if device.type == "cpu":
        return 0
    own = sum(parameter.nbytes for parameter in model.parameters() if parameter.device == device)
    others = [part for part in parts if isinstance(part, torch.nn.Module) and part is not model]
    coming = sum(p.nbytes for other in others for p in other.parameters() if p.device != device)
    return max(0, memory_in_use(device) - own) + coming


def _tell_schedules(before: torch.optim.Optimizer, after: torch.optim.Optimizer) -> None:
    """Keep schedulers working: they hold the original optimizer and check whether it has stepped."""

    def stepped(*_: Any) -> None:
        before._opt_called = True  # type: ignore[attr-defined]

    after.register_step_pre_hook(stepped)
