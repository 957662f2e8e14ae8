"""Draw the same random numbers again when something is computed a second time for backward."""

from typing import Any

import torch

from trimtab.model.selective_recompute import SavingMode


class Draws:
    """The state of the random generators before a block, if the block drew from them.

    torch.utils.checkpoint would save and restore all of them for each block; most blocks draw nothing.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        # meta tensors draw nothing, and another thread may be using the host generator
        has_data = any(device.type != "meta" for device in devices) or not devices
        self._generators = [torch.default_generator] if has_data else []
        for device in devices:
            if device.type == "mps":
                self._generators.append(torch.mps._get_default_mps_generator())
            elif device.type not in ("cpu", "meta"):
                self._generators.append(torch.get_device_module(device).default_generators[device.index])
        self.before: list[torch.Tensor] | None = None

    def read(self) -> list[torch.Tensor]:
        """The state of every generator."""
        # comparing 4-byte integers is faster than comparing bytes
        return [generator.get_state().view(torch.int32) for generator in self._generators]

    def set(self, states: list[torch.Tensor]) -> None:
        """Set the state of every generator."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state.view(torch.uint8))


class WatchedDraws:
    """Context of the forward of a block: detects whether it draws random numbers."""

    def __init__(self, drawn: Draws, keeping: SavingMode | None = None) -> None:
        self._drawn = drawn
        self.keeping = keeping

    def __enter__(self) -> None:
        self._before = self._drawn.read()
        if self.keeping is not None:
            self.keeping.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        if self.keeping is not None:
            self.keeping.__exit__(*exception)
        if not all(map(torch.equal, self._before, self._drawn.read())):
            self._drawn.before = self._before
        del self._before


class ReplayedDraws:
    """Context of the recomputation: draws the same random numbers as the forward, then restores the generators."""

    def __init__(self, drawn: Draws, inner: Any = None) -> None:
        self._drawn = drawn
        self._inner = inner

    def __enter__(self) -> None:
        if self._drawn.before is not None:
            self._now = self._drawn.read()
            self._drawn.set(self._drawn.before)
        if self._inner is not None:
            self._inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._inner is not None:
            self._inner.__exit__(*exception)
        if self._drawn.before is not None:
            self._drawn.set(self._now)
            del self._now
