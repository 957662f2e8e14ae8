"""One step of a plain transformers loop, traced: what benchmarks/planner/plain_rows.py does on a GPU, without one.

`trace_plain_step` has nothing of trimtab's step in it: it holds the tracer against measurements that anybody can
repeat. `trace_loop` is the part of it that knows neither model nor step, and traces the loops of users as well.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.model.hub import quiet_transformers
from trimtab.planner.trace.blocks import NotPeriodic, extend, watch_blocks
from trimtab.planner.trace.cuda import CudaRules, Gpu, as_on_cuda
from trimtab.planner.trace.default_dtype import own_default_dtype
from trimtab.planner.trace.recorder import Owner, Recorder, Trace
from trimtab.planner.trace.shortened_model import Shortened, shorten, stacks_of
from trimtab.planner.trace.stand_ins import kernels_stood_in

OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad"}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_STEPS = 2  # the state of optimizers is born in the first


@dataclass(frozen=True)
class Loop:
    """What a loop has on a model without weights.

    Attributes:
        model: The model.
        optimizer: The optimizer itself, not a prepared one.
        step: One step of the loop, `zero_grad` included; it tells the recorder when backward and the optimizer run,
            and which gradients there are.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def trace_plain_step(config: Mapping[str, Any], head: str, rows: int, length: int, **options: Any) -> Trace:
    """The second of two steps, with everything that was there before it.

    Args:
        config: Of the model, with its `model_type`.
        head: The class of transformers that makes the model, such as "AutoModelForCausalLM".
        rows: Of the batch.
        length: Tokens of each row.
        options: As for `trace_plain_model`.
    """
    dtype = torch.bfloat16 if options.get("precision") == "bf16-pure" else torch.float32
    return trace_plain_model(_skeleton(config, head, dtype), rows, length, **options)


def trace_plain_model(
    skeleton: Any,
    rows: int,
    length: int,
    *,
    precision: str = "fp32",
    optimizer: str = "adamw",
    implementation: str = "fused",
    gradient_checkpointing: bool = False,
    mask: str = "none",
    target_length: int | None = None,
    gpu: Gpu | None = None,
    whole: bool = False,
) -> Trace:
    """The same of a model that is there, without weights.

    Args:
        skeleton: The model, on meta, in the format of its weights.
        rows: Of the batch.
        length: Tokens of each row.
        precision: fp32, tf32, bf16 or fp16 (with autocast), or bf16-pure.
        optimizer: One of torch's: see `OPTIMIZERS`.
        implementation: "fused" or "foreach".
        gradient_checkpointing: Whether every block is recomputed, by transformers' own switch.
        mask: "none", "full" (all ones) or "padded".
        target_length: Tokens to be written, for a model with a decoder of its own.
        gpu: The device that is stood in for; an H200 by default.
        whole: Trace every block, also those that are like others.
    """
    batch = _batch(skeleton, rows, length, mask, target_length)

    def build(short: Shortened, recorder: Recorder) -> Loop:
        model = short.model.train()
        model.config.use_cache = False
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return _plain_loop(recorder, model, batch, precision, optimizer, implementation)

    return trace_loop(skeleton, build, batch, gpu=gpu, is_padded=mask == "padded", whole=whole)


def trace_loop(
    skeleton: Any,
    build: Callable[[Shortened, Recorder], Loop],
    batch: Mapping[str, Any],
    *,
    gpu: Gpu | None = None,
    is_padded: bool = False,
    mark: Callable[[int], Any] = lambda _: None,
    whole: bool = False,
) -> Trace:
    """The second of two steps of a loop, with everything that was there before it.

    Args:
        skeleton: The model, on meta; it stays as it is.
        build: Makes the loop for a copy of the model that may have fewer blocks.
        batch: What the loop's steps are given, on meta.
        gpu: The device that is stood in for; an H200 by default.
        is_padded: Whether some of the batch is padding: attention then takes another way.
        mark: What the loop does to a block, by its number counted through all stacks; blocks that differ in it differ.
        whole: Trace every block, also those that are like others.
    """
    gpu = gpu or Gpu()

    def traced(short: Shortened) -> Trace:
        recorder = Recorder(CudaRules(gpu), lambda tensor: _answer(tensor, is_padded))
        with as_on_cuda(gpu), kernels_stood_in(recorder, gpu.capability), quiet_transformers():
            _record(recorder, build(short, recorder), batch)
        return recorder.trace()

    if not whole:
        try:
            short = shorten(skeleton, mark)
            return extend(traced(short), short.repeats)
        except NotPeriodic:
            pass
    return traced(shorten(skeleton, allowed=False))


def _skeleton(config: Mapping[str, Any], head: str, dtype: torch.dtype) -> Any:
    import transformers

    values = dict(config)
    with quiet_transformers(), torch.device("meta"), own_default_dtype():
        made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        return getattr(transformers, head).from_config(made, dtype=dtype)


def _answer(tensor: torch.Tensor, is_padded: bool) -> Any:
    if tensor.dtype is torch.bool:
        return not is_padded  # "is all of the mask set?"
    return 0.0 if tensor.is_floating_point() else 0


