"""`Engine(memory_budget=…)`: the protocol of a memory planner, and the choice of the planner for a budget."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from trimtab.errors import RecipeError


class MemoryPlanner(Protocol):
    """Adapts the parts of a training loop to a memory budget when they are prepared."""

    def fit_to_budget(self, engine: Any, parts: tuple[Any, ...], splits_batches: bool) -> tuple[Any, ...]:
        """Change the parts until the predicted step fits the budget, and log the changes.

        Args:
            engine: The engine that will prepare the parts.
            parts: The arguments of `Engine.prepare`.
            splits_batches: Whether the batch size of a loader counts the rows of all processes.

        Returns:
            The parts to prepare, in the same order.
        """


class NoPlanner:
    """The memory planner of an engine without a budget."""

    def fit_to_budget(self, engine: Any, parts: tuple[Any, ...], splits_batches: bool) -> tuple[Any, ...]:
        """Return the parts unchanged."""
        return parts


def planner_for(
    budget: str | int | None, allow: Sequence[str], device: torch.device, planner: MemoryPlanner | None = None
) -> MemoryPlanner:
    """Return the memory planner for a budget.

    Args:
        budget: A size such as "8GiB"; "auto" for the free memory of the device; None for no budget.
        allow: Techniques that the planner may use although they change results slightly.
        device: The device whose memory is limited.
        planner: A planner to use instead of a budget.

    Raises:
        RecipeError: `allow` was given without a budget, or a planner with one.
    """
    if planner is not None:
        if budget is not None or allow:
            raise RecipeError(
                "memory_planner was passed together with memory_budget or memory_allow", "remove the latter"
            )
        return planner
    if budget is not None:
        # The planner is built on the engine, so a module-level import would create a cycle. This is the only import in
        # the package that goes up the layers.
        from trimtab.planner.own_loop import OwnLoop

        return OwnLoop(budget, allow, device)
    if allow:
        raise RecipeError(
            f"memory_allow={list(allow)!r} has no effect without a budget", 'memory_budget="8GiB", or leave it out'
        )
    return NoPlanner()
