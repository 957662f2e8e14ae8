"""Loss scaling for fp16: gradients are scaled up to avoid underflow, and unscaled before they are used.

torch's GradScaler is not used because it refuses to unscale twice in one step and does not report whether it skipped a
step: here gradients are unscaled after every backward that may end a window, and scaled again if another backward
follows.
"""

from collections.abc import Iterable
from typing import Any

import torch

from trimtab.distributed.world import World

NO_OWNER = 0  # owner of gradients that belong to no optimizer


class NoScaler:
    """The scaler for fp32 and bf16, which does nothing."""

    is_scaling = False

    def begin_window(self) -> None:
        """Do nothing."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss unchanged."""
        return loss

    def factor(self) -> float:
        """Return 1."""
        return 1.0

    def forget(self) -> None:
        """Do nothing."""

    def unscale(self, owner: int, gradients: list[torch.Tensor]) -> None:
        """Do nothing: gradients are not scaled."""

    def rescale(self, gradients: list[torch.Tensor]) -> None:
        """Do nothing."""

    def flags_of(self, owner: int) -> list[torch.Tensor]:
        """Return no flags."""
        return []

    def set_flags(self, owner: int, flags: list[torch.Tensor]) -> None:
        """Do nothing."""

    def overflowed(self, owner: int, world: World) -> bool:
        """Return False without reading the gradients."""
        return False

    def finish_step(self, owner: int, overflowed: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class LossScaler:
    """Dynamic loss scaling, with the constants and the rule of torch's GradScaler.

    The scale is a Python float. The scheduler must know whether a step overflowed, so the host reads that flag once per
    step anyway; this is the only host-device sync. Scales are powers of two, which makes scaling and unscaling exact.

    Args:
        init_scale: The initial scale.
        growth_factor: The factor by which the scale grows.
        backoff_factor: The factor by which it shrinks after an overflow.
        growth_interval: Steps without an overflow after which it grows.
        num_processes: The processes that share a batch. Each process computes the mean over fewer rows, so its
            gradients are larger by this factor. The scale is divided by it, so gradients overflow at the same values as
            on one process.
    """

    is_scaling = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        num_processes: int = 1,
    ) -> None:
        self._own_share = 0.5 ** (num_processes - 1).bit_length()  # rounded down to a power of two
        # the share of the open window; a loaded window may come from another number of processes
        self._share = self._own_share
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._num_good_steps = 0
        self._overflows: dict[int, list[torch.Tensor]] = {}  # per optimizer, one flag per device and backward
        self._counted = self._backed_off = False  # whether this window has already updated the counter or the scale

    def get_scale(self) -> float:
        """Return the current scale."""
        return self._scale

    def begin_window(self) -> None:
        """Use the share for this number of processes: no gradients of a loaded window are left."""
        self._share = self._own_share

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss."""
        return loss * self.factor()

    def factor(self) -> float:
        """Return the number that the loss of the next backward is multiplied by."""
        self._counted = self._backed_off = False
        return self._scale * self._share

    def forget(self) -> None:
        """Drop the overflow flags of an unfinished step."""
        self._overflows.clear()

    def unscale(self, owner: int, gradients: list[torch.Tensor]) -> None:
        """Unscale gradients in place, and record on the device, for optimizer `owner`, whether any is not finite."""
        flags = self._overflows.setdefault(owner, [])
        for (device, _), group in _by_device_and_dtype(gradients).items():
            flag = torch.zeros((), dtype=torch.float32, device=device)
            inverse = torch.full((), 1.0 / (self._scale * self._share), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, inverse)
            # the function above does not, and autograd checks the version
            torch.autograd.graph.increment_version(group)
            if owner != NO_OWNER:  # flags are read per optimizer
                flags.append(flag)

    def rescale(self, gradients: list[torch.Tensor]) -> None:
        """Scale gradients again, because another backward adds to them."""
        for group in _by_device_and_dtype(gradients).values():
            torch._foreach_mul_(group, self._scale * self._share)

    def flags_of(self, owner: int) -> list[torch.Tensor]:
        """Return the overflow flags of optimizer `owner` since its last step."""
        return list(self._overflows.get(owner, []))

    def set_flags(self, owner: int, flags: list[torch.Tensor]) -> None:
        """Replace the overflow flags of optimizer `owner`."""
        self._overflows.pop(owner, None)
        if flags:
            self._overflows[owner] = list(flags)

    def overflowed(self, owner: int, world: World) -> bool:
        """Return whether a gradient of optimizer `owner` was not finite on any process. One host-device sync."""
        flags = self._overflows.pop(owner, [])
        if not flags:
            return False
        total = flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).sum()
        return bool(world.total(total, total.device))

    def finish_step(self, owner: int, overflowed: bool) -> None:
        """Update the scale once per window: down after an overflow, up after enough steps without one."""
        if overflowed and not self._backed_off:
            self._scale *= self._backoff_factor
            self._num_good_steps = 0
            self._backed_off = self._counted = True
        elif not overflowed and not self._counted:
            self._counted = True
            self._num_good_steps += 1
            if self._num_good_steps == self._growth_interval:
                self._scale *= self._growth_factor
                self._num_good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the names of torch's GradScaler, and the share of several processes."""
        # the gradients of an open window are scaled with this share
        share = {} if self._share == 1.0 else {"share": self._share}
        return share | {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's GradScaler."""
        self._scale = float(state["scale"])
        self._share = float(state.get("share", 1.0))
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._num_good_steps = int(state["_growth_tracker"])


Scaler = NoScaler | LossScaler


def _by_device_and_dtype(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        dense = tensor._values() if tensor.is_sparse else tensor
        groups.setdefault((dense.device, dense.dtype), []).append(dense)
    return groups
