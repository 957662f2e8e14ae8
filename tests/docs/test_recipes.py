"""Every recipe that is shipped trains two steps, with a tiny model of its family and rows of its shape."""

import math
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Value

import trimtab
from tiny_runs import CHAT_TEMPLATE, lines_of, reviews, tiny_config
from trimtab import Recipe, fit
from trimtab.recipe.load import load_recipe

FOLDER = Path(__file__).parents[2] / "recipes"
FOUND = {path.name: path for path in sorted(FOLDER.rglob("*.yaml"))}
# the family of the model that each recipe names, as transformers calls it
FAMILIES = {
    "bert-imdb-fp16.yaml": "bert",
    "distilbert-sst2.yaml": "distilbert",
    "freeze-then-unfreeze.yaml": "bert",
    "from-scratch.yaml": "marian",
    "gpt2-text.yaml": "gpt2",
    "head-only.yaml": "bert",
    "llama-chat.yaml": "llama",
    "qlora-8b-16gb.yaml": "llama",
    "roberta-pairs.yaml": "roberta",
    "t5-summarize.yaml": "t5",
}
QUICK = (
    "freeze-then-unfreeze.yaml",
    "from-scratch.yaml",
    "llama-chat.yaml",
    "qlora-8b-16gb.yaml",
    "roberta-pairs.yaml",
)


def stand_in(recipe: Recipe, num_rows: int, first: int) -> Dataset:
    """Rows with the columns that the recipe names; labels are numbers with names, as on the hub."""
    rows, data = reviews(num_rows, first), recipe.data
    if recipe.task == "chat":
        said = [
            [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["label"]}] for row in rows
        ]
        return Dataset.from_dict({data.messages: said})
    texts = [data.text] if isinstance(data.text, str) else data.text
    columns = {name: [row["text"] for row in rows] for name in texts}
    kinds = {name: Value("string") for name in texts}
    if data.label is not None:
        columns[data.label] = [int(row["label"] == "good") for row in rows]
        kinds[data.label] = ClassLabel(names=["neg", "pos"])
    if data.target is not None:
        columns[data.target] = [row["label"] for row in rows]
        kinds[data.target] = Value("string")
    return Dataset.from_dict(columns, features=Features(kinds))


def with_stand_ins(recipe: Recipe, family: str, tiny) -> Recipe:
    values = recipe.model_dump()
    if isinstance(recipe.model, str):
        values["model"] = tiny.folder(family, chat=recipe.task == "chat")
    else:
        assert recipe.model.config["model_type"] == family
        values["model"]["config"] |= tiny_config(family, vocab_size=300)
    values["data"] |= {"train": stand_in(recipe, 24, 0), "eval": stand_in(recipe, 9, 100)}
    values["train"] |= {"epochs": 3.0, "max_steps": 2, "log_every": 1}
    values["train"]["batch_size"] = min(recipe.train.batch_size, 12)
    return Recipe(**values)


def test_they_are_all_here():
    assert sorted(FOUND) == sorted(FAMILIES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FOUND]
)
@pytest.mark.usefixtures("own_folder")
def test_two_steps(name, tiny):
    written = load_recipe(FOUND[name], {}, ()).recipe
    recipe = with_stand_ins(written, FAMILIES[name], tiny)
    result = fit(recipe, progress="quiet", device="cpu")
    assert (result.fit.step, result.fit.stop_reason) == (2, "finished")
    lines = [line for line in lines_of(result.folder) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert math.isfinite(result.fit.metrics[written.evaluate.metric])
    assert (result.plan.num_train_rows, result.plan.num_eval_rows) == (24, 9) or written.task == "causal-lm"
    assert result.plan.precision == {"auto": "fp32"}.get(written.train.precision, written.train.precision)
    assert result.folder.parent.name == written.track.experiment
    if written.train.freeze:  # a pooler and a head of two labels are left
        assert result.plan.num_trainable == 32 * 32 + 32 + 2 * 32 + 2

    loaded = trimtab.load(result.folder, device="cpu")
    assert loaded.model.config.model_type == FAMILIES[name]
    assert loaded.task_name == written.task
    if written.task == "classify":
        assert loaded.model.config.id2label == {0: "neg", 1: "pos"}
    if written.task == "chat":
        assert loaded.tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("name", FOUND)
def test_each_says_what_it_is(name):
    """A first line for the reader, and columns and metric written out: nothing is left to a guess."""
    assert FOUND[name].read_text().startswith("# ")
    recipe = load_recipe(FOUND[name], {}, ()).recipe
    assert recipe.task is not None
    assert recipe.evaluate.metric is not None
    assert recipe.data.text or recipe.data.messages
    assert recipe.data.eval is not None
