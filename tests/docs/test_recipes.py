"""Every recipe that is shipped trains two steps, with a tiny model of its family and rows of its shape."""

import math
from pathlib import Path

import pytest

import trimtab
from recipe_stand_ins import with_stand_ins
from tiny_runs import CHAT_TEMPLATE, lines_of
from trimtab import fit
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
