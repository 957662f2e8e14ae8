"""`Engine(memory_budget=…)`: how a loop of the user's own stays within a budget, chosen when it is prepared.

The step is traced on a copy of the user's model without weights (`trace/own_step.py`), with the largest batch of the
loader. What changes no result is tried first, the first that fits is taken, and everything that was decided is said.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from trimtab.build.levers import spelled
from trimtab.engine.engine import Engine
from trimtab.engine.prepared_optimizer import PreparedOptimizer
from trimtab.errors import DoesNotFit, RecipeError, in_one_line
from trimtab.hardware.memory import (
    MemoryCap,
    budget_in_bytes,
    cap_memory,
    memory_in_use,
    memory_outside,
    peak_memory,
    prefer_expandable_segments,
    total_memory,
    usually_outside,
)
from trimtab.log import say, unheard
from trimtab.optim.eight_bit import eight_bit_form, why_not_eight_bits
from trimtab.planner.explain import Change, Rung, cannot_fit, gib
from trimtab.planner.largest_batch import LargestBatch, NoBatch, largest_batch
from trimtab.planner.memory import Prediction, predict
from trimtab.planner.recipe_planner import SPARE
from trimtab.planner.search import Candidate, largest
from trimtab.planner.target import Target, target_here
from trimtab.planner.trace.own_step import OwnStep
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.recipe.yaml_text import read_value
from trimtab.techniques.gradient_checkpointing import checkpoint_layers
from trimtab.units import format_bytes, parse_bytes

_FEWEST_BLOCKS = 4  # from which on every second one is a choice of its own
_LENGTH_STEP = 64  # in which shorter rows are sought
_STEPS_UNTIL_STEADY = 2  # an optimizer makes its state in the first
_WORDS = {"none": "as it is", "{every: 2}": "every second block recomputed", "all": "all blocks recomputed"}


@dataclass(frozen=True)
class Chosen:
    """What a loop does to stay within its budget.

    Attributes:
        recomputed: Which blocks, as a recipe writes it.
        is_8bit: Whether the optimizer's state is in 8 bits.
        allocated_bytes: The predicted peak of what tensors take, with those that were there before.
        total_bytes: What the device needs by that prediction.
    """

    recomputed: str
    is_8bit: bool
    allocated_bytes: int
    total_bytes: int


class OwnLoop:
    """See `trimtab.engine.memory_budget.MemoryPlanner`. From its making on the process is held to the budget.

    Args:
        budget: Such as "8GiB"; "auto" is what the device has free.
        allow: "8bit" lets the optimizer have state of 8 bits.
        device: What it is a budget of.

    Raises:
        RecipeError: The device has less, or something is allowed that is not known.
    """

    def __init__(self, budget: str | int, allow: Sequence[str], device: torch.device) -> None:
        unknown = set([allow] if isinstance(allow, str) else allow) - {"8bit"}
        if isinstance(allow, str) or unknown:
            raise RecipeError(f"memory_allow={allow!r} is not known", 'memory_allow=["8bit"]')
        self._allows_8bit = "8bit" in allow
        self._device, self._budget = device, _in_bytes(budget, device)
        if device.type == "cuda":
            prefer_expandable_segments()
        self._cap = self._hold(0)
        self._is_settled = False
        self.chosen: Chosen | None = None

    def fit_to_budget(self, engine: Engine, parts: tuple[Any, ...], splits_batches: bool) -> tuple[Any, ...]:
        """Choose for the first model that comes, with its optimizer and its loader.

        Raises:
            DoesNotFit: Nothing fits into the memory of a GPU.
        """
        models = [part for part in parts if isinstance(part, torch.nn.Module)]
        if self._is_settled or not models:
            return parts
        self._is_settled = True

        def decide() -> Chosen | str | None:
            try:
                return self._choose(engine, parts, splits_batches)
            except DoesNotFit as error:
                return str(error)
            except (NoBatch, RecipeError) as error:
                say(f"memory_budget: nothing is predicted, and nothing changed: {error}; {self._held}")
            except Exception as error:  # a model that cannot be traced may train all the same
                what = in_one_line(error)
                say(f"memory_budget: this step cannot be traced ({what}): nothing is changed; {self._held}")
            return None

        found = engine.first_decides(decide)
        if isinstance(found, str):
            raise DoesNotFit(found)
        self.chosen = found
        self._cap = self._hold(usually_outside(found is not None and found.is_8bit))
        return parts if found is None else self._apply(found, parts)

    # ------------------------------------------------------------------ choosing

    @one_plan_at_a_time()
    def _choose(self, engine: Engine, parts: tuple[Any, ...], splits_batches: bool) -> Chosen:
        model, optimizer, loader = _trained(parts)
        num_parts = engine.num_processes if splits_batches else 1
        batch = largest_batch(loader, num_parts)
        target = self._target(model)
        step = OwnStep(model, optimizer, engine.mixed_precision, engine.gradient_accumulation_steps, target)
        predictions = _Predictions(step, target, _other_bytes(engine.device, model, parts))
        if target.is_cpu:  # what tracing imports is the process's own from then on
            predictions.of(next(self._candidates(step, optimizer, batch)), batch)
            predictions.target = target = self._target(model)
        tried: list[tuple[Candidate, Prediction]] = []
        for candidate in self._candidates(step, optimizer, batch):
            found = predictions.of(candidate, batch)
            tried.append((candidate, found))
            if target.fits(found, SPARE):
                break
        else:
            candidate, found = min(tried, key=lambda pair: pair[1].allocated)
            if not target.fits(found, 0.0):
                changes = list(_changes(predictions, candidate, batch, num_parts, optimizer))
                problem = _problem(predictions, candidate, found, batch, changes, optimizer)
                if not target.is_cpu:
                    raise DoesNotFit(problem)
                say(f"memory_budget: {problem}\nfigures of a CPU are estimates: that smallest plan is taken")
        total = predictions.total(found)
        allocated = found.allocated + predictions.other_bytes
        chosen = Chosen(candidate.recomputed, candidate.optimizer.endswith("8bit"), allocated, total)
        asked = f"{step.precision.replace('no', 'fp32')}, {candidate.optimizer}, {batch}"
        before = "" if len(tried) == 1 else f"; {_words(tried[0][0])} it would be {gib(predictions.total(tried[0][1]))}"
        say(
            f"memory_budget {gib(self._budget)} ({target.name}): {_words(candidate)}, "
            f"predicted {gib(total)}{before} ({asked})"
        )
        say(f"memory_budget: {'; '.join(self._left_out(engine, step, optimizer, target))}")
        return chosen

    def _candidates(self, step: OwnStep, optimizer: torch.optim.Optimizer, batch: LargestBatch) -> Iterator[Candidate]:
        """What changes no result first; of that, what costs least time first."""
        name = type(optimizer).__name__
        recomputed = ["none"]
        if step.num_blocks and not step.recomputes_already:
            recomputed += [spelled({"every": 2}), "all"] if step.num_blocks >= _FEWEST_BLOCKS else ["all"]
        is_small = self._allows_8bit and why_not_eight_bits(optimizer) is None
        for form in [name, f"{name}8bit"] if is_small else [name]:
            for word in recomputed:
                yield Candidate(batch.rows, optimizer=form, recomputed=word)

    def _target(self, model: torch.nn.Module) -> Target:
        target = target_here(self._device, f"{self._budget}B")
        if target.is_cpu:  # what is loaded now will be counted as weights
            weights = sum(parameter.nbytes for parameter in model.parameters())
            target = replace(target, outside_bytes=max(0, (target.outside_bytes or 0) - weights))
        return target

    def _left_out(
        self, engine: Engine, step: OwnStep, optimizer: torch.optim.Optimizer, target: Target
    ) -> Iterator[str]:
        """What a reader of the figures has to know."""
        yield "how many rows go through the model at once is the loop's to choose"
        if step.has_loss:
            yield "not in the figures is what the loop does besides model(**batch).loss, and evaluation"
        else:
            yield "not in the figures is the loss, for which the batches have no labels, nor evaluation"
        if step.recomputes_already:
            yield "the model's own gradient checkpointing stays as it is"
        reason = why_not_eight_bits(optimizer) if self._allows_8bit else None
        if reason is not None:
            yield f"state of 8 bits was not a choice: {reason}"
        if engine.num_processes > 1:
            yield "what processes exchange is not in the figures either"
        if target.note:
            yield target.note
        yield self._held

    # ------------------------------------------------------------------ doing it

    def _apply(self, chosen: Chosen, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        model, optimizer, _ = _trained(parts)
        if chosen.recomputed != "none":
            checkpoint_layers(model, read_value(chosen.recomputed))
        own = optimizer
        if chosen.is_8bit:
            own = eight_bit_form(optimizer, optimizer.param_groups)
            _tell_schedules(optimizer, own)
        self._watch(own, chosen)
        return tuple(own if part is optimizer else part for part in parts)

    def _hold(self, outside_bytes: int) -> MemoryCap:
        return cap_memory(self._device, self._budget, max(outside_bytes, memory_outside(self._device)))

    @property
    def _held(self) -> str:
        if self._device.type == "cuda":
            return f"the process is capped at {format_bytes(self._budget)}"
        return f"{self._device} cannot be capped at {format_bytes(self._budget)}: going beyond is said"

    def _watch(self, optimizer: torch.optim.Optimizer, chosen: Chosen) -> None:
        """Say once what was measured; where nothing is refused, say when the budget is passed."""
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
                    f"memory_budget: {format_bytes(measured)} at the peak so far; predicted {format_bytes(predicted)}, "
                    f"so {measured / predicted - 1:+.1%}"
                )

        optimizer.register_step_post_hook(stepped)


class _Predictions:
    """What candidates take, each traced once."""

    def __init__(self, step: OwnStep, target: Target, other_bytes: int) -> None:
        self.step, self.target, self.other_bytes = step, target, other_bytes
        self._known: dict[Any, Prediction] = {}

    def of(self, candidate: Candidate, batch: LargestBatch, precision: str | None = None) -> Prediction:
        """The memory of a step."""
        key = candidate, batch.rows, batch.length, precision
        if key not in self._known:
            is_8bit = candidate.optimizer.endswith("8bit")
            with unheard():
                trace = self.step.trace(batch, read_value(candidate.recomputed), is_8bit=is_8bit, precision=precision)
            self._known[key] = predict(trace, with_kernels=is_8bit)
        found = self.target.as_here(self._known[key])
        return replace(found, outside=found.outside + self.other_bytes)

    def total(self, prediction: Prediction) -> int:
        """All that the device needs; no allocator of blocks stands between on a CPU."""
        return prediction.allocated + prediction.outside if self.target.is_cpu else prediction.total

    def measure(
        self, candidate: Candidate, resized: Callable[[int], LargestBatch]
    ) -> Callable[[int], tuple[int, bool]]:
        """For `trimtab.planner.search.largest`."""

        def measured(size: int) -> tuple[int, bool]:
            found = self.of(candidate, resized(size))
            return found.allocated + found.outside, self.target.fits(found, SPARE)

        return measured


# ---------------------------------------------------------------------- what does not fit


def _changes(
    predictions: _Predictions,
    candidate: Candidate,
    batch: LargestBatch,
    num_parts: int,
    optimizer: torch.optim.Optimizer,
) -> Iterator[Change]:
    """What could be written instead, the least change first."""

    def change(words: str, found: Prediction) -> Change:
        return Change(words, predictions.total(found), predictions.target.fits(found, SPARE))

    room = predictions.target.room(SPARE)
    if batch.rows > 1:
        measure = predictions.measure(candidate, lambda rows: batch.resized(rows=rows))
        rows = largest(measure, room, first=max(1, batch.rows // 2), most=batch.rows - 1)
        if rows is not None:
            words = f"DataLoader(batch_size={rows * num_parts}), with gradient_accumulation_steps for the same batch"
            yield change(words, predictions.of(candidate, batch.resized(rows=rows)))
    if not candidate.optimizer.endswith("8bit") and why_not_eight_bits(optimizer) is None:
        smaller = replace(candidate, optimizer=f"{candidate.optimizer}8bit")
        yield change('memory_allow=["8bit"]', predictions.of(smaller, batch))
    native = predictions.target.precision("auto")
    if predictions.step.precision == "no" and native != "fp32":
        yield change(f'mixed_precision="{native}"', predictions.of(candidate, batch, native))
    if batch.length is not None and batch.length > 1:
        measure = predictions.measure(candidate, lambda length: batch.resized(length=length))
        step = min(_LENGTH_STEP, batch.length - 1)
        length = largest(measure, room, first=batch.length // 2, most=batch.length - 1, step=step)
        if length is not None:
            yield change(f"rows of at most {length} tokens", predictions.of(candidate, batch.resized(length=length)))


def _problem(
    predictions: _Predictions,
    candidate: Candidate,
    found: Prediction,
    batch: LargestBatch,
    changes: Sequence[Change],
    optimizer: torch.optim.Optimizer,
) -> str:
    target = predictions.target
    slack = predictions.total(found) - found.allocated - found.outside
    parts = {**found.parts, "allocator slack": slack, "outside the allocator": found.outside}
    rung = Rung(candidate, parts, 0.0, 0.0, None, fits=False)
    words = cannot_fit(rung, target.name, target.budget_bytes, changes, type(optimizer).__name__)
    return words.replace("\n", f" ({batch})\n", 1) if "\n" in words else f"{words} ({batch})"


# ---------------------------------------------------------------------- the user's parts


def _in_bytes(budget: str | int, device: torch.device) -> int:
    if budget == "auto":
        found = budget_in_bytes("auto", device)
        if found is None:
            raise RecipeError(f"nobody can say what {device} has free", 'memory_budget="8GiB"')
        return found
    wanted, total = parse_bytes(budget), total_memory(device)
    if total and wanted > total:
        raise RecipeError(
            f"memory_budget is {format_bytes(wanted)}, and {device} has {format_bytes(total)}",
            'memory_budget="auto" takes what is free',
        )
    return wanted


def _trained(parts: tuple[Any, ...]) -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """The model that trains, its optimizer, and the loader that comes first.

    Raises:
        NoBatch: One of them is missing, or there are several.
    """
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    loaders = [part for part in parts if isinstance(part, DataLoader)]
    missing = [word for word, found in (("optimizer", optimizers), ("DataLoader", loaders)) if not found]
    if missing:
        raise NoBatch(f"prepare was given a model without {' and '.join(missing)}; one call with all of them is needed")
    if len(optimizers) > 1:
        raise NoBatch(f"{len(optimizers)} optimizers take turns in a way that only the loop knows")
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
    """What lies on a GPU beside the model that trains, or will; on a CPU the process's memory counts it already."""
    if device.type == "cpu":
        return 0
    own = sum(parameter.nbytes for parameter in model.parameters() if parameter.device == device)
    others = [part for part in parts if isinstance(part, torch.nn.Module) and part is not model]
    coming = sum(p.nbytes for other in others for p in other.parameters() if p.device != device)
    return max(0, memory_in_use(device) - own) + coming


def _tell_schedules(before: torch.optim.Optimizer, after: torch.optim.Optimizer) -> None:
    """Schedules hold the optimizer that they were made with, and look whether it has stepped."""

    def stepped(*_: Any) -> None:
        before._opt_called = True  # type: ignore[attr-defined]

    after.register_step_pre_hook(stepped)


def _words(candidate: Candidate) -> str:
    in_8bit = ", the optimizer's state in 8 bits" if candidate.optimizer.endswith("8bit") else ""
    return _WORDS[candidate.recomputed] + in_8bit
