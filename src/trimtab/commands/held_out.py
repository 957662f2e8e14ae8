"""The rows on which a command evaluates a model: a file that the user names, or the held-out rows of its run."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.build.data import build_data
from trimtab.build.parts import Data
from trimtab.errors import DataError, RecipeError
from trimtab.inference.held_out import HeldOut, read_held_out, tokenized
from trimtab.inference.load import LoadedModel
from trimtab.recipe.schema import Recipe

_CURE = "pass a file with rows that the model was not trained on"


def held_out_of(
    loaded: LoadedModel,
    data: Any = None,
    num_rows: int | None = None,
    *,
    text: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
) -> HeldOut:
    """Return rows to evaluate a model on: `data` if given, else the held-out rows of the run that trained it.

    Args:
        loaded: The model.
        data: File, folder, glob or Hub name, or rows; None for the rows of the run.
        num_rows: Use at most this number of rows, chosen at random.
        text: Text column; by default the one used in training, or guessed.
        label: Label column; by default the one used in training, or guessed.

    Raises:
        RecipeError: If no data was named, and the model has no run, or its run held out no rows.
        DataError: If the rows cannot be read, or do not fit the model.
    """
    if num_rows is not None and num_rows < 1:
        raise RecipeError(f"{num_rows} rows are not enough to evaluate on", "--rows 1 or more")
    if data is not None:
        return read_held_out(loaded, data, text=text, label=label, num_rows=num_rows)
    if text is not None or label is not None:
        raise RecipeError("columns were given, but no data", f"{_CURE}, or leave out --text and --label")
    found = data_of_run(loaded.facts)
    if found.eval is None:
        raise RecipeError("the run held out no rows (data.eval_share is 0)", _CURE)
    if found.task.name == "classify":  # its labels are the model's, whatever the file contains now
        columns: dict[str, Any] = {"text": found.task.columns["text"], "label": found.task.columns["label"]}
        return read_held_out(loaded, found.eval, num_rows=num_rows, **columns)
    return tokenized(loaded, found.task, found.eval, num_rows)


def data_of_run(facts: Mapping[str, Any]) -> Data:
    """Read the rows of the run that trained a model again.

    Args:
        facts: The contents of the model's trimtab.json.

    Raises:
        RecipeError: The model was not trained by trimtab.
        DataError: The rows cannot be read.
    """
    recipe = facts.get("recipe")
    if not isinstance(recipe, Mapping):
        raise RecipeError("the held-out rows of this model are unknown: it was not trained by trimtab", _CURE)
    try:
        return build_data(Recipe(**recipe))
    except (DataError, RecipeError) as error:
        raise DataError(f"the held-out rows of the run cannot be read: {error.problem}", _CURE) from error
