"""4-bit linear modules (nf4 of bitsandbytes) for models loaded from files or built from a config.

Only the base model is quantized, not the output layer nor a task head. The whole model is never held unquantized: files
are read tensor by tensor, a model from a config is initialized block by block.
"""

import copy
import gc
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trimtab.errors import RecipeError
from trimtab.hardware.extras import require_extra
from trimtab.log import say
from trimtab.model.blocks import blocks_of

_BLOCK = 64  # weights that share one scale
_MAX_NAMED = 3  # modules that a warning names
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Nf4:
    """How a base model is quantized.

    Attributes:
        compute_dtype: Dtype of products with its weights.
        double_quant: Whether the scales are quantized too, to 8 bits.
    """

    compute_dtype: torch.dtype = torch.bfloat16
    double_quant: bool = True


@dataclass(frozen=True)
class LoadOptions:
    """Dtype, quantization and device of a model to load.

    Attributes:
        dtype: Dtype of the weights that are not quantized.
        nf4: How the base model is quantized; None for not at all.
        device: Device of the model.
    """

    dtype: torch.dtype
    nf4: Nf4 | None
    device: torch.device

    def describe(self, model: torch.nn.Module) -> str:
        """Describe a loaded model, such as "7.2 M parameters in bf16"."""
        total = sum(map(num_weights, model.parameters()))
        count, plain = _count_words(total), _DTYPE_NAMES.get(self.dtype, str(self.dtype))
        if self.nf4 is None:
            return f"{count} parameters in {plain}"
        return f"{count} parameters, {_num_quantized(model) / total:.1%} in nf4 and the rest in {plain}"


def device_for(device: torch.device | str | None, nf4: Nf4 | None) -> torch.device:
    """The device to load a model to: the given one, else the GPU if it has to quantize, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if nf4 is not None and torch.cuda.is_available() else "cpu")


@cache
def _bitsandbytes() -> Any:
    """Import the optional package."""
    require_extra("bitsandbytes", "an nf4 base")
    return import_module("bitsandbytes")


def num_weights(parameter: torch.Tensor) -> int:
    """Number of weights of a parameter; a quantized parameter has two in each byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def _num_quantized(model: torch.nn.Module) -> int:
    return sum(map(num_weights, filter(_is_quantized, model.parameters())))


def _is_quantized(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "quant_state", None) is not None


def warn_if_little_quantized(model: torch.nn.Module) -> None:
    """Log a warning if less than half of the weights of a model are in 4 bits."""
    total, quantized = sum(map(num_weights, model.parameters())), _num_quantized(model)
    if 2 * quantized >= total:
        return
    plain: Counter[str] = Counter()
    owners = {id(p): (name, module) for name, module in model.named_modules() for p in module._parameters.values()}
    for parameter in model.parameters():
        if not _is_quantized(parameter):
            name, module = owners[id(parameter)]
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            plain[f"{pattern} ({type(module).__name__})"] += parameter.numel()
    largest = ", ".join(f"{name} with {count / total:.0%}" for name, count in plain.most_common(_MAX_NAMED))
    counts = f"{_count_words(quantized)} of {_count_words(total)} weights ({quantized / total:.0%})"
    say(
        f"adapter: qlora: only {counts} are in 4 bits; the largest others: {largest}. Only linear modules of the base "
        "can be quantized, not embeddings or fused experts; adapter: lora would need little more memory"
    )


def _count_words(count: int) -> str:
    return f"{count:,}" if count < 1e6 else f"{count / 1e6:,.1f} M"


def is_nf4(module: torch.nn.Module) -> bool:
    """Whether the weight of a module is quantized."""
    weight = getattr(module, "weight", None)
    return weight is not None and _is_quantized(weight)


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


def rounded(weight: torch.Tensor, nf4: Nf4) -> torch.Tensor:
    """Quantize a matrix to 4 bits and dequantize it to the compute dtype."""
    values = weight.detach().to(nf4.compute_dtype, copy=True).contiguous()
    settings: Mapping[str, Any] = {"compress_statistics": nf4.double_quant, "quant_type": "nf4"}
    packed = _bitsandbytes().nn.Params4bit(values, requires_grad=False, **settings).to(values.device)
    return dequantized(packed, nf4.compute_dtype)


def quantizable(model: Any) -> list[str]:
    """Names of the linear modules of the base model, without heads and modules that have to stay in fp32."""
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    fragile = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    fragile += tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    base = {id(module) for part in base_parts(model) for module in part.modules()}
    return [
        name
        for name, module in model.named_modules()
        # Subclasses may have a different forward.
        if type(module) in (torch.nn.Linear, Conv1D)
        and id(module) in base
        and module is not output
        and not set(fragile) & set(name.split("."))
    ]


def base_parts(model: Any) -> list[torch.nn.Module]:
    """The parts of a model that are not a head."""
    from transformers import PreTrainedModel

    if getattr(model, "base_model", model) is not model:
        return [model.base_model]
    parts = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return [base for part in parts for base in base_parts(part)] or [model]


