"""Shared by the tests that need a GPU."""

import warnings

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _sync_debug_mode_has_warned():
    """The first call of torch's mode that finds host-device syncs warns that it is a prototype: not in a test."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn")
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _no_sync_debug_mode_after():
    """A test that fails inside the mode does not take the ones after it along."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
