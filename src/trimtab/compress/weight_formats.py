"""Formats of quantized weights that transformers can load: those of torchao and those of bitsandbytes.

A format turns one linear module into a quantized one, and describes a quantized model in its config.json, so that
`from_pretrained` loads it. Only weights of linear modules are quantized; embeddings, norms and heads are not.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from trimtab.errors import MissingDependency, ModelError
from trimtab.hardware.extras import has_package, require_extra
from trimtab.log import quiet_package, say

_FP8_CAPABILITY = (8, 9)  # compute capability of CUDA devices with fp8 products
_INT4_CAPABILITY = (8, 0)
_SMALLEST_INPUT = 1e-12  # lower bound for the largest input of a row, by which torchao divides
_NF4_BLOCK = 64  # weights that share a scale
_OUTLIER = 6.0  # bnb-int8 multiplies columns with larger inputs in half precision; transformers' default
_MAX_PADDING = 1.5  # times the size of a weight
_INT4_GROUPS = (128, 64, 32)  # numbers of weights that can share a scale


@dataclass(frozen=True)
class WeightFormat(ABC):
    """A format of quantized weights.

    Attributes:
        name: Its name on the command line and in trimtab.json.
        package: The package with its kernels.
        summary: A description of what it stores and how it multiplies.
        capability: The lowest compute capability of a CUDA device that supports it; None if every device does.
        needs_bf16: Whether the other weights of the model have to be bf16.
    """

    name: str
    package: str
    summary: str
    capability: tuple[int, int] | None = None
    needs_bf16: bool = False

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Check that this machine can quantize to this format and use it.

        Raises:
            MissingDependency: If its package is not installed.
            ModelError: If the device has no kernels for it, or the dtype of the model does not suit it.
        """
        require_extra(self.package, f"the format {self.name}")
        self.check_device(device)
        if self.needs_bf16 and dtype is not torch.bfloat16:
            raise ModelError(
                f"{self.name} multiplies in bf16, but the other weights would be {str(dtype).removeprefix('torch.')}",
                "--dtype bf16",
            )

    def check_device(self, device: torch.device) -> None:
        """Check that a device has kernels for this format."""
        if self.capability is None:
            return
        found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if found is None or found < self.capability:
            wanted = ".".join(map(str, self.capability))
            instead = "nf4" if self.name == "int4" else "fp8"
            raise ModelError(
                f"{self.name} needs a CUDA device of compute capability {wanted} or higher, not {device}",
                f"use --device cuda on a machine with one, or the format {instead}, which works on every device",
            )

    @abstractmethod
    def suits(self, module: torch.nn.Linear) -> bool:
        """Whether a module of this shape can be quantized to this format."""

    @abstractmethod
    def quantized(self, module: torch.nn.Linear) -> torch.nn.Module:
        """Return a quantized copy of a module, on its device; the module itself is not changed."""

    @abstractmethod
    def stored(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return tensors of a state_dict as stored in a safetensors file, and their description in its header."""

    @abstractmethod
    def describe(self, model: Any, formats: Mapping[str, "WeightFormat"]) -> Any:
        """Return transformers' quantizer of a model whose modules `formats` names have been quantized."""


@dataclass(frozen=True)
class TorchaoFormat(WeightFormat):
    """A format of torchao.

    Attributes:
        settings: Returns torchao's config for a module.
        multiple: Numbers that the sizes of a weight, (out, in), have to be multiples of.
        padded_to: Rows are padded to a multiple of this number.
    """

    settings: Callable[[Any, torch.nn.Linear], Any] = lambda ao, module: None
    multiple: tuple[int, int] = (1, 1)
    padded_to: int = 1

    def suits(self, module: torch.nn.Linear) -> bool:
        """Whether both sizes of the weight are multiples of the kernels' block sizes, and padding wastes little."""
        padded = -(-module.in_features // self.padded_to) * self.padded_to
        fits = not any(size % of for size, of in zip(module.weight.shape, self.multiple, strict=True))
        return fits and padded <= _MAX_PADDING * module.in_features

    def quantized(self, module: torch.nn.Linear) -> torch.nn.Module:
        """Return a linear module whose weight is a tensor of torchao."""
        copy: torch.nn.Linear = _empty_like(module, torch.nn.Linear)
        copy.weight, copy.bias = module.weight, module.bias
        with quiet_package("torchao"):  # it warns of kernels for other machines
            ao = _torchao()
            ao.quantize_(copy, self.settings(ao, module), filter_fn=lambda *_: True)
        return copy.requires_grad_(False)

    def stored(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the parts of torchao's tensors; the header describes every tensor."""
        support: Any = import_module("torchao.prototype.safetensors.safetensors_support")
        parts, metadata = support.flatten_tensor_state_dict(dict(tensors))
        return parts, {name: about for name, about in metadata.items() if name in tensors}

    def describe(self, model: Any, formats: Mapping[str, WeightFormat]) -> Any:
        """Return a quantizer with the config of each module, by name."""
        import transformers
        from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

        ao = _torchao()
        settings = {
            name: one.settings(ao, model.get_submodule(name))
            for name, one in formats.items()
            if isinstance(one, TorchaoFormat)
        }
        config_class: Any = transformers.TorchAoConfig
        quantizer: Any = TorchAoHfQuantizer
        return quantizer(config_class(ao.FqnToConfig(settings)), pre_quantized=False)


@dataclass(frozen=True)
class BitsAndBytesFormat(WeightFormat):
    """A bitsandbytes format; a model has one such format, and modules that are not quantized."""

    bits: int = 4

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Also check for accelerate, without which transformers does not load these formats."""
        super().check(device, dtype)
        _require_accelerate(self.name)

    def suits(self, module: torch.nn.Linear) -> bool:
        """Whether rows consist of whole blocks: on a CPU, bitsandbytes reads wrong scales for other rows."""
        return self.bits == 8 or module.in_features % _NF4_BLOCK == 0

    def quantized(self, module: torch.nn.Linear) -> torch.nn.Module:
        """Return a module of bitsandbytes."""
        nn: Any = import_module("bitsandbytes").nn
        weight = module.weight.data
        if self.bits == 4:
            settings = {"compress_statistics": True, "quant_type": "nf4"}
            copy: Any = _empty_like(module, nn.Linear4bit, compute_dtype=weight.dtype, **settings)
            # bitsandbytes quantizes when a weight is moved to its device
            copy.weight = nn.Params4bit(weight, requires_grad=False, **settings).to(weight.device)
        else:
            copy = _empty_like(module, nn.Linear8bitLt, has_fp16_weights=False, threshold=_OUTLIER)
            # bitsandbytes quantizes only what is moved from a CPU
            copy.weight = nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False).to(weight.device)
        copy.bias = module.bias
        return copy.requires_grad_(False)  # type: ignore[no-any-return]

    def stored(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors: bitsandbytes has names for all parts, and needs no header."""
        return dict(tensors), {}

    def describe(self, model: Any, formats: Mapping[str, WeightFormat]) -> Any:
        """Return a quantizer that names the linear modules which are not quantized."""
        import transformers
        from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
        from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

        plain = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear and name not in formats]
        config_class: Any = transformers.BitsAndBytesConfig
        config = config_class(
            load_in_4bit=self.bits == 4,
            load_in_8bit=self.bits == 8,
            llm_int8_threshold=_OUTLIER,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=model.dtype,
            llm_int8_skip_modules=plain,
        )
        quantizer: Any = Bnb4BitHfQuantizer if self.bits == 4 else Bnb8BitHfQuantizer
        return quantizer(config, pre_quantized=False)


def _int8_dynamic(ao: Any, module: torch.nn.Linear) -> Any:
    # CPUs without VNNI add pairs of products in 16 bits, which overflow in the full range
    reduce = import_module("torchao.utils").should_reduce_range(module.weight.device)
    return ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, reduce_range=reduce)


def _int4(ao: Any, module: torch.nn.Linear) -> Any:
    group = next(size for size in _INT4_GROUPS if module.in_features % size == 0)
    packing = import_module("torchao.quantization.quantize_.workflows").Int4PackingFormat.TILE_PACKED_TO_4D
    return ao.Int4WeightOnlyConfig(group_size=group, int4_packing_format=packing, set_inductor_config=False)


def _fp8_dynamic(ao: Any, module: torch.nn.Linear) -> Any:
    per_row = module.weight.dtype is torch.bfloat16  # torchao has scales of rows for bf16 only
    granularity = ao.PerRow() if per_row else ao.PerTensor()
    return ao.Float8DynamicActivationFloat8WeightConfig(
        granularity=granularity,
        activation_value_lb=_SMALLEST_INPUT,
        set_inductor_config=False,
    )


_IN_AO = "torchao"
FORMATS: dict[str, WeightFormat] = {
    one.name: one
    for one in (
        TorchaoFormat(
            "int8-dynamic", _IN_AO, "8 bits; inputs are rounded to 8 bits too, products are int8", None, False,
            _int8_dynamic,
        ),
        TorchaoFormat(
            "int8", _IN_AO, "8 bits, a scale for each row; products in the dtype of the model", None, False,
            lambda ao, _: ao.Int8WeightOnlyConfig(set_inductor_config=False),
        ),
        TorchaoFormat(
            "int4", _IN_AO, "4 bits, a scale for up to 128 weights; products in bf16 on CUDA", _INT4_CAPABILITY, True,
            _int4, (8, _INT4_GROUPS[-1]), 1024,
        ),
        TorchaoFormat(
            "fp8", _IN_AO, "fp8 (e4m3), a scale for each row; products in the dtype of the model", None, False,
            lambda ao, _: ao.Float8WeightOnlyConfig(set_inductor_config=False),
        ),
        TorchaoFormat(
            "fp8-dynamic", _IN_AO, "fp8 (e4m3); inputs are rounded to fp8 too, products are fp8 on CUDA",
            _FP8_CAPABILITY, False, _fp8_dynamic, (16, 16),
        ),
        BitsAndBytesFormat("nf4", "bitsandbytes", "4 bits at quantiles of a normal distribution, scales in 8 bits"),
        BitsAndBytesFormat("bnb-int8", "bitsandbytes", "8 bits, a scale for each row; products in int8", bits=8),
    )
}  # fmt: skip


_METHODS = {"torchao": "torchao", "bitsandbytes": "bitsandbytes"}  # names of transformers, and packages
_TYPES = {"Int4WeightOnlyConfig": "int4", "Float8DynamicActivationFloat8WeightConfig": "fp8-dynamic"}


def check_stored_formats(source: str, settings: Any, device: torch.device) -> None:
    """Check that a quantized model can be used on a device, from `quantization_config` in its config.json.

    Raises:
        MissingDependency: If a package is not installed.
        ModelError: If the settings are not those of a known format, or the device has no kernels for it.
    """
    again = "quantize the original model: trimtab quantize"
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method not in _METHODS:
        known = ", ".join(_METHODS)
        raise ModelError(f"{source}: quantization_config has the quant_method {method!r}; supported: {known}", again)
    require_extra(_METHODS[method], source)
    if method == "bitsandbytes":
        _require_accelerate(source)
        return
    kinds = set(_types_in(settings.get("quant_type")))
    if not kinds:
        raise ModelError(f"{source}: quantization_config contains no torchao format", again)
    for name in sorted(_TYPES[kind] for kind in kinds & set(_TYPES)):
        FORMATS[name].check_device(device)
    if "Int8DynamicActivationInt8WeightConfig" in kinds and _overflows(settings, device):
        say(
            f"{source} was quantized on a machine whose CPU adds int8 products in 32 bits; sums may overflow on this "
            "one. Quantize the original here, or use the format int8"
        )


def _overflows(settings: Any, device: torch.device) -> bool:
    """Whether int8 products of the full range are computed on a CPU that adds pairs of them in 16 bits."""
    has_full_range = '"reduce_range": false' in json.dumps(settings, default=str)
    return has_full_range and import_module("torchao.utils").should_reduce_range(device)


def _types_in(settings: Any) -> Iterator[str]:
    """Yield the names of torchao's configs in its settings."""
    if isinstance(settings, Mapping):
        if isinstance(settings.get("_type"), str):
            yield settings["_type"]
        for inner in settings.values():
            yield from _types_in(inner)


def _require_accelerate(asked: str) -> None:
    if not has_package("accelerate"):
        raise MissingDependency(f"{asked}: transformers needs accelerate to load it", "pip install accelerate")


def _empty_like(module: torch.nn.Linear, kind: Any, **settings: Any) -> Any:
    """Return a linear module of a given class without memory, of the same size and mode."""
    with torch.device("meta"):
        copy = kind(module.in_features, module.out_features, module.bias is not None, **settings)
    return copy.train(module.training)


def _torchao() -> Any:
    return import_module("torchao.quantization")
