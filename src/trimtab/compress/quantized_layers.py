"""A model whose linear modules can be switched between original and quantized forms, and its description."""

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trimtab.compress.compensated_nf4 import compensate, in_groups, recorded_inputs
from trimtab.compress.weight_formats import WeightFormat
from trimtab.errors import ModelError
from trimtab.model.quantization import quantizable
from trimtab.training.work_progress import working

_ENTRY_BYTES = 110  # dtype, shape and offsets of a tensor in the header of a file, without its name


class QuantizedLayers:
    """The linear modules of a model's base, each in its original form or in a format.

    Originals are kept, so that a choice can be undone; `finish` releases them.

    Attributes:
        names: Names of the modules that can be quantized; heads and embeddings are not among them.

    Args:
        model: A transformers model that is not quantized.

    Raises:
        ModelError: If it has no linear module to quantize.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        found = {name: model.get_submodule(name) for name in quantizable(model)}
        self._originals = {name: module for name, module in found.items() if type(module) is torch.nn.Linear}
        self._formats: dict[str, WeightFormat] = {}
        # by name and format, for formats whose rounding depends on data
        self._made: dict[tuple[str, str], torch.nn.Module] = {}
        self.names = list(self._originals)
        if not self.names:
            raise ModelError(
                f"the base of {type(model).__name__} has no torch.nn.Linear, which these formats store",
                "leave it unquantized: models without torch.nn.Linear, such as GPT-2, are not supported",
            )

    def suited(self, format: WeightFormat) -> list[str]:
        """Return the names of the modules whose shapes are supported by a format."""
        return [name for name, module in self._originals.items() if format.suits(module)]

    def apply(self, formats: Mapping[str, WeightFormat]) -> None:
        """Give each named module its format, and all others their original form."""
        for name, original in self._originals.items():
            wanted, current = formats.get(name), self._formats.get(name)
            if wanted is not current:
                self._model.set_submodule(name, original if wanted is None else self._quantized(name, wanted))
        self._formats = dict(formats)

    def calibrate(self, format: WeightFormat, run: Callable[[list[torch.Tensor]], None]) -> int:
        """Quantize all layers that suit a format of 4 bits with error compensation, a few at a time.

        Args:
            format: The format; only nf4 can be compensated.
            run: Runs the model on calibration rows; it appends the attention mask of each batch to its argument
                before the forward pass.

        Returns:
            The number of layers for which compensation beats plain rounding.
        """
        if format.name != "nf4":
            return 0
        self.apply({})
        layers, num_better = {name: self._originals[name] for name in self.suited(format)}, 0
        with working("error compensation of layers", len(layers)) as work:
            for group in in_groups(layers):
                masks: list[torch.Tensor] = []
                with recorded_inputs({name: layers[name] for name in group}, masks) as hessians:
                    run(masks)
                for name in group:
                    module = format.quantized(layers[name])
                    num_better += compensate(module, layers[name].weight.detach(), hessians.pop(name))
                    self._made[name, format.name] = module
                    work.advance()
        return num_better

    def _quantized(self, name: str, format: WeightFormat) -> torch.nn.Module:
        made = self._made.get((name, format.name))
        # a copy: the forward pass of nf4 repacks weights for the CPU that it runs on
        return format.quantized(self._originals[name]) if made is None else copy.deepcopy(made)

    def num_bytes(self, name: str, format: WeightFormat | None) -> int:
        """Return the size of a module in a file in a format; None means its original form."""
        module = self._originals[name]
        form = module if format is None else self._quantized(name, format)
        return _stored_bytes(form.state_dict(prefix=f"{name}."))

    def model_bytes(self) -> int:
        """Return the size of a file with the model in its current form; tied weights are stored once."""
        return _stored_bytes(self._model.state_dict())

    def finish(self, formats: Mapping[str, WeightFormat]) -> None:
        """Give the modules their final formats, and describe them in the model's config, ready to be saved.

        Modules are quantized again: the forward pass of some formats repacks weights for the CPU that it runs on.
        """
        self.apply({})
        self.apply(formats)
        self._originals, self._made = {}, {}
        quantizer = next(iter(formats.values())).describe(self._model, formats)
        # what `from_pretrained` sets; `save_pretrained` writes the format of this quantizer
        self._model.hf_quantizer = quantizer
        self._model.config.quantization_config = quantizer.quantization_config


def _stored_bytes(tensors: Mapping[str, Any]) -> int:
    """Return the size of tensors in a safetensors file, including their part of its header, or slightly more."""
    total, seen = 0, set[int]()
    for name, tensor in tensors.items():
        parts = _parts(tensor)
        address = parts[0].untyped_storage().data_ptr()
        if address not in seen:
            total += sum(part.nbytes + _ENTRY_BYTES + len(name) for part in parts)
        seen.add(address)
        total += _described_bytes(name, tensor)
    return total


def _described_bytes(name: str, tensor: Any) -> int:
    """Return the size of torchao's description of a tensor; bitsandbytes writes none."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return 2 * len(name) + _ENTRY_BYTES // 2
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    _, about = flatten_tensor_state_dict({name: tensor})
    return len(json.dumps(about))


def _parts(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that a torchao tensor consists of, or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
