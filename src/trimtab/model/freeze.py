"""Freeze parts of a model, always or until a step or epoch."""

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from trimtab.errors import CheckpointError, RecipeError
from trimtab.log import say
from trimtab.model.load import newly_initialized
from trimtab.units import Every

_BASE = "base"


class Freezing:
    """Freeze parameters of a model, and unfreeze them when they are due.

    A parameter that matches several patterns is unfrozen with the last of them. Parameters that were frozen before stay
    frozen.

    Args:
        model: The model, before it is prepared.
        spec: Maps a pattern to the step or epoch at which its parameters are unfrozen; None for never. A pattern is
            "base" (everything except the head) or a glob on names of modules and parameters, where `*` also matches
            dots.
    """

    def __init__(self, model: torch.nn.Module, spec: Mapping[str, Every | None]) -> None:
        for pattern, until in spec.items():
            if until is not None and until.seconds is not None:
                raise RecipeError(
                    f"train.freeze: {pattern!r} until {until} would depend on the speed of the machine",
                    'use steps or epochs, for example "200 steps", or "always"',
                )
        self._model = model
        self._spec = dict(spec)
        self._held: dict[str, list[torch.nn.Parameter]] = {
            pattern: [p for p in self._matched(pattern) if p.requires_grad] for pattern in spec
        }
        self._active = list(spec)
        trainable = {id(p) for p in model.parameters() if p.requires_grad}
        if self._spec and not trainable - {id(p) for held in self._held.values() for p in held}:
            raise RecipeError(
                f"train.freeze leaves no trainable parameters: {', '.join(spec)} freezes all of them",
                "freeze fewer modules; a head that is tied to the embeddings is frozen with them",
            )

    @property
    def active(self) -> list[str]:
        """The patterns whose parameters are still frozen."""
        return list(self._active)

    def apply(self) -> None:
        """Set `requires_grad` of all parameters that match a pattern."""
        held = {id(p) for pattern in self._active for p in self._held[pattern]}
        for parameters in self._held.values():
            for parameter in parameters:
                parameter.requires_grad_(id(parameter) not in held)
                if id(parameter) in held:
                    parameter.grad = None  # an optimizer would still apply a leftover gradient

    def released_later(self) -> list[torch.nn.Parameter]:
        """The parameters that are, or were, frozen for a part of the run."""
        return [p for pattern, until in self._spec.items() if until is not None for p in self._held[pattern]]

    def at_step(self, step: int, epoch: float) -> list[str]:
        """Unfreeze the parameters that are due.

        Args:
            step: Completed optimizer steps.
            epoch: Completed epochs, as a fraction.

        Returns:
            The patterns whose parameters were unfrozen.
        """
        due = [pattern for pattern in self._active if _is_due(self._spec[pattern], step, epoch)]
        if due:
            self._active = [pattern for pattern in self._active if pattern not in due]
            self.apply()
        return due

    def state_dict(self) -> dict[str, Any]:
        """The patterns whose parameters are still frozen, as state."""
        return {"active": list(self._active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Freeze exactly the patterns that were frozen when the state was saved."""
        unknown = [pattern for pattern in state["active"] if pattern not in self._spec]
        if unknown:
            raise CheckpointError(
                f"in the checkpoint {', '.join(unknown)} is frozen, which is not in train.freeze",
                "resume with the recipe that the run was started with",
            )
        self._active = [pattern for pattern in self._spec if pattern in state["active"]]
        self.apply()

    def _matched(self, pattern: str) -> list[torch.nn.Parameter]:
        if pattern == _BASE:
            return self._base_parameters()
        # Tied parameters have several names, and a pattern may match any of them.
        matched = {
            id(parameter): parameter
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if any(fnmatchcase(prefix, pattern) for prefix in _prefixes(name))
        }
        if not matched:
            names = {prefix for name, _ in self._model.named_parameters() for prefix in _prefixes(name)}
            near = get_close_matches(pattern, names, n=3, cutoff=0.5)
            raise RecipeError(
                f"train.freeze: {pattern!r} matches no module of {type(self._model).__name__}",
                f"did you mean {' or '.join(near)}?" if near else f"its modules are {self._module_names()}",
            )
        return list(matched.values())

    def _base_parameters(self) -> list[torch.nn.Parameter]:
        base = getattr(self._model, "base_model", self._model)
        if base is self._model:
            raise RecipeError(
                f'train.freeze: "base": {type(self._model).__name__} has no head separate from its base',
                f"list modules instead: {self._module_names()}",
            )
        new = newly_initialized(self._model)
        names = {id(p): name for name, p in self._model.named_parameters()}
        kept = [names[id(p)] for p in base.parameters() if names[id(p)] in new]
        if kept:
            say(f"train.freeze: {', '.join(kept[:3])} of the base is not frozen, because it is newly initialized")
        return [p for p in base.parameters() if names[id(p)] not in new]

    def _module_names(self) -> str:
        names = [name for name, module in self._model.named_modules() if name.count(".") < 2 and name]
        return ", ".join(names[:12]) + (" …" if len(names) > 12 else "")


def _is_due(until: Every | None, step: int, epoch: float) -> bool:
    if until is None:
        return False
    by_step = until.steps is not None and step >= until.steps
    # The epoch is a quotient, and a rounding error must not delay this by a step.
    return by_step or (until.epochs is not None and epoch >= until.epochs - 1e-9)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
