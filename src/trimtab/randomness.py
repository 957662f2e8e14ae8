"""Seed, save and restore all random number generators of the process.

A run resumes bit for bit only if every generator is restored, so all of them are listed in this one module.
"""

import hashlib
import operator
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.errors import RecipeError

RandomState = dict[str, Any]
DETERMINISTIC_WORKSPACES = ":4096:8"  # the value of CUBLAS_WORKSPACE_CONFIG that makes cuBLAS deterministic


def set_seed(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch (on every device).

    Args:
        seed: An integer from -2**63 to 2**64 - 1.

    Raises:
        RecipeError: The seed is not an integer in this range.
    """
    if not hasattr(seed, "__index__") or not -(2**63) <= operator.index(seed) < 2**64:
        raise RecipeError(f"seed: found {seed!r}", "an integer, such as 0")
    seed = operator.index(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_by_rank(rank: int) -> None:
    """Reseed this process's generators from its rank and their common state, so that dropout masks differ by rank.

    Rank 0 keeps its state: it draws the same numbers as a run with one process.
    """
    if rank > 0:
        state = torch.get_rng_state().numpy().tobytes()
        digest = hashlib.blake2b(state + rank.to_bytes(4, "big"), digest_size=8).digest()
        set_seed(int.from_bytes(digest, "big") >> 1)


def host_random_state() -> RandomState:
    """Return the state of the Python, NumPy and torch CPU generators, which samplers and collators draw from."""
    state: RandomState = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def random_state() -> RandomState:
    """Return the state of all generators: those of the host and one per accelerator."""
    return host_random_state() | torch_random_state()


def torch_random_state() -> RandomState:
    """Return the state of torch's generators on the CPU and each accelerator, which dropout draws from."""
    state: RandomState = {"torch": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if hasattr(module, "get_rng_state_all"):
            state[accelerator.type] = module.get_rng_state_all()
        else:
            state[accelerator.type] = [module.get_rng_state()]
    return state


def restore_random_state(state: RandomState) -> None:
    """Restore a state returned by `random_state`, `host_random_state` or `torch_random_state`.

    States of accelerators that this machine does not have are ignored: a run that resumes on another type of device
    cannot continue the same sequence of random numbers.
    """
    if "python" in state:
        random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in state:
        module = torch.get_device_module(accelerator)
        for index, device_state in enumerate(state[accelerator.type][: torch.accelerator.device_count()]):
            module.set_rng_state(device_state, index)


@contextmanager
def preserve_host_random_state() -> Iterator[None]:
    """Restore the host's generators on exit, no matter what was drawn from them inside."""
    state = host_random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def use_deterministic_kernels() -> None:
    """Use only deterministic kernels in this process; operations without one raise an error.

    Call it before the first use of cuBLAS, which reads CUBLAS_WORKSPACE_CONFIG once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_WORKSPACES)
    torch.use_deterministic_algorithms(True)
