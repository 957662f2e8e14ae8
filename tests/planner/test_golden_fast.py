"""Peaks of packed, compiled, captured and fp8 steps, measured on a GPU and predicted without one."""

import importlib
import sys
from pathlib import Path

import pytest

from trimtab.techniques.apply import plain_values

PLANNER = Path(__file__).parents[2] / "benchmarks" / "planner"
sys.path.insert(0, str(PLANNER))
try:
    accuracy, fast_rows = (importlib.import_module(name) for name in ("accuracy", "fast_rows"))
finally:
    del sys.path[0]

ROWS = [row for row in accuracy.golden_rows() if row.file == "h200-fast"]
QUICK = ("fast bert, packed", "fast llama 1B, lora, packed", "fast llama 1B, fp8, plain")


def marked(row):
    return pytest.param(row, id=row.name, marks=[] if row.name in QUICK else [pytest.mark.slow])


@pytest.fixture(scope="module")
def predictor():
    return accuracy.Predictor()


@pytest.mark.parametrize("row", [marked(row) for row in ROWS])
def test_the_peak_is_the_measured_one(row, predictor):
    off = predictor.predict(row).allocated / row.measured["allocated"] - 1
    if row.name in accuracy.KNOWN:  # one that has become good must be taken off the list
        figure, why = accuracy.KNOWN[row.name]
        assert abs(off - figure) < 0.002, f"{off:+.2%}; was off by {figure:+.2%} because {why}"
    else:
        assert -accuracy.MOST_BELOW <= off <= accuracy.MOST_ABOVE, f"{off:+.2%}"


def test_rows_have_every_fast_technique_with_every_kind_of_model():
    assert len(fast_rows.ROWS) >= 22
    for technique in ("packed", "compiled", "graphs", "recompute all", "micro-batches"):
        models = {name.split(",")[0] for name in fast_rows.ROWS if technique in name}
        assert len(models) >= 2, technique
    assert len({name.split(",")[0] for name in fast_rows.ROWS}) == 6


def values_of(name):
    """A row as the file has it, but for what is measured."""
    memory = fast_rows.ROWS[name]["memory"] | {"micro_batch": 32}
    step = fast_rows.small_step(fast_rows.ROWS[name]) | {"rows": 32, "length": 256, "memory": memory}
    techniques = {key: memory[key] for key in ("padding", "gradient_checkpointing", "kernels", "loss")}
    techniques |= {"compile": step["train"]["compile"], "optimizer": "adamw", "attention_backend": "flash"}
    assert techniques.keys() <= plain_values().keys()
    numbers = {"micro_batch_size": memory["micro_batch"], "precision": "bf16"}
    return {"name": name, "step": step, "techniques": techniques, **numbers, "measured": {"allocated": 1}}


def test_a_row_of_the_file_is_predicted(tmp_path, monkeypatch):
    """With the techniques of its run, from the file if it is present."""
    names = ("bert, packed", "bert, packed, recompute all")
    rows = [{**values_of(name), "commit": "none", "seconds": 1.0, "predicted": {}} for name in names]
    text = fast_rows.written(rows, "none")
    for file in accuracy.GOLDEN.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "h200-fast.json").write_text(text)
    monkeypatch.setattr(accuracy, "GOLDEN", tmp_path)
    found = [row for row in accuracy.golden_rows() if row.file == "h200-fast"]
    assert [row.name for row in found] == [f"fast {name}" for name in names]
    assert {row.family for row in found} == {"bert"}
    predictor = accuracy.Predictor()
    plain, recomputed = (predictor.predict(row, with_replay=True) for row in found)
    assert plain.allocated > recomputed.allocated > 0
    assert plain.needed >= plain.allocated
    assert predictor.step_of(found[0]) != predictor.step_of(found[1])


def test_what_failed_is_told_and_not_written():
    failed = {"name": "bert, graphs", "failure": "no GPU"}
    assert "FAILED: no GPU" in fast_rows.shown(failed)
    good = {"name": "a", "measured": {"allocated": 2**20}, "predicted": {"allocated": 2**21}, "seconds": 1.0}
    assert "2.0000" in fast_rows.shown(good)


def test_a_small_row_runs(own_folder):
    found = fast_rows.measure("minilm, packed", is_small=True, is_alone=True)
    assert "failure" not in found
    assert found["techniques"]["padding"] == "none"
    assert found["measured"]["allocated"] > 0
