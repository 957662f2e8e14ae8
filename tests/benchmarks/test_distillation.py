"""benchmarks/distillation.py: seeds in parallel processes, and the table of what they found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_runs import reviews

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "distillation.py"
SMALL = ["--max-length", "16", "--batch-size", "8", "--epochs", "1", "--teacher-epochs", "1", "--layers", "1"]


def run(*arguments, folder):
    environment = os.environ | {"TRIMTAB_CACHE": str(folder / "cache")}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows").mkdir()
    for first, part in ((0, "train"), (16, "test")):
        found = [row | {"text": f"{row['text']} {part}"} for row in reviews(16, first)]
        found.append(found[0] | {"text": "in both files"})
        (tmp_path / "rows" / f"some_{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return tmp_path / "rows"


@pytest.mark.slow
def test_seeds_in_parallel_give_one_table(tiny, tmp_path, rows):
    options = ["--model", tiny.folder("bert"), "--data", rows, "--device", "cpu", *SMALL]
    out = tmp_path / "found.json"
    done = run("--work", tmp_path / "work", *options, "--seeds", 3, 4, "--parallel", 2, "--out", out, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert [seed["seed"] for seed in report["seeds"]] == [3, 4]
    for seed in report["seeds"]:
        assert seed["rows"] == {"train": 17, "test": 16}, "a test row that is a training row is left out"
        assert set(seed["accuracy"]) == {"teacher", "start", "labels only", "teacher and labels"}
        assert Path(seed["folders"]["student"]).is_dir()
    assert "mean and standard deviation over 2 seeds" in done.stdout
    assert "times as fast as its teacher with 1 row" in done.stdout
    assert list(report["speed"]["cpu"]) == ["1", "32"]
    alone = run("--work", tmp_path / "alone", *options, "--seeds", 4, "--out", out, "--no-speed", folder=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert json.loads(out.read_text())["seeds"][0]["accuracy"] == report["seeds"][1]["accuracy"]


@pytest.mark.slow
def test_a_seed_that_fails_is_reported(tmp_path, rows):
    options = ["--model", tmp_path / "nothing", "--data", rows, "--device", "cpu", "--seeds", 0, 1, "--parallel", 2]
    out = tmp_path / "found.json"
    done = run("--work", tmp_path / "work", *options, "--out", out, "--no-speed", folder=tmp_path)
    assert done.returncode == 1
    assert "seed 0 failed:" in done.stdout
    assert json.loads(out.read_text())["seeds"] == []
