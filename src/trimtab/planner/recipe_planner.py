"""Predicts the steps that a recipe allows on a device, and searches among them."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from trimtab.build.batches import fast_steps, micro_batch_asked
from trimtab.data.batching import Batching
from trimtab.errors import LossError, RecipeError, TraceError, UserError, summarize_error
from trimtab.log import muted
from trimtab.model.freeze import Freezing
from trimtab.model.load import max_positions
from trimtab.model.quantization import num_weights
from trimtab.planner.explain import Change
from trimtab.planner.host import HostPrediction, predict_host
from trimtab.planner.memory import Prediction, predict, predict_captured, predict_evaluation
from trimtab.planner.search import Estimate, Ladder, Row, Space, halved_sizes, largest, search
from trimtab.planner.shapes import BatchShape, Lengths, StepTask
from trimtab.planner.target import SPARE, Target
from trimtab.planner.time import captured_ops, step_seconds
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.planner.trace.recorder import Op, Trace
from trimtab.recipe.schema import Recipe
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.adapter import num_virtual_tokens
from trimtab.techniques.apply import (
    axes_of,
    batching_of,
    captures,
    change_model,
    host_use,
    loads_kernels,
    may_fail_in_trace,
    method_values,
    refusal,
    require_possible,
    start_seconds,
)
from trimtab.techniques.base import (
    IN_AFTER_OUT,
    WEIGHTS_FROM_HOST,
    WEIGHTS_TO_HOST,
    Axis,
    Case,
    Phase,
    Site,
    StepSpec,
    compute_dtype,
)
from trimtab.units import parse_every

_LENGTH_STEP = 64  # of the search for the longest rows
_MOST_LENGTH, _MOST_ROWS = 2**20, 2**16
_OF_WEIGHTS = ("update", "transfer", "host")  # stages that take the same time for any number of tokens
_COPIES_OF_WEIGHTS = (WEIGHTS_TO_HOST, WEIGHTS_FROM_HOST, IN_AFTER_OUT)
_USUAL_STEPS = 1000  # of a run whose length is not known


@dataclass(frozen=True)
class _Variant:
    """A recipe with one method, and its tracer."""

    recipe: Recipe
    tracer: StepTracer


class RecipePlanner:
    """Predicts the steps that a recipe allows on a device, and searches among them.

    Args:
        recipe: What it fixes is kept; what it leaves to `auto` is searched.
        task: The task, which determines head and loss.
        target: The device and its budget.
        lengths: Lengths of the rows.
        num_processes: Number of processes that share a batch.
        has_own_loss: Whether the user passed a loss function.
        find_head_problem: See `trimtab.techniques.base.Case`.
        is_here: Whether the run will be on this machine: techniques then need their packages installed.
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
        self._find_head_problem, self._tokenizer = find_head_problem, tokenizer
        self._variants: dict[tuple[tuple[str, str], ...], _Variant] = {}
        self._predictions: dict[tuple[StepSpec, BatchShape, int], Prediction] = {}
        self.precision = target.precision(recipe.train.precision)
        self.left_out: dict[str, str] = {}  # methods that the ladder cannot show, and why

    @cached_property
    def batch_size(self) -> int:
        """Rows of a step on this device."""
        known = self.lengths.num_rows
        total = self.recipe.train.batch_size if known is None else min(self.recipe.train.batch_size, known)
        return math.ceil(total / self._num_processes)

    @cached_property
    def _num_steps(self) -> int | None:
        """Optimizer steps of the run; None if neither the recipe nor the data determine them."""
        train, num_rows = self.recipe.train, self.lengths.num_rows
        if self.recipe.limits.fast_dev_run:
            return fast_steps(self.recipe)
        if train.max_steps is not None or num_rows is None:
            return train.max_steps
        return max(1, math.ceil(train.epochs * math.ceil(num_rows / train.batch_size)))

    # ------------------------------------------------------------------ what may be chosen

    @cached_property
    def case(self) -> Case:
        """The input of the techniques' rules."""
        return self._case(method_values(self.recipe))

    @cached_property
    def space(self) -> Space:
        """The specifications of the recipe's own method."""
        return self._space(self.case)

    def _case(self, method: Mapping[str, str]) -> Case:
        variant = self._variant(method)
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

    def _variant(self, method: Mapping[str, str]) -> _Variant:
        """The recipe with another method, which only the user may choose."""
        key = tuple(sorted(method.items()))
        if key not in self._variants:
            recipe, own = self.recipe, method_values(self.recipe)
            for technique in TECHNIQUES:
                value = method.get(technique.key)
                if value is not None and value != own[technique.key]:
                    recipe = technique.in_recipe(recipe, value)
            self._variants[key] = _Variant(recipe, StepTracer(recipe, self.task, self.target.gpu, self._tokenizer))
        return self._variants[key]

    def tracer(self, spec: StepSpec) -> StepTracer:
        """Traces steps of the method of a specification."""
        return self._variant({key: spec[key] for key in method_values(self.recipe)}).tracer

    # ------------------------------------------------------------------ predictions

    def prediction(self, spec: StepSpec, shape: BatchShape | None = None, batch_size: int | None = None) -> Prediction:
        """The memory of a step, and its trace.

        Two micro-batches represent any larger number: from the second on, gradients are already allocated. In captured
        micro-batches they always are.

        Args:
            spec: How the step is made.
            shape: The shape of a micro-batch; the largest of the data if left out.
            batch_size: Rows of the step; the recipe's if left out.
        """
        shape = shape or self.shape(spec)
        num_micro = 2 if self._captures(spec) else min(2, math.ceil((batch_size or self.batch_size) / spec.micro_batch))
        key = spec, shape, num_micro
        if key not in self._predictions:
            with muted():
                trace = self.tracer(spec).trace(spec, shape, num_micro)
            found = (predict_captured if self._captures(spec) else predict)(trace, with_kernels=loads_kernels(spec))
            self._predictions[key] = self.target.as_here(found)
        return self._predictions[key]

    def _captures(self, spec: StepSpec) -> bool:
        """Whether micro-batches are replayed from CUDA graphs."""
        return not self.target.is_cpu and captures(spec)

    def shape(self, spec: StepSpec) -> BatchShape:
        """The largest micro-batch of a specification."""
        return self.lengths.shape(spec.micro_batch, batching_of(spec))

    def evaluation(self, spec: StepSpec) -> tuple[int, Prediction] | None:
        """The largest evaluation batch that fits while training keeps its memory, and its prediction.

        At most the recipe's evaluation batch size, at least one row; None if there is no evaluation data.
        """
        known = self.recipe.evaluate.batch_size or max(spec.micro_batch * self._num_processes, 8)
        rows, found = math.ceil(known / self._num_processes), None
        while found is None or (rows > 1 and not self.target.fits(found, SPARE)):
            rows = rows if found is None else math.ceil(rows / 2)
            shape = self.lengths.eval_shape(rows, batching_of(spec))
            if shape is None:
                return None
            rows = shape.rows
            with muted():
                trace = self.tracer(spec).trace_evaluation(spec, shape)
            predicted = predict_evaluation(trace, self.prediction(spec), with_kernels=loads_kernels(spec))
            found = self.target.as_here(predicted)
        return rows, found

    def host(self, spec: StepSpec, length: int | None = None) -> HostPrediction:
        """The most host memory and disk space; with rows of another length if one is given."""
        shape = None if length is None else self._with_length(spec, length)
        return self._host(spec, self.prediction(spec, shape))

    def _host(self, spec: StepSpec, prediction: Prediction) -> HostPrediction:
        tracer = self.tracer(spec)
        skeleton = tracer.skeleton()
        weight_bytes = tracer.weight_dtype(spec.precision).itemsize
        fp32_bytes = sum(weight.nbytes for weight in skeleton.state_dict().values())
        use = host_use(spec, skeleton, weight_bytes)
        # masters on the host are as they were loaded, whatever the device computes with
        trained = self.num_parameters()[1] * weight_bytes if use.updates_on_host else None
        return predict_host(
            prediction.trace,
            loaded_bytes=fp32_bytes * weight_bytes // torch.float32.itemsize,
            use=use,
            trained_bytes=trained,
            shares_weights=compute_dtype(spec.precision) in (None, tracer.weight_dtype(spec.precision)),
            num_kept=0 if self.recipe.checkpoint.every is None else self.recipe.checkpoint.keep,
        )

    def estimate(self, spec: StepSpec) -> Estimate | None:
        """Memory and time of a step; None where the model or a technique does not allow it."""
        if refusal(spec, self.case) is not None:
            return None
        try:
            found = self.prediction(spec)
        except (LossError, RecipeError, TraceError):
            if may_fail_in_trace(spec):
                return None
            raise
        seconds = self._step_seconds(found.trace, spec)
        tokens = self.lengths.tokens(self.recipe.train.batch_size)
        fits = self._fits(spec, found)
        start_s, num_steps = start_seconds(spec, self.case), self._num_steps or _USUAL_STEPS
        memory = found.allocated, found.outside, found.parts
        return Estimate(fits, *memory, seconds, tokens / seconds, start_s, num_steps)

    def _fits(self, spec: StepSpec, found: Prediction) -> bool:
        """Whether a step fits on the device, and what techniques keep on the host, if anything, there."""
        if not self.target.fits(found, SPARE):
            return False
        if self.target.host_bytes is None:
            return True
        host = self._host(spec, found)
        return not host.kept or self._num_processes * host.memory <= self.target.host_bytes

    def needed_bytes(self, row: Row) -> int:
        """The smallest allocator limit under which a row runs."""
        return self.target.needed_bytes(self.prediction(row.spec))

    def _step_seconds(self, trace: Trace, spec: StepSpec) -> float:
        num_micro = math.ceil(self.batch_size / spec.micro_batch)
        batching = batching_of(spec)
        share = self.lengths.mean_share(spec.micro_batch, batching)
        device, tf32 = self.target.device, self.precision == "tf32"
        before, again, after = _split(trace.ops)
        before, again = (_scaled(part, share, batching.is_packed) for part in (before, again))
        if self._captures(spec):
            before, zero = _captured(again, trace)
            again, after = before if num_micro > 1 else [], [*after, zero]
        if num_micro == 1 or not again:
            return step_seconds([*before, *again, *after], device, tf32=tf32).seconds
        # the first micro-batches fill the device queue; every later one takes equally long
        once, twice = (step_seconds([*before, *again * times, *after], device, tf32=tf32).seconds for times in (1, 2))
        return once + (num_micro - 2) * (twice - once)

    # ------------------------------------------------------------------ questions

    def choose(self, *, thorough: bool = False) -> Ladder:
        """Search for the fastest specification that fits; the ladder contains all predictions.

        Raises:
            RecipeError: The settings of the recipe exclude each other.
        """
        rows: dict[StepSpec, Row] = {}
        chosen = None
        spaces = list(dict.fromkeys(self._spaces()))
        for space in spaces:
            is_last = len(spaces) > 1 and space is spaces[-1] and self._usual_space is not self.space
            shows_all = thorough and not is_last  # too many combinations to show what cannot be chosen
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
        """A specification with every combination of the techniques that are used only where nothing else fits."""
        axes = [axis for axis in self.space.axes if axis.technique.last_resorts is None]
        for values in product(*(axis.values for axis in axes)):
            other = spec.having({axis.technique.key: value for axis, value in zip(axes, values, strict=True)})
            estimate = self.estimate(other) if other != spec else None
            if estimate is not None:
                yield Row(other, estimate)

    def _spaces(self) -> Iterator[Space]:
        """What is searched, one after the other, until something fits."""
        yield self._narrowed_space
        yield self._usual_space  # what is fastest may need more memory
        if self._usual_space is not self.space:
            yield replace(self.space, axes=tuple(map(_small_values, self.space.axes)))

    @cached_property
    def _usual_space(self) -> Space:
        """The space without values that are a last resort."""
        axes = [replace(axis, values=_usual_values(axis)) for axis in self.space.axes]
        return self.space if axes == list(self.space.axes) else replace(self.space, axes=tuple(axes))

    @cached_property
    def _narrowed_space(self) -> Space:
        """The usual space with the best value of techniques that are decided first."""
        space = self._usual_space
        open_axes = [axis for axis in space.axes if axis.technique.is_decided_first and len(axis.values) > 1]
        keys = [axis.technique.key for axis in open_axes]
        best: tuple[float, dict[str, str]] | None = None
        for values in product(*(axis.values for axis in open_axes)) if open_axes else ():
            chosen = dict(zip(keys, values, strict=True))
            estimate = self.estimate(space.reference().having(chosen))
            if estimate is not None and (best is None or estimate.ranked_s < best[0]):
                best = estimate.ranked_s, chosen
        if best is None:
            return space
        fixed = {axis: replace(axis, values=(best[1][axis.technique.key],)) for axis in open_axes}
        return replace(space, axes=tuple(fixed.get(axis, axis) for axis in space.axes))

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
        """Enough values of a technique to see what another method needs."""
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
        """Changes to the recipe that may make it fit, the least change first."""
        length = self.longest(row.spec, most=self.lengths.longest - 1)
        if length is not None:
            shorter = self.prediction(row.spec, self._with_length(row.spec, length))
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
        return Change(words, self.needed_bytes(row) + row.estimate.outside_bytes, row.estimate.fits)

    def most_rows(self, spec: StepSpec) -> int | None:
        """The largest batch that fits as one micro-batch."""

        def measure(rows: int) -> tuple[int, bool]:
            larger = spec.with_micro_batch(rows)
            # as many rows as long as the longest: more than a batch of the data has
            shape = replace(self.shape(larger), rows=rows, max_tokens=None, max_rows=None)
            found = self.prediction(larger, shape, batch_size=rows)
            return found.allocated + found.outside, self._fits(larger, found)

        return largest(measure, self.target.room(SPARE), first=spec.micro_batch, most=_MOST_ROWS)

    def longest(self, spec: StepSpec, *, most: int | None = None) -> int | None:
        """The longest rows, in tokens, that fit; at most as long as the model's positions."""
        limit = self.max_positions() or _MOST_LENGTH
        limit = limit if most is None else min(most, limit)
        shape = self.shape(spec)

        def measure(length: int) -> tuple[int, bool]:
            found = self.prediction(spec, self._with_length(spec, length))
            return found.allocated + found.outside, self._fits(spec, found)

        return largest(measure, self.target.room(SPARE), first=shape.length, most=limit, step=min(_LENGTH_STEP, limit))

    def _with_length(self, spec: StepSpec, length: int) -> BatchShape:
        """The largest micro-batch if the longest row had another length."""
        shape, asked = self.shape(spec), self.recipe.memory.micro_batch_tokens
        if length > shape.length:  # the tokens of the data are no longer a limit
            max_tokens = None if asked == "auto" else max(int(asked), length)
            shape = replace(shape, rows=spec.micro_batch, max_tokens=max_tokens, max_rows=None)
        return replace(shape, length=length, target_length=shape.target_length and length)

    def max_positions(self) -> int | None:
        """The longest rows that the model itself takes."""
        limit = max_positions(self.case.model)
        return None if limit is None else limit - num_virtual_tokens(self.recipe)

    def num_parameters(self) -> tuple[int, int]:
        """All parameters, and the trainable ones."""
        model = copy.deepcopy(self.case.model)
        site = Site(torch.device("meta"), self.target.accelerator, compute_dtype(self.precision), self.recipe)
        with muted(), torch.device("meta"):
            change_model(model, method_values(self.recipe), site, [Phase.ADAPTERS])
            freeze = self.recipe.train.freeze.items()
            Freezing(model, {name: None if word == "always" else parse_every(word) for name, word in freeze}).apply()
        parameters = list(model.parameters())
        return sum(map(num_weights, parameters)), sum(p.numel() for p in parameters if p.requires_grad)


