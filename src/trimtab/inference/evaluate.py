"""Evaluate a model on labelled rows: metrics with intervals, scores of each label, confusions, the worst rows."""

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trimtab.data.metrics import scores_by_label
from trimtab.errors import DataError, ModelError
from trimtab.inference.bootstrap import PairedDifference, interval_of, paired_differences, resampled_metrics
from trimtab.inference.held_out import HeldOut, read_held_out, tokenized
from trimtab.inference.load import LoadedModel
from trimtab.inference.row_scores import RowScores, score_rows


@dataclass(frozen=True)
class LabelScores:
    """Precision, recall and F1 of one label, and the number of rows that have it."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class EvaluatedRow:
    """The prediction of a model for one row.

    Args:
        location: Where the row is, such as "reviews.csv, line 17".
        text: Its text; for language models with the special tokens.
        label: Its label, or number; empty for language models.
        predicted: The prediction, in the same form.
        loss: Its loss; for language models the mean over its tokens.
    """

    location: str
    text: str
    label: str
    predicted: str
    loss: float


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The evaluation of a model on labelled rows.

    Args:
        task_name: Task of the model.
        origin: Source of the rows.
        metrics: Every metric of the task.
        intervals: 95% bootstrap interval of each metric, over rows. Long texts of causal-lm and masked-lm are cut into
            several rows, which count as independent.
        labels: Labels of a classifier, in the order of its outputs.
        by_label: Scores of each label of a classifier.
        confusion: Number of rows by true label, then by predicted label; empty unless rows have one label.
        worst: The rows with the highest loss, highest first.
        scores: Predictions of all rows.
    """

    task_name: str
    origin: str
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    labels: tuple[str, ...]
    by_label: tuple[LabelScores, ...]
    confusion: tuple[tuple[int, ...], ...]
    worst: tuple[EvaluatedRow, ...]
    scores: RowScores

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.scores)

    @property
    def losses(self) -> list[float]:
        """Loss of each row, in the order of the rows; for language models the mean over its tokens."""
        return _row_losses(self.scores).tolist()

    @property
    def are_correct(self) -> list[bool]:
        """Whether each row of a classifier is predicted correctly; empty for other tasks."""
        return (self.scores.hits_N > 0).tolist() if self.labels else []

    def compare_with(self, other: "Evaluation") -> dict[str, PairedDifference]:
        """Test whether another model differs from this one, on the same rows.

        Accuracy is tested with McNemar's exact test, the other metrics with a paired bootstrap.

        Raises:
            ModelError: If the models have different labels or tokens.
            DataError: If the rows differ.
        """
        return paired_differences(self.scores, _as_pair(self, other))

    def as_dict(self) -> dict[str, Any]:
        """Return everything except the predictions of all rows, as JSON types; NaN and infinity become None."""
        parts = asdict(replace(self, scores=None))  # type: ignore[arg-type]
        del parts["scores"]
        return _plain(parts | {"num_rows": self.num_rows})  # type: ignore[no-any-return]


def evaluate(
    loaded: LoadedModel, held_out: HeldOut, *, num_worst: int = 10, seed: int = 0, batch_size: int = 32
) -> Evaluation:
    """Evaluate a model on rows.

    Args:
        loaded: The model.
        held_out: The rows, tokenized for the model.
        num_worst: Number of rows with the highest loss to list.
        seed: Seed of the bootstrap.
        batch_size: Rows per forward pass.

    Raises:
        DataError: If the rows have nothing to predict.
    """
    scores = score_rows(loaded, held_out, batch_size)
    if not scores.count_N.sum() > 0:
        raise DataError(f"{held_out.rows.origin} has nothing to predict in {len(scores):,} rows", "use more rows")
    everything = torch.ones(1, len(scores), dtype=torch.float64)
    resampled = resampled_metrics(scores, seed=seed)
    names = tuple(loaded.labels)
    one_label = scores.kind == "cross-entropy"
    return Evaluation(
        loaded.task_name,
        held_out.rows.origin,
        {name: value.item() for name, value in scores.metrics(everything).items()},
        {name: interval_of(values) for name, values in resampled.items()},
        names,
        _by_label(scores, names) if names else (),
        tuple(map(tuple, (scores.targets_NK.T @ scores.predicted_NK).long().tolist())) if one_label else (),
        _worst_rows(loaded, held_out, scores, names, num_worst),
        scores,
    )


