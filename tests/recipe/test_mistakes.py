"""Error messages of a recipe: one line per mistake, all at once, with key, place, value, allowed values, suggestion."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import RecipeError
from trimtab.recipe.load import load_recipe
from trimtab.recipe.mistakes import shown
from trimtab.recipe.schema import Recipe
from trimtab.recipe.schema_keys import keys_of


def lines_of(**values):
    """The lines of the error, without the heading."""
    with pytest.raises(RecipeError) as caught:
        Recipe(**{"model": "bert", "data": {"train": "rows.csv"}, **values})
    heading, *lines = str(caught.value).splitlines()
    assert heading == f"the recipe has {len(lines)} problem{'s' if len(lines) > 1 else ''}:"
    return [line.strip() for line in lines]


def line_of(**values):
    (line,) = lines_of(**values)
    return line


SIX_MISTAKES = """\
model: bert-base-uncased
data:
  train: reviews.csv
  max_lenght: 128
train:
  lr: fast
  optimizer: adamw_torch
  epochs: 0
fp16: true
adapter: lorra
"""


def test_six_mistakes_are_six_lines(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(SIX_MISTAKES)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, {}, [])
    assert str(caught.value).replace(f"{tmp_path}/", "").splitlines() == [
        "the recipe has 6 problems:",
        "  recipe.yaml:4: data.max_lenght: found 128; no such key; did you mean data.max_length?",
        "  recipe.yaml:6: train.lr: found 'fast'; allowed: a number above 0",
        "  recipe.yaml:7: train.optimizer: found 'adamw_torch'; allowed: auto | adamw | adam | adagrad | sgd | "
        "adafactor | adamw8bit | adam8bit | adagrad8bit | paged-adamw8bit | paged-adam8bit | paged-adagrad8bit; "
        "write adamw",
        "  recipe.yaml:8: train.epochs: found 0; allowed: a number above 0, or null",
        "  recipe.yaml:9: fp16: found true; a key of HF Trainer; write train.precision: fp16",
        "  recipe.yaml:10: adapter: found 'lorra'; allowed: none | lora | qlora | ia3 | side | prompt | prefix, or a "
        "mapping with the keys kind, base, rank, alpha, dropout, targets, experts, layers, ranks, alphas, trains, "
        "rslora, dora, init, lr_ratio, reduction, every, tokens; did you mean lora?",
    ]


def test_mistakes_of_all_origins_come_together(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: bert\ntrain:\n  epochs: many\n  lr: 1\n  lr: 2\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, {"train.batch_size": 0}, ["train.wramup=3", "seed", "train.max_time=1:30"])
    lines = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    assert lines == [
        "the recipe has 7 problems:",
        "  recipe.yaml:3: train.epochs: found 'many'; allowed: a number above 0, or null",
        "  recipe.yaml:5: train.lr: given twice, first on line 4; keep one of them",
        "  --set: seed: found 'seed' without a value; write --set KEY=VALUE, such as --set train.lr=3e-5",
        "  data.train: required, but missing; allowed: a file, folder, glob or Hub name, as text, or a list of files "
        "(in Python also a dataset or rows)",
        "  --set: train.max_time: found '1:30', which may be 1h30m or 1m30s; allowed: a duration such as 90s, "
        "10min, 3h, 1h30m or a number of seconds, or null",
        "  --batch-size: train.batch_size: found 0; allowed: a whole number from 1",
        "  --set: train.wramup: found 3; no such key; did you mean train.warmup?",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"modle": "bert", "data": {"train": "x"}},
        {"model_name_or_path": "bert", "data": {"train": "x"}},
        {"model": "bert", "dta": {"train": "x"}},
        {"model": "bert", "data": {"trian": "x"}},
        {"model": "bert", "train_file": "x.csv"},
    ],
)
def test_a_misspelt_key_is_not_missing_as_well(values):
    with pytest.raises(RecipeError, match="the recipe has 1 problem:"):
        Recipe(**values)


@pytest.mark.parametrize("values", [{"train": {1: 2}}, {"trainer": {1: {2: 3}}}, {"train": {"freeze": {1: "always"}}}])
def test_keys_that_are_not_text(values):
    assert "found" in line_of(**values)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"lr": 3e-5}, "lr: found 3e-05; no such key here; write train.lr: 3.0e-05"),
        (
            {"batch-size": 4},
            "batch-size: found 4; no such key here; write train.batch_size: 4 or evaluate.batch_size: 4",
        ),
        ({"train.lr": 1}, "train.lr: found 1; no such key; write it in its section, train: {lr: 1}"),
        ({"train": {"batchSize": 4}}, "train.batchSize: found 4; no such key; did you mean train.batch_size?"),
        ({"train": {"epoch": 3}}, "train.epoch: found 3; no such key; did you mean train.epochs?"),
        (
            {"data": {"train": "a.csv", "test": "b c.csv"}},
            "data.test: found 'b c.csv'; a key of Hugging Face scripts; leave it out: training uses no test rows; "
            "afterwards: trimtab evaluate RUN 'b c.csv'",
        ),
        ({"tracking": {"uri": "none"}}, "tracking: found {uri: none}; no such key; did you mean track?"),
        ({"evalute": {"every": 5}}, "evalute: found {every: 5}; no such key; did you mean evaluate?"),
        (
            {"track": {"zzz": 1}},
            "track.zzz: found 1; no such key; allowed in track: uri, experiment, log_model, register_as",
        ),
        ({"model": {"nam": "x"}}, "model.nam: found 'x'; no such key; did you mean model.name?"),
        ({"train": {"patience": 3}}, "train.patience: found 3; no such key here; write early_stopping.patience: 3"),
    ],
)
def test_unknown_keys(values, line):
    assert lines_of(**values)[0] == line


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"model": torch.nn.Linear(1, 1)},
            ["pass an object of transformers to fit(recipe, model=…)", "trimtab.Engine"],
        ),
        ({"train": {"schedule": "cosin"}}, ["found 'cosin'", "linear | cosine", "did you mean cosine?"]),
        ({"train": {"schedule": "inverse_sqrt"}}, ["write inverse-sqrt"]),
        ({"train": {"precision": "16-mixed"}}, ["allowed: auto | fp32 | tf32 | fp16 | bf16 | bf16-pure; write fp16"]),
        ({"train": {"precision": 16}}, ["found 16", "write fp16"]),
        ({"train": {"precision": "no"}}, ["write fp32"]),
        ({"train": {"max_steps": -1}}, ["a whole number from 1, or null; write null"]),
        ({"train": {"freeze": "base"}}, ["did you mean train.freeze: {base: always}?"]),
        ({"train": {"freeze": {"base": "2 stpes"}}}, ["train.freeze.base: found '2 stpes'", "such as 200 steps"]),
        ({"train": {"betas": [0.9, 0.9, 0.9]}}, ["found [0.9, 0.9, 0.9]; allowed: a list of 2"]),
        ({"train": {"betas": [0.9, 2]}}, ["found [0.9, 2]", "a list of 2, each a number from 0 to below 1"]),
        ({"train": 3}, ["train: found 3", "a mapping with the keys epochs, max_steps"]),
        ({"data": "imdb"}, ["data: found 'imdb'", "did you mean data: {train: imdb}?"]),
        ({"task": "text-classification"}, ["write classify"]),
        ({"task": "clasify"}, ["did you mean classify?"]),
        ({"evaluate": {"metric": "eval_accuracy"}}, ["which has a prefix: write accuracy"]),
        ({"evaluate": {"every": "no"}}, ["write 1000 epochs"]),
        (
            {"checkpoint": {"best": "accuracy"}, "evaluate": {"metric": "f1"}},
            ["checkpoint.best", "evaluate.metric is f1", "leave one of them out"],
        ),
        ({"early_stopping": True}, ["did you mean early_stopping: {patience: 3}?"]),
        ({"memory": {"budget": "8G"}}, ["found '8G', which may be 8GiB or 8GB", "auto, or a size such as 8GiB"]),
        ({"memory": {"budget": 8}}, ["found 8, which is less than 1.0 MiB: a unit may be missing"]),
        ({"memory": {"budget": "lots"}}, ["found 'lots', which is not a size; allowed: auto, or a size such as 8GiB"]),
        ({"memory": {"padding": "nothing"}}, ["memory.padding: found 'nothing'; allowed: auto | longest | none"]),
        ({"memory": {"micro_batch_tokens": 0}}, ["memory.micro_batch_tokens: found 0", "a whole number from 1"]),
        ({"name": 2024}, ["put text in quotes: '2024'"]),
        (
            {"name": "ü名\n前"},
            [r"found 'ü名\n前', which contains line breaks", "allowed: one line of text"],
        ),
        ({"track": {"experiment": "a\x1b[2J"}}, ["contains line breaks or other control characters"]),
        ({"data": {"train": "x", "label": True}}, ["found true", "a column, or a list of columns"]),
        ({"model": 5}, ["found 5", "a Hub name, a folder or a run"]),
        ({"model": None}, ["required, but null"]),
        ({"limits": {"train": 1.0}}, ["which is ambiguous: 1, or 100%"]),
        ({"train": {"batch_size": 2**63}}, ["found 9223372036854775808, which is more than 1.09951e+12"]),
        ({"adapter": {"kind": "lora", "alpha": 1e300}}, ["adapter.alpha: found 1e+300, which is more than 1e+30"]),
        ({"train": {"lr": "x" * 500}}, ["found 'xxx", " …; allowed"]),
    ],
)
def test_wrong_values(values, parts):
    line = line_of(**values)
    assert len(line) < 400
    for part in parts:
        assert part in line


def test_a_section_of_another_library_is_answered_key_by_key():
    assert lines_of(trainer={"max_epochs": 3, "precision": "16-mixed", "accumulate_grad_batches": 4, "lr": 1}) == [
        "trainer: found {max_epochs: 3, precision: 16-mixed, accumulate_grad_batch …; no such key; did you mean train?",
        "trainer.max_epochs: found 3; a key of Lightning; write train.epochs: 3",
        "trainer.precision: found '16-mixed'; write fp16",
        "trainer.accumulate_grad_batches: found 4; a key of Lightning; write train.batch_size: rows per "
        "optimizer step; memory.micro_batch: rows per forward pass",
    ]


def test_contradictions_are_reported_with_other_mistakes_unless_one_of_the_two_keys_is_wrong():
    lines = lines_of(train={"momentum": 0.9, "lr": "fast"}, seed=-1)
    assert [line.split(":")[0] for line in lines] == ["train.lr", "seed", "train.momentum"]
    assert line_of(train={"momentum": 0.9, "optimizer": "sdg"}).startswith("train.optimizer: ")


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 10**20),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["auto", "none", "epoch", "1:30", "5%", "always", "-1", "train"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=4,
)
dotted = st.sampled_from([key.dotted for key in keys_of(Recipe)] + ["fp16", "train.max_epochs", "trainer", "a.b"])


@settings(max_examples=150)
@given(st.dictionaries(dotted, anything, max_size=4))
def test_any_value_gives_a_recipe_or_a_list_of_mistakes(overrides):
    try:
        loaded = load_recipe(None, {"model": "bert", "data.train": "x.csv", **overrides}, [])
    except RecipeError as error:
        heading, *lines = error.problem.split("\n  ")
        assert heading == f"the recipe has {len(lines)} problem{'s' if len(lines) != 1 else ''}:"
        assert lines
    else:
        assert isinstance(loaded.recipe, Recipe)


def test_a_value_is_shown_without_its_credentials():
    assert shown("https://host?token=abc") == "'https://host?token=***'"
    assert shown({"uri": "http://me:abc@host"}) == "{uri: http://host}"


@pytest.mark.parametrize(
    "values",
    [
        {"hub_token": "hf_abcdef"},
        {"train": {"password": "hf_abcdef"}},
        {"wandb": {"api_key": "hf_abcdef", "project": "x"}},
        {"trainer": {"hub_token": "hf_abcdef"}},
    ],
)
def test_credentials_are_not_shown(values):
    found = "\n".join(lines_of(**values))
    assert "hf_abcdef" not in found
    assert "***" in found
