"""The recipe of a run in its report, with the origin of each value; for several runs, the values that differ."""

from collections.abc import Sequence

from trimtab.report.page.document import fold, paragraph, table
from trimtab.report.page.run_files import RecipeValue

_HEADER, _KINDS = ["key", "value", "set by"], "kv-"
_SHOWN = ("model", "data.train")  # shown even if they are defaults


def recipe_section(recipe: Sequence[RecipeValue]) -> str:
    """Return the values that the user set, and the defaults folded."""
    if not recipe:
        return ""
    chosen = [value for value in recipe if value.origin != "default" or value.key in _SHOWN]
    rest = [value for value in recipe if value not in chosen]
    folded = fold(f"{len(rest)} keys with default values", table(_HEADER, _rows(rest), _KINDS))
    note = "Keys that were set, and where: an option of the command, a line of a recipe file, or Python."
    return paragraph(note, "soft") + table(_HEADER, _rows(chosen), _KINDS) + folded


def _rows(values: Sequence[RecipeValue]) -> list[list[str]]:
    return [[value.key, value.value, value.origin] for value in values]


def differences(names: Sequence[str], recipes: Sequence[Sequence[RecipeValue]]) -> str:
    """Return the keys whose values differ between the recipes of some runs."""
    values = [{value.key: value.value for value in recipe} for recipe in recipes]
    rows = []
    for key in dict.fromkeys(key for found in values for key in found):
        cells = [found.get(key, "–") for found in values]
        if len(set(cells)) > 1 and key not in ("out", "name"):
            rows.append([key, *cells])
    return table(["key", *names], rows, "k" + "v" * len(names)) or paragraph("The recipes are equal.")
