"""What a technique costs: its file, and a line in the list. Everything else iterates over them."""

import ast
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import trimtab
from tiny_runs import reviews, write_csv
from trimtab.recipe.schema import Recipe
from trimtab.techniques import TECHNIQUES, apply
from trimtab.techniques.base import Phase, Technique

SOURCE = Path(trimtab.__file__).parent
FOREIGN = Path("recipe/foreign_keys")
BY_KEY = {technique.key: technique for technique in TECHNIQUES}
# words that code is full of, whatever they mean there
ENGLISH = {"loss", "optimizer", "adapter", "kernels", "padding", "compile", "update"}


def files_with(pattern: str) -> list[str]:
    """Files of the package, but for those that answer keys of other tools: they name keys of all techniques."""
    found = re.compile(pattern)
    paths = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if found.search(path.read_text())]
    return [str(path) for path in paths if FOREIGN not in path.parents]


def home_of(technique: Technique) -> str:
    return str(Path(*type(technique).__module__.split(".")[1:])) + ".py"


# ---------------------------------------------------------------------- one file


def test_keys_and_settings_are_unique_and_in_the_schema():
    recipe = Recipe(model="nowhere", data={"train": "nowhere"})
    assert len(BY_KEY) == len(TECHNIQUES) == len({technique.setting for technique in TECHNIQUES})
    for technique in TECHNIQUES:
        assert technique.asked(recipe) in ("auto", technique.off), technique.key
        assert technique.off is not None or technique.before is not None, "a plan.json without the key has to be read"


@pytest.mark.parametrize("key", sorted(set(BY_KEY) - ENGLISH))
def test_the_key_is_a_word_of_three_files_at_most(key):
    found = set(files_with(rf"\b{key}\b"))
    assert {home_of(BY_KEY[key]), "recipe/schema.py"} <= found
    assert len(found) <= 3, found


def test_every_technique_has_a_file_of_its_own():
    homes = [home_of(technique) for technique in TECHNIQUES]
    assert len(set(homes)) == len(homes)
    files = {path.name for path in (SOURCE / "techniques").glob("*.py")}
    assert {Path(home).name for home in homes} | {"__init__.py", "apply.py", "base.py"} == files


SCHEMA = {"recipe/schema.py", "recipe/value_types.py", "recipe/consistency.py"}
OWNED = {"loss": {"model/chunked_loss.py"}}  # the arithmetic of the technique, which knows its two forms
VALUES = {
    "adapter": {"lora", "qlora", "ia3", "side"},
    "gradient_checkpointing": {"ops"},
    "loss": {"fused", "chunked", "liger"},
    "kernels": {"liger"},
    "offload": {"embeddings"},
    "attention_backend": {"cudnn", "efficient", "math"},
    "compile": {"capture", "blocks", "graphs"},
    "update": {"in-backward"},
}


@pytest.mark.parametrize("key", VALUES)
def test_nothing_else_branches_on_its_values(key):
    allowed = SCHEMA | {home_of(BY_KEY[key])} | OWNED.get(key, set())
    if "liger" in VALUES[key]:  # a value of two techniques
        allowed |= {home_of(BY_KEY["loss"]), home_of(BY_KEY["kernels"])} | OWNED["loss"]
    for name, line, words in compared_words():
        assert name in allowed or FOREIGN in Path(name).parents or not VALUES[key] & words, (name, line)