def _batch(model: Any, rows: int, length: int, mask: str, target_length: int | None) -> dict[str, torch.Tensor]:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.long, device="meta")

    batch = {"input_ids": numbers(rows, length)}
    if mask != "none":
        batch["attention_mask"] = numbers(rows, length)
    if "SequenceClassification" in type(model).__name__:
        batch["labels"] = numbers(rows)
    else:
        batch["labels"] = numbers(rows, target_length or length)
    return batch


def _plain_loop(
    recorder: Recorder, model: Any, batch: Mapping[str, Any], precision: str, optimizer_name: str, form: str
) -> Loop:
    """The loop of plain_rows.py."""
    optimizer = getattr(torch.optim, OPTIMIZERS[optimizer_name])(model.parameters(), lr=1e-5, **{form: True})
    dtype = _AUTOCAST.get(precision)
    scale: list[torch.Tensor] = []

    def step() -> None:
        if precision == "fp16" and not scale:
            scale.extend(_scale())
        with torch.autocast("cuda", dtype=dtype) if dtype else contextlib.nullcontext():
            loss = model(**batch).loss
        with recorder.during("backward"):
            (loss * scale[0] if scale else loss).backward()
        recorder.adopt_gradients(model.parameters())
        with recorder.during("optimizer"):
            optimizer.step()
        optimizer.zero_grad()

    return Loop(model, optimizer, step)


def _record(recorder: Recorder, loop: Loop, batch: Mapping[str, Any]) -> None:
    model, optimizer = loop.model, loop.optimizer
    output = model.get_output_embeddings()
    recorder.vocab_size = None if output is None else int(output.weight.shape[0])
    stacks = [blocks for _, blocks in stacks_of(model)]
    watch_blocks(stacks, recorder)
    visits = _Visits(recorder, stacks)
    visits.adopt(((tensor, [tensor]) for tensor in (*model.parameters(), *model.buffers())), "weights")
    # Adagrad makes its state with itself
    visits.adopt(((parameter, optimizer.state[parameter].values()) for parameter in list(optimizer.state)), "state")
    visits.watch_state_of(optimizer)
    recorder.adopt((value for value in batch.values() if isinstance(value, torch.Tensor)), "inputs")
    recorder.is_timing = False
    with recorder:
        for number in range(_NUM_STEPS):
            recorder.is_timing = number == _NUM_STEPS - 1
            recorder.mark(f"step {number}")
            loop.step()
        recorder.mark("end")
        recorder.enter("", None)


def _scale() -> tuple[torch.Tensor, ...]:
    """What a `GradScaler` has on the device all the time: its scale, and how many steps went well."""
    return tuple(torch.empty((), dtype=dtype, device="meta") for dtype in (torch.float32, torch.int32))


class _Visits:
    """Tells a recorder to which block what is made now belongs."""

    def __init__(self, recorder: Recorder, stacks: list[list[torch.nn.Module]]) -> None:
        self._recorder = recorder
        self._here: Owner | None = None
        self._owners = {
            id(tensor): Owner(stack, number)
            for stack, blocks in enumerate(stacks)
            for number, block in enumerate(blocks)
            for tensor in (*block.parameters(), *block.buffers())
        }

    def adopt(self, tensors: Iterable[tuple[torch.Tensor, Iterable[Any]]], part: str) -> None:
        """What exists already, each with the tensor of the model that it belongs to."""
        for tensor, made in tensors:
            self.visit(tensor, part)
            self._recorder.adopt((item for item in made if isinstance(item, torch.Tensor)), part)
        self.leave()

    def watch_state_of(self, optimizer: torch.optim.Optimizer) -> None:
        """See which parameter's state is made in the first step; torch's optimizers make it in `_init_group`."""
        optimizer.state = _State(lambda parameter: self.visit(parameter, "state"), optimizer.state)
        name = "_fresh_state" if hasattr(optimizer, "_fresh_state") else "_init_group"
        make: Callable[..., Any] | None = getattr(optimizer, name, None)
        if make is None:
            return

        def seen(*args: Any, **kwargs: Any) -> Any:
            with self._recorder.born_as("state"):
                made = make(*args, **kwargs)  # of a parameter, or of a group
            self.leave()
            return made

        setattr(optimizer, name, seen)

    def visit(self, tensor: torch.Tensor, kind: str) -> None:
        """This parameter or buffer is looked at."""
        owner = self._owners.get(id(tensor))
        if owner != self._here:
            self._here = owner
            self._recorder.enter(kind if owner is not None else "", owner)

    def leave(self) -> None:
        """What comes now is between blocks."""
        if self._here is not None:
            self._here = None
            self._recorder.enter("", None)


class _State(defaultdict[torch.Tensor, Any]):
    """The state of an optimizer, which says when that of a parameter is asked for before it is there."""

    def __init__(self, visit: Callable[[torch.Tensor], None], before: Mapping[torch.Tensor, Any]) -> None:
        super().__init__(dict, before)
        self._visit = visit

    def __missing__(self, parameter: torch.Tensor) -> Any:
        self._visit(parameter)
        return super().__missing__(parameter)
