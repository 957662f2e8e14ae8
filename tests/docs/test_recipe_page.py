"""docs/recipe.md lists every key of the recipe as the schema declares it. Run as a script, this writes the page."""

from pathlib import Path

from trimtab.recipe.schema import Recipe
from trimtab.recipe.schema_keys import keys_of

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"
HEAD = """# The recipe

One YAML file, or the same as flags (`--set train.lr=3e-5`); later wins: defaults, file, flags, `--set`. Only `model`
and `data.train` are needed. `trimtab init` writes a commented file, `trimtab check` validates one, sees that its data,
model, tokenizer and metrics are there, and prints it resolved with the origin of every value, `trimtab check --schema`
prints the JSON Schema for editors. A word and the keys of its mapping are one setting: `--set adapter=lora --set
adapter.rank=8` is `{kind: lora, rank: 8}`; settings that contradict each other on one command line are refused.

Keys that you know from HF Trainer, Accelerate or Lightning are answered with ours. Keys marked "Not supported yet" are
refused when they are set to anything else: no setting is ever ignored in silence. Names of metrics are listed in
[training.md](training.md#metrics).

| key | allowed | default | what it is |
|---|---|---|---|
"""


def rows() -> list[str]:
    found = []
    for key in keys_of(Recipe):
        if key.section is not None and not key.field.description:
            continue
        required = key.field.is_required()
        default = "" if required else _shown(key.field.get_default(call_default_factory=True))
        cells = [f"`{key.dotted}`", key.allowed, default, key.field.description or ""]
        found.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return found


def _shown(value: object) -> str:
    if hasattr(value, "model_dump"):
        return ""
    words = {"None": "null", "True": "true", "False": "false"}
    return f"`{words.get(str(value), value)}`"


def test_the_page_is_the_schema():
    assert len(rows()) > 50
    assert PAGE.read_text() == HEAD + "\n".join(rows()) + "\n", "run: python tests/docs/test_recipe_page.py"


if __name__ == "__main__":
    PAGE.write_text(HEAD + "\n".join(rows()) + "\n")
