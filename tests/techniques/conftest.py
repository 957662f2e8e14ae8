"""Shared by the tests of techniques: runs of four steps that differ in one setting."""

import itertools

import pytest

from tiny_runs import reviews
from trimtab import Recipe, fit


@pytest.fixture
def four_steps(tiny, tmp_path):
    """Trains a tiny BERT for four steps, in a new folder each time; keywords are sections of the recipe."""
    numbers = itertools.count()

    def train(callbacks=(), resume=False, **sections):
        settings = {"epochs": 1, "lr": 1e-3, "log_every": 1, "max_grad_norm": 0.5, "weight_decay": 0.1}
        usual = {
            "model": tiny.folder("bert"),
            "data": {"train": reviews(32), "eval": reviews(24, first=1000)},
            "checkpoint": {"every": "1 steps", "keep": 9},
            "out": str(tmp_path / f"run-{next(numbers)}"),
        }
        sections["train"] = settings | sections.get("train", {})
        options = {"callbacks": callbacks, "progress": "quiet", "device": "cpu", "resume": resume}
        return fit(Recipe(**usual | sections), **options)

    return train


@pytest.fixture
def train(four_steps):
    """Trains with a value of memory.update."""

    def train(update, callbacks=(), resume=False, memory=None, **sections):
        return four_steps(callbacks, resume, memory={"update": update, **(memory or {})}, **sections)

    return train
