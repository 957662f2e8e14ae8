"""Which keys may change when a run resumes, and how a change is reported."""

import pytest

from trimtab.build.resume_rules import differences
from trimtab.errors import RecipeError
from trimtab.recipe.schema import Recipe


def recipe(**sections):
    return Recipe(model="bert", data={"train": "rows.csv"}, **sections)


def test_an_adapter_in_other_words_is_the_same():
    assert differences(recipe(adapter="qlora"), recipe(adapter={"kind": "qlora", "rank": 16})) == []


def test_another_adapter_is_refused_by_the_key_that_differs():
    with pytest.raises(RecipeError) as refused:
        differences(recipe(adapter="lora"), recipe(adapter={"rank": 8, "ranks": {"q": 4}}))
    assert [line.strip() for line in refused.value.problem.splitlines()[1:]] == [
        "adapter.rank: 16 → 8",
        "adapter.ranks: {} → {'q': 4}",
    ]
    assert "trimtab merge" in refused.value.cure


def test_another_optimizer_is_refused():
    with pytest.raises(RecipeError, match="with this change:\n  train.optimizer: 'auto' → 'adamw8bit'") as refused:
        differences(recipe(), recipe(train={"optimizer": "adamw8bit"}))
    assert "model: RUN" in refused.value.cure


def test_memory_settings_may_change():
    memory = {"gradient_checkpointing": {"every": 2}, "loss": "chunked", "micro_batch": 2}
    found = differences(recipe(), recipe(memory=memory))
    assert {difference.key for difference in found} == {f"memory.{key}" for key in memory}
    assert all(difference.is_harmless for difference in found)