def _usual_values(axis: Axis) -> tuple[str, ...]:
    """The values of a technique that are not a last resort; what a recipe sets never is."""
    last_resorts = axis.technique.last_resorts
    if last_resorts is None:
        return axis.values[:1]
    return tuple(value for value in axis.values if value not in last_resorts) or axis.values


def _small_values(axis: Axis) -> Axis:
    """The values that are worth a prediction where nothing fits without a last resort: those that need least memory."""
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
    """What a step needs on the device before it has computed anything."""
    return row.estimate.parts["weights"] + row.estimate.outside_bytes


def _with_least_weights(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The same values, without those that do not help where the weights alone do not fit."""
    shrinking = [axis for axis in axes if axis.technique.shrinks_weights and len(axis.values) > 1]
    if len(shrinking) != 1:  # either of them may be enough
        return axes
    return tuple(replace(axis, values=axis.values[-1:]) if axis is shrinking[0] else axis for axis in axes)


def _split(ops: Iterable[Op]) -> tuple[list[Op], list[Op], list[Op]]:
    """The operations of the first micro-batch of a step, of the second one if there is one, and of the rest."""
    everything = list(ops)
    in_backward = [op.stage in ("backward", "recompute") for op in everything]
    last = max((at for at, is_in in enumerate(in_backward) if is_in), default=-1)
    begun = next((at for at, is_in in enumerate(in_backward) if is_in), 0)
    second = next((at for at in range(begun, last) if everything[at].stage == "forward"), last + 1)
    return everything[:second], everything[second : last + 1], everything[last + 1 :]


def _captured(second: list[Op], trace: Trace) -> tuple[list[Op], Op]:
    """A captured micro-batch, and the operation that zeroes gradients in place.

    Args:
        second: The second micro-batch of a step: every captured one adds to existing gradients.
        trace: The trace of both.
    """
    inputs = sum(birth.size for birth in trace.births.values() if birth.part == "inputs")
    gradients = sum(trace.births[storage].size for storage in trace.gradients)
    return captured_ops(second, inputs // 2), Op("aten._foreach_zero_", "optimizer", 0, gradients, "fp32")


def _scaled(ops: list[Op], share: float, is_packed: bool) -> list[Op]:
    """Operations on a micro-batch with fewer tokens: shorter rows, in which attention saves twice.

    Not if they are packed: long rows have most of the work, and kernels reach less of their rate in short ones.
    """
    if share == 1.0:
        return ops
    known: dict[int, Op] = {}  # blocks that repeat share their operations
    for op in ops:
        if id(op) not in known and (op.stage in _OF_WEIGHTS or op.name in _COPIES_OF_WEIGHTS):
            known[id(op)] = op
        elif id(op) not in known:
            flops = op.flops * (share**2 if "attention" in op.name and not is_packed else share)
            known[id(op)] = op._replace(flops=int(flops), moved=int(op.moved * share))
    return [known[id(op)] for op in ops]
