"""Shared by all tests: one thread a process, no hub, and nothing left behind."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible_and_clean():
    """Every test starts from one seed; what it does to the environment or the default dtype is an error."""
    torch.manual_seed(0)
    environment = dict(os.environ)
    yield
    changed = {key for key in environment.keys() | os.environ.keys() if environment.get(key) != os.environ.get(key)}
    own_of_torch = {key for key in changed if key.startswith(("KMP_", "TORCHINDUCTOR_"))}
    assert changed - own_of_torch <= {"PYTEST_CURRENT_TEST"}, changed
    assert torch.get_default_dtype() is torch.float32
