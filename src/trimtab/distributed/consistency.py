"""Processes that should be alike are compared before they train: who differs, in what, is said on every one of them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from trimtab.distributed.world import World
from trimtab.errors import RecipeError


def require_same(world: World, what: str, facts: Mapping[str, Any], cure: str = "") -> None:
    """Compare facts over the processes.

    Args:
        world: The processes.
        what: What is compared, for the message: "versions", "recipe".
        facts: Small values by name.
        cure: What mends a difference.

    Raises:
        RecipeError: On every process, with each rank that differs from most, and in what.
    """
    if world.num_processes == 1:
        return
    everyone = world.objects_of_all(dict(facts))
    names = dict.fromkeys(name for one in everyone for name in one)
    problems = []
    for name in names:
        values = [one.get(name) for one in everyone]
        usual = Counter(map(repr, values)).most_common(1)[0][0]
        problems += [
            f"rank {rank} has {name} {value!r}, others {usual}"
            for rank, value in enumerate(values)
            if repr(value) != usual
        ]
    if problems:
        cure = cure or f"start every process with the same {what}"
        raise RecipeError(f"the processes differ in {what}: {'; '.join(problems)}", cure)
