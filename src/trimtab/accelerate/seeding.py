"""`set_seed` with Accelerate's arguments."""

from trimtab.accelerate.latest import PartialState
from trimtab.randomness import set_seed as seed_all
from trimtab.randomness import use_deterministic_kernels


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch.

    Args:
        seed: The seed.
        device_specific: Add the index of the process, so that processes draw different numbers.
        deterministic: Use only kernels that give the same bits every time, in the whole process.
    """
    seed_all(seed + PartialState().process_index if device_specific else seed)
    if deterministic:
        use_deterministic_kernels()
