"""4-bit linear modules: nf4 of bitsandbytes."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trimtab.hardware.extras import require_extra
from trimtab.model.block_init import skeleton
from trimtab.model.quantization import Quantization, is_quantized, quantizable

_BLOCK = 64  # number of weights that share one scale


@dataclass(frozen=True)
class Nf4(Quantization):
    """Weights in 4 bits.

    Attributes:
        double_quant: Whether the scales are quantized too, to 8 bits.
    """

    double_quant: bool = True

    name = "nf4"
    bits = "4 bits"
    package = "bitsandbytes"

    def loading_arguments(self, auto_class: Any, config: Any, device: torch.device) -> dict[str, Any]:
        """Let transformers and bitsandbytes quantize."""
        import transformers

        self.check()
        empty = skeleton(auto_class, config, self.compute_dtype)
        chosen = set(quantizable(empty))
        others = [name for name, module in empty.named_modules() if name not in chosen and not any(module.children())]
        config_class: Any = transformers.BitsAndBytesConfig
        quantization = config_class(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=self.compute_dtype,
            llm_int8_skip_modules=others,
        )
        return {"quantization_config": quantization, "device_map": {"": device}}

    def quantize(self, module: Any) -> torch.nn.Module:
        """Quantize a linear module on its device."""
        nn = _bitsandbytes().nn
        weight = module.weight.data if isinstance(module, torch.nn.Linear) else module.weight.data.t()
        num_out, num_in = weight.shape
        with torch.device("meta"):
            new = nn.Linear4bit(
                num_in, num_out, module.bias is not None, compute_dtype=self.compute_dtype, **self._settings
            )
        values = weight.to(self.compute_dtype).contiguous()
        new.weight = nn.Params4bit(values, requires_grad=False, **self._settings).to(values.device)
        new.bias = module.bias
        new.train(module.training)
        return new  # type: ignore[no-any-return]

    def finish(self, model: Any) -> None:
        """Prepare bitsandbytes' modules for training."""
        linear_4bit = _bitsandbytes().nn.Linear4bit
        for name, module in list(model.named_modules()):
            if not isinstance(module, linear_4bit):
                continue
            if not is_quantized(module):  # not in the files, so it is newly initialized and must be trainable
                model.set_submodule(name, _plain(module))
                continue
            weight: Any = module.weight
            weight.module = None  # a deepcopy of the weight would keep the original module alive
            weight.quant_state.dtype = self.compute_dtype  # otherwise backward first dequantizes the matrix to fp32
            # Otherwise an eval forward repacks the weights on some CPUs, and gradients are not possible afterwards.
            module.support_avx512bf16_for_cpu = False
            if weight.quant_state.shape[-1] % _BLOCK:
                module.forward = MethodType(_forward_unaligned, module)
        model.is_loaded_in_4bit = True  # read by PEFT

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize a matrix to 4 bits and dequantize it to the compute dtype."""
        values = weight.detach().to(self.compute_dtype, copy=True).contiguous()
        packed = _bitsandbytes().nn.Params4bit(values, requires_grad=False, **self._settings).to(values.device)
        return dequantized(packed, self.compute_dtype)

    @property
    def _settings(self) -> Mapping[str, Any]:
        return {"compress_statistics": self.double_quant, "quant_type": "nf4"}


@cache
def _bitsandbytes() -> Any:
    """Import the optional package."""
    require_extra("bitsandbytes", "an nf4 base")
    return import_module("bitsandbytes")


def is_nf4(module: torch.nn.Module) -> bool:
    """Whether the weight of a module is quantized by bitsandbytes."""
    return getattr(module._parameters.get("weight"), "quant_state", None) is not None


def dequantized(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize a weight to a matrix (out, in)."""
    if weight.quant_state.shape[-1] % _BLOCK == 0:
        plain: torch.Tensor = _bitsandbytes().functional.dequantize_4bit(weight.data, weight.quant_state)
        return plain.to(dtype)
    state = copy.copy(weight.quant_state)
    shape, state.shape = state.shape, torch.Size((1, math.prod(state.shape)))
    # As one long row: on the CPU, bitsandbytes uses wrong scales if the row length is not a multiple of the block size.
    row: torch.Tensor = _bitsandbytes().functional.dequantize_4bit(weight.data, state)
    return row.view(shape).to(dtype)


def _plain(module: Any) -> torch.nn.Module:
    """Convert a Linear4bit module whose weight was never quantized into a plain linear module."""
    num_out, num_in = module.weight.shape
    with torch.device("meta"):
        plain = torch.nn.Linear(num_in, num_out, module.bias is not None)
    plain.weight, plain.bias = torch.nn.Parameter(module.weight.data), module.bias
    return plain.train(module.training)


def _forward_unaligned(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward for a width that is not a multiple of the block size; also correct on the CPU (see `dequantized`)."""
    if x.device.type != "cpu":
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    apply: Any = _Product.apply
    product: torch.Tensor = apply(x.to(module.compute_dtype), module.weight, module.bias)
    return product.to(x.dtype)


class _Product(torch.autograd.Function):
    """x W^T + bias; backward dequantizes the weight again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return torch.nn.functional.linear(x, dequantized(weight, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad @ dequantized(ctx.weight, grad.dtype), None, None
