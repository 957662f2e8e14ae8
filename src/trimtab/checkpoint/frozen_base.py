"""What does not train is not written; it is recognised instead, so that another base is an error and not garbage."""

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
class Likeness:
    """What a tensor is known by: its form, and a checksum of all its values.

    Attributes:
        dtype: Such as "bfloat16".
        shape: Its shape.
        checksum: Empty for kinds of tensors whose memory cannot be read.
        made_by: Of quantized weights, whose last bits may depend on it, what they were quantized by; else empty. Two
            checksums are compared only where this is the same.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str
    made_by: str = ""

    def as_list(self) -> list[Any]:
        """As it is saved."""
        known = [self.dtype, list(self.shape), self.checksum]
        return [*known, self.made_by] if self.made_by else known

    def is_same(self, other: "Likeness") -> bool:
        """Whether two tensors are the same, as far as they can be compared."""
        has_same_form = (self.dtype, self.shape) == (other.dtype, other.shape)
        can_compare = self.checksum and other.checksum and self.made_by == other.made_by
        return has_same_form and (not can_compare or self.checksum == other.checksum)


def likeness_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Likeness]:
    """The likeness of each tensor; reads all of their memory once, on their devices."""
    distinct = {id(tensor): tensor for tensor in tensors.values()}  # a tied weight has two names and is read once
    values = {key: _values_of(tensor) for key, tensor in distinct.items()}
    checksums = iter(checksums_of([value for several in values.values() for value in several]))
    known = {
        key: Likeness(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            "+".join(next(checksums) for _ in values[key]),
            "" if tensor.dtype in _FLOATS or not values[key] else _quantized_by(tensor),
        )
        for key, tensor in distinct.items()
    }
    return {name: known[id(tensor)] for name, tensor in tensors.items()}


def different_from(saved: Mapping[str, list[Any]], tensors: Mapping[str, torch.Tensor]) -> dict[str, Likeness]:
    """Those of the tensors that are not as they were saved, with what they are known by here.

    Args:
        saved: What `Likeness.as_list` gave of each.
        tensors: The tensors of the same names.
    """
    here = likeness_of(tensors)
    different = {}
    for name, known in here.items():
        before = Likeness(saved[name][0], tuple(saved[name][1]), *saved[name][2:])
        if before.checksum and not is_checksum(before.checksum):  # written by a version that took samples
            known = Likeness(known.dtype, known.shape, _checksum_of_samples(tensors[name]))
        if not known.is_same(before):
            different[name] = known
    return different


def frozen_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that do not train now, under every name that they have."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


class FrozenBase:
    """Remembers what of a model did not train when it was prepared, to tell later what has still not changed.

    A weight that trained and was frozen after that, or that is moved by other means (an average of other weights), does
    not train either, but a checkpoint without it would lose it.

    Args:
        model: The model as it was loaded, before its first step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._likeness = likeness_of(frozen_parameters(model))

    def changed(self, likeness: Mapping[str, Likeness]) -> set[str]:
        """The names of those that are not as they were in the beginning."""
        return {
            name
            for name, now in likeness.items()
            if (before := self._likeness.get(name)) is None or not now.is_same(before)
        }


def left_out(
    model: torch.nn.Module, also: Iterable[torch.nn.Parameter], base: FrozenBase | None
) -> dict[str, Likeness]:
    """The parameters of a model that a checkpoint leaves out, and what they are known by.

    Args:
        model: The model.
        also: Frozen parameters that are written all the same.
        base: What was frozen in the beginning; None believes `requires_grad`.
    """
    kept = {id(parameter) for parameter in also}
    frozen = {name: parameter for name, parameter in frozen_parameters(model).items() if id(parameter) not in kept}
    likeness = likeness_of(frozen)
    changed = base.changed(likeness) if base is not None else set()
    return {name: known for name, known in likeness.items() if name not in changed}


def _values_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Everything that the values of a tensor are stored in: of bitsandbytes' 4-bit weights their scales, too."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return []
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    if not type(tensor).__module__.startswith("bitsandbytes"):
        return []  # a subclass that may have no memory of its own
    state: Any = getattr(tensor, "quant_state", None)
    inner = [getattr(one, "absmax", None) for one in (state, getattr(state, "state2", None))]
    return [tensor.data, *(scale for scale in inner if isinstance(scale, torch.Tensor))]


def _quantized_by(tensor: torch.Tensor) -> str:
    """What the rounding of a quantized weight may depend on."""
    if tensor.device.type == "cuda":
        where = torch.cuda.get_device_name(tensor.device)
    else:
        where = f"{tensor.device.type} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    packages = dict.fromkeys(("torch", type(tensor).__module__.partition(".")[0]))
    return ", ".join([where, *(f"{name} {sys.modules[name].__version__}" for name in packages)])


def _checksum_of_samples(tensor: torch.Tensor) -> str:
    """What checkpoints of earlier versions hold: the CRC-32 of about 16 values at even distances."""
    flat = tensor.detach().reshape(-1)
    samples = flat[:: max(1, (flat.numel() - 1) // (_NUM_SAMPLES - 1))]
    return f"{zlib.crc32(bytes(as_bytes(samples.cpu()).tolist())):08x}"
