"""docs/recipe.md lists every key of the recipe as the schema declares it. Run as a script, this writes the page."""

from pathlib import Path

from trimtab.recipe.schema import Recipe
from trimtab.recipe.schema_keys import keys_of

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"
HEAD = """# The recipe

A recipe is one YAML file, or the same settings as flags (`--set train.lr=3e-5`). Later wins: defaults, file, flags,
`--set`. Only `model` and `data.train` are required.

- `trimtab init` writes a commented file.
- In Python: `fit("recipe.yaml")`, `Recipe.from_file("recipe.yaml", sets=["train.lr=3e-5"])`; `help(Recipe)` lists the
  keys below. `trimtab.errors` has the exceptions; a notebook shows them as one message, with cures in Python.
- `trimtab check` validates a recipe, checks that its data, model, tokenizer and metrics exist, and prints it resolved,
  with the origin of every value. `trimtab check --schema` prints the JSON Schema for editors.
- A setting that is a word or a mapping can be written in parts: `--set adapter=lora --set adapter.rank=8` is
  `{kind: lora, rank: 8}`. Settings on one command line that contradict each other are refused.
- Keys of [HF Trainer](coming-from/hf-trainer.md), [Accelerate](coming-from/accelerate.md),
  [Lightning](coming-from/lightning.md), [TRL and PEFT](coming-from/trl-peft.md), [Axolotl](coming-from/axolotl.md),
  [Unsloth](coming-from/unsloth.md), [torchtune](coming-from/torchtune.md) and [Ludwig](coming-from/ludwig.md) are
  answered with the key of trimtab; `trimtab convert` translates a whole config of Axolotl. Unknown keys and
  values are refused: no setting is ever ignored silently.

Names of metrics are in [training.md](training.md#metrics), keys that save memory or time in
[techniques.md](techniques.md), terms in [glossary.md](glossary.md).
"""
TABLE = """
| key | allowed | default | meaning |
|---|---|---|---|
"""


# Keys without a section, and the table that they are in.
SINGLE = {"model": "model and task", "task": "model and task", **dict.fromkeys(("seed", "name", "out"), "the run")}


def page() -> str:
    """One table for each section of a recipe."""
    sections: dict[str, list[str]] = {}
    for dotted, row in rows().items():
        name = dotted.partition(".")[0]
        sections.setdefault(SINGLE.get(name, name), []).append(row)
    return HEAD + "".join(f"\n## {name}\n{TABLE}" + "\n".join(found) + "\n" for name, found in sections.items())


def rows() -> dict[str, str]:
    found = {}
    for key in keys_of(Recipe):
        if key.section is not None and not key.field.description:
            continue
        required = key.field.is_required()
        default = "" if required else _shown(key.field.get_default(call_default_factory=True))
        cells = [f"`{key.dotted}`", key.allowed, default, key.field.description or ""]
        found[key.dotted] = "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    return found


def _shown(value: object) -> str:
    if hasattr(value, "model_dump"):
        return ""
    words = {"None": "null", "True": "true", "False": "false"}
    return f"`{words.get(str(value), value)}`"


def test_the_page_is_the_schema():
    assert len(rows()) > 50
    assert PAGE.read_text() == page(), "run: python tests/docs/test_recipe_page.py"


if __name__ == "__main__":
    PAGE.write_text(page())
