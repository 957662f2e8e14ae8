"""Log a comparison to MLflow: a run for the comparison, with a nested run for each variant."""

from collections.abc import Sequence
from pathlib import Path

from trimtab.build.data import run_name
from trimtab.commands.tracked_results import Results, log_results
from trimtab.errors import RecipeError
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import as_yaml
from trimtab.report.compare import NUMBERS, Comparison, Outcome
from trimtab.report.verdict import verdict
from trimtab.tracking.mlflow.uri import tracking_uri

# names on the server, where a / would be shown as a folder
_NAMES = {
    "samples/s": "samples_per_s",
    "tokens/s": "tokens_per_s",
    "step ms": "step_ms",
    "allocated": "allocated_peak_bytes",
    "reserved": "reserved_peak_bytes",
    "tensors": "tensor_peak_bytes",
    "process": "process_peak_bytes",
}


def track_comparison(comparison: Comparison, recipe: Recipe, folder: Path, files: Sequence[Path]) -> str:
    """Log a comparison with its files.

    Args:
        comparison: The comparison.
        recipe: The recipe without the changes of a variant.
        folder: The folder of the results, after which the run is named.
        files: Files to upload.

    Returns:
        A line that says where it is.

    Raises:
        RecipeError: Tracking is disabled.
        TrimtabError: The server cannot be reached, or rejects the data.
    """
    uri = tracking_uri(recipe.track.uri, folder)
    if uri is None:
        raise RecipeError("tracking is switched off for this recipe", "unset TRIMTAB_TRACK, or set track.uri")
    params = {name: str(value) for name, value in comparison.protocol.items()}
    parts = [_results(outcome) for outcome in comparison.outcomes]
    name = folder.absolute().name
    whole = Results(name, params | {"verdict": verdict(comparison)}, {}, files, parts)
    return log_results(whole, uri, recipe.track.experiment or run_name(recipe))


def _results(outcome: Outcome) -> Results:
    params = {key: as_yaml(value) for key, value in outcome.variant.changes.items()}
    spreads = {number: outcome.spread(number) for number in NUMBERS}
    metrics = {_NAMES.get(number, number): spread.median for number, spread in spreads.items() if spread is not None}
    if outcome.failure:
        params["failure"] = outcome.failure
    curves = {"training_loss": outcome.runs[0].losses} if outcome.runs else {}
    return Results(outcome.name, params, metrics, curves=curves, has_failed=bool(outcome.failure))
