"""Every variant of every shipped study is a recipe that is taken, and no two of a study are the same."""

import pytest

from trimtab.errors import RecipeError
from trimtab.recipe.load import load_recipe
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import as_yaml
from trimtab.report.studies import STUDIES, build_study

PLAIN = {"model": "x", "data": {"train": "y.csv"}, "train": {"batch_size": 32}}


def recipe_of(variant, **changes):
    sets = [f"{key}={as_yaml(value)}" for key, value in variant.changes.items()]
    return load_recipe(None, {"model": "x", "data.train": "y.csv", **changes}, sets).recipe


@pytest.mark.parametrize("name", STUDIES)
def test_every_variant_is_a_valid_recipe(name):
    variants = build_study(name, Recipe(**PLAIN))
    recipes = [recipe_of(variant) for variant in variants]
    assert len(variants) > 1
    assert len({variant.name for variant in variants}) == len(variants)
    assert all(one != other for i, one in enumerate(recipes) for other in recipes[:i])


def test_accumulation_keeps_the_batch():
    variants = build_study("accumulation", Recipe(**PLAIN))
    assert [variant.name for variant in variants] == [
        "32 as 1 × 32",
        "32 as 2 × 16",
        "32 as 4 × 8",
        "32 as 8 × 4",
        "4 alone",
    ]
    recipes = [recipe_of(variant) for variant in variants]
    assert [recipe.train.batch_size for recipe in recipes] == [32, 32, 32, 32, 4]
    assert [recipe.memory.micro_batch for recipe in recipes] == [32, 16, 8, 4, 4]
    single = build_study("accumulation", Recipe(**PLAIN | {"train": {"batch_size": 1}}))
    assert [variant.name for variant in single] == ["1 as 1 × 1"]


def test_methods_keep_the_settings_of_the_adapter():
    own = Recipe(**PLAIN, adapter={"kind": "lora", "rank": 4})
    found = {variant.name: recipe_of(variant) for variant in build_study("methods", own)}
    assert list(found) == ["full", "head-only", "lora", "qlora"]
    assert (found["full"].adapter, found["full"].train.freeze) == ("none", {})
    assert found["head-only"].train.freeze == {"base": "always"}
    assert [(found[kind].adapter.kind, found[kind].adapter.rank) for kind in ("lora", "qlora")] == [
        ("lora", 4),
        ("qlora", 4),
    ]
    assert recipe_of(build_study("methods", Recipe(**PLAIN))[3]).adapter == "qlora"


def test_a_study_that_is_not_there():
    with pytest.raises(RecipeError, match="did you mean precisions"):
        build_study("precision", Recipe(**PLAIN))
