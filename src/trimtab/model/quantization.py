"""Base models with quantized weights: which modules are quantized, and how such a model is loaded or built.

Subclasses of `Quantization` define how weights are stored: `nf4.Nf4` and `fp8.Fp8`. Only the base model is quantized,
neither the output layer nor a task head. The whole model is never held unquantized: files are read tensor by tensor, a
model from a config is initialized block by block. Quantized parameters are integers, so nothing that trains or converts
floating-point parameters changes them.
"""

import gc
import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.extras import require_extra
from trimtab.log import say
from trimtab.model.block_init import initialize, materialize, owner_of, skeleton
from trimtab.model.blocks import blocks_of
from trimtab.model.direct_reads import directly_read
from trimtab.units import format_bytes

_MAX_NAMED = 3  # number of modules that a warning names
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SCALE_BITS = torch.int32  # dtype of parameters that store the bits of fp32 scales


@dataclass(frozen=True)
class Quantization(ABC):
    """How a base model is quantized.

    Attributes:
        compute_dtype: Dtype of products with its weights.
        name: Its name in messages, and its key in the facts of an exported adapter.
        bits: Bits of a weight, as text.
        package: The optional package that it needs; None if it needs none.
    """

    compute_dtype: torch.dtype = torch.bfloat16

    name: ClassVar[str]
    bits: ClassVar[str]
    package: ClassVar[str | None] = None

    def check(self) -> None:
        """Check that its package is installed.

        Raises:
            MissingDependency: The package is missing; the message has the command that installs it.
        """
        if self.package is not None:
            require_extra(self.package, f"an {self.name} base")

    @abstractmethod
    def loading_arguments(self, auto_class: Any, config: Any, device: torch.device) -> dict[str, Any]:
        """Keyword arguments for `from_pretrained` to quantize each weight when it is read."""

    @abstractmethod
    def quantize(self, module: Any) -> torch.nn.Module:
        """Quantize a linear module on its device."""

    @abstractmethod
    def finish(self, model: Any) -> None:
        """Prepare quantized modules, and turn those that are not in the files into plain modules."""

    @abstractmethod
    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize a matrix (out, in) and dequantize it to the compute dtype."""


@dataclass(frozen=True)
class LoadOptions:
    """Dtype, quantization and device of a model to load.

    Attributes:
        dtype: Dtype of the weights that are not quantized.
        quantization: How the base model is quantized; None if it is not.
        device: Device of the model.
        draws_on: Device that draws random weights; None for `device`.
        as_stored: Whether weights keep the form in which a folder stores them, instead of `dtype`.
    """

    dtype: torch.dtype
    quantization: Quantization | None
    device: torch.device
    draws_on: torch.device | None = None
    as_stored: bool = False

    def describe(self, model: Any) -> str:
        """Describe a loaded model, such as "7.2 M parameters in bf16"."""
        total = sum(map(num_weights, model.parameters()))
        dtype = model.dtype if self.as_stored else self.dtype
        count, plain = _count_words(total), _DTYPE_NAMES.get(dtype, str(dtype))
        if getattr(model, "hf_quantizer", None) is not None:
            return f"{count} parameters, quantized, the rest in {plain}"
        if self.quantization is None:
            return f"{count} parameters in {plain}"
        share, name = _num_quantized(model) / total, self.quantization.name
        return f"{count} parameters, {share:.1%} in {name} and the rest in {plain}"


def device_for(device: torch.device | str | None, quantization: Quantization | None) -> torch.device:
    """The device to load a model to: the given one, else the GPU if it has to quantize, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if quantization is not None and torch.cuda.is_available() else "cpu")


def num_weights(parameter: torch.Tensor) -> int:
    """Number of weights that a parameter stores: two in each byte of nf4, none in scales."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return math.prod(state.shape)
    return 0 if parameter.dtype is SCALE_BITS else parameter.numel()


def _num_quantized(model: torch.nn.Module) -> int:
    return sum(num_weights(parameter) for parameter in model.parameters() if not parameter.is_floating_point())


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether the weight of a module is quantized."""
    weight = module._parameters.get("weight")
    return weight is not None and not weight.is_floating_point()


