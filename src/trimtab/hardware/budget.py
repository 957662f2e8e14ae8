"""Who keeps a loop of one's own within a budget of memory: the engine asks here, and someone far above it answers.

The planner is built on the engine, so the engine cannot import it. `trimtab/__init__.py`, which knows both, says who
answers; nothing heavy is imported for that.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trimtab.errors import RecipeError


class BudgetKeeper(Protocol):
    """Looks at what a loop is made of when it is prepared."""

    def settle(self, engine: Any, parts: tuple[Any, ...], splits_batches: bool) -> tuple[Any, ...]:
        """Change what may be changed so that the step stays within the budget, and say so.

        Args:
            engine: The engine that will prepare them.
            parts: What `prepare` was given.
            splits_batches: Whether a loader's batch size is that of all processes together.

        Returns:
            What is to be prepared, in the same order.
        """


class NoBudget:
    """All the memory that there is."""

    def settle(self, engine: Any, parts: tuple[Any, ...], splits_batches: bool) -> tuple[Any, ...]:
        """Everything stays as it is."""
        return parts


MakeKeeper = Callable[[str | int, Sequence[str], Any], BudgetKeeper]
_makers: list[MakeKeeper] = []


def register_keeper(make: MakeKeeper) -> None:
    """Say who keeps budgets.

    Args:
        make: Called with a budget, what is allowed for its sake, and the device.
    """
    _makers[:] = [make]


def keeper_of(budget: str | int | None, allow: Sequence[str], device: Any) -> BudgetKeeper:
    """What keeps a loop within a budget; without one it does nothing.

    Args:
        budget: Such as "8GiB"; "auto" is what the device has free; None is no budget.
        allow: What may be chosen although it changes results a little.
        device: What it is a budget of.

    Raises:
        RecipeError: Something is allowed for the sake of a budget that was not given.
    """
    if budget is not None:
        return _makers[0](budget, allow, device)
    if allow:
        raise RecipeError(
            f"memory_allow={list(allow)!r} has no effect without a budget", 'memory_budget="8GiB", or leave it out'
        )
    return NoBudget()
