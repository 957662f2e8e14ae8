"""Saving and loading by all ranks: rank 0 writes the state that all ranks share, and all ranks learn the outcome.

Currently only random number generators differ between ranks. Support for a sharded state, of which every rank holds a
part, would belong here: in `collective_save`, each rank would write its shards between the two exchanges, and rank 0
the manifest after them; in `collective_load`, each rank would read the shards that it needs. Callers would not change.
"""

from collections.abc import Sequence
from pathlib import Path

from trimtab.checkpoint.codec import Encoded
from trimtab.checkpoint.state import Part, RandomPart, StatefulPart, apply_parts, checked_parts, encode_parts
from trimtab.checkpoint.store import StoredCheckpoint, write_checkpoint
from trimtab.distributed.world import World
from trimtab.errors import CheckpointError
from trimtab.log import log_info_once
from trimtab.randomness import random_state


def collective_save(
    world: World, folder: str | Path, parts: Sequence[Part], gradients_are_same: bool, may_be_alone: bool = False
) -> str:
    """Write every part to a folder. All ranks call it; the generators of all ranks are saved.

    Args:
        world: The processes.
        folder: The checkpoint's folder; the value on rank 0 is used.
        parts: The state.
        gradients_are_same: Whether all ranks have the same gradients, or none. Different ones could not be saved.
        may_be_alone: Whether rank 0 saves alone if the other ranks do not call it; its generators stand for theirs.

    Returns:
        The folder.
    """
    if may_be_alone and world.process_index == 0 and not world.monitor.others_enter("save_state"):
        return _save_alone(world, folder, parts)
    world.monitor.meet("save_state")
    _gather_generators(world, parts, gradients_are_same)
    problem: Exception | None = None
    if world.process_index == 0:
        try:
            with world.monitor.long("save_state"):
                write_checkpoint(folder, encode_parts(parts))
        except (CheckpointError, OSError) as error:
            problem = error
    problem, folder = world.broadcast_object((problem, folder))
    if problem is not None:
        raise problem
    return str(folder)


def _save_alone(world: World, folder: str | Path, parts: Sequence[Part]) -> str:
    log_info_once(
        "save_state was called on rank 0 only: when the state is loaded, the other ranks continue with rank 0's random "
        "state. If processes draw different random numbers, call save_state on all of them"
    )
    for part in parts:
        if isinstance(part, RandomPart):
            part.of_all = [random_state()] * world.num_processes
    with world.monitor.long("save_state"):
        write_checkpoint(folder, encode_parts(parts))
    return str(folder)


def collective_capture(world: World, parts: Sequence[Part], gradients_are_same: bool) -> dict[str, Encoded] | None:
    """Encode the current state of every part on rank 0; None on the other ranks. All ranks call it."""
    _gather_generators(world, parts, gradients_are_same)
    return encode_parts(parts) if world.process_index == 0 else None


def _gather_generators(world: World, parts: Sequence[Part], gradients_are_same: bool) -> None:
    if world.num_processes == 1:
        return
    if world.anyone(not gradients_are_same):
        raise CheckpointError(
            "the state cannot be saved here: inside this accumulation window the gradients of the ranks differ",
            "call save_state where engine.sync_gradients is True, after a backward outside no_sync",
        )
    generators = world.all_gather_object(random_state())
    for part in parts:
        if isinstance(part, RandomPart):
            part.of_all = generators
        elif isinstance(part, StatefulPart):
            part.gather()


def collective_load(world: World, folder: str | Path | StoredCheckpoint, parts: Sequence[Part]) -> None:
    """Restore every part from a folder, on every rank or on none."""
    world.monitor.meet("load_state")
    problem: Exception | None = None
    try:
        stored = checked_parts(folder, parts)
    except (CheckpointError, OSError) as error:
        problem = error
    problems = world.all_gather_object(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, found in enumerate(problems):
        if found is not None:
            raise CheckpointError(
                f"rank {rank} cannot load {folder}: {found}", "put the folder where every process can read it"
            )
    apply_parts(stored, parts)