def warn_if_little_quantized(model: torch.nn.Module, quantization: Quantization) -> None:
    """Log a warning if less than half of the weights of a model are quantized."""
    total, quantized = sum(map(num_weights, model.parameters())), _num_quantized(model)
    if 2 * quantized >= total:
        return
    plain: Counter[str] = Counter()
    plain_bytes: Counter[str] = Counter()
    owners = {id(p): (name, module) for name, module in model.named_modules() for p in module._parameters.values()}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            name, module = owners[id(parameter)]
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            kind = f"{pattern} ({type(module).__name__})"
            plain[kind] += parameter.numel()
            plain_bytes[kind] += parameter.nbytes
    shares = {name: f"{count / total:.0%}" for name, count in plain.most_common(_MAX_NAMED)}
    largest = ", ".join(f"{name} with {share}, {format_bytes(plain_bytes[name])}" for name, share in shares.items())
    counts = f"{_count_words(quantized)} of {_count_words(total)} weights ({quantized / total:.0%})"
    say(
        f"{quantization.name} base: only {counts} are in {quantization.bits}; the largest others: {largest}. Only "
        "linear modules of the base can be quantized, not embeddings or fused experts; adapter: lora would need little "
        "more memory"
    )


def _count_words(count: int) -> str:
    return f"{count:,}" if count < 1e6 else f"{count / 1e6:,.1f} M"


def quantizable(model: Any) -> list[str]:
    """Names of the linear modules of the base model, without heads and modules that must stay in fp32.

    Modules whose weight other code reads directly are not quantized either: the code would read packed integers.
    """
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    fragile = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    fragile += tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    base = {id(module) for part in base_parts(model) for module in part.modules()}
    read = directly_read(model)
    return [
        name
        for name, module in model.named_modules()
        # Subclasses may have a different forward.
        if type(module) in (torch.nn.Linear, Conv1D)
        and id(module) in base
        and module is not output
        and name not in read
        and not set(fragile) & set(name.split("."))
    ]


def base_parts(model: Any) -> list[torch.nn.Module]:
    """The parts of a model that are not a head."""
    from transformers import PreTrainedModel

    if getattr(model, "base_model", model) is not model:
        return [model.base_model]
    parts = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return [base for part in parts for base in base_parts(part)] or [model]


def finish_quantized(model: Any, quantization: Quantization, expected: list[str]) -> None:
    """Prepare a model whose modules were quantized, by us or by transformers, for training.

    Args:
        model: The model.
        quantization: How it was quantized.
        expected: Names of the modules that should be quantized; those that are not yet are quantized now.
    """
    for name in expected:
        if not is_quantized(model.get_submodule(name)):
            model.set_submodule(name, quantization.quantize(model.get_submodule(name)))
    quantization.finish(model)
    quantized = [module for module in model.modules() if is_quantized(module)]
    if not quantized:
        raise RecipeError(f"the base of {type(model).__name__} has no linear module to quantize", "adapter: lora")
    for module in quantized:
        module.requires_grad_(False)
        bias: Any = module.bias
        if bias is not None:
            bias.data = bias.data.to(quantization.compute_dtype)  # bitsandbytes would do so in the first forward
    # With these attributes of its quantizer, transformers would refuse to move, copy or save the model.
    for place, key in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        place.__dict__.pop(key, None)
    model.is_quantized = False


def build_quantized(
    auto_class: Any, config: Any, dtype: torch.dtype, quantization: Quantization, device: torch.device
) -> Any:
    """Build a model with random weights from a config, initialized and quantized block by block on the device.

    The weights depend only on torch's seed and the device, but differ from those of an unquantized model.

    Args:
        auto_class: Auto class of transformers for the kind of model.
        config: Config of transformers.
        dtype: Dtype of the weights that are not quantized.
        quantization: How to quantize.
        device: Device of the model.
    """
    quantization.check()
    model = skeleton(auto_class, config, dtype)
    names = quantizable(model)
    with torch.no_grad():
        for block_name, block in blocks_of(model):
            materialize(block, device)
            initialize(block, owner_of(model, block_name))
            for name in names:
                if name.startswith(f"{block_name}."):
                    model.set_submodule(name, quantization.quantize(model.get_submodule(name)))
        materialize(model, device)
        for module in model.modules():
            if is_quantized(module):
                for marked in (module, *module.parameters(recurse=False)):
                    marked._is_hf_initialized = True
        model.init_weights()  # initializes the remaining modules and ties weights
    finish_quantized(model, quantization, names)
    gc.collect()  # replaced modules can be in reference cycles, with their unquantized weights
    return model
