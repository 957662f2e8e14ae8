"""The random state that the order and the contents of a loader's batches depend on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from trimtab.randomness import RandomState, host_random_state, preserve_host_random_state, restore_random_state


class LoaderRandomState:
    """The generators of the host, and those of a loader and its samplers.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators of the loader and its samplers, each once."""
        found = (getattr(owner, "generator", None) for owner in (self._loader, *samplers_of(self._loader)))
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())

    def generator_states(self) -> list[torch.Tensor]:
        """Return the states of `generators`."""
        return [generator.get_state() for generator in self.generators]

    def set_generator_states(self, states: list[torch.Tensor]) -> None:
        """Set the states of `generators`."""
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def get(self) -> RandomState:
        """Return the state of all generators."""
        return {"host": host_random_state(), "generators": self.generator_states()}

    def set(self, state: RandomState) -> None:
        """Set the state of all generators."""
        restore_random_state(state["host"])
        self.set_generator_states(state["generators"])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the state of all generators at the end of the context."""
        restore = self.undo_point()
        with preserve_host_random_state():
            try:
                yield
            finally:
                restore()

    def undo_point(self) -> Callable[[], None]:
        """Return a function that restores the current states of `generators`, even if samplers replace them."""
        states = [(generator, generator.get_state()) for generator in self.generators]

        def undo() -> None:
            for generator, state in states:
                generator.set_state(state)

        return undo


def samplers_of(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return the sampler, the batch sampler, and the sampler inside the batch sampler; some may be None."""
    return loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Call `set_epoch` on the samplers and the dataset of a loader, if they have it."""
    listeners = {id(listener): listener for listener in (*samplers_of(loader), loader.dataset)}
    for listener in listeners.values():
        if hasattr(listener, "set_epoch"):
            listener.set_epoch(epoch)
