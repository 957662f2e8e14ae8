"""A run that has a name resumes like any other: from the command line, from Python, after a kill and after Ctrl-C."""

import json
import re
import signal
from pathlib import Path

import pytest
import yaml

import trimtab
from tiny_runs import reviews, write_csv


@pytest.fixture
def recipe(own_folder, tiny):
    """recipe.yaml and its data in the working folder."""
    write_csv(own_folder / "reviews.csv", reviews(100))
    values = {
        "model": tiny.folder("bert"),
        "data": {"train": "reviews.csv"},
        "train": {"epochs": 1, "batch_size": 9, "log_every": 3, "lr": 1e-3},
        "checkpoint": {"every": "4 steps"},
    }
    (own_folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return values


def saved_step(run: Path) -> int:
    try:
        return json.loads((run / "run.json").read_text()).get("saved_step", 0)
    except (OSError, ValueError):
        return 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_name_given_on_the_command_line(recipe, own_folder, fork_server, number):
    run = own_folder / "runs" / "reviews" / "mine"
    words = ("--name", "mine", "--quiet", "--set", "train.epochs=2000")
    stopped = fork_server.start_command("train", "recipe.yaml", *words, cwd=own_folder)
    stopped.wait_until(lambda: saved_step(run) >= 8, 120)
    stopped.kill(number)
    code = stopped.wait()
    command = "trimtab resume runs/reviews/mine"
    if number == signal.SIGINT:
        assert code == 75
        command = re.search(r"go on with: (trimtab resume \S+)", stopped.err)[1]
    resumed = fork_server.start_command(*command.split()[1:], "--set", "train.epochs=1", cwd=own_folder)
    assert resumed.wait() == 0, resumed.err
    assert re.search(r"resuming from step-\d+ \(runs/reviews/mine\)", resumed.err)
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    assert [path.name for path in run.parent.iterdir()] == ["mine"]


class Stop:
    """A callback that interrupts the run, as Ctrl-C in a notebook does."""

    def on_step(self, state):
        if state.step == 5:
            signal.raise_signal(signal.SIGINT)


def test_a_name_in_the_recipe_and_from_python(recipe, own_folder, caplog):
    caplog.set_level("INFO", logger="trimtab")
    asked = trimtab.Recipe(**recipe, name="mine")
    with pytest.raises(trimtab.errors.Stopped, match="trimtab resume runs/reviews/mine"):
        trimtab.fit(asked, callbacks=[Stop()], progress="quiet", device="cpu")
    result = trimtab.resume("runs/reviews/mine", progress="quiet", device="cpu")
    assert "resuming from step-5 (runs/reviews/mine)" in caplog.text
    assert "name: " not in caplog.text  # that the folder has taken the place of the name is no news
    assert (result.fit.step, result.folder) == (10, Path("runs/reviews/mine"))
    again = trimtab.resume("runs/reviews/mine", sets=["train.epochs=2"], progress="quiet", device="cpu")
    assert again.fit.step == 20


@pytest.mark.parametrize("change", ["out=elsewhere", "name=other"])
def test_resuming_never_starts_a_run_elsewhere(recipe, own_folder, change):
    trimtab.fit(trimtab.Recipe(**recipe, name="mine"), progress="quiet", device="cpu")
    with pytest.raises(trimtab.errors.RecipeError, match=r"leave (it|one of them) out"):
        trimtab.resume("runs/reviews/mine", sets=[change], progress="quiet", device="cpu")
    assert not Path("elsewhere").exists()
