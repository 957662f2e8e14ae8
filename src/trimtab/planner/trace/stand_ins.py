"""Parts of a step that cannot run on tensors without data, each with the allocations of the real one.

Weights of 4 bits, the kernels of liger-kernel, of bitsandbytes and of our own for Triton, embeddings in host memory.
"""

import contextlib
import math
from collections.abc import Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trimtab.errors import RecipeError
from trimtab.model import adapters, linear_cross_entropy, lora_product, nf4, precision
from trimtab.optim import build, quantized, stochastic_rounding
from trimtab.planner.trace.recorder import Recorder
from trimtab.planner.trace.thread_patches import stand_ins_on_this_thread

_BLOCK, _NESTED_BLOCK = 64, 256


@contextlib.contextmanager
def kernels_stood_in(recorder: Recorder, capability: tuple[int, int]) -> Iterator[None]:
    """Inside, and on this thread, optimizers and products that need kernels of a GPU run on meta."""

    def paged_or_not(self: Any, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.is_paged and parameter.numel() >= quantized.MIN_PAGED:
            with recorder.on_host():
                return torch.zeros(parameter.shape, dtype=dtype, device="meta")
        return torch.zeros(parameter.shape, dtype=dtype, device="meta")

    def maps(self: Any, functions: Any, device: torch.device) -> list[torch.Tensor]:
        if device not in self._maps:
            self._maps[device] = [torch.empty(256, device="meta") for _ in range(2)]
        return list(self._maps[device])

    def call(self: Any, functions: Any, group: Any, weights: Any, gradient: Any, state: Any) -> None:
        if state["state1"].dtype is not torch.float32:
            self._maps_on(functions, weights.device)
        recorder.note(
            "bitsandbytes.optimizer", [weights, gradient, *(t for t in state.values() if hasattr(t, "shape"))]
        )

    def step_adam(members: list[list[torch.Tensor]], *args: Any, **options: Any) -> None:
        for tensors in members:
            recorder.note("trimtab.rounded_adam", tensors)

    kernel = SimpleNamespace(LONGEST=2**62, step_adam=step_adam)
    all_chunks = linear_cross_entropy._chunks

    def few_chunks(num_tokens: int, vocab: int) -> Iterator[slice]:
        """Chunks come one after the other and are alike: three of them show it, and the second is counted often."""
        chunks = list(all_chunks(num_tokens, vocab))
        for number, chunk in enumerate(chunks[:2]):
            first_op = len(recorder.ops)
            yield chunk
            if number == 1 and len(chunks) > 3:
                recorder.ops += recorder.ops[first_op:] * (len(chunks) - 3)
        yield from chunks[2:3] if len(chunks) == 3 else chunks[-1:] if len(chunks) > 3 else ()

    half_sums = capability >= (8, 0)
    stand_ins: list[tuple[Any, str, Any]] = [
        (adapters, "say", lambda *_: None),  # of a model with fewer blocks, and not of the user's
        (precision, "say", lambda *_: None),
        (quantized, "require_extra", lambda *_: None),
        (build, "require_extra", lambda *_: None),
        (quantized, "bitsandbytes_functions", lambda: None),
        (quantized.Quantized, "_buffer", paged_or_not),
        (quantized.Quantized, "_maps_on", maps),
        (quantized.Quantized, "_call", call),
        (stochastic_rounding, "_kernel_for", lambda _: kernel),
        (stochastic_rounding, "has_fused", lambda *_: True),
        (stochastic_rounding.Chance, "_generator_on", lambda *_: None),
        (linear_cross_entropy, "_sums_half_in_fp32", lambda _: half_sums),
        (linear_cross_entropy, "_chunks", few_chunks),
        (precision, "_use_tf32", lambda _: None),
        (lora_product, "dequantized", dequantized),
        (nf4, "dequantized", dequantized),
    ]
    with stand_ins_on_this_thread(stand_ins):
        yield


# ---------------------------------------------------------------------- 4 bits


def dequantized(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """As bitsandbytes does it: scales in fp32 first, then the matrix."""
    shape = weight.quant_state.shape
    scales = torch.empty(math.ceil(math.prod(shape) / _BLOCK), device="meta")
    scales = scales + 0.0
    return torch.empty(shape, dtype=weight.quant_state.dtype, device="meta").to(dtype)


def quantize(model: Any, compute_dtype: torch.dtype) -> None:
    """Give the linear modules of a base weights of 4 bits, on meta."""
    from transformers.pytorch_utils import Conv1D

    for name in nf4.quantizable(model):
        module = model.get_submodule(name)
        num_in, num_out = module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape)
        linear = torch.nn.Linear(num_in, num_out, module.bias is not None, device="meta", dtype=compute_dtype)
        count = num_in * num_out
        packed: Any = torch.nn.Parameter(
            torch.empty((math.ceil(count / 2), 1), dtype=torch.uint8, device="meta"), requires_grad=False
        )
        num_scales = math.ceil(count / _BLOCK)
        packed.quant_state = SimpleNamespace(
            shape=torch.Size((num_out, num_in)),
            dtype=compute_dtype,
            tensors=[
                torch.empty(num_scales, dtype=torch.uint8, device="meta"),
                torch.empty(math.ceil(num_scales / _NESTED_BLOCK), device="meta"),
                torch.empty(16, device="meta"),
                torch.empty(256, device="meta"),
                torch.empty((), device="meta"),
            ],
        )
        linear.weight = packed
        linear.compute_dtype = compute_dtype  # type: ignore[assignment]
        linear.forward = MethodType(_forward_4bit, linear)  # type: ignore[method-assign]
        if linear.bias is not None:
            linear.bias.requires_grad_(False)
        model.set_submodule(name, linear)
    model.is_loaded_in_4bit = True


def quantization_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Scales and tables beside weights of 4 bits."""
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from state.tensors


def _forward_4bit(module: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.to(module.compute_dtype)
    matrix = dequantized(module.weight, module.compute_dtype)
    with torch.autocast("meta", enabled=False):
        return functional.linear(rows, matrix, module.bias).to(x.dtype)


# ---------------------------------------------------------------------- liger-kernel


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and a number for each row; its backward writes into the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, num_multiprocessors: int) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        result = torch.empty_like(rows)
        ctx.save_for_backward(rows, weight, torch.empty(rows.shape[0], dtype=torch.float32, device="meta"))
        ctx.num_multiprocessors = num_multiprocessors
        return result.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()
        partial = torch.empty((ctx.num_multiprocessors, weight.shape[0]), dtype=torch.float32, device="meta")
        return grad, partial.sum(dim=0).to(weight.dtype), None


class _SiluMul(torch.autograd.Function):
    """Keeps its two inputs, which its backward overwrites."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return gate.detach(), up.detach()


def use_liger(model: torch.nn.Module, num_multiprocessors: int) -> None:
    """Give norms and gated products the allocations of liger-kernel's."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        apply: Any = _RmsNorm.apply
        return apply(x, self.weight, num_multiprocessors)  # type: ignore[no-any-return]

    def gated(self: Any, x: torch.Tensor) -> torch.Tensor:
        apply: Any = _SiluMul.apply
        return self.down_proj(apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]

    known = 0
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            known += 1
            module.forward = MethodType(norm, module)
        elif kind.endswith("MLP") and all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            known += 1
            module.forward = MethodType(gated, module)
    if not known:
        raise RecipeError(f"memory.kernels: liger has nothing for a {type(model).__name__}", "plain, or auto")
