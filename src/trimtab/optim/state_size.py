"""How large the state of an optimizer will be, to the byte, before there is one: plans and checks of disks ask."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trimtab.optim.build import OPTIMIZERS, PAGED, QUANTIZED, fused_form
from trimtab.optim.quantized import BLOCK, MIN_PAGED, MIN_QUANTIZED

Place = Literal["device", "paged", "host"]

MAP_BYTES = 256 * 4  # a table of what 8 bits stand for; two of them for each 8-bit optimizer, not for each parameter

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state of a parameter.

    `place` is where it lives: beside its parameter, in memory that the driver moves between GPU and host, or on the
    host.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place = "device"

    @property
    def num_bytes(self) -> int:
        """Its size, without what an allocator adds."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateSize:
    """Bytes of state by the place where they live: the parameters' device, paged memory, the host."""

    device_bytes: int = 0
    paged_bytes: int = 0
    host_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All together, as a checkpoint holds it."""
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
    """The size of the state that an optimizer keeps for one parameter once it has trained.

    Args:
        name: One of `trimtab.optim.build.OPTIMIZERS`.
        shape: The parameter's shape.
        dtype: The parameter's dtype.
        momentum: As given to `build_optimizer`.
        rounds_stochastically: As given to `build_optimizer`.
        device: Where the parameter is.

    Returns:
        Bytes by place. The tables of the 8-bit optimizers (2 KiB for a whole optimizer) are not in it.
    """
    tensors = state_tensors(
        name, shape, dtype, momentum=momentum, rounds_stochastically=rounds_stochastically, device=device
    )
    return _total(tensors)


def state_tensors(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    momentum: float = 0.0,
    rounds_stochastically: bool = False,
    device: str | torch.device = "cuda",
) -> list[StateTensor]:
    """The tensors that an optimizer keeps for one parameter, for those who know what an allocator makes of each.

    Args and meaning as in `state_bytes`.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"no optimizer is called {name!r}")
    device, shape = torch.device(device), tuple(shape)
    kind = name.removeprefix(PAGED)
    if kind in QUANTIZED:
        pages = name.startswith(PAGED) and device.type == "cuda"
        return _quantized(shape, num_moments=1 if kind == "adagrad8bit" else 2, pages=pages)
    if name == "adafactor":
        return [*_factored(shape, dtype), _step("host")]
    moments = _MOMENTS.get(name, ("momentum_buffer",) if momentum else ())
    tensors = [StateTensor(moment, shape, dtype) for moment in moments]
    counts_plainly = rounds_stochastically and dtype is torch.bfloat16  # with a number that is no tensor
    if name != "sgd" and not counts_plainly:
        tensors.append(_step("device" if fused_form(name, device, momentum) else "host"))
    return tensors


def _quantized(shape: tuple[int, ...], num_moments: int, pages: bool) -> list[StateTensor]:
    num_elements = math.prod(shape)
    place: Place = "paged" if pages and num_elements >= MIN_PAGED else "device"
    tensors = []
    for number in range(1, num_moments + 1):
        if num_elements < MIN_QUANTIZED:
            tensors.append(StateTensor(f"state{number}", shape, torch.float32, place))
            continue
        tensors.append(StateTensor(f"state{number}", shape, torch.uint8, place))
        tensors.append(StateTensor(f"absmax{number}", (-(-num_elements // BLOCK),), torch.float32))
    return tensors


def _factored(shape: tuple[int, ...], dtype: torch.dtype) -> list[StateTensor]:
    if len(shape) < 2:
        return [StateTensor("variance", shape, dtype)]
    rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return [StateTensor("row_var", rows, dtype), StateTensor("col_var", columns, dtype)]


def _step(place: Place) -> StateTensor:
    return StateTensor("step", (), torch.float32, place)


def _total(tensors: Iterable[StateTensor]) -> StateSize:
    by_place: dict[Place, int] = {"device": 0, "paged": 0, "host": 0}
    for tensor in tensors:
        by_place[tensor.place] += tensor.num_bytes
    return StateSize(by_place["device"], by_place["paged"], by_place["host"])
