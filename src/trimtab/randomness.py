"""Every random number generator of the process as one value: seed it, take it, put it back.

A run resumes bit for bit only if each generator does, so the list lives in this one place.
"""

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

RandomState = dict[str, Any]
DETERMINISTIC_WORKSPACES = ":4096:8"  # with work memory of one of two sizes cuBLAS gives the same bits every time


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (every device) alike."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def diverge(rank: int) -> None:
    """Let a process draw other numbers than its peers, which stood at the same state: dropout is not to repeat.

    The first process goes on as it would alone. What the others draw follows from that state and their rank.
    """
    if rank > 0:
        state = torch.get_rng_state().numpy().tobytes()
        digest = hashlib.blake2b(state + rank.to_bytes(4, "big"), digest_size=8).digest()
        set_seed(int.from_bytes(digest, "big") >> 1)


def host_random_state() -> RandomState:
    """The generators of Python, NumPy and torch's CPU: those that samplers and collators draw from."""
    state: RandomState = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def random_state() -> RandomState:
    """Every generator: those of the host and one for each accelerator."""
    return host_random_state() | torch_random_state()


def torch_random_state() -> RandomState:
    """The generators of torch alone, on the CPU and on each accelerator: those that a model's own layers draw from."""
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
    """Put back what `random_state`, `host_random_state` or `torch_random_state` took.

    Accelerators that this machine does not have are left out: a run that moves to another kind of device cannot
    continue its random numbers there.
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
def host_randomness_kept() -> Iterator[None]:
    """Whatever is drawn inside leaves no trace: the host's generators are put back at the end."""
    state = host_random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def use_deterministic_kernels() -> None:
    """From now on only kernels that give the same bits every time, in the whole process; an error where there is none.

    cuBLAS reads its setting when it is first used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_WORKSPACES)
    torch.use_deterministic_algorithms(True)
