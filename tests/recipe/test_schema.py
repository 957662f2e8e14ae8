"""The recipe as a Python object: its defaults, the values it accepts and refuses, and its documentation."""

import subprocess
import sys
from math import inf, nan
from pathlib import Path

import pytest
from pydantic import ValidationError

from trimtab.build.data import run_name
from trimtab.errors import RecipeError
from trimtab.recipe.schema import AdapterSettings, ModelSettings, Recipe
from trimtab.recipe.schema_keys import keys_of

FROM_SCRATCH = {"config": {"model_type": "bert"}, "tokenizer": "train"}


def recipe(**values):
    return Recipe(**{"model": "bert", "data": {"train": "rows.csv"}, **values})


def value_at(key, value):
    """Make a recipe with one value at a dotted key, and return the value that it holds there."""
    outer, _, name = key.rpartition(".")
    settings = {outer: {name: value}} if outer else {name: value}
    if outer == "data":
        settings = {"data": {"train": "rows.csv", name: value}}
    made = recipe(**settings)
    return getattr(getattr(made, outer) if outer else made, name)


def test_defaults_are_those_of_the_hf_trainer():
    train = recipe().train
    assert (train.epochs, train.batch_size, train.lr, train.optimizer) == (3.0, 8, 5e-5, "auto")
    assert (train.betas, train.eps, train.weight_decay) == ((0.9, 0.999), 1e-8, 0.0)
    assert (train.schedule, train.warmup, train.max_grad_norm, train.label_smoothing) == ("linear", 0, 1.0, 0.0)


def test_every_key_is_documented():
    keys = list(keys_of(Recipe))
    assert len(keys) > 60
    for key in keys:
        text = key.field.description or ""
        assert text.endswith("."), key.dotted
        assert len(text) > 9, key.dotted
        assert key.allowed, key.dotted


# Key → pairs of what is written and the value it becomes.
ACCEPTED = {
    "train.lr": [("5e-5", 5e-5)],
    "train.epochs": [(2, 2.0)],
    "train.batch_size": [("32", 32)],
    "train.max_time": [("1h30m", "1h30min"), (90, "1min30s"), ("none", None)],
    "train.warmup": [(500, 500), ("500 steps", 500), ("6%", 0.06), (0.06, 0.06), (1, 1)],
    "train.max_grad_norm": [(0, None), ("none", None), (None, None)],
    "train.betas": [([0.9, 0.98], (0.9, 0.98))],
    "train.freeze": [
        ({"base": 200, "*.0": "1 epoch"}, {"base": "200 steps", "*.0": "epoch"}),
        ({"base": "Always"}, {"base": "always"}),
    ],
    "train.log_every": [("5 steps", 5)],
    "train.group_by_length": [("off", False), ("yes", True)],
    "evaluate.every": [("10 min", "10min"), (500, "500 steps")],
    "data.eval_share": [("20%", 0.2), (0, 0.0)],
    "data.text": [(["a", "b"], ["a", "b"])],
    "data.label": [(["a", "b", "c"], ["a", "b", "c"]), ("no", "no")],
    "data.eval": [("none", None)],
    "memory.budget": [("8 GiB", "8GiB"), ("8.5GiB", "8704MiB"), (8 * 2**30, "8GiB"), ("Auto", "auto"), ("none", None)],
    "memory.micro_batch": [("auto", "auto"), ("4", 4)],
    "memory.gradient_checkpointing": [
        *((True, "all"), ("off", "none"), (None, "none")),
        *(
            ({"every": 2}, {"every": 2}),
            ({"all_but_every": 4}, {"all_but_every": 4}),
            ({"layers": [0, -1]}, {"layers": [0, -1]}),
        ),
    ],
    "limits.fast_dev_run": [(True, True), ("yes", True), (5, 5), (0, False)],
    "limits.train": [(100, 100), ("10%", 0.1)],
    "adapter": [
        *((None, "none"), (False, "none"), ("off", "none"), ("qlora", "qlora")),
        ({"kind": "qlora", "rank": 4}, AdapterSettings(kind="qlora", rank=4)),
    ],
    "adapter.targets": [("all_linear", "all-linear"), ("q_proj", ["q_proj"])],
    "adapter.layers": [("8-15", [8, 15]), ([-4, -1], [-4, -1])],
    "adapter.ranks": [({"*.q_proj": 4}, {"*.q_proj": 4})],
    "early_stopping": [("none", None)],
    "out": [(Path("a/b"), "a/b")],
    "model": [(Path("a/b"), "a/b"), (FROM_SCRATCH, ModelSettings(**FROM_SCRATCH))],
    "track.uri": [
        *((None, "none"), ("Databricks", "databricks"), ("databricks://profile", "databricks://profile")),
        *((uri, uri) for uri in ("sqlite:///a.db", "postgresql://user@host/db", "mysql+pymysql://user@host/db")),
    ],
}


@pytest.mark.parametrize(
    ("key", "value", "expected"), [(key, *pair) for key, pairs in ACCEPTED.items() for pair in pairs]
)
def test_accepted_values(key, value, expected):
    found = value_at(key, value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("written", "uri"),
    [
        *((None, "local"), ({}, "local"), ("local", "local"), ("none", "none"), ("off", "none"), (False, "none")),
        ("http://host:5000", "http://host:5000"),
    ],
)
def test_a_single_word_for_track_is_its_uri(written, uri):
    assert recipe(track=written).track.uri == uri


