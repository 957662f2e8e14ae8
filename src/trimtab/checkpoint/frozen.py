"""What does not train is not written; it is recognised instead, so that another base is an error and not garbage."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.checkpoint.tensor_file import as_bytes

_NUM_SAMPLES = 16
_SAMPLED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Likeness:
    """What a tensor is known by: its form, and a checksum over a few of its values.

    Attributes:
        dtype: Such as "bfloat16".
        shape: Its shape.
        checksum: Empty for quantized weights, whose bits may differ from one device to the next.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str

    def as_list(self) -> list[Any]:
        """As it is saved."""
        return [self.dtype, list(self.shape), self.checksum]


def likeness_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Likeness]:
    """The likeness of each tensor; all values that it needs come from a device in one copy for each dtype."""
    sampled = {name: tensor for name, tensor in tensors.items() if _can_be_sampled(tensor)}
    checksums: dict[str, str] = {}
    for names in _by_place(sampled):
        samples = [_samples(sampled[name]) for name in names]
        raw = bytes(as_bytes(torch.cat(samples).cpu()).tolist())
        size = sampled[names[0]].element_size()
        begin = 0
        for name, sample in zip(names, samples, strict=True):
            end = begin + sample.numel() * size
            checksums[name] = f"{zlib.crc32(raw[begin:end]):08x}"
            begin = end
    return {
        name: Likeness(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), checksums.get(name, ""))
        for name, tensor in tensors.items()
    }


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
        return {name for name, now in likeness.items() if self._likeness.get(name) != now}


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


def _can_be_sampled(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_plain and tensor.dtype in _SAMPLED and tensor.device.type != "meta"


def _by_place(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(name)
    yield from groups.values()


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Values at even distances, the first and nearly the last among them; of a contiguous tensor a view."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, (flat.numel() - 1) // (_NUM_SAMPLES - 1))]
