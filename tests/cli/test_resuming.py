"""Resume a named run on the command line and from Python: after a kill, after Ctrl-C, when finished, with changes."""

import json
import logging
import re
import signal
from pathlib import Path

import pytest
import yaml

import trimtab as library
from tiny_runs import lines_of, reproducible_lines, reviews, write_csv
from trimtab.log import logger

RUN = Path("runs/reviews/mine")


@pytest.fixture
def recipe(own_folder, tiny):
    """recipe.yaml and its data in the working folder."""
    write_csv(own_folder / "reviews.csv", reviews(100))
    values = {
        "model": tiny.folder("bert"),
        "data": {"train": "reviews.csv"},
        "train": {"epochs": 1, "batch_size": 9, "log_every": 3, "lr": 1e-3},
        "checkpoint": {"every": "4 steps"},
        "evaluate": {"every": "5 steps"},
        "name": "mine",
    }
    (own_folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return values


@pytest.fixture
def command(recipe, trimtab, caplog):
    """Run a command; its standard error includes the log."""

    def run(*arguments):
        logger.setLevel(logging.INFO)
        caplog.clear()
        done = trimtab(*arguments)
        return done._replace(err=done.err + caplog.text)

    return run


def status_of(run: Path) -> dict:
    try:
        return json.loads((run / "run.json").read_text())
    except (OSError, ValueError):  # not there yet
        return {}


def stop_long_run(fork_server, number: signal.Signals):
    """Start a run that would take 2,000 epochs, and send it a signal after its second checkpoint."""
    started = fork_server.start_command("train", "recipe.yaml", "--quiet", "--set", "train.epochs=2000")
    try:
        started.wait_until(lambda: status_of(RUN).get("saved_step", 0) >= 8, 120)
    finally:
        started.kill(number)
    return started.wait(), started.err


def test_from_a_kill_to_a_longer_run(command, fork_server):
    assert stop_long_run(fork_server, signal.SIGKILL)[0] == -signal.SIGKILL
    code, _, err = command("train", "recipe.yaml", "--quiet")
    assert code == 2
    assert re.search(
        r"mine contains an unfinished run \(step [\d,]+ of 20,000\)\n  cure: pass --resume to resume it, --fresh", err
    )
    code, out, _ = command("checkpoints", RUN)
    assert code == 0
    assert out.count(" valid") == 2
    steps = [int(step) for step in re.findall(r"step-(\d+)", out)]
    newest = max(steps)
    (RUN / f"checkpoints/step-{newest}/state.json").write_text("{}")
    assert command("checkpoints", RUN).out.count(" valid") == 1
    code, out, err = command("resume", RUN, "--set", "train.epochs=1", "--set", "train.log_every=5")
    assert code == 0, err
    assert f"skipping step-{newest}: " in err
    assert f"resuming from step-{min(steps)}" in err
    assert "train.epochs: 2000.0 → 1.0 (takes effect from now on)" in err
    assert "train.log_every: 3 → 5 (does not change results)" in err


def test_ctrl_c_prints_the_command_that_resumes(recipe, fork_server):
    code, err = stop_long_run(fork_server, signal.SIGINT)
    assert code == 75
    command = re.search(r"resume with: (trimtab resume \S+)", err)[1]
    resumed = fork_server.start_command(*command.split()[1:], "--set", "train.epochs=1")
    assert resumed.wait() == 0, resumed.err
    assert re.search(rf"resuming from step-\d+ \({RUN}\)", resumed.err)
    assert status_of(RUN)["state"] == "finished"
    assert [path.name for path in RUN.parent.iterdir()] == ["mine"]


def test_stopped_resumed_extended_replaced(command):
    assert command("train", "recipe.yaml", "--quiet", "--name", "whole").code == 0
    whole = reproducible_lines(RUN.parent / "whole")
    assert command("train", "recipe.yaml", "--quiet", "--resume", "--max-time", "0.001s").code == 75
    assert (status_of(RUN)["state"], status_of(RUN)["step"]) == ("stopped", 1)
    code, _, err = command("resume", RUN, "--set", "train.max_time=null")
    assert code == 0
    assert "resuming from step-1 " in err
    assert reproducible_lines(RUN) == whole
    code, _, err = command("resume", RUN, "--set", "train.epochs=2")
    assert code == 0
    assert "the schedule is stretched over all steps: the learning rate goes from 0 to 0.0005 at step 10" in err
    assert status_of(RUN)["num_steps"] == 20
    rates = [line["lr"] for line in lines_of(RUN) if line["step"] > 10 and "lr" in line]
    assert 0.0005 > rates[0] > rates[-1] == 0.0
    assert rates == sorted(rates, reverse=True)
    # Keys that must not change are refused all at once, before anything is loaded; the run is unchanged.
    before = {path: path.stat().st_mtime_ns for path in RUN.rglob("*")}
    code, _, err = command("resume", RUN, "--set", "seed=3", "--set", "train.batch_size=4", "--set", "train.epochs=3")
    assert code == 2
    assert "cannot be resumed with these changes" in err
    assert f"start a new run from the model: model: {RUN}" in err
    assert "train.batch_size: 9 → 4" in err
    assert "seed: 0 → 3" in err
    assert "train.epochs" not in err
    assert "rows to train on" not in err
    assert {path: path.stat().st_mtime_ns for path in RUN.rglob("*")} == before
    code, _, err = command("resume", RUN, "--from", "step-7")
    assert code == 2
    assert "has no checkpoint of step 7" in err
    code, _, err = command("train", "recipe.yaml", "--quiet")
    assert (code, "contains a finished run (step 20 of 20)" in err) == (2, True)
    for mistake in (["--data", "nowhere.csv"], ["--model", "no-such-model"], ["--set", "adapter={targets: [none]}"]):
        assert command("train", "recipe.yaml", "--quiet", "--fresh", *mistake).code == 2
        assert {path: path.stat().st_mtime_ns for path in RUN.rglob("*")} == before  # a mistake costs no run
    assert command("train", "recipe.yaml", "--quiet", "--fresh").code == 0
    assert reproducible_lines(RUN) == whole
    code, _, err = command("resume", "nowhere")
    assert (code, "nowhere is not a folder" in err) == (2, True)


class Stop:
    """A callback that interrupts the run, as Ctrl-C in a notebook does."""

    def on_step(self, state):
        if state.step == 5:
            signal.raise_signal(signal.SIGINT)


def test_resumed_from_python(recipe, caplog):
    caplog.set_level("INFO", logger="trimtab")
    with pytest.raises(library.errors.Stopped, match=f"trimtab resume {RUN}"):
        library.fit(library.Recipe(**recipe), callbacks=[Stop()], progress="quiet", device="cpu")
    result = library.resume(str(RUN), progress="quiet", device="cpu")
    assert f"resuming from step-5 ({RUN})" in caplog.text
    assert "name: " not in caplog.text  # the folder replaces the name, which is not reported as a change
    assert (result.fit.step, result.folder) == (10, RUN)
    for change in ("out=elsewhere", "name=other"):
        with pytest.raises(library.errors.RecipeError, match=r"leave (it|one of them) out"):
            library.resume(str(RUN), sets=[change], progress="quiet", device="cpu")
    assert not Path("elsewhere").exists()
    again = library.resume(str(RUN), sets=["train.epochs=2"], progress="quiet", device="cpu")
    assert again.fit.step == 20


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forked", "started"])
def test_resume_is_verified(command, fork_server, monkeypatch, start):
    if start == "forked":  # three processes that need not import everything; the kill is a real one
        monkeypatch.setattr("trimtab.commands.verify_resume.subprocess", fork_server)
    code, out, err = command("check", "recipe.yaml", "--resume")
    assert code == 0, err
    assert re.search(r"equal: killed, resumed from step 3; all \d\d+ tensors .* all \d+ lines", out)


def test_a_mistake_found_while_resume_is_verified(command, fork_server, monkeypatch):
    """It is found in a subprocess, and printed as one message like any other."""
    monkeypatch.setattr("trimtab.commands.verify_resume.subprocess", fork_server)
    code, out, err = command("check", "recipe.yaml", "--resume", "--set", "train.freeze.nothing=always")
    assert code == 2, out + err
    assert "nothing" in err
    assert "cure: " in err
