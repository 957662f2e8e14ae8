"""One step of a plain transformers loop, traced: what benchmarks/planner/plain_rows.py does on a GPU, without one.

Nothing of trimtab's step is in it. It is there to hold the tracer against measurements that anybody can repeat.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from trimtab.model.hub import quiet_transformers
from trimtab.planner.blocks import NotPeriodic, extend, watch_blocks
from trimtab.planner.cuda import CudaRules, Gpu, as_on_cuda
from trimtab.planner.shortening import Shortened, shorten, stacks_of
from trimtab.planner.trace import Owner, Recorder, Trace

OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad"}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_STEPS = 2  # the state of optimizers is born in the first


def trace_plain_step(
    config: Mapping[str, Any],
    head: str,
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
    """The second of two steps, with everything that was there before it.

    Args:
        config: Of the model, with its `model_type`.
        head: The class of transformers that makes the model, such as "AutoModelForCausalLM".
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
    gpu = gpu or Gpu()
    skeleton = _skeleton(config, head, torch.bfloat16 if precision == "bf16-pure" else torch.float32)

    def traced(short: Shortened) -> Trace:
        model = short.model.train()
        model.config.use_cache = False
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        recorder = Recorder(CudaRules(gpu), lambda tensor: _answer(tensor, mask))
        with as_on_cuda(gpu), quiet_transformers():
            _record(
                recorder, model, _batch(model, rows, length, mask, target_length), precision, optimizer, implementation
            )
        return recorder.trace()

    if not whole:
        try:
            short = shorten(skeleton)
            return extend(traced(short), short.repeats)
        except NotPeriodic:
            pass
    return traced(shorten(skeleton, allowed=False))


def _skeleton(config: Mapping[str, Any], head: str, dtype: torch.dtype) -> Any:
    import transformers

    values = dict(config)
    with quiet_transformers(), torch.device("meta"):
        made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        return getattr(transformers, head).from_config(made, dtype=dtype)


def _answer(tensor: torch.Tensor, mask: str) -> Any:
    if tensor.dtype is torch.bool:
        return mask != "padded"  # "is all of the mask set?"
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


def _record(
    recorder: Recorder, model: Any, batch: dict[str, torch.Tensor], precision: str, optimizer_name: str, form: str
) -> None:
    """The loop of plain_rows.py."""
    output = model.get_output_embeddings()
    recorder.vocab_size = None if output is None else int(output.weight.shape[0])
    stacks = [blocks for _, blocks in stacks_of(model)]
    watch_blocks(stacks, recorder)
    optimizer = getattr(torch.optim, OPTIMIZERS[optimizer_name])(model.parameters(), lr=1e-5, **{form: True})
    visits = _Visits(recorder, stacks)
    visits.adopt(((tensor, [tensor]) for tensor in (*model.parameters(), *model.buffers())), "weights")
    # Adagrad makes its state with itself
    visits.adopt(((parameter, optimizer.state[parameter].values()) for parameter in list(optimizer.state)), "state")
    visits.watch_state_of(optimizer)
    recorder.adopt(batch.values(), "inputs")
    dtype = _AUTOCAST.get(precision)
    recorder.is_timing = False
    with recorder:
        scale = _scale() if precision == "fp16" else None
        for number in range(_NUM_STEPS):
            recorder.is_timing = number == _NUM_STEPS - 1
            recorder.mark(f"step {number}")
            with torch.autocast("cuda", dtype=dtype) if dtype else contextlib.nullcontext():
                loss = model(**batch).loss
            with recorder.during("backward"):
                (loss if scale is None else loss * scale[0]).backward()
            recorder.adopt_gradients(model.parameters())
            with recorder.during("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            del loss
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
        """See which parameter's state is made in the first step."""
        optimizer.state = _State(lambda parameter: self.visit(parameter, "state"), optimizer.state)
        make: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]

        def seen(*args: Any, **kwargs: Any) -> Any:
            with self._recorder.born_as("state"):
                made = make(*args, **kwargs)
            self.leave()
            return made

        optimizer._init_group = seen  # type: ignore[attr-defined]

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