@cache
def compared_words() -> list[tuple[str, int, set[str]]]:
    """Of each comparison in the package: its file, its line, and the strings in it."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.MatchValue):
                constants = [child.value for child in ast.walk(node) if isinstance(child, ast.Constant)]
                words = {value for value in constants if isinstance(value, str)}
                found.append((str(path.relative_to(SOURCE)), node.lineno, words))
    assert len(found) > 500
    return found


# ---------------------------------------------------------------------- a new one


class Sample(Technique):
    """A technique that exists here alone: nothing of it is in the package."""

    key = "sample"
    setting = "memory.sample"
    off = "no"
    phase = Phase.KERNELS
    before = "no"

    def __init__(self):
        self.changed, self.num_batchings, self.stepped, self.state_saved = [], 0, 0, 0
        self.refusal, self.refused_loss = "sample does not go with this loss", None

    def asked(self, recipe):
        return "auto"

    def values(self, case):
        return ("no", "yes")

    def without_plan(self, case):
        return "yes"

    def refuse(self, spec, case):
        return self.refusal if spec["sample"] == "yes" and spec["loss"] == self.refused_loss else None

    def change_model(self, model, value, site):
        self.changed.append((value, site.is_traced))

    def change_batching(self, batching, value):
        self.num_batchings += 1
        return replace(batching, is_packed=False)

    def wrap_step(self, compute_gradients, value):
        def stepped(*args, **kwargs):
            self.stepped += 1
            return compute_gradients(*args, **kwargs)

        return stepped

    def state(self, model, value):
        return self

    def state_dict(self):
        self.state_saved += 1
        return {"count": 7}

    def load_state_dict(self, state):
        assert state == {"count": 7}

    def describe(self, value):
        return f"sample {value}"


@pytest.fixture
def sample(monkeypatch):
    made = Sample()
    monkeypatch.setitem(BY_KEY, "sample", made)
    TECHNIQUES.append(made)
    yield made
    TECHNIQUES.remove(made)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def test_a_new_technique_is_searched_and_shown(sample):
    from trimtab.planner.survey import survey

    recipe = Recipe(
        model={"config": LLAMA, "tokenizer": "train"},
        task="causal-lm",
        data={"train": "nowhere"},
        train={"batch_size": 2},
        memory={"gradient_checkpointing": "none"},
    )
    found = survey(recipe, gpu="t4", length=64)
    assert {rung.spec["sample"] for rung in found.rungs} == {"no", "yes"}
    assert ("yes", True) in sample.changed, "a trace applies it"
    assert {one["sample"] for one in found.as_dict()["ladder"]} == {"no", "yes"}
    from trimtab.planner.explain import table

    _, rows = table(found.rungs, found.target.budget_bytes, found.reference)
    assert any("sample yes" in row[-1] for row in rows)


def test_a_new_technique_is_used_saved_and_resumed(sample, tiny, own_folder):
    rows = write_csv(own_folder / "reviews.csv", reviews(16))
    out = own_folder / "run"
    recipe = Recipe(
        model=tiny.folder("bert"),
        data={"train": str(rows)},
        train={"batch_size": 4, "max_steps": 2},
        out=str(out),
        track="none",
    )
    result = trimtab.fit(recipe, progress="quiet", device="cpu")
    assert ("yes", False) in sample.changed
    assert sample.num_batchings
    assert sample.stepped == 2
    assert sample.state_saved
    assert result.plan.sample == "yes"
    assert json.loads((out / "plan.json").read_text())["sample"] == "yes"
    assert any("sample yes" in line for line in result.plan.describe())
    longer = trimtab.resume(out, sets=["train.max_steps=4"], progress="quiet", device="cpu")
    assert longer.fit.step == 4
    assert longer.plan.sample == "yes"


def test_a_plan_of_before_a_technique_is_still_read(sample):
    stored = apply.values_in_plan({"optimizer": "adamw", "adapter": "lora, rank 4", "loss": "chunked"})
    assert stored["sample"] == "no"
    assert stored["adapter"] == "lora"
    assert stored["attention_backend"] == "torch", "what torch chose before there was a choice"


def test_a_combination_that_a_technique_refuses_is_neither_searched_nor_run(sample, tiny, own_folder):
    sample.refused_loss = "plain"
    recipe = Recipe(
        model={"config": LLAMA, "tokenizer": "train"},
        task="causal-lm",
        data={"train": "nowhere"},
        train={"batch_size": 2},
        memory={"gradient_checkpointing": "none"},
    )
    from trimtab.planner.survey import survey

    found = survey(recipe, gpu="t4", length=64, thorough=False)
    assert {rung.spec["sample"] for rung in found.rungs} == {"no"}
    rows = write_csv(own_folder / "reviews.csv", reviews(8))
    asked = Recipe(model=tiny.folder("bert"), data={"train": str(rows)}, out=str(own_folder / "run"), track="none")
    with pytest.raises(trimtab.TrimtabError, match="sample does not go with this loss"):
        trimtab.fit(asked, progress="quiet", device="cpu")
    assert not (own_folder / "run").exists()
