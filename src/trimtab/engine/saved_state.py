"""The state of an engine in a checkpoint: which parts it contains, how it is saved, and how it is loaded."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.codec import Encoded
from trimtab.checkpoint.collective import collective_capture, collective_load, collective_save
from trimtab.checkpoint.state import ExecutionPart, ModelPart, OptimizerPart, Part, RandomPart, StatefulPart
from trimtab.checkpoint.store import StoredCheckpoint
from trimtab.distributed.world import World
from trimtab.engine.forward_backward import ForwardBackward
from trimtab.engine.loss_scaler import Scaler
from trimtab.engine.prepared_parts import PreparedParts, unwrap
from trimtab.errors import PrepareError


class SavedState:
    """Saves and loads everything an engine has prepared. Every process calls each method.

    Args:
        world: The processes; rank 0 writes.
        prepared: The prepared parts.
        scaler: The loss scaler.
        forward_backward: Computes micro-batches; knows whether compiling or capturing failed.
    """

    def __init__(
        self, world: World, prepared: PreparedParts, scaler: Scaler, forward_backward: ForwardBackward
    ) -> None:
        self._world = world
        self._prepared = prepared
        self._scaler = scaler
        self._forward_backward = forward_backward
        self._registered: list[Any] = []
        self._later: list[torch.nn.Parameter] = []  # frozen parameters that become trainable during the run

    def register(self, objects: Iterable[Any]) -> None:
        """Include objects with `state_dict` and `load_state_dict` in the state."""
        objects = list(objects)
        unfit = [o for o in objects if not (hasattr(o, "state_dict") and hasattr(o, "load_state_dict"))]
        if unfit:
            kinds = ", ".join(type(o).__name__ for o in unfit)
            raise PrepareError(f"{kinds} cannot be saved", "register objects that have state_dict and load_state_dict")
        self._registered.extend(objects)

    def include_later(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Include frozen parameters in the state, because they become trainable during the run."""
        self._later.extend(parameters)

    def save(self, folder: str | Path, may_be_alone: bool = False) -> str:
        """Write the state to a folder and return the folder; with `may_be_alone`, rank 0 does not need the others."""
        are_same = self._prepared.gradients.are_same_everywhere
        return collective_save(self._world, folder, self.parts(), are_same, may_be_alone)

    def capture(self) -> dict[str, Encoded] | None:
        """Return the state on rank 0, None elsewhere. Its tensors share memory with the model."""
        return collective_capture(self._world, self.parts(), self._prepared.gradients.are_same_everywhere)

    def load(self, source: str | Path | StoredCheckpoint) -> None:
        """Load a state into the prepared parts; if it does not match them, nothing changes."""
        collective_load(self._world, source, self.parts())

    def parts(self) -> list[Part]:
        """Return the parts of the state; those that may reject a state come first, see `apply_parts`."""
        prepared = self._prepared
        parts: list[Part] = [
            StatefulPart("accumulation", prepared.accumulation),
            StatefulPart("scaler", self._scaler),
            StatefulPart("gradients", prepared.gradients),
        ]
        if self._forward_backward.has_state:
            parts.append(ExecutionPart(self._forward_backward))
        for name, owners in (
            ("scheduler", prepared.schedulers),
            ("loader", prepared.loaders),
            ("object", self._registered),
        ):
            parts += [StatefulPart(_numbered(name, index), owner) for index, owner in enumerate(owners)]
        models = [unwrap(model) for model in prepared.models]
        parts += [
            OptimizerPart(_numbered("optimizer", index), optimizer.optimizer, models)
            for index, optimizer in enumerate(prepared.optimizers)
        ]
        parts += [
            ModelPart(_numbered("model", index), model, also=self._later, base=base)
            for index, (model, base) in enumerate(zip(models, prepared.frozen, strict=True))
        ]
        return [*parts, RandomPart(self._world.process_index)]

    def clear(self) -> None:
        """Drop all references to registered objects and parameters."""
        self._registered.clear()
        self._later.clear()


def _numbered(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index}"
