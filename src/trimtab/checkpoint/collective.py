"""Saving and loading by several processes: the first writes what is the same on all, and all learn how it went."""

from collections.abc import Sequence
from pathlib import Path

from trimtab.checkpoint.codec import Encoded
from trimtab.checkpoint.state import (
    Part,
    RandomPart,
    apply_parts,
    checked_parts,
    encode_parts,
    load_parts,
    save_parts,
)
from trimtab.checkpoint.store import StoredCheckpoint
from trimtab.distributed.world import World
from trimtab.errors import CheckpointError
from trimtab.randomness import random_state


def save_together(world: World, folder: str | Path, parts: Sequence[Part], gradients_are_same: bool) -> str:
    """Write every part to a folder. All processes call it; only their generators differ, and all of these are kept.

    Args:
        world: The processes.
        folder: Where to; that of the first process counts.
        parts: The state.
        gradients_are_same: Every process has the same gradients, or none; what differs could not be saved.

    Returns:
        The folder.
    """
    if world.num_processes == 1:
        return str(save_parts(folder, parts))
    world.monitor.meet("save_state")
    _gather_generators(world, parts, gradients_are_same)
    problem: Exception | None = None
    if world.process_index == 0:
        try:
            with world.monitor.long("save_state"):
                save_parts(folder, parts)
        except (CheckpointError, OSError) as error:
            problem = error
    problem, folder = world.object_of_first((problem, folder))
    if problem is not None:
        raise problem
    return str(folder)


def capture_together(world: World, parts: Sequence[Part], gradients_are_same: bool) -> dict[str, Encoded] | None:
    """The state of every part now, on the first process; None on the others, which have given what is their own."""
    if world.num_processes > 1:
        _gather_generators(world, parts, gradients_are_same)
    return encode_parts(parts) if world.process_index == 0 else None


def _gather_generators(world: World, parts: Sequence[Part], gradients_are_same: bool) -> None:
    if world.anyone(not gradients_are_same):
        raise CheckpointError(
            "a state is saved in the middle of an accumulation window, where each process has gradients of its own",
            "call save_state where engine.sync_gradients is True, after a backward outside no_sync",
        )
    generators = world.objects_of_all(random_state())
    for part in parts:
        if isinstance(part, RandomPart):
            part.of_all = generators


def load_together(world: World, folder: str | Path | StoredCheckpoint, parts: Sequence[Part]) -> None:
    """Restore every part from a folder, on every process or on none."""
    if world.num_processes == 1:
        load_parts(folder, parts)
        return
    world.monitor.meet("load_state")
    problem = stored = None
    try:
        stored = checked_parts(folder, parts)
    except (CheckpointError, OSError) as error:
        problem = error
    problems = world.objects_of_all(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, found in enumerate(problems):
        if found is not None:
            raise CheckpointError(
                f"rank {rank} cannot load {folder}: {found}", "put the folder where every process can read it"
            )
    assert stored is not None
    apply_parts(stored, parts)
