"""Linear modules in 4 bits (nf4, of bitsandbytes): from files, from a config, or out of a model that is there.

Only the base is quantized, never the output head nor a task head. The whole model is never held unquantized: files are
read tensor by tensor, a model from a config is made block by block.
"""

import copy
import gc
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trimtab.errors import RecipeError
from trimtab.hardware.extras import require_extra
from trimtab.model.blocks import blocks_of

_BLOCK = 64  # weights that share one scale
_NESTED_BLOCK = 256  # scales that share one scale, with double quantization
_CODE_BYTES = 16 * 4  # the values of the 16 codes, in fp32, kept with each weight
_NESTED_CODE_BYTES = 256 * 4
_MOST_NAMED = 3  # modules that a warning names
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Nf4:
    """How a base is quantized.

    Attributes:
        compute_dtype: The format in which products with its weights are computed.
        double_quant: Whether the scales of the blocks are quantized too, to 8 bits.
    """

    compute_dtype: torch.dtype = torch.bfloat16
    double_quant: bool = True


@dataclass(frozen=True)
class LoadedForm:
    """In what form the weights of a model are loaded, and where to.

    Attributes:
        dtype: The format of what is not quantized.
        nf4: How the base is quantized; None is not at all.
        device: Where to.
    """

    dtype: torch.dtype
    nf4: Nf4 | None
    device: torch.device

    def describe(self, model: torch.nn.Module) -> str:
        """How many weights a loaded model has, and in which form, such as "7.2 M parameters in bf16"."""
        total = sum(map(num_weights, model.parameters()))
        count, plain = _count_words(total), _DTYPE_NAMES.get(self.dtype, str(self.dtype))
        if self.nf4 is None:
            return f"{count} parameters in {plain}"
        return f"{count} parameters, {num_quantized(model) / total:.1%} of them in nf4, the others in {plain}"


def device_for(device: torch.device | str | None, nf4: Nf4 | None) -> torch.device:
    """Where a model is loaded to: the CPU, unless a device is named or the GPU has to quantize."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if nf4 is not None and torch.cuda.is_available() else "cpu")


@cache
def _bitsandbytes() -> Any:
    """The package, without its types: it is an extra."""
    require_extra("bitsandbytes", "an nf4 base")
    return import_module("bitsandbytes")


def stored_bytes(shape: tuple[int, ...], double_quant: bool = True) -> int:
    """The exact size of one quantized weight: codes, scales and their tables.

    Args:
        shape: Of the weight, as it was before.
        double_quant: Whether the scales are quantized too.
    """
    num_weights = math.prod(shape)
    num_scales = math.ceil(num_weights / _BLOCK)
    codes = math.ceil(num_weights / 2)
    if not double_quant:
        return codes + 4 * num_scales + _CODE_BYTES
    nested = 4 * math.ceil(num_scales / _NESTED_BLOCK) + _NESTED_CODE_BYTES + 4  # the last are the mean of the scales
    return codes + num_scales + nested + _CODE_BYTES


def num_weights(parameter: torch.Tensor) -> int:
    """How many numbers a parameter stands for: two in each byte of a quantized one."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def num_quantized(model: torch.nn.Module) -> int:
    """How many of a model's weights are in 4 bits."""
    return sum(map(num_weights, filter(_is_quantized, model.parameters())))


def _is_quantized(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "quant_state", None) is not None


def warning_of_little_quantized(model: torch.nn.Module) -> str | None:
    """What to tell a user where 4 bits hold the smaller part of the weights; None where they hold the larger one."""
    total, quantized = sum(map(num_weights, model.parameters())), num_quantized(model)
    if 2 * quantized >= total:
        return None
    plain: Counter[str] = Counter()
    owners = {id(p): (name, module) for name, module in model.named_modules() for p in module._parameters.values()}
    for parameter in model.parameters():
        if not _is_quantized(parameter):
            name, module = owners[id(parameter)]
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            plain[f"{pattern} ({type(module).__name__})"] += parameter.numel()
    largest = ", ".join(f"{name} with {count / total:.0%}" for name, count in plain.most_common(_MOST_NAMED))
    counts = f"{_count_words(quantized)} of {_count_words(total)} weights ({quantized / total:.0%})"
    return (
        f"adapter: qlora: only {counts} are in 4 bits; the largest that are not: {largest}. Linear modules of the base "
        "can be quantized, embeddings and experts that share one tensor cannot: adapter: lora needs little more memory"
    )


