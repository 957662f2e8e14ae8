"""8-bit linear modules: weights in float8_e4m3fn with one fp32 scale per output row, multiplied in fp8.

A product rounds its input to e4m3 too, with one scale per token. On GPUs with fp8 units both factors are multiplied in
fp8 (`torch._scaled_mm`); elsewhere the same rounded values are multiplied in fp32. Layers whose sizes the units do not
support are dequantized instead, and their inputs are not rounded.

The gradient of the input is grad W. The units need both factors with a contiguous inner dimension, so the weight is
transposed for each product (a second copy would use the memory that fp8 saves), and the gradient is multiplied by the
scales of the weight's rows before it is rounded. Gradients are rounded to e4m3 as well: with a scale for each token,
its precision matters more than the range of e5m2.

Shapes: x (tokens, in), weight (out, in), grad (tokens, out).
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trimtab.hardware.extras import has_package
from trimtab.log import log_info_once
from trimtab.model.quantization import SCALE_BITS, Quantization

FP8 = torch.float8_e4m3fn
_ALIGNMENT = 16  # of both sizes of a weight, in elements


@dataclass(frozen=True)
class Fp8(Quantization):
    """Weights in 8 bits: e4m3 with one scale per row."""

    name = "fp8"
    bits = "8 bits"

    def loading_arguments(self, auto_class: Any, config: Any, device: torch.device) -> dict[str, Any]:
        """Make transformers call `quantized_rows` for each weight that it reads."""
        loading: Any = importlib.import_module("trimtab.model.fp8_loading")
        return {"quantization_config": loading.Fp8Config(), "device_map": {"": device}}

    def quantize(self, module: Any) -> torch.nn.Module:
        """Quantize a linear module on its device."""
        weight = module.weight.data if isinstance(module, torch.nn.Linear) else module.weight.data.t()
        return Fp8Linear(*quantized_rows(weight), module.bias, self.compute_dtype).train(module.training)

    def finish(self, model: Any) -> None:
        """Turn the weights that transformers has read into modules."""
        for name, (module, scales) in getattr(getattr(model, "hf_quantizer", None), "scales", {}).items():
            new = Fp8Linear(module.weight.data.view(FP8), scales, module.bias, self.compute_dtype)
            model.set_submodule(name, new.train(module.training))

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize a matrix and dequantize it to the compute dtype."""
        codes, scales = quantized_rows(weight.detach())
        return _dequantized(codes, scales, self.compute_dtype)


def is_supported(capability: tuple[int, int] | None) -> bool:
    """Whether an NVIDIA GPU of this compute capability multiplies in fp8: Ada, Hopper and newer."""
    # 9.4 and 9.5 are AMD's, whose e4m3 has other codes
    return capability in ((8, 9), (9, 0)) or (capability is not None and capability >= (10, 0))


