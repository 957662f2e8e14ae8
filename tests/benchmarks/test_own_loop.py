"""benchmarks/own_loop.py: every variant trains, and the table has a line for each."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def own_loop(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("own_loop")
    for name in ("own_loop", "record"):
        sys.modules.pop(name)


def test_every_variant_is_timed(own_loop, monkeypatch, tmp_path, capsys):
    names = [name for name in own_loop.VARIANTS if name != "Accelerate" and "compile" not in name]
    monkeypatch.setattr(own_loop, "variants_here", lambda device: names)  # Accelerate's settings are global
    monkeypatch.setattr(own_loop.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["own_loop.py", "--small", "--out", str(tmp_path / "found.json")])
    own_loop.main()
    report, table = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    assert list(report["ms_per_step"]) == names
    assert all(f"| {name} | " in table for name in names)
    # the same seed for all; graphs are not captured here
    assert report["last_loss"]["trimtab"] == report["last_loss"]["trimtab, cuda_graphs"]
