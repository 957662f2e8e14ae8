"""Parts of a model that do not train: always, or until a step or an epoch."""

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from trimtab.errors import CheckpointError, RecipeError
from trimtab.log import say
from trimtab.model.load import newly_initialised
from trimtab.units import Every

_BASE = "base"


class Freezing:
    """Keeps parts of a model from training and lets them train when they are due.

    A parameter that several patterns name trains once the last of them lets go. What did not train before stays so.

    Args:
        model: The model, before it is prepared.
        spec: Pattern to when it begins to train; None is never. A pattern is "base" (everything but the head) or a
            glob on the names of modules and parameters, where `*` also spans dots.
    """

    def __init__(self, model: torch.nn.Module, spec: Mapping[str, Every | None]) -> None:
        for pattern, until in spec.items():
            if until is not None and until.seconds is not None:
                raise RecipeError(
                    f"train.freeze: {pattern!r} until {until} depends on how fast the machine is",
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
                f"train.freeze leaves nothing to train: {', '.join(spec)} hold every parameter",
                "a head that shares its weights with the embeddings is frozen with them; freeze fewer modules",
            )

    @property
    def active(self) -> list[str]:
        """The patterns that still hold parameters back."""
        return list(self._active)

    @property
    def trainable_share(self) -> float:
        """The share of all parameters that trains now."""
        sizes = [(p.numel(), p.requires_grad) for p in self._model.parameters()]
        return sum(size for size, trains in sizes if trains) / max(1, sum(size for size, _ in sizes))

    def apply(self) -> None:
        """Freeze everything that is held back now."""
        held = {id(p) for pattern in self._active for p in self._held[pattern]}
        for parameters in self._held.values():
            for parameter in parameters:
                parameter.requires_grad_(id(parameter) not in held)
                if id(parameter) in held:
                    parameter.grad = None  # an optimizer would go on with a gradient that is left

    def released_later(self) -> list[torch.nn.Parameter]:
        """The parameters that are held back for a time, and not for good."""
        return [p for pattern, until in self._spec.items() if until is not None for p in self._held[pattern]]

    def at_step(self, step: int, epoch: float) -> list[str]:
        """Let train what is due.

        Args:
            step: Optimizer steps done.
            epoch: Epochs done, as a fraction.

        Returns:
            The patterns whose parameters begin to train now.
        """
        due = [pattern for pattern in self._active if _is_due(self._spec[pattern], step, epoch)]
        if due:
            self._active = [pattern for pattern in self._active if pattern not in due]
            self.apply()
        return due

    def state_dict(self) -> dict[str, Any]:
        """What is still frozen."""
        return {"active": list(self._active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Freeze what was frozen when the state was taken, and nothing else of what this object holds."""
        unknown = [pattern for pattern in state["active"] if pattern not in self._spec]
        if unknown:
            raise CheckpointError(
                f"the checkpoint holds {', '.join(unknown)} frozen, which train.freeze does not name",
                "resume with the recipe that the run began with",
            )
        self._active = [pattern for pattern in self._spec if pattern in state["active"]]
        self.apply()

    def _matched(self, pattern: str) -> list[torch.nn.Parameter]:
        if pattern == _BASE:
            return self._base_parameters()
        # Tied parameters have several names; any of them may be matched.
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
                f'train.freeze: {type(self._model).__name__} has no head apart from its base, so "base" means nothing',
                f"name modules instead: {self._module_names()}",
            )
        new = newly_initialised(self._model)
        names = {id(p): name for name, p in self._model.named_parameters()}
        kept = [names[id(p)] for p in base.parameters() if names[id(p)] in new]
        if kept:
            say(
                f"train.freeze: {', '.join(kept[:3])} of the base trains with the head, because it is newly initialised"
            )
        return [p for p in base.parameters() if names[id(p)] not in new]

    def _module_names(self) -> str:
        names = [name for name, module in self._model.named_modules() if name.count(".") < 2 and name]
        return ", ".join(names[:12]) + (" …" if len(names) > 12 else "")


def _is_due(until: Every | None, step: int, epoch: float) -> bool:
    if until is None:
        return False
    by_step = until.steps is not None and step >= until.steps
    # An epoch's end is a quotient of whole numbers; a rounding error must not cost another step.
    return by_step or (until.epochs is not None and epoch >= until.epochs - 1e-9)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
