"""The recipe as a Python object: its defaults, what it takes, and that every key is documented."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from trimtab.errors import RecipeError
from trimtab.recipe.describe import keys_of
from trimtab.recipe.schema import AdapterSettings, ModelSettings, Recipe

KEYS = list(keys_of(Recipe))


def recipe(**values):
    return Recipe(**{"model": "bert", "data": {"train": "rows.csv"}, **values})


def value_at(key, value):
    """The recipe that has one value at a dotted key, and the value it holds there."""
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
    assert len(KEYS) > 60
    for key in KEYS:
        text = key.field.description or ""
        assert text.endswith("."), key.dotted
        assert len(text) > 9, key.dotted
        assert key.allowed, key.dotted


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.lr", "5e-5", 5e-5),
        ("train.epochs", 2, 2.0),
        ("train.batch_size", "32", 32),
        ("train.max_time", "1h30m", "1h30min"),
        ("train.max_time", 90, "1min30s"),
        ("train.max_time", "none", None),
        ("train.warmup", 500, 500),
        ("train.warmup", "500 steps", 500),
        ("train.warmup", "6%", 0.06),
        ("train.warmup", 0.06, 0.06),
        ("train.warmup", 1, 1),
        ("train.max_grad_norm", 0, None),
        ("train.max_grad_norm", "none", None),
        ("train.max_grad_norm", None, None),
        ("train.betas", [0.9, 0.98], (0.9, 0.98)),
        ("train.freeze", {"base": "200 steps"}, {"base": "200 steps"}),
        ("train.freeze", {"base": 200, "*.0": "1 epoch"}, {"base": "200 steps", "*.0": "epoch"}),
        ("train.freeze", {"base": "Always"}, {"base": "always"}),
        ("train.log_every", "5 steps", 5),
        ("train.group_by_length", "off", False),
        ("train.group_by_length", "yes", True),
        ("evaluate.every", "10 min", "10min"),
        ("evaluate.every", 500, "500 steps"),
        ("data.eval_share", "20%", 0.2),
        ("data.eval_share", 0, 0.0),
        ("data.text", ["a", "b"], ["a", "b"]),
        ("data.label", ["a", "b", "c"], ["a", "b", "c"]),
        ("data.label", "no", "no"),
        ("data.eval", "none", None),
        ("memory.budget", "8 GiB", "8GiB"),
        ("memory.budget", "8.5GiB", "8704MiB"),
        ("memory.budget", 8 * 2**30, "8GiB"),
        ("memory.budget", "Auto", "auto"),
        ("memory.budget", "none", None),
        ("memory.micro_batch", "auto", "auto"),
        ("memory.micro_batch", "4", 4),
        ("limits.fast_dev_run", True, True),
        ("limits.fast_dev_run", "yes", True),
        ("limits.fast_dev_run", 5, 5),
        ("limits.fast_dev_run", 0, False),
        ("limits.train", 100, 100),
        ("limits.train", "10%", 0.1),
        ("adapter", None, "none"),
        ("adapter", False, "none"),
        ("adapter", "off", "none"),
        ("adapter", "qlora", "qlora"),
        ("adapter", {"kind": "qlora", "rank": 4}, AdapterSettings(kind="qlora", rank=4)),
        ("adapter.targets", "all_linear", "all-linear"),
        ("adapter.targets", "q_proj", ["q_proj"]),
        ("adapter.layers", "8-15", [8, 15]),
        ("adapter.layers", [-4, -1], [-4, -1]),
        ("adapter.ranks", {"*.q_proj": 4}, {"*.q_proj": 4}),
        ("memory.gradient_checkpointing", True, "all"),
        ("memory.gradient_checkpointing", "off", "none"),
        ("memory.gradient_checkpointing", None, "none"),
        ("memory.gradient_checkpointing", {"every": 2}, {"every": 2}),
        ("memory.gradient_checkpointing", {"layers": [0, -1]}, {"layers": [0, -1]}),
        ("track.uri", None, "none"),
        ("early_stopping", "none", None),
        ("out", Path("a/b"), "a/b"),
        ("model", Path("a/b"), "a/b"),
        (
            "model",
            {"config": {"model_type": "bert"}, "tokenizer": "train"},
            ModelSettings(config={"model_type": "bert"}, tokenizer="train"),
        ),
    ],
)
def test_what_is_understood(key, value, expected):
    found = value_at(key, value)
    assert found == expected
    assert type(found) is type(expected)


def test_every_key_of_an_adapter_can_be_written():
    settings = {
        "kind": "qlora",
        "layers": "2-5",
        "targets": ["q_proj"],
        "ranks": {"*.q_proj": 4},
        "trains": ["lm_head"],
    }
    written = recipe(adapter=settings, memory={"gradient_checkpointing": {"layers": [0]}}).model_dump(mode="json")
    assert written["adapter"]["layers"] == [2, 5]
    assert recipe(adapter=written["adapter"]).adapter == recipe(adapter=settings).adapter


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.lr", 0),
        ("train.lr", float("nan")),
        ("train.lr", float("inf")),
        ("train.lr", True),
        ("train.lr", None),
        ("train.epochs", 0),
        ("train.batch_size", 0),
        ("train.batch_size", 2.5),
        ("train.max_steps", -1),
        ("train.max_steps", True),
        ("train.max_time", 0),
        ("train.betas", [0.9]),
        ("train.betas", [0.9, 1.0]),
        ("train.betas", 0.9),
        ("train.warmup", -1),
        ("train.warmup", 1.0),
        ("train.warmup", 1.5),
        ("train.warmup", "100%"),
        ("train.warmup", True),
        ("train.max_grad_norm", -1),
        ("train.freeze", {"base": "10min"}),
        ("train.freeze", {"base": None}),
        ("train.freeze", {"base": True}),
        ("train.freeze", ["base"]),
        ("train.log_every", "epoch"),
        ("train.log_every", 0),
        ("train.group_by_length", "sometimes"),
        ("evaluate.every", None),
        ("evaluate.batch_size", 0),
        ("data.train", ""),
        ("data.train", 5),
        ("data.train", {"a": [1]}),
        ("data.text", ["a", "b", "c"]),
        ("data.text", ["a"]),
        ("data.text", ["a", "a"]),
        ("data.text", []),
        ("data.label", []),
        ("data.label", [1]),
        ("data.prompt", ""),
        ("data.eval_share", 1),
        ("data.max_length", 1),
        ("memory.micro_batch", 0),
        ("memory.micro_batch", True),
        ("limits.overfit_batches", -1),
        ("limits.train", 0),
        ("limits.train", "0%"),
        ("limits.fast_dev_run", "some"),
        ("seed", -1),
        ("seed", 1.5),
        ("name", "a/b"),
        ("name", ".."),
        ("name", ""),
        ("out", ""),
        ("track.experiment", "a/b"),
        ("model", ""),
        ("model", 5),
        ("early_stopping", {"patience": 0}),
        ("early_stopping", {"mode": "most"}),
    ],
)
def test_what_is_refused(key, value):
    with pytest.raises(RecipeError, match=key.partition(".")[0]):
        value_at(key, value)


@pytest.mark.parametrize(
    ("written", "uri"),
    [
        (None, "local"),
        ({}, "local"),
        ("none", "none"),
        ("off", "none"),
        (False, "none"),
        ("local", "local"),
        ("http://host:5000", "http://host:5000"),
        ({"uri": None}, "none"),
        ({"uri": "Databricks"}, "databricks"),
        ({"uri": "databricks://profile"}, "databricks://profile"),
        ({"uri": "sqlite:///runs/mlflow.db"}, "sqlite:///runs/mlflow.db"),
        ({"uri": "postgresql://user@host/db"}, "postgresql://user@host/db"),
        ({"uri": "mysql+pymysql://user@host/db"}, "mysql+pymysql://user@host/db"),
    ],
)
def test_where_a_run_is_tracked(written, uri):
    assert recipe(track=written).track.uri == uri


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("host:5000", "track.uri: found 'host:5000'; allowed: local | none | databricks, or an address"),
        ("yes", "track.uri: found 'yes'"),
        (3, "track.uri: found 3"),
        ("htp://host:5000", "is no address that MLflow knows: http:// is"),
        ("databricks-uc", "track.uri: found 'databricks-uc'"),
        ("file:///runs", "is no address that MLflow knows"),
        ("redis://host:5000", "is no address that MLflow knows; allowed"),
        ("sqlite://mlflow.db", "too few slashes"),
        ("http://me:secret@host", "MLFLOW_TRACKING_PASSWORD"),
        ("postgresql://me:secret@host/db", "MLFLOW_TRACKING_URI"),
    ],
)
def test_addresses_that_are_none(written, words):
    with pytest.raises(RecipeError) as failure:
        recipe(track={"uri": written})
    assert words in str(failure.value)


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
