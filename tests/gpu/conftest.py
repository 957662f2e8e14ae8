"""Shared by the tests that need a GPU."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

_FRESH = """
import json, sys
from trimtab import Recipe, fit
result = fit(Recipe(**json.load(open(sys.argv[1]))), progress="quiet")
print(json.dumps([result.plan.predicted_peak_bytes, result.fit.peak_memory_bytes]))
"""


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


@pytest.fixture
def no_cache(monkeypatch):
    """Nothing that an earlier test has predicted or tokenized."""
    monkeypatch.setenv("TRIMTAB_CACHE", "off")


@pytest.fixture
def no_cap():
    """Start with an empty device, and take back the limit that a budget has set."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.fixture
def fresh_peaks(tmp_path):
    """Trains a recipe in a new process, whose allocator has seen nothing else; returns its predicted and real peak."""

    def train(recipe):
        path = tmp_path / "recipe.json"
        path.write_text(json.dumps(recipe))
        command = [sys.executable, "-c", _FRESH, str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"TRIMTAB_CACHE": "off"}
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return train
