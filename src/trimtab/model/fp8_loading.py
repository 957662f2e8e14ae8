"""A quantizer for transformers that rounds each weight of a base model to fp8 when it is read. Imported when used."""

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from trimtab.model.fp8 import quantized_rows
from trimtab.model.quantization import quantizable

_METHOD = "trimtab_fp8"


class Fp8Config(QuantizationConfigMixin):
    """The argument of `from_pretrained` that selects `Fp8Quantizer`."""

    def __init__(self) -> None:
        super().__init__(quant_method=_METHOD)  # type: ignore[arg-type]


@register_quantizer(_METHOD)
class Fp8Quantizer(HfQuantizer):
    """Stores codes as the weights of unchanged modules; `Fp8.finish` replaces the modules afterwards.

    Attributes:
        scales: The module and the scales of its rows, by module name.
    """

    requires_calibration = False
    is_trainable = True

    def __init__(self, quantization_config: Fp8Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.scales: dict[str, tuple[torch.nn.Module, torch.Tensor]] = {}
        self._chosen: frozenset[str] = frozenset()

    def is_serializable(self) -> bool:
        """Return False: only adapters are saved."""
        return False

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is the weight of a linear module of the base."""
        return param_name in self._chosen

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes per weight, for the memory that transformers reserves before it loads."""
        return 1.0 if param_name in self._chosen else param.element_size()

    def get_quantize_ops(self) -> "Fp8Quantize":
        """The operation that rounds a weight."""
        return Fp8Quantize(self.scales)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._chosen = frozenset(f"{name}.weight" for name in quantizable(model))


class Fp8Quantize(ConversionOps):
    """Rounds a weight to fp8.

    Args:
        scales: Where to store the scales.
    """

    def __init__(self, scales: dict[str, tuple[torch.nn.Module, torch.Tensor]]) -> None:
        self._scales = scales

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **context: Any) -> dict[str, Any]:
        """Return the codes of each weight as (out, in)."""
        converted, model = {}, context["model"]
        for key, found in input_dict.items():
            weight = found[0] if isinstance(found, list) else found
            name = key.removesuffix(".weight")
            module = model.get_submodule(name)
            codes, scales = quantized_rows(weight if isinstance(module, torch.nn.Linear) else weight.t())
            self._scales[name] = module, scales
            converted[key] = codes.view(torch.uint8)
        return converted
