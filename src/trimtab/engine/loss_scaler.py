"""Loss scaling for fp16: gradients are enlarged so that they do not vanish, and made true again before they are used.

Written by hand because torch's GradScaler refuses to unscale twice in one step and keeps to itself whether it skipped:
here gradients can be made true after every backward, and enlarged again should another backward follow.
"""

from collections.abc import Iterable
from typing import Any

import torch

from trimtab.distributed.world import World

NO_OWNER = 0  # gradients that no optimizer holds


class NoScaler:
    """The do-nothing scaler of fp32 and bf16."""

    is_scaling = False

    def begin_window(self) -> None:
        """Nothing to prepare."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss itself."""
        return loss

    def forget(self) -> None:
        """Nothing is held."""

    def unscale(self, owner: int, gradients: list[torch.Tensor]) -> None:
        """Gradients are true already."""

    def rescale(self, gradients: list[torch.Tensor]) -> None:
        """Gradients stay as they are."""

    def flags_of(self, owner: int) -> list[torch.Tensor]:
        """There are none."""
        return []

    def set_flags(self, owner: int, flags: list[torch.Tensor]) -> None:
        """There are none."""

    def overflowed(self, owner: int, world: World) -> bool:
        """Never looked for."""
        return False

    def finish_step(self, owner: int, overflowed: bool) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class LossScaler:
    """Dynamic loss scaling, with the constants and the rule of torch's GradScaler.

    The scale lives on the host: whether a step overflowed is read once a step in any case, because the schedule must
    know, and that read is the only synchronization. Scales are powers of two, so that scaling and unscaling are exact.

    Args:
        init_scale: The factor at the beginning.
        growth_factor: By how much it grows.
        backoff_factor: By how much it shrinks after an overflow.
        growth_interval: Steps without an overflow before it grows.
        num_processes: How many share a batch. Each takes a mean over its own, fewer rows, whose gradients are as many
            times larger: they are enlarged by that much less, so that they overflow where one process would.
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
        self._own_share = 0.5 ** (num_processes - 1).bit_length()  # a power of two again
        self._share = self._own_share  # in a window that other processes began, theirs: `.grad` contains it
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._num_good_steps = 0
        self._overflows: dict[int, list[torch.Tensor]] = {}  # per optimizer, one flag for each device and pass
        self._counted = self._backed_off = False  # what this window has done to the scale

    def get_scale(self) -> float:
        """The factor that losses are multiplied with now."""
        return self._scale

    def begin_window(self) -> None:
        """No scaled gradients are left of what another number of processes has saved."""
        self._share = self._own_share

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, enlarged."""
        self._counted = self._backed_off = False
        return loss * (self._scale * self._share)

    def forget(self) -> None:
        """Hold on to no flag of a step that was not finished."""
        self._overflows.clear()

    def unscale(self, owner: int, gradients: list[torch.Tensor]) -> None:
        """Make gradients true, and note on the device, for the optimizer `owner`, whether any is not finite."""
        flags = self._overflows.setdefault(owner, [])
        for (device, _), group in _by_device_and_dtype(gradients).items():
            flag = torch.zeros((), dtype=torch.float32, device=device)
            inverse = torch.full((), 1.0 / (self._scale * self._share), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, inverse)
            if owner != NO_OWNER:  # nobody would ever ask
                flags.append(flag)

    def rescale(self, gradients: list[torch.Tensor]) -> None:
        """Enlarge true gradients again, because another backward is about to add to them."""
        for group in _by_device_and_dtype(gradients).values():
            torch._foreach_mul_(group, self._scale * self._share)

    def flags_of(self, owner: int) -> list[torch.Tensor]:
        """What was noted for the optimizer `owner` since its last step."""
        return list(self._overflows.get(owner, []))

    def set_flags(self, owner: int, flags: list[torch.Tensor]) -> None:
        """Put back what `flags_of` gave; nothing where there are none."""
        self._overflows.pop(owner, None)
        if flags:
            self._overflows[owner] = list(flags)

    def overflowed(self, owner: int, world: World) -> bool:
        """Whether a gradient of the optimizer `owner` was not finite, on any process. A step's one host-device sync."""
        flags = self._overflows.pop(owner, [])
        if not flags:
            return False
        total = flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).sum()
        return bool(world.total(total, total.device))

    def finish_step(self, owner: int, overflowed: bool) -> None:
        """Move the scale: down after an overflow, up after many steps without one; once a window."""
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
        """What torch's GradScaler keeps, under its names; of several processes also what they enlarge less by."""
        share = {} if self._share == 1.0 else {"share": self._share}  # gradients of an open window contain it
        return share | {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` of this class or of a GradScaler gave."""
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
