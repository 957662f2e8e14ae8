"""Compare versions, recipes and data across the ranks before training: a difference is an error on every rank."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from trimtab.distributed.world import World
from trimtab.errors import RecipeError


def require_same(world: World, what: str, facts: Mapping[str, Any], cure: str = "") -> None:
    """Require that every rank has the same values.

    Args:
        world: The ranks.
        what: What is compared, for the message: "versions", "recipe".
        facts: Small picklable values by name.
        cure: What to do about a difference.

    Raises:
        RecipeError: Values differ. It is raised on every rank, and names each rank that differs from the majority, and
            the values.
    """
    if world.num_processes == 1:
        return
    facts_by_rank = world.all_gather_object(dict(facts))
    problems = []
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        values = [repr(facts.get(name)) for facts in facts_by_rank]
        majority = Counter(values).most_common(1)[0][0]
        problems += [
            f"rank {rank} has {name} {value}, the others have {majority}"
            for rank, value in enumerate(values)
            if value != majority
        ]
    if problems:
        cure = cure or f"start every process with the same {what}"
        raise RecipeError(f"the processes differ in {what}: {'; '.join(problems)}", cure)