def loading_arguments(auto_class: Any, config: Any, nf4: Nf4, device: torch.device) -> dict[str, Any]:
    """Keyword arguments for `from_pretrained` to quantize each weight when it is read."""
    import transformers

    require_extra("bitsandbytes", "an nf4 base")
    empty = skeleton(auto_class, config, nf4.compute_dtype)
    chosen = set(quantizable(empty))
    others = [name for name, module in empty.named_modules() if name not in chosen and not any(module.children())]
    config_class: Any = transformers.BitsAndBytesConfig
    quantization = config_class(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nf4.double_quant,
        bnb_4bit_compute_dtype=nf4.compute_dtype,
        llm_int8_skip_modules=others,
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def finish_quantized(model: Any, nf4: Nf4, expected: list[str]) -> None:
    """Prepare a model whose modules were quantized, by us or by transformers, for training.

    Args:
        model: The model.
        nf4: How it was quantized.
        expected: Names of the modules that should be quantized; those that are not yet are quantized now.
    """
    linear_4bit = _bitsandbytes().nn.Linear4bit
    for name in expected:
        if not is_nf4(model.get_submodule(name)):
            model.set_submodule(name, _quantized(model.get_submodule(name), nf4))
    for name, module in list(model.named_modules()):
        if not isinstance(module, linear_4bit):
            continue
        if not is_nf4(module):  # not in the files, so it is newly initialized and has to be trainable
            model.set_submodule(name, _plain(module))
            continue
        weight: Any = module.weight
        weight.requires_grad_(False)
        weight.module = None  # a deepcopy of the weight would keep the original module alive
        weight.quant_state.dtype = nf4.compute_dtype  # otherwise backward first dequantizes the matrix to fp32
        # Otherwise a forward in eval mode repacks the weights on some CPUs, and gradients are not possible afterwards.
        module.support_avx512bf16_for_cpu = False
        if weight.quant_state.shape[-1] % _BLOCK:
            module.forward = MethodType(_forward_unaligned, module)
        if module.bias is not None:
            module.bias.requires_grad_(False)
            module.bias.data = module.bias.data.to(nf4.compute_dtype)  # bitsandbytes would do so in the first forward
    if not any(is_nf4(module) for module in model.modules()):
        raise RecipeError(f"the base of {type(model).__name__} has no linear module to quantize", "adapter: lora")
    # With these attributes of its quantizer, transformers would refuse to move, copy or save the model.
    for place, key in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        place.__dict__.pop(key, None)
    model.is_quantized = False
    model.is_loaded_in_4bit = True  # read by PEFT


def build_quantized(auto_class: Any, config: Any, dtype: torch.dtype, nf4: Nf4, device: torch.device) -> Any:
    """Build a model with random weights from a config, initialized and quantized block by block on the device.

    The weights depend only on torch's seed and the device, but differ from those of an unquantized model.

    Args:
        auto_class: Auto class of transformers for the kind of model.
        config: Config of transformers.
        dtype: Dtype of the weights that are not quantized.
        nf4: How to quantize.
        device: Device of the model.
    """
    require_extra("bitsandbytes", "an nf4 base")
    model = skeleton(auto_class, config, dtype)
    names = quantizable(model)
    with torch.no_grad():
        for block_name, block in blocks_of(model):
            _materialize(block, device)
            _initialize(block, _owner_of(model, block_name))
            for name in names:
                if name.startswith(f"{block_name}."):
                    model.set_submodule(name, _quantized(model.get_submodule(name), nf4))
        _materialize(model, device)
        for module in model.modules():
            if is_nf4(module):
                module._is_hf_initialized = module.weight._is_hf_initialized = True
        model.init_weights()  # initializes the remaining modules and ties weights
    finish_quantized(model, nf4, names)
    gc.collect()  # replaced modules can be in reference cycles, with their unquantized weights
    return model


def skeleton(auto_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=dtype)


def _materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Allocate every meta tensor on the device; tied tensors stay tied."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        empty = torch.empty_like(tensor, device=device)
                        is_weight = isinstance(tensor, torch.nn.Parameter)
                        made[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
                    tensors[name] = made[id(tensor)]


def _initialize(module: torch.nn.Module, owner: Any) -> None:
    """Initialize a module with `_init_weights` of the model that it belongs to, children first."""
    from transformers import PreTrainedModel

    for child in module.children():
        _initialize(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)
    module._is_hf_initialized = True  # type: ignore[assignment]


def _owner_of(model: Any, name: str) -> Any:
    """The innermost transformers model around a module, whose `_init_weights` initializes it."""
    from transformers import PreTrainedModel

    owner, module = model, model
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner


def _quantized(module: Any, nf4: Nf4) -> torch.nn.Module:
    """Quantize a linear module on its device."""
    nn = _bitsandbytes().nn
    weight = module.weight.data if isinstance(module, torch.nn.Linear) else module.weight.data.t()
    num_out, num_in = weight.shape
    settings: Mapping[str, Any] = {"compress_statistics": nf4.double_quant, "quant_type": "nf4"}
    with torch.device("meta"):
        new = nn.Linear4bit(num_in, num_out, module.bias is not None, compute_dtype=nf4.compute_dtype, **settings)
    values = weight.to(nf4.compute_dtype).contiguous()
    new.weight = nn.Params4bit(values, requires_grad=False, **settings).to(values.device)
    new.bias = module.bias
    new.train(module.training)
    return new  # type: ignore[no-any-return]


def _plain(module: Any) -> torch.nn.Module:
    """Convert a Linear4bit module whose weight was never quantized to a plain linear module."""
    num_out, num_in = module.weight.shape
    with torch.device("meta"):
        plain = torch.nn.Linear(num_in, num_out, module.bias is not None)
    plain.weight, plain.bias = torch.nn.Parameter(module.weight.data), module.bias
    return plain.train(module.training)


def _forward_unaligned(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward for a width that is not a multiple of the block size: correct on the CPU, too (see `dequantized`)."""
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
