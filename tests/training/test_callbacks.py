"""What is given as a callback or as an own metric is called, or refused before anything is loaded."""

import pytest

from trimtab import Recipe, fit
from trimtab.data.metrics import higher_is_better
from trimtab.errors import RecipeError
from trimtab.training.callbacks import check_callbacks

NOWHERE = Recipe(model="no-such-model", data={"train": "no-such-file.csv"})


class OnStep:
    def on_step(self, state):
        pass


class Misspelt:
    def on_step(self, state):
        pass

    def on_evla(self, state, metrics):
        pass


class OfAnotherLibrary:
    def on_train_begin(self, args, state, control):
        pass


class Helpers:
    on_save = None  # switched off in an object of this class

    def on_end(self, state):
        pass

    def _on_milestone(self):
        pass

    def one_step(self):
        pass


@pytest.mark.parametrize(
    ("callback", "problem", "cure"),
    [
        (type("Typo", (), {"on_stpe": lambda self, state: None})(), "on_stpe would never be called", "mean on_step?"),
        (Misspelt(), r"callbacks\[1\], a Misspelt: on_evla would never be called", "mean on_eval?"),
        (
            OfAnotherLibrary(),
            "on_train_begin would never be called",
            "The events are on_step, on_eval, on_save, on_end",
        ),
        (lambda state: None, "<lambda>, has no method that would be called", r"on_step\(state\)"),
        (print, "print, has no method that would be called", r"on_eval\(state, metrics\)"),
        (OnStep, "is the class OnStep", r"OnStep\(\)"),
        (object(), "a object, has no method", "on_end"),
    ],
)
def test_what_would_never_be_called_is_refused(callback, problem, cure):
    with pytest.raises(RecipeError, match=problem) as caught:
        fit(NOWHERE, callbacks=[OnStep(), callback])
    assert cure.replace("\\", "") in caught.value.cure


def test_callbacks_with_helpers_are_fine():
    check_callbacks([OnStep(), Helpers()])


@pytest.mark.parametrize("name", ["accuracy", "loss", "pearson"])
def test_an_own_metric_does_not_replace_one_of_ours(name):
    assert higher_is_better(name) in (True, False)  # it is one of ours
    with pytest.raises(RecipeError, match=f"{name} is the name of a built-in metric\n.*my_{name}"):
        fit(NOWHERE, metrics={name: lambda logits, batch: logits.mean(-1)})


def test_an_own_metric_is_a_function():
    with pytest.raises(RecipeError, match="metrics: level is a float"):
        fit(NOWHERE, metrics={"level": 0.5})
