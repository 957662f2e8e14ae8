"""Trace a step of a recipe without a GPU or weights, with the builders and the step function of a run."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from trimtab.build.model import source_of
from trimtab.build.optimizer import optimizer_of
from trimtab.build.teacher import cut_student, student_loss, teacher_skeleton, use_plain_attention
from trimtab.data.metrics import Metrics
from trimtab.distributed.world import World
from trimtab.engine.engine import Engine
from trimtab.errors import TraceError, TrimtabError
from trimtab.model.blocks import stacks_of
from trimtab.model.distillation import PROBABILITIES, TOKENS
from trimtab.model.freeze import Freezing
from trimtab.model.load import load_skeleton
from trimtab.model.losses import Loss
from trimtab.model.streamed_blocks import is_streamed
from trimtab.optim.host_update import optimized
from trimtab.optim.offloaded_state import has_state_on_host
from trimtab.optim.preallocation import preallocate_state
from trimtab.optim.schedules import build_schedule
from trimtab.planner.shapes import BatchShape, StepTask
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.default_dtype import own_default_dtype
from trimtab.planner.trace.example_batch import example_batch, name_missing_tokens
from trimtab.planner.trace.model_trace import BlockVisits, Work, trace_model
from trimtab.planner.trace.recorder import Recorder, Trace
from trimtab.planner.trace.shortened_model import Shortened
from trimtab.planner.trace.thread_patches import replaced, stand_ins_on_this_thread
from trimtab.randomness import DETERMINISTIC_WORKSPACES
from trimtab.recipe.schema import Recipe
from trimtab.techniques.apply import (
    block_marker,
    captures,
    change_model,
    load_options,
    make_loss,
    names_blocks,
    reaches_far,
    tries_loss_first,
    wrap_step,
)
from trimtab.techniques.base import LoadOptions, LossRequest, Phase, Site, StepSpec, compute_dtype
from trimtab.training.evaluate import Evaluator
from trimtab.training.step import take_step, window_gradients
from trimtab.units import parse_every


class StepTracer:
    """Trace steps of one recipe; its model is built once, without weights.

    Args:
        recipe: The recipe; values of a `StepSpec` take precedence.
        task: Its task.
        gpu: The GPU to simulate.
        tokenizer: The tokenizer of the run, whose size the model is adapted to; None uses the vocabulary size of the
            model.
    """

    def __init__(self, recipe: Recipe, task: StepTask, gpu: Gpu, tokenizer: Any = None) -> None:
        if recipe.train.deterministic:
            config = gpu.workspace_config or DETERMINISTIC_WORKSPACES
            gpu = replace(gpu, workspace_config=config, is_deterministic=True)
        self.recipe, self._task, self.gpu, self._tokenizer = recipe, task, gpu, tokenizer
        self._skeletons: dict[torch.dtype, Any] = {}
        self._teachers: dict[torch.dtype, Any] = {}

    def trace(self, spec: StepSpec, batch: BatchShape, num_micro: int = 1, *, whole: bool = False) -> Trace:
        """Trace an optimizer step and everything allocated before it, including the optimizer's state.

        Args:
            spec: The specification of the step.
            batch: The shape of a micro-batch.
            num_micro: Micro-batches of the step.
            whole: Whether to trace every block, including repeated ones.
        """

        def step(parts: _Parts) -> None:
            batches = (self._with_targets(self._batch(batch, parts), parts) for _ in range(num_micro))
            compute = wrap_step(spec, window_gradients)
            limit = self.recipe.train.max_grad_norm
            result = compute(parts.engine, parts.model, parts.loss, batches, num_micro, limit)
            parts.recorder.adopt_gradients(parts.model.parameters())
            take_step(parts.optimizer, parts.scheduler, result)

        if captures(spec) and not batch.is_packed:
            batch = replace(batch, is_padded=True)  # a graph is replayed with every mask, even one that masks nothing
        return self._trace(spec, batch, step, whole)

    def trace_evaluation(self, spec: StepSpec, batch: BatchShape, *, whole: bool = False) -> Trace:
        """Trace one evaluation batch, with everything that training keeps allocated."""

        def evaluate(parts: _Parts) -> None:
            kind, shifts = self._task.loss_kind, self._task.shifts_labels
            num_labels = int(self._task.head().get("num_labels") or 0)
            loss = make_loss(spec, LossRequest(kind, shifts))
            metrics = partial(Metrics, kind, num_labels=num_labels, shifts_labels=shifts)
            held_out = self._batch(batch, parts)
            Evaluator(parts.engine, None, loss, metrics).try_batch(parts.model, held_out)

        return self._trace(spec, batch, evaluate, whole)

    def _with_targets(self, batch: dict[str, Any], parts: "_Parts") -> dict[str, Any]:
        """A batch with the cached outputs of a teacher, if the recipe uses them."""
        distill = self.recipe.distill
        if distill is None or distill.cache != "disk":
            return batch
        num_classes = parts.recorder.vocab_size or int(self._task.head().get("num_labels") or 1)
        is_of_tokens = self._task.loss_kind == "token-cross-entropy"
        shape = tuple(batch["labels"].shape) if is_of_tokens else (batch["labels"].shape[0],)
        has_top = distill.top_k is not None and distill.top_k < num_classes
        widths = (distill.top_k + 1, distill.top_k) if has_top and distill.top_k is not None else (num_classes,)
        with parts.recorder.born_as("inputs"):
            for name, width, dtype in zip((PROBABILITIES, TOKENS), widths, (torch.float32, torch.int32), strict=False):
                batch[name] = torch.empty((*shape, width), dtype=dtype, device="meta")
        return batch

    def _batch(self, shape: BatchShape, parts: "_Parts") -> dict[str, Any]:
        return example_batch(self._task, shape, parts.recorder, parts.model.config)

    def skeleton(self, dtype: torch.dtype = torch.float32) -> Any:
        """The model on `meta`, before techniques change it."""
        if dtype not in self._skeletons:
            source, task = source_of(self.recipe), self._task
            with own_default_dtype():
                self._skeletons[dtype] = load_skeleton(
                    source.model,
                    task.model_kind,
                    task.head(),
                    self._tokenizer,
                    trust_remote_code=source.trust_remote_code,
                    dtype=dtype,
                )
            cut_student(self.recipe, self._skeletons[dtype])
            if self.recipe.distill is not None and self.recipe.distill.attention["weight"]:
                use_plain_attention(self._skeletons[dtype])
            if self._tokenizer is None:
                name_missing_tokens(self._skeletons[dtype].config, task.model_kind)
        return self._skeletons[dtype]

    def teacher(self, precision: str) -> Any:
        """The teacher on `meta`; None if the recipe has none, or only its outputs are used."""
        if self.recipe.distill is None or self.recipe.distill.cache == "disk":
            return None
        dtype = compute_dtype(precision) or torch.float32
        if dtype not in self._teachers:
            task = self._task
            with own_default_dtype():
                self._teachers[dtype] = teacher_skeleton(self.recipe, task.model_kind, task.head(), dtype)
            name_missing_tokens(self._teachers[dtype].config, task.model_kind)
        return self._teachers[dtype]

    # ------------------------------------------------------------------ the trace

    def _trace(self, spec: StepSpec, batch: BatchShape, do: Callable[["_Parts"], None], whole: bool) -> Trace:
        is_named = any(letter.isdigit() for letter in str(self.recipe.train.freeze)) or names_blocks(self.recipe)
        try:
            skeleton = self.skeleton(self.weight_dtype(spec.precision))
            num_blocks = sum(len(blocks) for _, blocks in stacks_of(skeleton))
            return trace_model(
                skeleton,
                lambda short, recorder: self._work(spec, batch, do, short, recorder),
                gpu=self.gpu,
                is_padded=batch.is_padded,
                mark=block_marker(spec, num_blocks, self.recipe),
                whole=whole or is_named or self._compares_layers,
                reaches_far=reaches_far(spec),
            )
        except TrimtabError:
            raise
        except Exception as error:  # a forward that reads values, operations without a meta kernel, odd modules …
            raise TraceError(type(self.skeleton()).__name__, error) from error

    @property
    def _compares_layers(self) -> bool:
        """Whether single layers of the model are compared with those of a teacher."""
        distill = self.recipe.distill
        return distill is not None and bool(distill.hidden["weight"] or distill.attention["weight"])

    def weight_dtype(self, precision: str) -> torch.dtype:
        """The dtype that weights are loaded in."""
        half = compute_dtype(precision) or torch.float32
        options = LoadOptions(half if precision == "bf16-pure" else torch.float32)
        return load_options(self.recipe, options, half).dtype

    def _work(
        self, spec: StepSpec, batch: BatchShape, do: Callable[["_Parts"], None], short: Shortened, recorder: Recorder
    ) -> Work:
        recorder.is_timing = False
        parts = self._build(spec, short, recorder)
        visits = BlockVisits(recorder, parts.model)
        visits.adopt_weights(parts.model)
        teacher = self.teacher(spec.precision)
        if teacher is not None:
            recorder.adopt([*teacher.parameters(), *teacher.buffers()], "weights")

        def work() -> None:
            with _stages_recorded(recorder, parts.engine, parts.optimizer.optimizer):
                if tries_loss_first(spec):
                    with recorder.paused(), torch.no_grad():
                        parts.loss(parts.model, self._batch(replace(batch, rows=1, length=8), parts))
                _make_state(parts.optimizer.optimizer, parts.model, visits, recorder)
                recorder.is_timing = True
                recorder.mark("step")
                do(parts)

        return work

    def _build(self, spec: StepSpec, short: Shortened, recorder: Recorder) -> "_Parts":
        engine = engine_to_trace("no" if spec.precision == "fp32" else spec.precision)
        model = self._changed(short, spec, engine)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        recorder.vocab_size = None if head is None else int(head.weight.shape[0])
        model = engine.prepare(model).train()
        optimizer: Any = optimizer_of(self.recipe, model, spec, "cuda")
        scheduler: Any = build_schedule("constant", optimizer, num_steps=10, warmup_steps=0)
        optimizer, scheduler = engine.prepare(optimizer, scheduler)
        smoothing = self.recipe.train.label_smoothing
        num_labels = int(self._task.head().get("num_labels") or 0)
        weights = None if self.recipe.train.class_weights is None else (1.0,) * num_labels
        request = LossRequest(self._task.loss_kind, self._task.shifts_labels, smoothing, class_weights=weights)
        teacher = self.teacher(spec.precision)
        is_student = self.recipe.distill is not None
        loss = student_loss(self.recipe, request, teacher) if is_student else make_loss(spec, request)
        return _Parts(engine, model, optimizer, scheduler, loss, recorder)

    def _changed(self, short: Shortened, spec: StepSpec, engine: Engine) -> Any:
        """The model with every technique applied, as in `build/model.py` for a run."""
        site = Site(
            torch.device("meta"),
            self.gpu.accelerator,
            engine.compute_dtype,
            self.recipe,
            self._task.model_kind,
            kept_blocks=short.kept,
        )
        change_model(short.model, spec, site, [Phase.ADAPTERS])
        freeze = self.recipe.train.freeze.items()
        until = {name: None if word == "always" else parse_every(word) for name, word in freeze}
        Freezing(short.model, until).apply()
        change_model(short.model, spec, site, [phase for phase in Phase if phase is not Phase.ADAPTERS])
        return short.model


def engine_to_trace(precision: str, num_micro: int = 1) -> Engine:
    """An engine of one process for tensors without data; the other processes of a run do not trace."""
    return Engine(precision, num_micro, device="meta", world=World())


@dataclass(frozen=True)
class _Parts:
    """The parts of a step."""

    engine: Engine
    model: Any
    optimizer: Any
    scheduler: Any
    loss: Loss
    recorder: Recorder


def _make_state(optimizer: Any, model: torch.nn.Module, visits: BlockVisits, recorder: Recorder) -> None:
    """Allocate the optimizer's state before the first step, block by block, as a run does."""
    with recorder.born_as("state"):
        for parameter in model.parameters():
            if parameter.requires_grad:
                visits.visit(parameter, "state")
                known = optimized(parameter)
                is_away = known is not parameter or is_streamed(parameter) or has_state_on_host(parameter)
                with recorder.on_host() if is_away else contextlib.nullcontext():
                    preallocate_state(optimizer, [known])
    visits.leave()


