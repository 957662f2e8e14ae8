"""Quantize a model that is larger than memory: read a weight from its files, quantize it, write it.

At any time, one weight with the temporaries of its rounding and one output file are in memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trimtab.compress.quantized_layers import QuantizedLayers
from trimtab.compress.weight_files import WeightShards, converted, model_tensors, stored_tensors
from trimtab.compress.weight_formats import WeightFormat
from trimtab.errors import ModelError
from trimtab.training.work_progress import tracked


class FileQuantization:
    """The quantization of a model in files to one format.

    Attributes:
        names: Names of the linear modules that are quantized.
        num_left: Number of linear modules of the base that do not suit the format.

    Args:
        files: Its safetensors files; their tensors have the names of the model's parameters and buffers.
        skeleton: The model on the meta device, in the dtype of the weights that are not quantized.
        format: The format.
        device: Where to quantize.

    Raises:
        ModelError: If no module suits the format.
    """

    def __init__(self, files: Sequence[Path], skeleton: Any, format: WeightFormat, device: torch.device) -> None:
        self._files, self._skeleton, self._format, self._device = files, skeleton, format, device
        layers = QuantizedLayers(skeleton)
        self.names = layers.suited(format)
        self.num_left = len(layers.names) - len(self.names)
        if not self.names:
            raise ModelError(f"no layer has a shape that {format.name} can store", "choose another format")

    def write_weights(self, shards: WeightShards) -> None:
        """Quantize and write the weights."""
        modules = {f"{name}.weight": name for name in self.names}
        total = len(list(model_tensors(self._skeleton)))
        for name, tensor in tracked(stored_tensors(self._files, self._skeleton), "quantize weights", total):
            values = converted(tensor, self._skeleton.dtype)
            if name in modules:
                parts = self._quantized(values, modules[name])
            else:
                parts = {name: values}
            shards.add(*self._format.stored(parts))
        shards.finish(sum(parameter.numel() for parameter in self._skeleton.parameters()))

    def _quantized(self, weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        module = self._module_with(weight.to(self._device))
        tensors: dict[str, torch.Tensor] = self._format.quantized(module).state_dict(prefix=f"{name}.")
        return tensors

    def describe(self) -> Any:
        """Return the config of the model, with the description that `from_pretrained` reads."""
        skeleton = self._skeleton
        for name in self.names:  # settings of a format can depend on dtype and device of a weight
            module = skeleton.get_submodule(name)
            without_memory = torch.empty((), dtype=skeleton.dtype, device=self._device).expand(module.weight.shape)
            skeleton.set_submodule(name, self._module_with(without_memory))
        config = skeleton.config
        quantizer = self._format.describe(skeleton, dict.fromkeys(self.names, self._format))
        config.quantization_config = quantizer.quantization_config
        config.dtype = str(skeleton.dtype).removeprefix("torch.")
        config.architectures = [type(skeleton).__name__]
        return config

    def _module_with(self, weight: torch.Tensor) -> torch.nn.Linear:
        """Return a linear module with a weight; its bias is written separately."""
        with torch.device("meta"):
            module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        return module.eval()
