"""Predict the steps that a recipe allows on a device, and search among them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from trimtab.build.batches import fast_steps, micro_batch_asked
from trimtab.data.batching import Batching
from trimtab.errors import LossError, RecipeError, TraceError, UserError, summarize_error
from trimtab.model.load import max_positions
from trimtab.planner.explain import Change
from trimtab.planner.host import HostPrediction
from trimtab.planner.memory import Prediction
from trimtab.planner.predicted_step import PredictedStep
from trimtab.planner.search import Estimate, Ladder, Row, Space, halved_sizes, largest, search
from trimtab.planner.shapes import BatchShape, Lengths, StepTask
from trimtab.planner.step_predictor import StepPredictor
from trimtab.planner.target import SPARE, Target
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.recipe.schema import Recipe
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.adapter import num_virtual_tokens
from trimtab.techniques.apply import (
    axes_of,
    may_fail_in_trace,
    method_values,
    refusal,
    require_possible,
    start_seconds,
)
from trimtab.techniques.base import (
    Axis,
    Case,
    Phase,
    StepSpec,
)

_LENGTH_STEP = 64  # of the search for the longest rows
_MOST_LENGTH, _MOST_ROWS = 2**20, 2**16
_USUAL_STEPS = 1000  # for a run of unknown length


class RecipePlanner:
    """Predict the steps that a recipe allows on a device, and search among them.

    Args:
        recipe: The recipe. Settings at `auto` are searched; all others are kept.
        task: The task, which determines head and loss.
        target: The device and its budget.
        lengths: Lengths of the rows.
        num_processes: Number of processes that share a batch.
        has_own_loss: Whether the user passed a loss function.
        find_head_problem: See `trimtab.techniques.base.Case`.
        is_here: Whether the run will use this machine; then the packages of techniques must be installed.
        tokenizer: The tokenizer of the run, whose size the model is adapted to.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: StepTask,
        target: Target,
        lengths: Lengths,
        *,
        num_processes: int = 1,
        has_own_loss: bool = False,
        find_head_problem: Callable[[str], str | None] | None = None,
        is_here: bool = False,
        tokenizer: Any = None,
    ) -> None:
        self.recipe, self.task, self.target, self.lengths = recipe, task, target, lengths
        needs_logits = has_own_loss or recipe.distill is not None
        self._num_processes, self._has_own_loss, self._is_here = num_processes, needs_logits, is_here
        self._find_head_problem = find_head_problem
        self._steps = StepPredictor(recipe, task, target, lengths, num_processes, tokenizer)
        self.precision, self.batch_size = self._steps.precision, self._steps.batch_size
        self.left_out: dict[str, str] = {}  # methods that the ladder cannot show, and why

    @cached_property
    def _num_steps(self) -> int | None:
        """Optimizer steps of the run; None if neither the recipe nor the data determine them."""
        train, num_rows = self.recipe.train, self.lengths.num_rows
        if self.recipe.limits.fast_dev_run:
            return fast_steps(self.recipe)
        if train.max_steps is not None or num_rows is None:
            return train.max_steps
        return train.num_steps(math.ceil(num_rows / train.batch_size))

    # ------------------------------------------------------------------ the search space

    @cached_property
    def case(self) -> Case:
        """The input of the techniques' rules."""
        return self._case(method_values(self.recipe))

    @cached_property
    def space(self) -> Space:
        """The specifications of the recipe's own method."""
        return self._space(self.case)

    def _case(self, method: Mapping[str, str]) -> Case:
        variant = self._steps.variant(method)
        padded, num_rows = Batching(), self._micro_batches[0]
        shape = self.lengths.shape(num_rows, padded)
        return Case(
            variant.tracer.skeleton(),
            replace(self.target.accelerator, is_here=self._is_here),
            self._precision(method),
            variant.recipe,
            frozenset(self.recipe.memory.allow),
            self.task.loss_kind,
            self._has_own_loss,
            model_kind=self.task.model_kind,
            num_rows=num_rows,
            num_targets=shape.target_length or self.lengths.longest,
            num_processes=self._num_processes,
            num_steps=self._num_steps,
            count_shapes=partial(self.lengths.num_shapes, num_rows, padded),
            find_head_problem=self._find_head_problem,
        )

    def _space(self, case: Case) -> Space:
        return Space(self._micro_batches, case.precision, axes_of(case))

    @cached_property
    def _micro_batches(self) -> tuple[int, ...]:
        asked = micro_batch_asked(self.recipe, self.lengths.longest)
        return tuple(halved_sizes(self.batch_size)) if asked is None else (min(asked, self.batch_size),)

    def _precision(self, method: Mapping[str, str]) -> str:
        precision = self.precision
        for technique in TECHNIQUES:
            if technique.key in method:
                precision = technique.precision(method[technique.key], precision)
        return precision

    def tracer(self, spec: StepSpec) -> StepTracer:
        """The tracer for the method of a specification."""
        return self._steps.variant_of(spec).tracer

    # ------------------------------------------------------------------ predictions

    def prediction(self, spec: StepSpec, shape: BatchShape | None = None, batch_size: int | None = None) -> Prediction:
        """The memory of a step, and its trace.

        Args:
            spec: The specification of the step.
            shape: The shape of a micro-batch; by default the largest of the data.
            batch_size: Rows of the step; by default the recipe's.
        """
        return self._steps.prediction(spec, shape, batch_size)

    def shape(self, spec: StepSpec) -> BatchShape:
        """The largest micro-batch of a specification."""
        return self._steps.shape(spec)

    def evaluation(self, spec: StepSpec) -> tuple[int, PredictedStep] | None:
        """The largest evaluation batch that fits while training keeps its memory, and its prediction."""
        return self._steps.evaluation(spec)

    def host(self, spec: StepSpec, length: int | None = None) -> HostPrediction:
        """Peak host memory and disk space; for rows of another length if one is given."""
        shape = None if length is None else self._with_length(spec, length)
        return self._steps.host(spec, self._steps.step(spec, shape))

    def estimate(self, spec: StepSpec) -> Estimate | None:
        """Memory and time of a step; None if the model or a technique does not support it."""
        if refusal(spec, self.case) is not None:
            return None
        found = self._steps.step(spec)
        try:
            memory = found.allocated, found.outside, found.parts
        except (LossError, RecipeError, TraceError):
            if may_fail_in_trace(spec):
                return None
            raise
        seconds = found.seconds(self._steps.timing(spec))
        tokens = self.lengths.tokens(self.recipe.train.batch_size)
        fits = self.target.fits(found, SPARE)
        excess = self._steps.excess_on_host(spec, found) if fits else None
        start_s, num_steps = start_seconds(spec, self.case), self._num_steps or _USUAL_STEPS
        fits = fits and excess is None
        return Estimate(fits, *memory, seconds, tokens / seconds, start_s, num_steps, excess)

    def needed_bytes(self, row: Row) -> int:
        """The smallest allocator limit under which a row runs."""
        return self.target.needed_bytes(self._steps.step(row.spec))

    # ------------------------------------------------------------------ questions

    def choose(self, *, thorough: bool = False) -> Ladder:
        """Search for the fastest specification that fits; the ladder contains all predictions.

        Raises:
            RecipeError: Settings of the recipe contradict each other.
        """
        rows: dict[StepSpec, Row] = {}
        chosen = None
        spaces = list(dict.fromkeys(self._spaces()))
        for space in spaces:
            is_last = len(spaces) > 1 and space is spaces[-1] and self._usual_space is not self.space
            shows_all = thorough and not is_last  # too many combinations to show plans that cannot be chosen
            room = self.target.room(SPARE)
            if is_last and rows and min(map(_bytes_of_weights, rows.values())) > room:
                space = replace(space, axes=_with_least_weights(space.axes))
            found = search(space, self.estimate, room=room, thorough=shows_all)
            rows |= {row.spec: row for row in found.rows}
            chosen = found.chosen
            if chosen is not None:
                break
        if not rows:
            require_possible(self.space.reference(), self.case)
        return Ladder(tuple(sorted(rows.values(), key=lambda row: row.estimate.ranked_s)), chosen)

    def last_resorts(self, spec: StepSpec) -> Iterator[Row]:
        """A specification with every combination of the techniques that are used only if nothing else fits."""
        axes = [axis for axis in self.space.axes if axis.technique.last_resorts is None]
        for values in product(*(axis.values for axis in axes)):
            other = spec.having({axis.technique.key: value for axis, value in zip(axes, values, strict=True)})
            estimate = self.estimate(other) if other != spec else None
            if estimate is not None:
                yield Row(other, estimate)

    def _spaces(self) -> Iterator[Space]:
        """The spaces to search, one after another, until something fits."""
        yield self._narrowed_space
        yield self._usual_space  # the fastest specification may need more memory
        if self._usual_space is not self.space:
            yield replace(self.space, axes=tuple(map(_small_values, self.space.axes)))

    @cached_property
    def _usual_space(self) -> Space:
        """The space without values that are last resorts."""
        axes = [replace(axis, values=_usual_values(axis)) for axis in self.space.axes]
        return self.space if axes == list(self.space.axes) else replace(self.space, axes=tuple(axes))

    @cached_property
    def _narrowed_space(self) -> Space:
        """The usual space with the best values of techniques that are decided first.

        They are compared with the whole batch as one micro-batch. If none of them fits, they are compared with the
        smallest micro-batches: the less a micro-batch computes, the more Python's overhead matters, and so do
        techniques that reduce it.
        """
        space, reference = self._usual_space, self._usual_space.reference()
        open_axes = [axis for axis in space.axes if axis.technique.is_decided_first and len(axis.values) > 1]
        rows = self._rows_of(open_axes, reference)
        if rows and not any(row.estimate.fits for row in rows):
            rows = self._rows_of(open_axes, reference.with_micro_batch(space.micro_batches[-1])) or rows
        if not rows:
            return space
        best = min(rows, key=lambda row: row.estimate.ranked_s)
        fixed = {axis: replace(axis, values=(best.spec[axis.technique.key],)) for axis in open_axes}
        return replace(space, axes=tuple(fixed.get(axis, axis) for axis in space.axes))

    def _rows_of(self, axes: Sequence[Axis], spec: StepSpec) -> list[Row]:
        """The combinations of values of some techniques, with the other values of a specification."""
        keys = [axis.technique.key for axis in axes]
        combinations = product(*(axis.values for axis in axes)) if axes else ()
        specs = [spec.having(dict(zip(keys, values, strict=True))) for values in combinations]
        return [Row(one, estimate) for one in specs if (estimate := self.estimate(one)) is not None]

    def other_methods(self) -> Iterator[tuple[str, Row]]:
        """The fastest row that fits for every other method, with the setting that selects the method."""
        reference = self.space.reference()
        for technique in TECHNIQUES:
            if technique.effect == "method":
                for suggestion in technique.suggest(reference, self.case):
                    value = suggestion.spec[technique.key]
                    row = self._best_of_method({**method_values(self.recipe), technique.key: value}, value)
                    if row is not None:
                        yield suggestion.words, row

    def _best_of_method(self, method: Mapping[str, str], name: str) -> Row | None:
        try:
            space = self._space(self._case(method))
            axes = tuple(replace(axis, values=self._few_values(axis)) for axis in space.axes)
            found = search(replace(space, axes=axes), self.estimate, room=self.target.room(SPARE))
        except Exception as error:  # another method is only a suggestion
            self.left_out[name] = error.problem if isinstance(error, UserError) else summarize_error(error)
            return None
        return (found.chosen or found.smallest) if found.rows else None

    def _few_values(self, axis: Axis) -> tuple[str, ...]:
        """Enough values of a technique to show what another method needs."""
        technique, values = axis.technique, _usual_values(axis)
        if technique.is_decided_first:  # as for the recipe's own method
            own = next(own.values[0] for own in self._narrowed_space.axes if own.technique is technique)
            return (own,) if own in values else values[-1:] if own != technique.off else values[:1]
        if technique.effect == "rounding":
            return values
        if not technique.is_slower_with_each_value:
            return values[-1:]
        return tuple(dict.fromkeys((values[0], values[-1]))) if technique.phase is Phase.RECOMPUTATION else values[:1]

    def changes(self, row: Row) -> Iterator[Change]:
        """Changes to the recipe that may make it fit, smallest change first."""
        length = self.longest(row.spec, most=self.lengths.longest - 1)
        if length is not None:
            shorter = self._steps.step(row.spec, self._with_length(row.spec, length))
            yield Change(f"data.max_length: {length}", shorter.allocated + shorter.outside, True)
        for technique in TECHNIQUES:
            if technique.effect == "rounding":
                for suggestion in technique.suggest(row.spec, self.case):
                    estimate = self.estimate(suggestion.spec)
                    if estimate is not None:
                        yield self._change(suggestion.words, Row(suggestion.spec, estimate))
        for words, other in self.other_methods():
            yield self._change(words, other)

    def _change(self, words: str, row: Row) -> Change:
        estimate = row.estimate
        return Change(words, self.needed_bytes(row) + estimate.outside_bytes, estimate.fits, estimate.excess_host_bytes)

    def most_rows(self, spec: StepSpec) -> int | None:
        """The largest batch that fits as one micro-batch."""

        def measure(rows: int) -> tuple[int, bool]:
            larger = spec.with_micro_batch(rows)
            # this many rows as long as the longest one: more than a batch of the data has
            shape = replace(self.shape(larger), rows=rows, max_tokens=None, max_rows=None)
            found = self._steps.step(larger, shape, batch_size=rows)
            return found.allocated + found.outside, self._steps.fits(larger, found)

        return largest(measure, self.target.room(SPARE), first=spec.micro_batch, most=_MOST_ROWS)

    def longest(self, spec: StepSpec, *, most: int | None = None) -> int | None:
        """The longest rows, in tokens, that fit; at most as long as the model's positions."""
        limit = self.max_positions() or _MOST_LENGTH
        limit = limit if most is None else min(most, limit)
        shape = self.shape(spec)

        def measure(length: int) -> tuple[int, bool]:
            found = self._steps.step(spec, self._with_length(spec, length))
            return found.allocated + found.outside, self._steps.fits(spec, found)

        return largest(measure, self.target.room(SPARE), first=shape.length, most=limit, step=min(_LENGTH_STEP, limit))

    def _with_length(self, spec: StepSpec, length: int) -> BatchShape:
        """The largest micro-batch if the longest row had another length."""
        shape, asked = self.shape(spec), self.recipe.memory.micro_batch_tokens
        if length > shape.length:  # the tokens of the data are no longer a limit
            max_tokens = None if asked == "auto" else max(int(asked), length)
            shape = replace(shape, rows=spec.micro_batch, max_tokens=max_tokens, max_rows=None)
        return replace(shape, length=length, target_length=shape.target_length and length)

    def max_positions(self) -> int | None:
        """The longest rows that the model accepts."""
        limit = max_positions(self.case.model)
        return None if limit is None else limit - num_virtual_tokens(self.recipe)

    def num_parameters(self) -> tuple[int, int]:
        """The number of all parameters, and of the trainable ones."""
        return self._steps.num_parameters


