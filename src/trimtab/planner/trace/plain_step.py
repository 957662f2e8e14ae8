"""Trace a step of a plain transformers loop, which benchmarks/planner/plain_rows.py runs on a GPU.

`trace_plain_step` does not use trimtab's step, so the tracer can be compared with measurements of plain PyTorch code.
`trace_loop` is its part that is independent of model and step; it also traces the loops of users.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.model.hub import quiet_transformers
from trimtab.model.own_checkpointing import start_own_checkpointing
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.default_dtype import own_default_dtype
from trimtab.planner.trace.example_batch import tell_values
from trimtab.planner.trace.model_trace import BlockVisits, Work, trace_model
from trimtab.planner.trace.recorder import Recorder, Trace
from trimtab.planner.trace.shortened_model import Shortened

OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad"}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_STEPS = 2  # optimizers create their state in the first step


@dataclass(frozen=True)
class Loop:
    """A loop on a model without weights.

    Attributes:
        model: The model.
        optimizer: The optimizer itself, not a prepared one.
        step: One step of the loop, including `zero_grad`; it tells the recorder when backward and the optimizer run,
            and which tensors are gradients.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def trace_plain_step(config: Mapping[str, Any], head: str, rows: int, length: int, **options: Any) -> Trace:
    """Trace the second of two steps, with everything that was allocated before it.

    Args:
        config: Config of the model, with its `model_type`.
        head: The transformers class that builds the model, such as "AutoModelForCausalLM".
        rows: Rows of the batch.
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
    recomputes: bool = False,
    mask: str = "none",
    target_length: int | None = None,
    gpu: Gpu | None = None,
    whole: bool = False,
) -> Trace:
    """Trace the second of two steps of a model on `meta`.

    Args:
        skeleton: The model on meta, in the dtype of its weights.
        rows: Rows of the batch.
        length: Tokens of each row.
        precision: fp32, tf32, bf16 or fp16 (with autocast), or bf16-pure.
        optimizer: One of torch's: see `OPTIMIZERS`.
        implementation: "fused" or "foreach".
        recomputes: Whether to enable transformers' own gradient checkpointing.
        mask: "none", "full" (all ones) or "padded".
        target_length: Tokens to generate, for a model with an encoder and a decoder.
        gpu: The GPU to simulate; an H200 by default.
        whole: Whether to trace every block, including repeated ones.
    """
    batch = _batch(skeleton, rows, length, mask, target_length)

    def build(short: Shortened, recorder: Recorder) -> Loop:
        model = short.model.train()
        model.config.use_cache = False
        if recomputes:
            start_own_checkpointing(model)
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
    """Trace the second of two steps of a loop, with everything that was allocated before it.

    Args:
        skeleton: The model, on meta; it is not changed.
        build: Builds the loop for a copy of the model that may have fewer blocks.
        batch: The batch of every step, on meta.
        gpu: The GPU to simulate; an H200 by default.
        is_padded: As in `trace_model`.
        mark: As in `trace_model`.
        whole: Whether to trace every block.
    """

    def prepare(short: Shortened, recorder: Recorder) -> Work:
        loop = build(short, recorder)
        recorder.is_timing = False
        _adopt(recorder, loop, batch)
        tell_values(recorder.values, batch, loop.model.config, is_padded=is_padded)
        return lambda: _run(recorder, loop)

    return trace_model(skeleton, prepare, gpu=gpu or Gpu(), is_padded=is_padded, mark=mark, whole=whole)


def _adopt(recorder: Recorder, loop: Loop, batch: Mapping[str, Any]) -> None:
    """Tell the recorder what is allocated before the first step."""
    head = loop.model.get_output_embeddings()
    recorder.vocab_size = None if head is None else int(head.weight.shape[0])
    visits = BlockVisits(recorder, loop.model)
    visits.adopt_weights(loop.model)
    visits.watch_state_of(loop.optimizer)
    recorder.adopt((value for value in batch.values() if isinstance(value, torch.Tensor)), "inputs")


def _run(recorder: Recorder, loop: Loop) -> None:
    for number in range(_NUM_STEPS):
        recorder.is_timing = number == _NUM_STEPS - 1
        recorder.mark(f"step {number}")
        loop.step()


def _skeleton(config: Mapping[str, Any], head: str, dtype: torch.dtype) -> Any:
    import transformers

    values = dict(config)
    with quiet_transformers(), torch.device("meta"), own_default_dtype():
        made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        return getattr(transformers, head).from_config(made, dtype=dtype)


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


def _scale() -> tuple[torch.Tensor, ...]:
    """The tensors that a `GradScaler` keeps on the device: its scale and its growth counter."""
    return tuple(torch.empty((), dtype=dtype, device="meta") for dtype in (torch.float32, torch.int32))
