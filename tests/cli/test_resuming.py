"""Killed, listed, resumed and extended on the command line, as a user does it."""

import json
import logging
import re
import signal
import sys
from pathlib import Path

import pytest
import yaml

from tiny_runs import lines_of, reviews, write_csv
from trimtab.cli.main import main
from trimtab.log import logger
from trimtab.runs.journal import OF_THE_MOMENT


@pytest.fixture
def trimtab(own_folder, tiny, monkeypatch, capsys, caplog):
    """Runs a command line in this process, in a folder that holds recipe.yaml and its data."""
    monkeypatch.setenv("COLUMNS", "200")
    write_csv(own_folder / "reviews.csv", reviews(100))
    recipe = {
        "model": tiny.folder("bert"),
        "data": {"train": "reviews.csv"},
        "train": {"epochs": 1, "batch_size": 9, "log_every": 3, "lr": 1e-3},
        "checkpoint": {"every": "4 steps"},
        "evaluate": {"every": "5 steps"},
        "out": "run",
    }
    (own_folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    before = list(logger.handlers), logger.level

    def run(*arguments):
        logger.setLevel(logging.INFO)
        caplog.clear()
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return ending.value.code or 0, out, err + caplog.text

    yield run
    logger.handlers[:], logger.level = before


def numbers(run: str) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in OF_THE_MOMENT} for line in lines_of(Path(run))]


def test_from_a_kill_to_a_longer_run(trimtab, own_folder, fork_server):
    killed = fork_server.start_command("train", "recipe.yaml", "--quiet", "--set", "train.epochs=2000")
    try:
        killed.wait_until(lambda: json.loads(text(own_folder / "run/run.json") or "{}").get("saved_step", 0) >= 8, 120)
    finally:
        killed.kill()
    assert killed.wait() == -signal.SIGKILL
    code, _, err = trimtab("train", "recipe.yaml", "--quiet")
    assert code == 2
    assert re.search(
        r"run holds a run that is not finished \(step [\d,]+ of 20,000\)\n  cure: --resume to go on, --fresh", err
    )
    code, out, _ = trimtab("checkpoints", "run")
    assert code == 0
    assert out.count(" valid") == 2
    steps = [int(step) for step in re.findall(r"step-(\d+)", out)]
    newest = max(steps)
    (own_folder / f"run/checkpoints/step-{newest}/state.json").write_text("{}")
    assert trimtab("checkpoints", "run")[1].count(" valid") == 1
    code, out, err = trimtab("resume", "run", "--set", "train.epochs=1", "--set", "train.log_every=5")
    assert code == 0, err
    assert f"step-{newest} is passed over" in err
    assert f"resuming from step-{min(steps)}" in err
    assert "train.epochs: 2000.0 → 1.0 (takes effect from here on)" in err
    assert "train.log_every: 3 → 5 (does not change results)" in err


def text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_stopped_resumed_extended_replaced(trimtab, own_folder):
    assert trimtab("train", "recipe.yaml", "--quiet", "--out", "whole")[0] == 0
    assert trimtab("train", "recipe.yaml", "--quiet", "--resume", "--max-time", "0.001s")[0] == 75
    status = json.loads(Path("run/run.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 1)
    code, _, err = trimtab("resume", "run", "--set", "train.max_time=null")
    assert code == 0
    assert "resuming from step-1 " in err
    assert numbers("run") == numbers("whole")
    code, _, err = trimtab("resume", "run", "--set", "train.epochs=2")
    assert code == 0
    assert "the schedule is stretched over all steps: the learning rate goes from 0 to 0.0005 at step 10" in err
    assert json.loads(Path("run/run.json").read_text())["num_steps"] == 20
    rates = [line["lr"] for line in lines_of(Path("run")) if line["step"] > 10 and "lr" in line]
    assert 0.0005 > rates[0] > rates[-1] == 0.0
    assert rates == sorted(rates, reverse=True)
    # what would make it another run: all such keys at once, before anything is loaded, and the run is as it was
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    code, _, err = trimtab("resume", "run", "--set", "seed=3", "--set", "train.batch_size=4", "--set", "train.epochs=3")
    assert code == 2
    assert "cannot go on with another value of these keys" in err
    assert "train.batch_size: 9 → 4" in err
    assert "seed: 0 → 3" in err
    assert "train.epochs" not in err
    assert "rows to train on" not in err
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
    code, _, err = trimtab("resume", "run", "--from", "step-7")
    assert code == 2
    assert "has no checkpoint of step 7" in err
    code, _, err = trimtab("train", "recipe.yaml", "--quiet")
    assert (code, "holds a finished run (step 20 of 20)" in err) == (2, True)
    assert trimtab("train", "recipe.yaml", "--quiet", "--fresh")[0] == 0
    assert numbers("run") == numbers("whole")
    code, _, err = trimtab("resume", "nowhere")
    assert (code, "nowhere is no folder" in err) == (2, True)


@pytest.mark.parametrize("start", ["forked", pytest.param("started", marks=pytest.mark.slow)])
def test_the_proof(trimtab, fork_server, monkeypatch, start):
    if start == "forked":  # three processes that need not import everything; the kill is a real one
        monkeypatch.setattr("trimtab.commands.verify_resume.subprocess", fork_server)
    code, out, err = trimtab("check", "recipe.yaml", "--resume")
    assert code == 0, err
    assert re.search(r"equal: killed, resumed from step 3, .* all \d\d+ tensors .* all \d+ lines", out)


def test_a_recipe_that_cannot_be_proven(trimtab, fork_server, monkeypatch):
    """The mistake is found in another process, and comes as one message all the same."""
    monkeypatch.setattr("trimtab.commands.verify_resume.subprocess", fork_server)
    code, out, err = trimtab("check", "recipe.yaml", "--resume", "--set", "data.text=nothing")
    assert code == 2, out + err
    assert "nothing" in err
    assert "cure: " in err
