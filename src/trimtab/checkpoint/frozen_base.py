"""Fingerprints of frozen parameters, which a checkpoint stores instead of their values to recognize the same base."""

import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.checkpoint.tensor_checksum import checksums_of, is_checksum
from trimtab.checkpoint.tensor_file import as_bytes

_NUM_SAMPLES = 16
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fingerprint:
    """The dtype, shape and checksum of a tensor.

    Attributes:
        dtype: Its dtype, such as "bfloat16".
        shape: Its shape.
        checksum: Over all values; empty for a tensor whose memory cannot be read.
        quantized_by: For quantized weights, the device and packages that quantized them, on which their last bits may
            depend; else empty. Checksums are compared only if this is equal.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str
    quantized_by: str = ""

    def as_list(self) -> list[Any]:
        """Return it in the form in which it is saved."""
        saved = [self.dtype, list(self.shape), self.checksum]
        return [*saved, self.quantized_by] if self.quantized_by else saved

    def matches(self, other: "Fingerprint") -> bool:
        """Whether two tensors are equal, as far as they can be compared."""
        has_same_form = (self.dtype, self.shape) == (other.dtype, other.shape)
        can_compare = self.checksum and other.checksum and self.quantized_by == other.quantized_by
        return has_same_form and (not can_compare or self.checksum == other.checksum)


def fingerprints_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Fingerprint]:
    """Compute the fingerprint of each tensor; reads all of their memory once, on their devices."""
    distinct = {id(tensor): tensor for tensor in tensors.values()}  # a tied weight has two names and is read once
    values = {key: _stored_values(tensor) for key, tensor in distinct.items()}
    checksums = iter(checksums_of([value for several in values.values() for value in several]))
    found = {
        key: Fingerprint(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            "+".join(next(checksums) for _ in values[key]),
            "" if tensor.dtype in _FLOATS or not values[key] else _quantizer_of(tensor),
        )
        for key, tensor in distinct.items()
    }
    return {name: found[id(tensor)] for name, tensor in tensors.items()}


def find_changed(saved: Mapping[str, list[Any]], tensors: Mapping[str, torch.Tensor]) -> dict[str, Fingerprint]:
    """Return the current fingerprints of the tensors that differ from what was saved.

    Args:
        saved: The result of `Fingerprint.as_list` for each tensor.
        tensors: The tensors of the same names.
    """
    changed = {}
    for name, now in fingerprints_of(tensors).items():
        before = Fingerprint(saved[name][0], tuple(saved[name][1]), *saved[name][2:])
        if before.checksum and not is_checksum(before.checksum):  # written by a version that used samples
            now = Fingerprint(now.dtype, now.shape, _checksum_of_samples(tensors[name]))
        if not now.matches(before):
            changed[name] = now
    return changed


def frozen_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that do not require gradients, under each of their names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


class FrozenBase:
    """The fingerprints of the parameters that were frozen when a model was prepared.

    A parameter that was trained and then frozen, or that is changed by other means (such as an average of other
    weights), does not require gradients either, but a checkpoint without it would lose its value.

    Args:
        model: The model before its first step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._fingerprints = fingerprints_of(frozen_parameters(model))

    def changed(self, current: Mapping[str, Fingerprint]) -> set[str]:
        """Return the names of the parameters that have changed since the model was prepared."""
        return {
            name
            for name, now in current.items()
            if (before := self._fingerprints.get(name)) is None or not now.matches(before)
        }


def unsaved_parameters(
    model: torch.nn.Module, also: Iterable[torch.nn.Parameter], base: FrozenBase | None
) -> dict[str, Fingerprint]:
    """Return the fingerprints of the parameters whose values a checkpoint does not contain.

    Args:
        model: The model.
        also: Frozen parameters that are saved anyway.
        base: The parameters that were frozen when the model was prepared; None treats all frozen parameters as
            unchanged.
    """
    saved = {id(parameter) for parameter in also}
    frozen = {name: parameter for name, parameter in frozen_parameters(model).items() if id(parameter) not in saved}
    found = fingerprints_of(frozen)
    changed = base.changed(found) if base is not None else set()
    return {name: fingerprint for name, fingerprint in found.items() if name not in changed}


def _stored_values(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that store a tensor's values; for 4-bit weights of bitsandbytes these include the scales."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return []
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    if not type(tensor).__module__.startswith("bitsandbytes"):
        return []  # an unknown subclass may have no memory
    state: Any = getattr(tensor, "quant_state", None)
    scales = [getattr(one, "absmax", None) for one in (state, getattr(state, "state2", None))]
    return [tensor.data, *(scale for scale in scales if isinstance(scale, torch.Tensor))]


def _quantizer_of(tensor: torch.Tensor) -> str:
    """Describe what the rounding of a quantized weight may depend on."""
    if tensor.device.type == "cuda":
        where = torch.cuda.get_device_name(tensor.device)
    else:
        where = f"{tensor.device.type} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    packages = dict.fromkeys(("torch", type(tensor).__module__.partition(".")[0]))
    return ", ".join([where, *(f"{name} {sys.modules[name].__version__}" for name in packages)])


def _checksum_of_samples(tensor: torch.Tensor) -> str:
    """Compute the checksum of earlier versions: the CRC-32 of about 16 values at equal distances."""
    flat = tensor.detach().reshape(-1)
    samples = flat[:: max(1, (flat.numel() - 1) // (_NUM_SAMPLES - 1))]
    return f"{zlib.crc32(bytes(as_bytes(samples.cpu()).tolist())):08x}"
