"""`set_seed` and `synchronize_rng_state` with Accelerate's arguments."""

import torch

from trimtab.accelerate.shared_state import PartialState
from trimtab.randomness import set_seed as seed_all
from trimtab.randomness import use_deterministic_kernels


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch.

    Args:
        seed: The seed.
        device_specific: Whether to add the rank to the seed, so that each process draws different numbers.
        deterministic: Whether to use only deterministic kernels from now on.
    """
    seed_all(seed + PartialState().process_index if device_specific else seed)
    if deterministic:
        use_deterministic_kernels()


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Copy the state of a random number generator from rank 0 to all processes.

    Args:
        rng_type: "torch", "generator", or the type of an accelerator, such as "cuda".
        generator: The generator to synchronize, if `rng_type` is "generator".
    """
    world = PartialState().world
    kind = getattr(rng_type, "value", rng_type)
    if kind == "generator":
        if generator is None:
            raise ValueError("rng_type='generator' needs a generator")
        generator.set_state(world.broadcast_object(generator.get_state()))
    else:
        module = torch if kind == "torch" else torch.get_device_module(kind)
        module.set_rng_state(world.broadcast_object(module.get_rng_state()))


def synchronize_rng_states(rng_types: list[str], generator: torch.Generator | None = None) -> None:
    """Call `synchronize_rng_state` for several types."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)
