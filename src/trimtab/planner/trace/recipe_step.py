"""One step of a recipe, traced without a GPU and without weights: the same builders, the same step function."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from trimtab.build.model import adapter_settings, add_adapter_of, source_of
from trimtab.build.optimizer import optimizer_of
from trimtab.data.metrics import Metrics
from trimtab.data.tasks.base import Task
from trimtab.distributed.world import SoloWorld
from trimtab.engine.engine import Engine
from trimtab.errors import TraceError, TrimtabError
from trimtab.model.freeze import Freezing
from trimtab.model.grouped_heads import flash_runs, repeat_heads
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_skeleton
from trimtab.model.losses import Loss, build_loss
from trimtab.optim.preallocation import preallocate_state
from trimtab.optim.schedules import build_schedule
from trimtab.planner.trace.blocks import NotPeriodic, extend, watch_blocks
from trimtab.planner.trace.cuda import CudaRules, Gpu, as_on_cuda
from trimtab.planner.trace.default_dtype import own_default_dtype
from trimtab.planner.trace.recorder import Owner, Recorder, Trace
from trimtab.planner.trace.shortened_model import Shortened, shorten, stacks_of
from trimtab.planner.trace.stand_ins import kernels_stood_in, quantization_tensors, quantize, use_liger
from trimtab.planner.trace.thread_patches import stand_ins_on_this_thread
from trimtab.randomness import DETERMINISTIC_WORKSPACES
from trimtab.recipe.schema import Recipe
from trimtab.techniques.gradient_checkpointing import checkpoint_layers, chosen_blocks
from trimtab.techniques.host_embeddings import check_embeddings_can_leave
from trimtab.training.evaluate import Evaluator
from trimtab.training.step import take_step, window_gradients
from trimtab.units import parse_every


@dataclass(frozen=True)
class Choice:
    """What a plan decides, and a recipe may leave open."""

    precision: str
    optimizer: str
    loss: str = "plain"
    kernels: str = "plain"
    gradient_checkpointing: Any = "none"
    offload: str = "none"


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch.

    Attributes:
        rows: How many.
        length: Tokens of each, padding included.
        is_padded: Whether some are padding: attention then takes another way.
        target_length: Tokens to be written, for a model with a decoder of its own.
        num_labels: Of each row, where it has several.
    """

    rows: int
    length: int
    is_padded: bool = False
    target_length: int | None = None
    num_labels: int = 1


