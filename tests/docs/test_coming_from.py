"""docs/coming-from/: the tables agree with the answers of the recipe, and every converted file trains."""

import ast
import math
import re
from pathlib import Path

import pytest
import typer
import yaml

from recipe_stand_ins import with_stand_ins
from trimtab import fit
from trimtab.cli.main import app
from trimtab.commands.convert import convert_axolotl
from trimtab.recipe.foreign_keys import translate_key
from trimtab.recipe.foreign_keys.axolotl import AXOLOTL
from trimtab.recipe.foreign_keys.axolotl_data import dataset_answers
from trimtab.recipe.foreign_keys.ludwig import LUDWIG
from trimtab.recipe.foreign_keys.torchtune import TORCHTUNE
from trimtab.recipe.foreign_keys.unsloth import UNSLOTH
from trimtab.recipe.load import load_recipe
from trimtab.recipe.schema import Recipe
from trimtab.recipe.schema_keys import keys_of

FOLDER = Path(__file__).parents[2] / "docs" / "coming-from"
PAGES = {page.stem: page.read_text() for page in sorted(FOLDER.glob("*.md")) if page.stem != "index"}
KEYS = {key.dotted for key in keys_of(Recipe)}
OURS = {dotted.rpartition(".")[2] for dotted in KEYS}  # a wrong place of one of these is answered with the right one
OWN_TABLES = {"axolotl": AXOLOTL, "unsloth": UNSLOTH, "torchtune": TORCHTUNE, "ludwig": LUDWIG}
CALLS = re.compile(r"fit\(|Engine\(|load\(|from trimtab|on_|o_proj|output_proj|--")
# Functions, methods, and keys of a dataset, which are answered with it.
NO_KEYS = {
    *("accumulate", "clip_grad_norm_", "gather_for_metrics", "find_executable_batch_size", "compute_metrics"),
    *("configure_optimizers", "training_step", "path", "split", "name", "field", "field_messages", "model_type"),
}
# Values to ask with, where the answer depends on them.
VALUES = {
    "input_features": [{"name": "text"}],
    "output_features": [{"name": "label"}],
    "quantization": {"bits": 4},
    "datasets": [{"path": "rows.jsonl", "type": "completion"}],
    "test_datasets": [{"path": "rows.jsonl"}],
    "xformers_attention": True,
    "lora_target_linear": True,
    "full_finetuning": True,
    "load_in_4bit": True,
    "adapter": "lora",
    "early_stop": 3,
    "max_time": "1h",
    "val_set_size": 0.1,
}


def rows_of(page: str) -> list[tuple[str, str]]:
    table = PAGES[page].partition("## Equivalents")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [(left, right) for left, right in rows[1:]]


def answer_to(page: str, name: str) -> str:
    """What the recipe says about a key of the other tool; empty if it does not know it."""
    value = VALUES.get(name, 1)
    if name in ("datasets", "test_datasets"):
        return " ".join(answer.text for _, _, answer in dataset_answers(name, value))
    rule = OWN_TABLES.get(page, {}).get(name)
    return rule(value, {name: value}).text if rule else translate_key(name, value, {name: value})


def test_the_pages_are_these():
    names = {"accelerate", "axolotl", "hf-trainer", "lightning", "ludwig", "torchtune", "trl-peft", "unsloth"}
    assert set(PAGES) == names
    assert set(re.findall(r"\]\(([\w-]+)\.md\)", (FOLDER / "index.md").read_text())) == names
    for text in PAGES.values():
        assert {"Equivalents", "One file converted", "What is not there"} <= set(re.findall(r"^## (.*)$", text, re.M))


@pytest.mark.parametrize("page", PAGES)
def test_keys_on_the_left_are_known_and_answered_alike(page):
    names = [
        (name, right)
        for left, right in rows_of(page)
        for name in re.findall(r"`([a-z][a-z0-9_]*)`", left)
        if name not in NO_KEYS
    ]
    assert len(names) > 8
    for name, right in names:
        answer = answer_to(page, name)
        assert answer or name in OURS, f"{page}: {name} is not known"
        written = set(re.findall(r"(?:write|and) ([\w.]+):", answer))
        shown = set(re.findall(r"`([\w.]+)", right)) & KEYS
        pairs = [(f"{key}.", f"{other}.") for key in written for other in shown]
        assert not pairs or any(key.startswith(other) or other.startswith(key) for key, other in pairs), answer


@pytest.mark.parametrize("page", PAGES)
def test_keys_on_the_right_exist(page):
    commands = set(typer.main.get_command(app).commands)
    found = [code for _, right in rows_of(page) for code in re.findall(r"`([^`]+)`", right)]
    assert len(found) > 8
    for code in found:
        words = code.split()
        if words[0] == "trimtab":
            assert words[1] in commands, code
        elif not CALLS.match(code):
            key, _, value = code.partition(": ")
            assert key in KEYS, f"{page}: {code}"
            if value:
                settings = [f"{key}={value}", "train.max_grad_norm=null"]  # which an update in backward needs
                load_recipe(None, {"model": "bert", "data.train": "rows.csv"}, settings)


def blocks_of(page: str, language: str) -> list[str]:
    text = PAGES[page].partition("## One file converted")[2]
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_other_file_is_complete(page):
    """Python that compiles, or YAML that is read; test_pages.py also runs those in Python whose library is here."""
    python, config = blocks_of(page, "py") + blocks_of(page, "python"), blocks_of(page, "yml")
    assert len(python) + len(config) == 1
    for block in python:
        ast.parse(block)
    for block in config:
        assert len(yaml.safe_load(block)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("own_folder")
def test_the_recipe_trains(page, tiny):
    (block,) = blocks_of(page, "yaml")
    Path("recipe.yaml").write_text(block)
    written = load_recipe(Path("recipe.yaml"), {}, ()).recipe
    recipe = with_stand_ins(written, "llama" if written.task == "chat" else "bert", tiny)
    result = fit(recipe, progress="quiet", device="cpu")
    assert (result.fit.step, result.fit.stop_reason) == (2, "finished")
    assert math.isfinite(result.fit.metrics["loss"])


def test_the_recipe_of_axolotl_is_what_the_command_writes(tmp_path):
    (config,), (recipe,) = blocks_of("axolotl", "yml"), blocks_of("axolotl", "yaml")
    path = tmp_path / "axolotl.yml"
    path.write_text(config)
    assert convert_axolotl(path).render(path.name) == recipe
