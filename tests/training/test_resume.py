"""A run that is stopped, rewound or started again: what is owed is done, what is over stays over."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tiny_runs import reproducible_lines, reviews, write_csv
from trimtab import Recipe, fit, resume
from trimtab.errors import Stopped, TrimtabError
from trimtab.inference.load import load
from trimtab.recipe.schema import ModelSettings
from trimtab.runs.run_folder import read_status
from trimtab.training.loop import Trainer


class Signals:
    """Sends a signal to its own process after a step."""

    def __init__(self, step):
        self._step = step

    def on_step(self, state):
        if state.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


class BadAt:
    """A loss that is NaN at the given calls, of all that train."""

    def __init__(self, *calls):
        self._calls, self.count = calls, 0

    def __call__(self, outputs, batch):
        if not outputs.logits.requires_grad:
            return outputs.logits.mean() * 0
        self.count += 1
        loss = torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])
        return loss * float("nan") if self.count in self._calls else loss


@pytest.fixture
def recipe(own_folder, tiny):
    write_csv(own_folder / "reviews.csv", reviews(90))
    write_csv(own_folder / "others.csv", reviews(20, first=500))

    def make(out="run", **sections):
        train = {"epochs": 2, "batch_size": 9, "lr": 1e-3, "log_every": 1} | sections.pop("train", {})
        return Recipe(
            model=tiny.folder("bert"),
            data={"train": "reviews.csv", "eval": "others.csv"},
            train=train,
            checkpoint={"every": "4 steps"} | sections.pop("checkpoint", {}),
            out=out,
            **sections,
        )

    return make


def test_an_evaluation_that_was_due_when_the_signal_came_is_made_up_for(recipe):
    # weighted rows in micro-batches: the expected weight of a window is a part of the state
    settings = {
        "evaluate": {"every": "5 steps"},
        "train": {"class_weights": {"good": 2.7}},
        "memory": {"micro_batch": 2},
    }
    fit(recipe("whole", **settings), progress="quiet")
    with pytest.raises(Stopped):
        fit(recipe(**settings), callbacks=[Signals(5)], progress="quiet")
    assert [line["step"] for line in reproducible_lines("run") if "eval_loss" in line] == []
    fit(recipe(**settings), progress="quiet", resume=True)
    assert reproducible_lines("run") == reproducible_lines("whole")


def test_a_rewind_over_the_end_of_an_epoch_goes_on_in_the_right_one(recipe, monkeypatch):
    places = []
    one_step = Trainer._one_step

    def noted(self, *arguments):
        places.append((self._position.locate(self.state.step), self.parts.batches.epoch, self.state.step))
        return one_step(self, *arguments)

    monkeypatch.setattr(Trainer, "_one_step", noted)
    loss = BadAt(13)
    settings = {"train": {"epochs": 3, "on_nan": "rewind"}, "checkpoint": {"every": "8 steps"}}
    result = fit(recipe(**settings), loss=loss, progress="quiet")
    assert result.fit.step == 30
    assert all(place[0] == epoch for place, epoch, _ in places)
    at = next(index for index in range(1, len(places)) if places[index][2] < places[index - 1][2])
    assert (places[at][2], places[at][0]) == (8, (1, 3)), "back to step 8, on with the rows after the bad ones"


def test_a_rewind_to_before_something_began_to_train(recipe):
    settings = {"train": {"freeze": {"base": "5 steps"}, "on_nan": "rewind"}}
    result = fit(recipe(**settings), loss=BadAt(7), progress="quiet")
    assert result.fit.step == 20


def test_a_run_that_ended_early_stays_so_until_it_is_asked_for_more(recipe):
    settings = {"early_stopping": {"patience": 1, "min_delta": 10}, "evaluate": {"every": "3 steps"}}
    first = fit(recipe(**settings), progress="quiet")
    assert (first.fit.step, first.fit.stop_reason) == (6, "early stopping")
    for _ in range(2):
        again = fit(recipe(**settings), progress="quiet", resume=True)
        assert (again.fit.step, again.fit.stop_reason) == (6, "early stopping")
    longer = resume("run", sets=["train.epochs=3", "early_stopping.patience=2"], progress="quiet", device="cpu")
    assert longer.fit.step == 12


def test_nothing_is_said_to_be_saved_that_was_not(recipe):
    with pytest.raises(TrimtabError, match="no checkpoint was saved: checkpoint.every is null") as stopped:
        fit(recipe(checkpoint={"every": None}), callbacks=[Signals(2)], progress="quiet")
    assert not isinstance(stopped.value, Stopped)


def test_another_way_from_an_earlier_state_seeks_its_own_best(recipe):
    fit(recipe(evaluate={"every": "4 steps", "metric": "loss"}, checkpoint={"keep": 9}), progress="quiet")
    changed = recipe(evaluate={"every": "4 steps", "metric": "loss"}, checkpoint={"keep": 9}, train={"lr": 1e-9})
    result = fit(changed, progress="quiet", resume="step-8")
    assert result.fit.best_step is not None
    assert result.fit.best_step > 8
    kept = [path.name for path in Path("run").glob("best*")]
    assert "best" in kept
    assert any(name.startswith("best-step-") for name in kept)


def test_a_best_model_of_the_same_step_and_other_weights_is_not_damaged(recipe):
    """After a kill between a best model and the next save, the resumed run writes the best of that step again."""

    class Dies:
        def on_step(self, state):
            if state.step == 8:
                raise RuntimeError

    settings = {"evaluate": {"every": "7 steps", "metric": "loss"}}
    with pytest.raises(RuntimeError):
        fit(recipe(**settings, checkpoint={"every": "5 steps"}), callbacks=[Dies()], progress="quiet")
    first, best = read_status(Path("run"))["best_files"], Path("run/best/model.safetensors").read_bytes()
    with pytest.raises(RuntimeError):
        resume("run", sets=["train.lr=2e-3"], callbacks=[Dies()], progress="quiet", device="cpu")
    second = read_status(Path("run"))["best_files"]
    assert first["step"] == second["step"] == 7
    assert Path("run/best/model.safetensors").read_bytes() != best
    assert load("run").device.type == "cpu"


def test_momentum_of_a_part_that_begins_to_train_later(recipe):
    train = {"optimizer": "sgd", "momentum": 0.5, "freeze": {"base": "3 steps"}, "epochs": 1}
    assert fit(recipe(train=train), progress="quiet").fit.step == 10


def test_code_that_comes_with_a_model_is_never_run_in_silence(recipe, caplog):
    plain = recipe(train={"epochs": 0.1})
    with caplog.at_level("INFO", "trimtab"):
        fit(plain, progress="quiet")
        assert "trust_remote_code" not in caplog.text
        trusted = {"name": plain.model, "trust_remote_code": True}
        fit(plain.model_copy(update={"model": ModelSettings(**trusted), "out": "trusted"}), progress="quiet")
    assert "model.trust_remote_code is on" in caplog.text


def test_a_resumed_run_keeps_the_precision_it_started_in(recipe, monkeypatch, caplog):
    caplog.set_level("INFO", logger="trimtab")
    settings = {"train": {"epochs": 1}, "checkpoint": {"every": "2 steps"}, "evaluate": {"every": "100 steps"}}
    monkeypatch.setenv("TRIMTAB_CPU_PRECISION", "bf16")
    whole = fit(recipe("whole", **settings), progress="quiet", device="cpu")
    with pytest.raises(Stopped):
        fit(recipe(**settings), callbacks=[Signals(2)], progress="quiet", device="cpu")
    monkeypatch.setenv("TRIMTAB_CPU_PRECISION", "fp32")
    monkeypatch.setattr("trimtab.log._logged_once", set())
    Path("run/plan.json").unlink()
    resumed = resume("run", progress="quiet", device="cpu")
    assert whole.plan.precision == resumed.plan.precision == "bf16"
    assert "the run stays in bf16, with which it started; precision auto would take fp32 on this device" in caplog.text
    assert "bf16 is emulated on this CPU" in caplog.text
    assert reproducible_lines("run")[-1] == reproducible_lines("whole")[-1]
