"""Exact size of the state of an optimizer, computed before the optimizer exists: for plans and disk-space checks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.optim.build import OPTIMIZERS, PAGED, QUANTIZED, fused_form
from trimtab.optim.quantized import BLOCK, MIN_PAGED, MIN_QUANTIZED

_NUM_MOMENTS = {"adamw": 2, "adam": 2, "adagrad": 1, "adamw8bit": 2, "adam8bit": 2, "adagrad8bit": 1}
_STEP_BYTES = 4  # torch counts steps in an fp32 scalar


@dataclass(frozen=True)
class StateSize:
    """Bytes of optimizer state on the device of the parameters, in paged (CUDA managed) memory and on the host."""

    device_bytes: int = 0
    paged_bytes: int = 0
    host_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Total size, as in a checkpoint."""
        return self.device_bytes + self.paged_bytes + self.host_bytes

    def __add__(self, other: "StateSize") -> "StateSize":
        return StateSize(
            self.device_bytes + other.device_bytes,
            self.paged_bytes + other.paged_bytes,
            self.host_bytes + other.host_bytes,
        )


def state_bytes(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    momentum: float = 0.0,
    rounds_stochastically: bool = False,
    device: str | torch.device = "cuda",
) -> StateSize:
    """The size of the state that an optimizer keeps for one parameter, without rounding by an allocator.

    Args:
        name: One of `trimtab.optim.build.OPTIMIZERS`.
        shape: Shape of the parameter.
        dtype: Dtype of the parameter.
        momentum: As for `build_optimizer`.
        rounds_stochastically: As for `build_optimizer`.
        device: Device of the parameter.

    Returns:
        Bytes by place. The code tables of the 8-bit optimizers (2 KiB per optimizer) are not included.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}")
    device, num_elements = torch.device(device), math.prod(shape)
    kind = name.removeprefix(PAGED)
    if kind in QUANTIZED:
        return _quantized_bytes(num_elements, _NUM_MOMENTS[kind], name.startswith(PAGED) and device.type == "cuda")
    if name == "adafactor":
        return StateSize(_factored_elements(shape) * dtype.itemsize, host_bytes=_STEP_BYTES)
    moments = _NUM_MOMENTS.get(name, 1 if momentum else 0) * num_elements * dtype.itemsize
    counts_in_int = rounds_stochastically and dtype is torch.bfloat16  # a Python int, not a tensor
    if name == "sgd" or counts_in_int:
        return StateSize(moments)
    if fused_form(name, device, momentum):
        return StateSize(moments + _STEP_BYTES)
    return StateSize(moments, host_bytes=_STEP_BYTES)


def bytes_of_groups(
    name: str, groups: Iterable[dict[str, Any]], *, rounds_stochastically: bool, dtype: torch.dtype | None = None
) -> int:
    """The size of the state of all parameters of groups, with momentum if there may be any.

    Args:
        name: One of `trimtab.optim.build.OPTIMIZERS`.
        groups: The parameter groups.
        rounds_stochastically: As for `build_optimizer`.
        dtype: Dtype in which parameters are updated; None uses their own.
    """
    parameters = (parameter for group in groups for parameter in group["params"])
    options: dict[str, Any] = {"momentum": 0.9, "rounds_stochastically": rounds_stochastically, "device": "cpu"}
    return sum(state_bytes(name, p.shape, dtype or p.dtype, **options).num_bytes for p in parameters)


def _quantized_bytes(num_elements: int, num_moments: int, pages: bool) -> StateSize:
    if num_elements < MIN_QUANTIZED:
        return StateSize(num_moments * 4 * num_elements)
    codes, scales = num_moments * num_elements, num_moments * 4 * -(-num_elements // BLOCK)
    if pages and num_elements >= MIN_PAGED:
        return StateSize(scales, paged_bytes=codes)
    return StateSize(codes + scales)


def _factored_elements(shape: Sequence[int]) -> int:
    """Elements of adafactor's second moments: one per row and one per column of a matrix."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]
