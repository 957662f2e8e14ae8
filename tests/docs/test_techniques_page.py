"""docs/techniques.md lists every technique as its file declares it."""

import re
from pathlib import Path

import pytest

from trimtab.recipe.schema import Recipe
from trimtab.techniques import TECHNIQUES

PAGE = (Path(__file__).parents[2] / "docs" / "techniques.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| [")]


def test_every_technique_has_a_row():
    assert [row[1] for row in ROWS] == [f"`{technique.setting}`" for technique in TECHNIQUES]


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.key)
def test_the_row_is_what_the_code_declares(technique):
    _, _, values, effect, on_resume, file = next(row for row in ROWS if row[1] == f"`{technique.setting}`")
    assert effect == technique.effect
    assert on_resume == technique.on_resume("one", "other")
    assert file == "`" + "/".join(type(technique).__module__.split(".")[1:]) + ".py`"
    recipe = Recipe(model="nowhere", data={"train": "nowhere"})
    assert str(technique.asked(recipe)) in re.split(r"[, ]+", values)