# ---------------------------------------------------------------------- stages


@contextlib.contextmanager
def _stages_recorded(recorder: Recorder, engine: Any, optimizer: Any) -> Iterator[None]:
    """Tell the recorder when backward, the optimizer and recomputation run."""
    backward, step = engine.backward, optimizer.step
    hook: Any = torch.utils.checkpoint._recomputation_hook
    enter, leave = hook.__enter__, hook.__exit__

    def recorded_backward(*args: Any, **kwargs: Any) -> Any:
        with _BackwardRecorded(recorder):
            return backward(*args, **kwargs)

    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        with recorder.during("optimizer"):
            return step(*args, **kwargs)

    def enter_recorded(self: Any) -> None:
        self._noted = recorder.recomputing()
        self._noted.__enter__()
        enter(self)

    def leave_recorded(self: Any, *error: object) -> None:
        leave(self, *error)
        self._noted.__exit__(None, None, None)

    recorded_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedules check that steps are counted
    with (
        replaced(engine, "backward", recorded_backward),  # engine and optimizer belong to the trace
        replaced(optimizer, "step", recorded_step),
        stand_ins_on_this_thread([(hook, "__enter__", enter_recorded), (hook, "__exit__", leave_recorded)]),
    ):
        yield


class _BackwardRecorded(TorchFunctionMode):
    """Tell a recorder when a backward runs; a function mode applies to its own thread only."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.backward:
            return func(*args, **(kwargs or {}))
        with self._recorder.during("backward"):
            return func(*args, **(kwargs or {}))  # type: ignore[no-untyped-call]