class StepTracer:
    """Traces steps of one recipe: its model is made once, without weights.

    Args:
        recipe: The recipe; what a `Choice` says goes before it.
        task: Its task.
        gpu: The device that is stood in for.
        tokenizer: That of the run, which the model is fitted to; None is that of the model as it comes.
    """

    def __init__(self, recipe: Recipe, task: Task, gpu: Gpu, tokenizer: Any = None) -> None:
        if recipe.train.deterministic and gpu.workspace_config is None:
            gpu = replace(gpu, workspace_config=DETERMINISTIC_WORKSPACES)
        self._recipe, self._task, self._gpu, self._tokenizer = recipe, task, gpu, tokenizer
        self._skeletons: dict[torch.dtype, Any] = {}

    def trace(self, choice: Choice, batch: BatchShape, num_micro: int = 1, *, whole: bool = False) -> Trace:
        """An optimizer step and what was there before it, the optimizer's state included.

        Args:
            choice: How the step is made.
            batch: The shape of a micro-batch.
            num_micro: Micro-batches of the step.
            whole: Trace every block, also those that are like others.
        """

        def step(parts: _Parts) -> None:
            parts.recorder.is_timing = True
            parts.recorder.mark("step")
            batches = (_batch(self._task, batch, parts.recorder) for _ in range(num_micro))
            result = window_gradients(
                parts.engine, parts.model, parts.loss, batches, num_micro, self._recipe.train.max_grad_norm
            )
            parts.recorder.adopt_gradients(parts.model.parameters())
            take_step(parts.optimizer, parts.scheduler, result)

        return self._whole_from_part(choice, batch, step, whole)

    def trace_evaluation(self, choice: Choice, batch: BatchShape, *, whole: bool = False) -> Trace:
        """One held-out batch, with everything that training keeps beside it."""

        def evaluate(parts: _Parts) -> None:
            parts.recorder.is_timing = True
            parts.recorder.mark("step")
            kind, shifts = self._task.loss_kind, self._task.shifts_labels
            num_labels = int(self._task.head().get("num_labels") or 0)
            loss = build_loss(kind, shifts_labels=shifts, how=choice.loss)
            metrics = partial(Metrics, kind, num_labels=num_labels, shifts_labels=shifts)
            Evaluator(parts.engine, None, loss, metrics).try_batch(
                parts.model, _batch(self._task, batch, parts.recorder)
            )

        return self._whole_from_part(choice, batch, evaluate, whole)

    def _whole_from_part(
        self, choice: Choice, batch: BatchShape, work: Callable[["_Parts"], None], whole: bool
    ) -> Trace:
        try:
            return self._from_part(choice, batch, work, whole)
        except TrimtabError:
            raise
        except Exception as error:  # a forward that reads values, kernels that meta does not have, odd modules …
            raise TraceError(type(self.skeleton()).__name__, error) from error

    def _from_part(self, choice: Choice, batch: BatchShape, work: Callable[["_Parts"], None], whole: bool) -> Trace:
        if not whole:
            try:
                short = self._shortened(choice)
                return extend(self._traced(choice, batch, work, short), short.repeats)
            except NotPeriodic:
                pass
        return self._traced(choice, batch, work, self._shortened(choice, whole=True))

    def skeleton(self, dtype: torch.dtype = torch.float32) -> Any:
        """The model as it is loaded, without weights."""
        if dtype not in self._skeletons:
            source, task = source_of(self._recipe), self._task
            with own_default_dtype():
                self._skeletons[dtype] = load_skeleton(
                    source.model,
                    task.model_kind,
                    task.head(),
                    self._tokenizer,
                    trust_remote_code=source.trust_remote_code,
                    dtype=dtype,
                )
            if self._tokenizer is None:
                _name_missing_tokens(self._skeletons[dtype].config, task.model_kind)
        return self._skeletons[dtype]

    # ------------------------------------------------------------------ the model

    def _shortened(self, choice: Choice, *, whole: bool = False) -> Shortened:
        adapter = adapter_settings(self._recipe)
        is_half = adapter is not None or choice.precision == "bf16-pure"
        dtype = {"bf16": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp16": torch.float16}.get(choice.precision)
        skeleton = self.skeleton(dtype if is_half and dtype is not None else torch.float32)
        num_blocks = sum(len(blocks) for _, blocks in stacks_of(skeleton))
        which = choice.gradient_checkpointing
        chosen = set(chosen_blocks(which, num_blocks)) if which != "none" and num_blocks else set()
        adapted = set(range(num_blocks))
        if adapter is not None and adapter.layers is not None:
            first, last = (number % num_blocks for number in adapter.layers)
            adapted = set(range(first, last + 1))
        patterns = str(self._recipe.train.freeze) + ("" if adapter is None else _patterns(adapter))
        names_blocks = any(letter.isdigit() for letter in patterns)
        return shorten(
            skeleton, lambda number: (number in chosen, number in adapted), allowed=not whole and not names_blocks
        )

    def _prepared(self, short: Shortened, choice: Choice, engine: Engine) -> Any:
        model, adapter = short.model, adapter_settings(self._recipe)
        if adapter is not None:
            model.requires_grad_(False)
            if adapter.kind == "qlora":
                quantize(model, engine.compute_dtype or torch.float32)
            if adapter.layers is not None:
                num_blocks = 1 + max(short.kept)
                first, last = (number % num_blocks for number in adapter.layers)
                inside = [index for index, number in enumerate(short.kept) if first <= number <= last]
                adapter = adapter.model_copy(update={"layers": [inside[0], inside[-1]]})
            with torch.device("meta"):
                add_adapter_of(adapter, model)
        freeze = self._recipe.train.freeze
        Freezing(
            model, {name: None if word == "always" else parse_every(word) for name, word in freeze.items()}
        ).apply()
        if choice.offload == "embeddings":
            check_embeddings_can_leave(model)
            model.get_input_embeddings().weight.is_in_host_memory = True
        if not self._gpu.flash or not flash_runs(self._gpu.capability, engine.compute_dtype):
            repeat_heads(model)
        if choice.kernels == "liger":
            use_liger(model, self._gpu.num_multiprocessors)
        checkpoint_layers(model, _on_kept(choice.gradient_checkpointing, short))
        return model

    # ------------------------------------------------------------------ the step

    def _traced(self, choice: Choice, batch: BatchShape, work: Callable[["_Parts"], None], short: Shortened) -> Trace:
        def answer(tensor: torch.Tensor) -> Any:
            if tensor.dtype is torch.bool:
                return not batch.is_padded  # "is all of the mask set?"
            return 0.0 if tensor.is_floating_point() else 0

        recorder = Recorder(CudaRules(self._gpu), answer)
        with as_on_cuda(self._gpu), kernels_stood_in(recorder, self._gpu.capability), quiet_transformers():
            parts = self._build(choice, short, recorder)
            recorder.is_timing = False
            stacks = [blocks for _, blocks in stacks_of(parts.model)]
            owners = _owners(stacks)
            with _visiting(recorder, "weights", owners) as visit:
                for tensor in _on_device(parts.model):
                    visit(tensor)
                    recorder.adopt([tensor], "weights")
            watch_blocks(stacks, recorder)
            with recorder, _staged(recorder, parts.engine, parts.optimizer.optimizer):
                if choice.loss != "plain":  # others try the model out, once
                    with recorder.paused(), torch.no_grad():
                        parts.loss(parts.model, _batch(self._task, replace(batch, rows=1, length=8), recorder))
                _make_state(parts.optimizer.optimizer, parts.model, owners, recorder)
                work(parts)
                recorder.mark("end")
                recorder.enter("", None)
            return recorder.trace()

    def _build(self, choice: Choice, short: Shortened, recorder: Recorder) -> "_Parts":
        engine = engine_to_trace("no" if choice.precision == "fp32" else choice.precision)
        model = self._prepared(short, choice, engine)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        recorder.vocab_size = None if head is None else int(head.weight.shape[0])
        model = engine.prepare(model).train()
        optimizer: Any = optimizer_of(self._recipe, model, choice.optimizer, choice.precision, "cuda")
        scheduler: Any = build_schedule("constant", optimizer, num_steps=10, warmup_steps=0)
        optimizer, scheduler = engine.prepare(optimizer, scheduler)
        loss = build_loss(
            self._task.loss_kind,
            shifts_labels=self._task.shifts_labels,
            label_smoothing=self._recipe.train.label_smoothing,
            how=choice.loss,
        )
        return _Parts(engine, model, optimizer, scheduler, loss, recorder)


def _name_missing_tokens(config: Any, kind: str) -> None:
    """What a tokenizer would have told the model, and forward asks for; the numbers have no meaning here."""
    for name, wanting in (("pad_token_id", "sequence-classification"), ("decoder_start_token_id", "seq2seq-lm")):
        if kind == wanting and getattr(config, name, None) is None:
            setattr(config, name, 0)


def engine_to_trace(precision: str, num_micro: int = 1) -> Engine:
    """An engine for tensors without data, of one process: the others of a run do not trace."""
    return Engine(precision, num_micro, device="meta", world=SoloWorld())


@dataclass(frozen=True)
class _Parts:
    """What a step is made of."""

    engine: Engine
    model: Any
    optimizer: Any
    scheduler: Any
    loss: Loss
    recorder: Recorder


def _patterns(adapter: Any) -> str:
    return f"{adapter.targets} {adapter.ranks} {adapter.alphas} {adapter.trains}"


def _on_kept(which: Any, short: Shortened) -> Any:
    """Which blocks are recomputed, in the numbers of a shortened model."""
    if isinstance(which, str):
        return which
    chosen = set(chosen_blocks(which, 1 + max(short.kept)))
    return {"layers": [index for index, number in enumerate(short.kept) if number in chosen]}


def _owners(stacks: list[list[torch.nn.Module]]) -> dict[int, Owner]:
    return {
        id(tensor): Owner(stack, number)
        for stack, blocks in enumerate(stacks)
        for number, block in enumerate(blocks)
        for tensor in (*block.parameters(), *block.buffers(), *quantization_tensors(block))
    }


def _on_device(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*model.parameters(), *model.buffers()):
        if not getattr(tensor, "is_in_host_memory", False):
            yield tensor
    yield from quantization_tensors(model)


def _make_state(optimizer: Any, model: torch.nn.Module, owners: dict[int, Owner], recorder: Recorder) -> None:
    """The optimizer's state, as it is made before the first step; that of each block is known as the block's."""
    with recorder.born_as("state"), _visiting(recorder, "state", owners) as visit:
        for parameter in model.parameters():
            if parameter.requires_grad:
                visit(parameter)
                preallocate_state(optimizer, [parameter])


@contextlib.contextmanager
def _visiting(recorder: Recorder, kind: str, owners: dict[int, Owner]) -> Iterator[Callable[[torch.Tensor], None]]:
    """Tell the recorder to which block a tensor belongs that is looked at now."""
    here: list[Owner | None] = [None]

    def visit(tensor: torch.Tensor) -> None:
        owner = owners.get(id(tensor))
        if owner != here[0]:
            here[0] = owner
            recorder.enter(kind if owner is not None else "", owner)

    yield visit
    recorder.enter("", None)


def _batch(task: Task, batch: BatchShape, recorder: Recorder) -> dict[str, torch.Tensor]:
    shape = (batch.rows, batch.length)
    with recorder.born_as("inputs"):
        made = {name: torch.empty(shape, dtype=torch.long, device="meta") for name in ("input_ids", "attention_mask")}
        if task.loss_kind == "token-cross-entropy":
            length = batch.target_length or batch.length
            made["labels"] = torch.empty((batch.rows, length), dtype=torch.long, device="meta")
        elif task.loss_kind == "cross-entropy":
            made["labels"] = torch.empty(batch.rows, dtype=torch.long, device="meta")
        else:
            made["labels"] = torch.empty((batch.rows, batch.num_labels), device="meta")
    return made


@contextlib.contextmanager
def _staged(recorder: Recorder, engine: Any, optimizer: Any) -> Iterator[None]:
    """Tell the recorder when backward and the optimizer run, and when something is computed again.

    Engine and optimizer are the trace's own.
    """
    backward, step = engine.backward, optimizer.step
    hook: Any = torch.utils.checkpoint._recomputation_hook
    enter, leave = hook.__enter__, hook.__exit__

    def with_backward_seen(*args: Any, **kwargs: Any) -> Any:
        with _BackwardSeen(recorder):
            return backward(*args, **kwargs)

    def in_optimizer(*args: Any, **kwargs: Any) -> Any:
        with recorder.during("optimizer"):
            return step(*args, **kwargs)

    def recomputing(self: Any) -> None:
        self._noted = recorder.recomputing()
        self._noted.__enter__()
        enter(self)

    def recomputed(self: Any, *error: object) -> None:
        leave(self, *error)
        self._noted.__exit__(None, None, None)

    in_optimizer._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedules look whether steps are counted
    with (
        mock.patch.object(engine, "backward", with_backward_seen),
        mock.patch.object(optimizer, "step", in_optimizer),
        stand_ins_on_this_thread([(hook, "__enter__", recomputing), (hook, "__exit__", recomputed)]),
    ):
        yield


class _BackwardSeen(TorchFunctionMode):
    """Tells a recorder when a backward begins and ends; as a mode it sees this thread alone."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.backward:
            return func(*args, **(kwargs or {}))
        with self._recorder.during("backward"):
            return func(*args, **(kwargs or {}))  # type: ignore[no-untyped-call]
