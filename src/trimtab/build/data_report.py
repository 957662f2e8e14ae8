"""The report of `trimtab data show`: the data of a recipe as the model sees it."""

from trimtab.build.data import build_data, build_tokens
from trimtab.build.model import build_skeleton
from trimtab.data.report import DataReport, describe_data
from trimtab.recipe.schema import Recipe


def report_data(recipe: Recipe, num_examples: int = 3) -> DataReport:
    """Read and tokenize the data of a recipe; no weights are loaded."""
    data = build_data(recipe)  # logs what was guessed
    loaded = build_skeleton(recipe, data)
    tokens = build_tokens(recipe, data, loaded)
    return describe_data(data.task, data.train, data.eval, tokens.train, tokens.eval, loaded.tokenizer, num_examples)