def _count_words(count: int) -> str:
    return f"{count:,}" if count < 1e6 else f"{count / 1e6:,.1f} M"


def is_nf4(module: torch.nn.Module) -> bool:
    """Whether the weight of a module is quantized."""
    return getattr(getattr(module, "weight", None), "quant_state", None) is not None


def dequantized(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """A quantized weight as the plain matrix that it stands for, (out, in)."""
    if weight.quant_state.shape[-1] % _BLOCK == 0:
        plain: torch.Tensor = _bitsandbytes().functional.dequantize_4bit(weight.data, weight.quant_state)
        return plain.to(dtype)
    state = copy.copy(weight.quant_state)
    shape, state.shape = state.shape, torch.Size((1, math.prod(state.shape)))
    # As one long row: on the CPU bitsandbytes takes wrong scales where rows are no multiple of a block.
    row: torch.Tensor = _bitsandbytes().functional.dequantize_4bit(weight.data, state)
    return row.view(shape).to(dtype)


def rounded(weight: torch.Tensor, nf4: Nf4) -> torch.Tensor:
    """What 4 bits make of a plain matrix: the values that they stand for, in the format of the computation."""
    values = weight.detach().to(nf4.compute_dtype, copy=True).contiguous()
    settings: Mapping[str, Any] = {"compress_statistics": nf4.double_quant, "quant_type": "nf4"}
    packed = _bitsandbytes().nn.Params4bit(values, requires_grad=False, **settings).to(values.device)
    return dequantized(packed, nf4.compute_dtype)


def quantizable(model: Any) -> list[str]:
    """Names of the linear modules of the base; not the output head, not a task head, not what has to stay in fp32."""
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    fragile = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    fragile += tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    base = {id(module) for part in base_parts(model) for module in part.modules()}
    return [
        name
        for name, module in model.named_modules()
        # Subclasses have a forward of their own.
        if type(module) in (torch.nn.Linear, Conv1D)
        and id(module) in base
        and module is not output
        and not set(fragile) & set(name.split("."))
    ]


def base_parts(model: Any) -> list[torch.nn.Module]:
    """The parts of a model that are no head."""
    from transformers import PreTrainedModel

    if getattr(model, "base_model", model) is not model:
        return [model.base_model]
    parts = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return [base for part in parts for base in base_parts(part)] or [model]


def loading_arguments(auto_class: Any, config: Any, nf4: Nf4, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` needs to quantize each weight as it is read."""
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


def settle(model: Any, nf4: Nf4, expected: list[str] | None = None) -> None:
    """Bring a model whose modules were quantized, by us or by transformers, into the form that trains well.

    Args:
        model: The model.
        nf4: How it was quantized.
        expected: Names of the modules that should be quantized; those that are not yet are quantized now.
    """
    linear_4bit = _bitsandbytes().nn.Linear4bit
    for name in expected or []:
        if not is_nf4(model.get_submodule(name)):
            model.set_submodule(name, _quantized(model.get_submodule(name), nf4))
    for name, module in list(model.named_modules()):
        if not isinstance(module, linear_4bit):
            continue
        if not is_nf4(module):  # not in the files, so it is random and has to train
            model.set_submodule(name, _plain(module))
            continue
        weight: Any = module.weight
        weight.requires_grad_(False)
        weight.module = None  # a copy of the weight would keep the module that it was copied from alive
        weight.quant_state.dtype = nf4.compute_dtype  # else backward makes the whole matrix in fp32 first
        # On some CPUs an evaluation would repack the weights into a form that gives no gradients afterwards.
        module.support_avx512bf16_for_cpu = False
        if weight.quant_state.shape[-1] % _BLOCK:
            module.forward = MethodType(_forward_of_odd_width, module)
        if module.bias is not None:
            module.bias.requires_grad_(False)
            module.bias.data = module.bias.data.to(nf4.compute_dtype)  # bitsandbytes does so in the first forward
    if not any(is_nf4(module) for module in model.modules()):
        raise RecipeError(f"the base of {type(model).__name__} has no linear module to quantize", "adapter: lora")
    # What is left of transformers' quantizer would refuse that the model is moved, copied or saved.
    for place, key in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        place.__dict__.pop(key, None)
    model.is_quantized = False
    model.is_loaded_in_4bit = True  # PEFT asks


def build_quantized(auto_class: Any, config: Any, dtype: torch.dtype, nf4: Nf4, device: torch.device) -> Any:
    """A model with random weights from a config: made and quantized block by block on the device.

    The weights are a function of torch's seed and of the device, but not those of a model that is built plainly.

    Args:
        auto_class: transformers' class for models of the kind.
        config: transformers' config.
        dtype: Of the weights that are not quantized.
        nf4: How to quantize.
        device: Where to.
    """
    require_extra("bitsandbytes", "an nf4 base")
    model = skeleton(auto_class, config, dtype)
    names = quantizable(model)
    with torch.no_grad():
        for block_name, block in blocks_of(model):
            _materialize(block, device)
            _initialise(block, _owner_of(model, block_name))
            for name in names:
                if name.startswith(f"{block_name}."):
                    model.set_submodule(name, _quantized(model.get_submodule(name), nf4))
        _materialize(model, device)
        for module in model.modules():
            if is_nf4(module):
                module._is_hf_initialized = module.weight._is_hf_initialized = True
        model.init_weights()  # what has not been initialised yet, and the ties
    settle(model, nf4, names)
    gc.collect()  # what was replaced may hang in a cycle, a matrix of half precision with it
    return model


def skeleton(auto_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model without data."""
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=dtype)


def _materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Give every tensor that has no data yet memory on the device; tied ones stay one."""
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


def _initialise(module: torch.nn.Module, owner: Any) -> None:
    """Initialise a part of a model as its owner would, children first."""
    from transformers import PreTrainedModel

    for child in module.children():
        _initialise(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)
    module._is_hf_initialized = True  # type: ignore[assignment]


def _owner_of(model: Any, name: str) -> Any:
    """The innermost transformers model around a module: it knows how the module is initialised."""
    from transformers import PreTrainedModel

    owner = model
    for outer in _outer_names(name):
        found = model.get_submodule(outer)
        if isinstance(found, PreTrainedModel):
            owner = found
    return owner


def _outer_names(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _quantized(module: Any, nf4: Nf4) -> torch.nn.Module:
    """The quantized form of a linear module, on the same device."""
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
    """The linear module that a module for 4 bits is when nothing was quantized."""
    num_out, num_in = module.weight.shape
    with torch.device("meta"):
        plain = torch.nn.Linear(num_in, num_out, module.bias is not None)
    plain.weight, plain.bias = torch.nn.Parameter(module.weight.data), module.bias
    return plain.train(module.training)


def _forward_of_odd_width(module: Any, x: torch.Tensor) -> torch.Tensor:
    """On the CPU, the right product (see `dequantized`); elsewhere that of bitsandbytes."""
    if x.device.type != "cpu":
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    apply: Any = _Product.apply
    product: torch.Tensor = apply(x.to(module.compute_dtype), module.weight, module.bias)
    return product.to(x.dtype)


class _Product(torch.autograd.Function):
    """x W^T + bias; the weight is made anew in backward instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return torch.nn.functional.linear(x, dequantized(weight, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad @ dequantized(ctx.weight, grad.dtype), None, None