def same_rows(held_out: HeldOut, loaded: LoadedModel) -> HeldOut:
    """Return the rows that one model was evaluated on, tokenized for another one.

    Raises:
        ModelError: If the other model has another task.
    """
    task = held_out.task
    if loaded.task_name != task.name:
        raise ModelError(
            f"the tasks of the models differ: {task.name} and {loaded.task_name}", "compare models of one task"
        )
    if task.name == "classify":  # each model numbers the labels in its own order
        columns: dict[str, Any] = {"text": task.columns["text"], "label": task.columns["label"]}
        return read_held_out(loaded, held_out.rows, **columns)
    return tokenized(loaded, copy.deepcopy(task), held_out.rows)  # a copy, because a task is bound to one tokenizer


def _as_pair(first: Evaluation, second: Evaluation) -> RowScores:
    """Return the scores of the second model, with its labels in the order of the first."""
    scores = second.scores
    if first.task_name != second.task_name or set(first.labels) != set(second.labels):
        raise ModelError(
            f"the models predict different things: {first.task_name} {', '.join(first.labels)} and "
            f"{second.task_name} {', '.join(second.labels)}",
            "compare models of one task with the same labels",
        )
    if first.labels != second.labels:
        order = [second.labels.index(name) for name in first.labels]
        scores = replace(scores, outputs_NK=scores.outputs_NK[:, order], targets_NK=scores.targets_NK[:, order])
    if len(first.scores) != len(scores) or not torch.equal(first.scores.targets_NK, scores.targets_NK):
        raise DataError("the models were evaluated on different rows", "evaluate both on the same file")
    if not torch.equal(first.scores.count_N, scores.count_N):
        raise ModelError(
            "the models split the rows into different tokens, so their losses cannot be compared",
            "compare models with the same tokenizer and max_length",
        )
    return scores


def _by_label(scores: RowScores, names: tuple[str, ...]) -> tuple[LabelScores, ...]:
    counts = scores.counts(torch.ones(1, len(scores), dtype=torch.float64))[:, 0]
    columns = [values.tolist() for values in scores_by_label(counts).values()]
    support = [int(value) for value in counts[2].tolist()]
    return tuple(LabelScores(*row) for row in zip(names, *columns, support, strict=True))


def _row_losses(scores: RowScores) -> Tensor:
    return scores.loss_N / scores.count_N.clamp(min=1)


def _worst_rows(
    loaded: LoadedModel, held_out: HeldOut, scores: RowScores, names: tuple[str, ...], num_worst: int
) -> tuple[EvaluatedRow, ...]:
    losses = _row_losses(scores)
    found = []
    for row in losses.topk(min(num_worst, len(losses))).indices.tolist():
        label = _described(scores.kind, scores.targets_NK[row], names)
        predicted = _described(scores.kind, _prediction(scores, row), names)
        found.append(EvaluatedRow(*_source(loaded, held_out, row), label, predicted, losses[row].item()))
    return tuple(found)


def _prediction(scores: RowScores, row: int) -> Tensor:
    if scores.kind in ("mse", "token-cross-entropy"):
        return scores.outputs_NK[row]
    return replace(scores, outputs_NK=scores.outputs_NK[row : row + 1]).predicted_NK[0]


def _described(kind: str, values_K: Tensor, names: tuple[str, ...]) -> str:
    if kind == "mse":
        return ", ".join(f"{value:.4g}" for value in values_K.tolist())
    return ", ".join(name for name, is_set in zip(names, values_K.tolist(), strict=True) if is_set) if names else ""


def _source(loaded: LoadedModel, held_out: HeldOut, row: int) -> tuple[str, str]:
    """Return the location and the text of a row."""
    rows, task = held_out.rows, held_out.task
    is_whole_row = len(rows) == len(held_out.tokens)  # long texts may become several
    location = rows.location(row) if is_whole_row else f"{rows.origin}, part {row + 1}"
    if task.loss_kind == "token-cross-entropy":
        return location, task.example_text(held_out.tokens[row], loaded.tokenizer)
    text = task.columns["text"]
    return location, "\n".join(str(rows.columns[name][row]) for name in ([text] if isinstance(text, str) else text))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
