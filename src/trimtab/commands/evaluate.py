"""`trimtab evaluate`: evaluate a model on labelled rows, alone or against another one on the same rows."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.commands.held_out import held_out_of
from trimtab.commands.tracked_results import Results, track_results
from trimtab.errors import RecipeError
from trimtab.hardware.inventory import find_device
from trimtab.inference.bootstrap import PairedDifference
from trimtab.inference.evaluate import Evaluation, evaluate, same_rows
from trimtab.inference.load import load

_MAX_LABELS = 100  # maximum number of labels whose scores are tracked individually


@dataclass(frozen=True)
class EvaluationResult:
    """The result of `trimtab evaluate`.

    Args:
        model: The model, as the user named it.
        facts: The contents of its trimtab.json.
        evaluation: Its evaluation.
        other: The second model; None if there is none.
        against: The evaluation of the second model.
        differences: The paired test of each metric, second against first.
    """

    model: str
    facts: Mapping[str, Any]
    evaluation: Evaluation
    other: str | None = None
    against: Evaluation | None = None
    differences: Mapping[str, PairedDifference] | None = None


def evaluate_model(
    model: str,
    data: Any = None,
    *,
    against: str | None = None,
    text: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    num_rows: int | None = None,
    num_worst: int = 10,
    device: str | torch.device | None = None,
) -> EvaluationResult:
    """Evaluate a model, and compare it with another one on the same rows.

    Args:
        model: A run, a folder, a Hub name or a model on a tracking server.
        data: Labelled rows; by default those that the run of the model held out.
        against: A second model.
        text: Text column; by default the one used in training, or guessed.
        label: Label column; by default the one used in training, or guessed.
        num_rows: Use at most this number of rows, chosen at random.
        num_worst: Number of rows with the highest loss to list.
        device: The device to compute on; None chooses one.
    """
    if num_rows is not None and num_rows < 1:
        raise RecipeError(f"--rows {num_rows} leaves no rows", "--rows 1 or more")
    if num_worst < 0:
        raise RecipeError(f"--worst {num_worst} is negative", "--worst 0 or more")
    where = find_device(device)
    loaded = load(model, device=where)
    facts = loaded.facts
    held_out = held_out_of(loaded, data, num_rows, text=text, label=label)
    first = evaluate(loaded, held_out, num_worst=num_worst)
    if against is None:
        return EvaluationResult(model, facts, first)
    del loaded
    gc.collect()  # frees the first model, which has reference cycles
    other = load(against, device=where)
    second = evaluate(other, same_rows(held_out, other), num_worst=num_worst)
    return EvaluationResult(model, facts, first, against, second, first.compare_with(second))


def track(result: EvaluationResult, files: Sequence[Path]) -> str:
    """Log an evaluation to MLflow, and return a line that says where it is.

    Args:
        result: The evaluation.
        files: Files to upload.
    """
    params = {"model": result.model, "data": result.evaluation.origin, "rows": str(result.evaluation.num_rows)}
    if result.other is not None:
        params["against"] = result.other
    name = f"evaluate {Path(result.model).name}"
    return track_results(result.model, result.facts, Results(name, params, _tracked_metrics(result), files))


def _tracked_metrics(result: EvaluationResult) -> dict[str, float]:
    found = result.evaluation
    values = dict(found.metrics)
    for name, (low, high) in found.intervals.items():
        values |= {f"{name}_low": low, f"{name}_high": high}
    if len(found.by_label) <= _MAX_LABELS:
        values |= {f"f1/{each.label}": each.f1 for each in found.by_label}
    for name, difference in (result.differences or {}).items():
        values |= {f"{name}_difference": difference.second - difference.first, f"{name}_p": difference.p_value}
    return values
