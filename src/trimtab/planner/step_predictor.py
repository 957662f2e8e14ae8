"""Predict single steps of a recipe on a device: memory, evaluation, host and time."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from trimtab.log import muted
from trimtab.model.freeze import Freezing
from trimtab.model.quantization import num_weights
from trimtab.planner.host import HostPrediction, predict_host
from trimtab.planner.memory import Prediction, predict, predict_captured, predict_evaluation
from trimtab.planner.predicted_step import PredictedStep
from trimtab.planner.prediction_cache import open_prediction_cache
from trimtab.planner.prediction_key import PredictionKeys, traced_recipe
from trimtab.planner.shapes import BatchShape, Lengths, StepTask
from trimtab.planner.step_timing import StepTiming
from trimtab.planner.target import SPARE, Target
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.recipe.schema import Recipe
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.apply import batching_of, captures, change_model, host_use, loads_kernels, method_values
from trimtab.techniques.base import Phase, Site, StepSpec, compute_dtype
from trimtab.units import parse_every


@dataclass(frozen=True)
class Variant:
    """A recipe with one method, its tracer, and the keys of its steps in the cache."""

    recipe: Recipe
    tracer: StepTracer
    task: StepTask
    has_tokenizer: bool

    @cached_property
    def keys(self) -> PredictionKeys:
        """Keys of the cache."""
        tracer = self.tracer
        return PredictionKeys(tracer.recipe, self.task, tracer.gpu, tracer.skeleton(), has_tokenizer=self.has_tokenizer)


class StepPredictor:
    """Predict steps of a recipe; predictions of earlier plans are read from the cache.

    Args:
        recipe: The recipe; values of a `StepSpec` take precedence.
        task: The task, which determines head and loss.
        target: The device and its budget.
        lengths: Lengths of the rows.
        num_processes: Number of processes that share a batch.
        tokenizer: The tokenizer of the run, whose size the model is adapted to.
    """

    def __init__(
        self, recipe: Recipe, task: StepTask, target: Target, lengths: Lengths, num_processes: int, tokenizer: Any
    ) -> None:
        self.recipe, self.task, self.target, self.lengths = recipe, task, target, lengths
        self._num_processes, self._tokenizer = num_processes, tokenizer
        self._variants: dict[tuple[tuple[str, str], ...], Variant] = {}
        self._predictions: dict[tuple[StepSpec, BatchShape, int], Prediction] = {}
        self._steps: dict[tuple[StepSpec, BatchShape, int], PredictedStep] = {}
        self._cache = open_prediction_cache()
        self.precision = target.precision(recipe.train.precision)

    @cached_property
    def batch_size(self) -> int:
        """Rows of a step on this device."""
        known = self.lengths.num_rows
        total = self.recipe.train.batch_size if known is None else min(self.recipe.train.batch_size, known)
        return math.ceil(total / self._num_processes)

    def variant(self, method: Mapping[str, str]) -> Variant:
        """The recipe with another method, which only the user may choose."""
        key = tuple(sorted(method.items()))
        if key not in self._variants:
            recipe, own = self.recipe, method_values(self.recipe)
            for technique in TECHNIQUES:
                value = method.get(technique.key)
                if value is not None and value != own[technique.key]:
                    recipe = technique.in_recipe(recipe, value)
            tracer = StepTracer(traced_recipe(recipe), self.task, self.target.gpu, self._tokenizer)
            self._variants[key] = Variant(recipe, tracer, self.task, self._tokenizer is not None)
        return self._variants[key]

    def variant_of(self, spec: StepSpec) -> Variant:
        """The recipe with the method of a specification."""
        return self.variant({key: spec[key] for key in method_values(self.recipe)})

    def shape(self, spec: StepSpec) -> BatchShape:
        """The largest micro-batch of a specification."""
        return self.lengths.shape(spec.micro_batch, batching_of(spec))

    # ------------------------------------------------------------------ memory

    def step(self, spec: StepSpec, shape: BatchShape | None = None, batch_size: int | None = None) -> PredictedStep:
        """The memory and time of a step, which is traced only if the cache lacks an answer.

        Args:
            spec: The specification of the step.
            shape: The shape of a micro-batch; by default the largest of the data.
            batch_size: Rows of the step; by default the recipe's.
        """
        key = spec, shape or self.shape(spec), self._num_micro(spec, batch_size)
        if key not in self._steps:
            answers = self._cache.answers(self._key("answers", *key, *self._kind_of_target))
            predict_it, kernels = partial(self._prediction, *key), loads_kernels(spec)
            self._steps[key] = PredictedStep(predict_it, answers, self.target, with_kernels=kernels)
        return self._steps[key]

    def prediction(self, spec: StepSpec, shape: BatchShape | None = None, batch_size: int | None = None) -> Prediction:
        """The memory of a step, and its trace; see `step`."""
        return self._prediction(spec, shape or self.shape(spec), self._num_micro(spec, batch_size))

    def _num_micro(self, spec: StepSpec, batch_size: int | None) -> int:
        """The number of micro-batches to trace. Two represent any larger number: gradients exist from the second on.

        In captured micro-batches, gradients always exist.
        """
        rows = batch_size or self.batch_size
        return 2 if self._captures(spec) else min(2, math.ceil(rows / spec.micro_batch))

    def _prediction(self, spec: StepSpec, shape: BatchShape, num_micro: int) -> Prediction:
        key = spec, shape, num_micro
        if key not in self._predictions:
            tracer = self.variant_of(spec).tracer
            with muted():
                trace = self._cache.trace(self._key("step", *key), lambda: tracer.trace(spec, shape, num_micro))
            found = (predict_captured if self._captures(spec) else predict)(trace, with_kernels=loads_kernels(spec))
            self._predictions[key] = self.target.as_here(found)
        return self._predictions[key]

    def evaluation(self, spec: StepSpec) -> tuple[int, PredictedStep] | None:
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
            rows, found = shape.rows, self._evaluation(spec, shape)
        return rows, found

    def _evaluation(self, spec: StepSpec, shape: BatchShape) -> PredictedStep:
        training = spec, self.shape(spec), self._num_micro(spec, None)

        def predict_it() -> Prediction:
            tracer = self.variant_of(spec).tracer
            with muted():
                trace = self._cache.trace(
                    self._key("evaluation", spec, shape), lambda: tracer.trace_evaluation(spec, shape)
                )
            predicted = predict_evaluation(trace, self._prediction(*training), with_kernels=loads_kernels(spec))
            return self.target.as_here(predicted)

        key = self._key("answers on evaluation", *training, shape, *self._kind_of_target)
        return PredictedStep(predict_it, self._cache.answers(key), self.target, with_kernels=loads_kernels(spec))

    def _key(self, kind: str, spec: StepSpec, *parts: Any) -> str | None:
        """The cache key of what is known about a step; see `PredictionKeys`."""
        return self.variant_of(spec).keys.of(kind, spec, *parts)

    @property
    def _kind_of_target(self) -> tuple[bool, bool]:
        """Everything besides the trace that predictions depend on; memory outside the allocator is added later."""
        return self.target.is_cpu, self.target.expandable

    def _captures(self, spec: StepSpec) -> bool:
        """Whether micro-batches are replayed from CUDA graphs."""
        return not self.target.is_cpu and captures(spec)

    # ------------------------------------------------------------------ host and time

    def fits(self, spec: StepSpec, found: PredictedStep) -> bool:
        """Whether a step fits on the device, and the tensors that techniques keep on the host fit there."""
        return self.target.fits(found, SPARE) and self.excess_on_host(spec, found) is None

    def excess_on_host(self, spec: StepSpec, found: PredictedStep) -> int | None:
        """The host memory of a step that keeps more tensors on the host than fit there; None for others."""
        if self.target.host_bytes is None:
            return None
        host = self.host(spec, found)
        needed = self._num_processes * host.memory
        return needed if host.kept and needed > self.target.host_bytes else None

    def host(self, spec: StepSpec, found: PredictedStep) -> HostPrediction:
        """Peak host memory and disk space."""
        tracer = self.variant_of(spec).tracer
        skeleton = tracer.skeleton()
        weight_bytes = tracer.weight_dtype(spec.precision).itemsize
        fp32_bytes = sum(weight.nbytes for weight in skeleton.state_dict().values())
        use = host_use(spec, skeleton, weight_bytes)
        # master weights on the host keep the dtype they were loaded in, whatever dtype the device computes with
        trained = self.num_parameters[1] * weight_bytes if use.updates_on_host else None
        return predict_host(
            found.tensors,
            loaded_bytes=fp32_bytes * weight_bytes // torch.float32.itemsize,
            use=use,
            trained_bytes=trained,
            shares_weights=compute_dtype(spec.precision) in (None, tracer.weight_dtype(spec.precision)),
            num_kept=0 if self.recipe.checkpoint.every is None else self.recipe.checkpoint.keep,
        )

    def timing(self, spec: StepSpec) -> StepTiming:
        """The values that determine the time of a step."""
        batching = batching_of(spec)
        return StepTiming(
            self.target.device,
            tf32=self.precision == "tf32",
            num_micro=math.ceil(self.batch_size / spec.micro_batch),
            share=self.lengths.mean_share(spec.micro_batch, batching),
            is_packed=batching.is_packed,
            is_captured=self._captures(spec),
        )

    @cached_property
    def num_parameters(self) -> tuple[int, int]:
        """The number of all parameters, and of the trainable ones."""
        recipe = self.recipe
        model = copy.deepcopy(self.variant(method_values(recipe)).tracer.skeleton())
        site = Site(torch.device("meta"), self.target.accelerator, compute_dtype(self.precision), recipe)
        with muted(), torch.device("meta"):
            change_model(model, method_values(recipe), site, [Phase.ADAPTERS])
            freeze = recipe.train.freeze.items()
            Freezing(model, {name: None if word == "always" else parse_every(word) for name, word in freeze}).apply()
        parameters = list(model.parameters())
        return sum(map(num_weights, parameters)), sum(p.numel() for p in parameters if p.requires_grad)
