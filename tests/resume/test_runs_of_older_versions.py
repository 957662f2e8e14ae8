"""Runs that an older version of trimtab made resume with this one: its folder, its plan, its checkpoint.

`before_techniques/` holds two runs that were stopped by a signal after 4 of 8 steps, with their data and models, and
the trainable weights that the same version had after resuming both to the end.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rounding import rounding_error
from tiny_runs import lines_of
from trimtab import resume

OLD = Path(__file__).parent / "before_techniques"
NUM_ROUNDINGS = 200  # on the way from step 4 to step 8, by which processors may differ


@pytest.fixture
def old_runs(tmp_path, monkeypatch):
    """A copy somewhere else, as after moving a folder to another machine."""
    shutil.copytree(OLD, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")


@pytest.mark.parametrize("name", ["classify", "lora"])
def test_an_older_run_resumes_to_the_same_weights(name, old_runs):
    before = lines_of(Path(name))
    stored_plan = json.loads(Path(name, "plan.json").read_text())
    result = resume(name, progress="quiet")
    assert result.fit.step == 8
    lines = lines_of(Path(name))
    assert lines[: len(before)] == before  # the history was kept, and the run went on from step 4
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    plan = json.loads(Path(name, "plan.json").read_text())
    assert {key: plan[key] for key in stored_plan if not key.startswith("predicted")} == {
        key: value for key, value in stored_plan.items() if not key.startswith("predicted")
    }
    expected = load_file(OLD / f"{name}-after-8-steps.safetensors")
    found = load_file(Path(name, "checkpoints", "step-8", "model.safetensors"))
    assert found.keys() == expected.keys()
    largest = torch.stack([tensor.abs().max() for tensor in expected.values()])
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=rounding_error(largest, NUM_ROUNDINGS))
