"""The same recipe on one and on three processes: the same losses, the same metrics, the same model."""

import json
from functools import cache, partial

import pytest
import recipe_runs
import torch
from launching import run_alone, run_together
from safetensors.torch import load_file

from rounding import rounding_error
from tiny_runs import NO_DROPOUT, lines_of, reviews, write_csv
from trimtab.runs.journal import VOLATILE_KEYS

QUICK = ("micro", "packed lm")
SLOW = tuple(name for name in recipe_runs.RECIPES if name not in QUICK)


@pytest.fixture(scope="module")
def runs_of(fork_server, tiny, tmp_path_factory):
    """The folder with the runs of some recipes; they run when they are first asked for."""
    return cache(partial(run_recipes, fork_server, tiny, tmp_path_factory))


def run_recipes(fork_server, tiny, tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("recipes")
    write_csv(folder / "reviews.csv", reviews(90))
    models = {name: tiny.folder(name, **NO_DROPOUT[name]) for name in ("bert", "gpt2")}
    labels = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    larger = {"num_hidden_layers": 2, **NO_DROPOUT["bert"]}
    models["teacher"] = tiny.folder("bert", kind="sequence-classification", head=labels, **larger)
    models["lm teacher"] = tiny.folder("gpt2", n_layer=2, **NO_DROPOUT["gpt2"])
    (folder / "models.json").write_text(json.dumps(models))
    (folder / "names.json").write_text(json.dumps(names))
    run_alone(fork_server, recipe_runs, folder)
    run_together(fork_server, recipe_runs, folder, 3)
    return folder


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_losses_metrics_and_weights_agree(runs_of, name):
    runs = runs_of(QUICK if name in QUICK else SLOW)
    # 4 roundings in each of 20 steps; fp16 rounds each process's part of a batch on its own
    num_roundings, dtype = (4, torch.float16) if name == "fp16" else (80, torch.float32)
    bound = rounding_error(1.0, num_roundings, dtype)
    alone, together = (lines_of(runs / f"{name}-{count}") for count in (1, 3))
    assert len(alone) == len(together) > 3
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - VOLATILE_KEYS:
            assert other[key] == pytest.approx(one[key], rel=bound, abs=bound), (key, one)
    evaluations = [line for line in alone if "eval_loss" in line]
    assert evaluations
    one, other = (load_file(runs / f"{name}-{count}" / "best" / "model.safetensors") for count in (1, 3))
    assert one.keys() == other.keys()
    for key in one:
        assert (one[key] - other[key]).abs().max() <= bound * max(1.0, float(one[key].abs().max())), key


@pytest.mark.parametrize("names", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_what_a_run_leaves_is_written_once(runs_of, names):
    runs = runs_of(names)
    for name in names:
        together = runs / f"{name}-3"
        assert {path.name for path in together.iterdir()} == {path.name for path in (runs / f"{name}-1").iterdir()}
        assert json.loads((together / "run.json").read_text())["state"] == "finished"
        assert json.loads((together / "plan.json").read_text())["num_processes"] == 3
        one, three = (json.loads((runs / f"{name}-{count}" / "report.json").read_text()) for count in (1, 3))
        assert one["data"] == three["data"]
        held_out = [facts.get("held_out", {}) for facts in (one, three)]
        assert held_out[0].get("num_rows") == held_out[1].get("num_rows")
        assert held_out[0].get("confusion") == held_out[1].get("confusion")
        steps = [line["step"] for line in lines_of(together) if "loss" in line]
        assert steps == sorted(set(steps))
