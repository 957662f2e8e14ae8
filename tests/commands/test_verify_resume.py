"""The comparison behind `trimtab check --resume` finds what differs: a proof that cannot fail proves nothing."""

import shutil
from pathlib import Path

import pytest

from tiny_runs import reviews, write_csv
from trimtab import Recipe, fit
from trimtab.commands.verify_resume import _compare


@pytest.fixture
def trained(own_folder, tiny):
    """Trains eight steps at a learning rate and gives the run's folder."""
    data = write_csv(own_folder / "reviews.csv", reviews(80))

    def train(name, lr):
        recipe = Recipe(
            model=tiny.folder("bert"),
            data={"train": str(data)},
            train={"lr": lr, "max_steps": 8, "log_every": 1},
            out=name,
        )
        fit(recipe, progress="quiet", device="cpu")
        return Path(name)

    return train


def test_what_differs_is_named(trained):
    whole = trained("whole", 1e-3)
    same = Path(shutil.copytree(whole, "same"))
    proof = _compare(whole, same)
    assert proof.difference == ""
    assert proof.num_tensors > 60
    assert proof.num_lines > 8
    almost = _compare(whole, trained("almost", 1e-3 * (1 + 1e-6))).difference
    assert "differs by up to" in almost
    journal = same / "metrics.jsonl"
    journal.write_text(journal.read_text().replace('"step": 5', '"step": 6', 1))
    assert "of metrics.jsonl" in _compare(whole, same).difference