def test_every_key_of_an_adapter_can_be_written():
    settings = {"kind": "qlora", "layers": "2-5", "targets": ["q_proj"], "ranks": {"*.q_proj": 4}, "trains": ["head"]}
    written = recipe(adapter=settings).model_dump(mode="json")["adapter"]
    assert written["layers"] == [2, 5]
    assert recipe(adapter=written).adapter == recipe(adapter=settings).adapter


REFUSED = {
    "train.lr": [0, nan, inf, True, None],
    "train.epochs": [0],
    "train.batch_size": [0, 2.5],
    "train.max_steps": [-1, True],
    "train.max_time": [0],
    "train.betas": [[0.9], [0.9, 1.0], 0.9],
    "train.warmup": [-1, 1.0, 1.5, "100%", True],
    "train.max_grad_norm": [-1],
    "train.freeze": [{"base": "10min"}, {"base": None}, {"base": True}, ["base"]],
    "train.log_every": ["epoch", 0],
    "train.group_by_length": ["sometimes"],
    "evaluate.every": [None],
    "evaluate.batch_size": [0],
    "data.train": ["", 5, {"a": [1]}],
    "data.text": [["a", "b", "c"], ["a"], ["a", "a"], []],
    "data.label": [[], [1]],
    "data.prompt": [""],
    "data.eval_share": [1],
    "data.max_length": [1],
    "memory.micro_batch": [0, True],
    "limits.overfit_batches": [-1],
    "limits.train": [0, "0%"],
    "limits.fast_dev_run": ["some"],
    "seed": [-1, 1.5],
    "name": ["a/b", "..", ""],
    "out": [""],
    "track.experiment": ["a/b"],
    "model": ["", 5],
    "early_stopping": [{"patience": 0}, {"mode": "most"}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values])
def test_refused_values(key, value):
    with pytest.raises(RecipeError, match=key.partition(".")[0]):
        value_at(key, value)


def test_names_on_databricks():
    track = {"uri": "databricks", "experiment": "/Users/me@example.com/films", "register_as": "main.films.best"}
    recipe = Recipe(model="m", data={"train": "a.csv"}, track=track)
    assert (recipe.track.experiment, run_name(recipe)) == ("/Users/me@example.com/films", "films")
    for wrong in ({"register_as": "films"}, {"experiment": "Users/films"}, {"experiment": "/Users/.."}):
        with pytest.raises(RecipeError, match=f"track.{next(iter(wrong))}: found "):
            Recipe(model="m", data={"train": "a.csv"}, track=track | wrong)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("host:5000", "track.uri: found 'host:5000'; allowed: local | none | databricks, or an address"),
        ("yes", "track.uri: found 'yes'"),
        (3, "track.uri: found 3"),
        ("htp://host:5000", "which MLflow does not support (did you mean http://?); allowed"),
        ("databricks-uc", "track.uri: found 'databricks-uc'"),
        ("file:///runs", "which MLflow does not support; allowed"),
        ("redis://host:5000", "which MLflow does not support; allowed"),
        ("sqlite://mlflow.db", "needs three slashes"),
        ("http://me:secret@host", "MLFLOW_TRACKING_PASSWORD"),
        ("postgresql://me:secret@host/db", "MLFLOW_TRACKING_URI"),
    ],
)
def test_refused_addresses(written, words):
    with pytest.raises(RecipeError) as failure:
        recipe(track={"uri": written})
    assert words in str(failure.value)
    assert "secret" not in str(failure.value)


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        recipe().seed = 1


def test_sections_may_be_empty_or_null():
    assert recipe(train=None, memory={}, track=None, checkpoint=None) == recipe()
    assert recipe(early_stopping={}).early_stopping.patience == 3


def test_rows_may_come_from_python():
    rows = [{"text": "good", "label": 1}]
    made = Recipe(model="bert", data={"train": rows})
    assert made.data.train is rows
    assert made.model_dump(mode="json")["data"]["train"] == "<list given in Python>"


def test_a_list_of_files_is_written_and_read_back(tmp_path):
    paths = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    written = recipe(data={"train": [Path(path) for path in paths]}).model_dump(mode="json")
    assert written["data"]["train"] == paths
    texts = Recipe(model="bert", data={"train": paths})
    assert texts.data.train == paths, "strings that are not files are texts"
    for path in paths:
        Path(path).write_text("")
    assert Recipe(**written) == recipe(data={"train": paths}) != texts


def test_a_dict_of_datasets_may_come_from_python():
    import datasets

    both = datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]}))
    assert Recipe(model="bert", data={"train": both}).data.train is both
    with pytest.raises(RecipeError, match="data.train: found"):
        Recipe(model="bert", data={"train": {"text": ["a"]}})


def test_a_dump_makes_the_same_recipe():
    made = recipe(train={"max_time": "3h", "warmup": 0.06, "freeze": {"base": 5}}, early_stopping={"patience": 2})
    assert Recipe(**made.model_dump(mode="json")) == made


def test_it_needs_neither_torch_nor_transformers():
    code = (
        "import sys; before = set(sys.modules); import trimtab.recipe.load; "
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    foreign = set(done.stdout.split()) - sys.stdlib_module_names
    assert {"trimtab", "pydantic", "yaml"} <= foreign
    assert not foreign & {"torch", "numpy", "transformers", "datasets", "rich", "typer"}