def _usual_values(axis: Axis) -> tuple[str, ...]:
    """The values of a technique that are not last resorts; a value set in the recipe never is."""
    last_resorts = axis.technique.last_resorts
    if last_resorts is None:
        return axis.values[:1]
    return tuple(value for value in axis.values if value not in last_resorts) or axis.values


def _small_values(axis: Axis) -> Axis:
    """The values worth predicting if nothing fits without a last resort: those that need the least memory."""
    technique, values = axis.technique, axis.values
    if technique.is_decided_first:
        values = values[:1]
    elif technique.last_resorts:
        resorts = (value for value in values if value in technique.last_resorts)
        values = tuple(dict.fromkeys((_usual_values(axis)[-1], *resorts)))
    elif technique.is_slower_with_each_value and technique.last_resorts is not None:
        ends = (values[0], values[-1])
        values = tuple(dict.fromkeys(ends)) if technique.phase is Phase.RECOMPUTATION else values[-1:]
    return replace(axis, values=values)


def _bytes_of_weights(row: Row) -> int:
    """Bytes that a step needs on the device before it computes anything."""
    return row.estimate.parts["weights"] + row.estimate.outside_bytes


def _with_least_weights(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The values without those that do not help if the weights alone do not fit."""
    shrinking = [axis for axis in axes if axis.technique.shrinks_weights and len(axis.values) > 1]
    if len(shrinking) != 1:  # either may be enough
        return axes
    return tuple(replace(axis, values=axis.values[-1:]) if axis is shrinking[0] else axis for axis in axes)