class Fp8Linear(torch.nn.Linear):
    """A frozen linear module with its weight in fp8.

    Both parameters are stored as integers (see `trimtab.model.quantization`); `codes` and `scales` view them.

    Args:
        codes: The weight divided by its scales, in e4m3.
        scales: Scale of each row, as (out, 1).
        bias: The bias.
        compute_dtype: Dtype of the product outside autocast.
    """

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.nn.Parameter | None, compute_dtype: torch.dtype
    ) -> None:
        num_out, num_in = codes.shape
        with torch.device("meta"):
            super().__init__(num_in, num_out, bias=False)
        self.weight = torch.nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scales.view(SCALE_BITS), requires_grad=False)
        self.register_parameter("bias", bias)
        self.compute_dtype = compute_dtype

    @property
    def codes(self) -> torch.Tensor:
        """The weight divided by its scales."""
        return self.weight.detach().view(FP8)

    @property
    def scales(self) -> torch.Tensor:
        """Scale of each row, as (out, 1)."""
        return self.weight_scale.detach().view(torch.float32)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in another dtype."""
        return _dequantized(self.codes, self.scales, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply in fp8; the result has the dtype that a plain module in `compute_dtype` would return."""
        is_cast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if is_cast else self.compute_dtype
        apply: Any = _Product.apply
        product: torch.Tensor = apply(x.reshape(-1, x.shape[-1]), self.weight, self.weight_scale, self.bias, dtype)
        return product.view(*x.shape[:-1], self.out_features).to(dtype if is_cast else x.dtype)

    def multiply(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return x W^T + bias, without autograd."""
        return _multiplied(rows, self.codes, self.scales, self.bias, dtype)

    def input_gradient(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return grad W, without autograd."""
        return _input_gradient(rows, self.codes, self.scales, dtype)


class _Product(torch.autograd.Function):
    """The product of a module; only the module's parameters are saved for backward.

    It takes parameters instead of the module, because torch's compiler cannot save a module for backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, weight_scale)
        ctx.dtype, ctx.input_dtype = dtype, rows.dtype
        with torch.autocast(rows.device.type, enabled=False):
            return _multiplied(rows, weight.view(FP8), weight_scale.view(torch.float32), bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, weight_scale = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            rows = _input_gradient(grad, weight.view(FP8), weight_scale.view(torch.float32), ctx.dtype)
            return rows.to(ctx.input_dtype), None, None, None, None


def _multiplied(
    rows: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return x W^T + bias."""
    bias = None if bias is None else bias.to(dtype)
    if not _is_aligned(weight):
        return functional.linear(rows.to(dtype), _dequantized(weight, weight_scales, dtype), bias)
    codes, scales = quantized_rows(rows)
    if not _has_units(rows.device):
        product = (codes.float() @ weight.float().t()) * scales * weight_scales.t()
        return _cast(product if bias is None else product + bias, dtype)
    bias = None if bias is None else bias.to(torch.bfloat16)
    return _cast(_scaled_product(codes, weight.t(), scales, weight_scales.t(), bias), dtype)


def _cast(product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor, without any call that returns its argument: torch 2.11 compiles that to a gradient of zero.

    Its compiler would then treat the product of an autograd function as a second result (pytorch issue 180642).
    """
    return product if product.dtype is dtype else product.to(dtype)


def _input_gradient(
    rows: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return grad W."""
    if not _is_aligned(weight):
        return rows.to(dtype) @ _dequantized(weight, weight_scales, dtype)
    codes, scales = quantized_rows(rows, weight_scales)
    if not _has_units(rows.device):
        return (codes.float() @ weight.float()).mul_(scales).to(dtype)
    ones = torch.ones((1, weight.shape[1]), device=rows.device)
    return _scaled_product(codes, transposed(weight).t(), scales, ones).to(dtype)


def _is_aligned(weight: torch.Tensor) -> bool:
    return weight.shape[0] % _ALIGNMENT == 0 and weight.shape[1] % _ALIGNMENT == 0


def _scaled_product(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scales: torch.Tensor,
    right_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    # Row scales are supported with bf16 results on all GPUs. Fast accumulation loses less precision than e4m3 already
    # has.
    return torch._scaled_mm(
        left,
        right,
        scale_a=left_scales,
        scale_b=right_scales,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _has_units(device: torch.device) -> bool:
    """Whether a device multiplies in fp8; a trace simulates a device that does."""
    if device.type == "cuda":
        return torch.version.cuda is not None and is_supported(torch.cuda.get_device_capability(device))
    return device.type == "meta"


# For torch's compiler, which would otherwise split the graph to query the capability. This is what
# `torch.compiler.assume_constant_result` sets; importing the compiler takes a second.
_has_units._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.to(dtype).mul_(scales)  # in place: computed in fp32, rounded once


def quantized_rows(x: torch.Tensor, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to e4m3, with one scale per row.

    Args:
        x: The matrix.
        factors: Factors to multiply the columns by first.

    Returns:
        The values divided by the scales, contiguous, and the scales as (rows, 1).
    """
    x = x if x.is_contiguous() else x.contiguous()
    kernels = None if torch.compiler.is_compiling() else _kernels_for(x.device)
    if kernels is not None and x.shape[-1] <= kernels.WIDEST and x.numel():
        quantized: tuple[torch.Tensor, torch.Tensor] = kernels.quantize_rows(x, factors)
        return quantized
    return rounded_rows(x, factors)


def rounded_rows(x: torch.Tensor, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantized_rows` in torch's operations, which its compiler fuses with the preceding ones."""
    values = x.float() if factors is None else x * factors.view(1, -1)
    largest_code, smallest = limits()
    largest = torch.linalg.vector_norm(values, float("inf"), -1, keepdim=True).clamp_(min=smallest)
    return (values * (largest_code / largest)).to(FP8), largest / largest_code


def limits() -> tuple[float, float]:
    """The largest code, and the lower bound for the largest value of a row.

    The bound keeps a scale and its inverse normal fp32 numbers. Both are in a function because torch's compiler treats
    module-level numbers as inputs of its graphs.
    """
    return torch.finfo(FP8).max, 1e-35


def transposed(codes: torch.Tensor) -> torch.Tensor:
    """Return a contiguous transposed copy of a matrix in fp8."""
    kernels = None if torch.compiler.is_compiling() else _kernels_for(codes.device)
    flipped: torch.Tensor = codes.t().contiguous() if kernels is None else kernels.transpose(codes)
    return flipped


@functools.cache
def _kernels_for(device: torch.device) -> Any:
    """The module with Triton kernels if they work on the device; else None."""
    if device.type != "cuda" or not _has_units(device) or not has_package("triton"):
        return None
    try:
        kernels: Any = importlib.import_module("trimtab.model.fp8_kernels")
        codes, _ = kernels.quantize_rows(torch.ones((_ALIGNMENT, _ALIGNMENT), device=device), None)
        kernels.transpose(codes)
    except Exception as error:  # Triton needs a C compiler and raises arbitrary exceptions if it fails
        log_info_once(f"fp8: torch's operations are used, because the faster Triton kernels do not run: {error}")
        return None
    return kernels
