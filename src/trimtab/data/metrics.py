"""Metrics accumulated on the device: a batch adds to sums, and only `compute` reads them (a host-device sync).

Memory does not depend on the number of rows of an evaluation: sums of fixed size, and for AUC a bounded number of
scores. `combine` merges the sums of several ranks. Logits have shape [rows, labels] or [rows, length, vocabulary].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Protocol

import torch
from torch import Tensor

from trimtab.data.auc import RankedScores
from trimtab.errors import LossError, RecipeError

_LOWER_IS_BETTER = ("loss", "mse", "mae", "perplexity")
_OF_COUNTS = ("accuracy", "f1", "precision", "recall")
# Metrics by kind of loss.
METRIC_NAMES = {
    "cross-entropy": ("loss", *_OF_COUNTS, "auc", "mcc"),
    "binary-cross-entropy": ("loss", *_OF_COUNTS, "auc"),
    "mse": ("loss", "mse", "mae", "pearson"),
    "token-cross-entropy": ("loss", "perplexity", "token_accuracy"),
}
_DEFAULTS = {
    "cross-entropy": ("loss", "accuracy", "f1"),
    "binary-cross-entropy": ("loss", "f1", "accuracy"),
    "mse": ("loss", "mse", "mae", "pearson"),
    "token-cross-entropy": ("loss", "perplexity"),
}
_LOSSES_OF_TASKS = {"classify": ("cross-entropy", "binary-cross-entropy"), "regress": ("mse",)}


def metrics_of_task(task: str | None) -> list[str]:
    """Return the metrics that a task may have, as far as its name determines them; None means any task."""
    kinds = list(METRIC_NAMES) if task is None else _LOSSES_OF_TASKS.get(task, ("token-cross-entropy",))
    return list(dict.fromkeys(name for kind in kinds for name in METRIC_NAMES[kind]))


def higher_is_better(name: str) -> bool:
    """Whether a higher value of a metric is better.

    Raises:
        RecipeError: If there is no such metric.
    """
    if name not in metrics_of_task(None):
        raise _no_metric(name, metrics_of_task(None), "")
    return name not in _LOWER_IS_BETTER


def check_own_metrics(metrics: Mapping[str, object]) -> None:
    """Reject user-defined metrics that have the name of a built-in one or are not callable.

    Raises:
        RecipeError: A metric is invalid; the message says what to use instead.
    """
    for name, function in metrics.items():
        if name in metrics_of_task(None):
            raise RecipeError(
                f"metrics: {name} is the name of a built-in metric",
                f"use another name: metrics={{'my_{name}': …}}; evaluate.metric: {name} needs no function",
            )
        if not callable(function):
            raise RecipeError(
                f"metrics: {name} is a {type(function).__name__}, expected a function",
                "pass a function of (logits, batch) that returns one value per row",
            )


class Metrics:
    """Sums of an evaluation, and the metrics computed from them.

    The loss is always among the results. F1, precision and recall are those of label 1 if there are two labels, and the
    macro average if there are more. With several labels per row, accuracy counts rows whose labels are all correct.

    Args:
        kind: The kind of loss: "cross-entropy", "binary-cross-entropy", "mse" or "token-cross-entropy".
        names: The metrics to compute; by default the usual ones of the loss.
        num_labels: Number of outputs per row.
        shifts_labels: Whether the logits at position t are scored against the label at t + 1.

    Raises:
        RecipeError: If a metric does not exist for this loss.
    """

    def __init__(
        self, kind: str, names: Sequence[str] | None = None, *, num_labels: int = 0, shifts_labels: bool = False
    ) -> None:
        wanted = _DEFAULTS[kind] if names is None else tuple(names)
        for name in wanted:
            if name not in METRIC_NAMES[kind]:
                raise _no_metric(name, METRIC_NAMES[kind], " for this task")
        self.names = list(dict.fromkeys(("loss", *wanted)))
        self._totals = torch.zeros(2, dtype=torch.float64)  # sum of losses, sum of weights
        self._parts: list[_SumAccumulator] = []
        if set(wanted) & {*_OF_COUNTS, "mcc"}:
            self._parts.append(_Counts(num_labels, several=kind == "binary-cross-entropy"))
        self._areas = _Areas(num_labels, one_label=kind == "cross-entropy") if "auc" in wanted else None
        if kind == "mse" and set(wanted) - {"loss"}:
            self._parts.append(_Moments(max(num_labels, 1)))
        if "token_accuracy" in wanted:
            self._parts.append(_TokenHits(shifts_labels))

    @property
    def sums(self) -> list[Tensor]:
        """All sums; the AUC scores are separate. Elementwise addition merges those of several ranks."""
        return [self._totals, *(part.sums for part in self._parts)]

    def combine(self, reduce: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums of this rank by those of all ranks.

        Args:
            reduce: Returns the sum of a tensor over the ranks.
            gather: Concatenates the tensors of all ranks along dimension 0; their lengths may differ.
        """
        for kept in self.sums:
            kept.copy_(reduce(kept.cpu()))
        if self._areas is not None:
            self._areas.ranks.replace(gather(self._areas.ranks.table()))

    @torch.no_grad()
    def update(
        self,
        logits: Tensor,
        batch: dict[str, Tensor],
        loss_sum: Tensor,
        weight: Tensor | int,
        hits: Tensor | None = None,
    ) -> None:
        """Add a batch without a host-device sync, except for AUC once per about a million scores.

        Args:
            logits: The model's logits; empty if the loss was computed without them.
            batch: The batch with its "labels".
            loss_sum: The loss summed over the batch.
            weight: Number of rows or tokens in the sum.
            hits: How many of these were predicted correctly, if there are no logits.

        Raises:
            LossError: If a metric needs logits and there are none.
        """
        device = loss_sum.device
        if self._totals.device != device:
            self._totals = self._totals.to(device)
            for part in self._parts:
                part.sums = part.sums.to(device)
        self._totals[0] += loss_sum.detach()
        self._totals[1] += weight
        for accumulator in self._accumulators:
            if logits.numel():
                accumulator.update(logits.detach(), batch["labels"])
            elif hits is not None and isinstance(accumulator, _TokenHits):
                accumulator.add(hits, weight)
            else:
                raise LossError(
                    f"not all of {', '.join(self.names)} can be computed without logits, but this loss returns none",
                    "set memory.loss: plain, or use only loss and perplexity",
                )

    @property
    def _accumulators(self) -> list["_Accumulator"]:
        return [*self._parts, *([] if self._areas is None else [self._areas])]

    def compute(self) -> dict[str, float]:
        """Return the metrics of all batches so far; NaN where undefined. A host-device sync."""
        loss_sum, weight = self._totals.tolist()
        values = {"loss": _ratio(loss_sum, weight, empty=math.nan)}
        values["perplexity"] = math.exp(values["loss"]) if not values["loss"] > 700 else math.inf
        for part in self._accumulators:
            values |= part.values()
        return {name: values[name] for name in self.names}


class _Accumulator(Protocol):
    """An accumulator and the metrics computed from it."""

    def update(self, logits: Tensor, labels: Tensor) -> None: ...

    def values(self) -> dict[str, float]: ...


class _SumAccumulator(_Accumulator, Protocol):
    """An accumulator that is one tensor of sums."""

    sums: Tensor


class _Counts:
    """For each label: how often it was correct, predicted, true. Enough for MCC too, without a confusion matrix.

    With several labels per row, a label is predicted if its logit is above 0.
    """

    def __init__(self, num_labels: int, *, several: bool) -> None:
        self._several = several
        # The last column: number of rows whose labels are all correct, and number of rows.
        self.sums = torch.zeros(3, num_labels + 1, dtype=torch.int64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        if self._several:
            predicted, true = logits > 0, labels > 0.5
        else:
            predicted, true = (_one_hot(each, logits.shape[-1]) for each in (logits.argmax(dim=-1), labels))
        for index, flags in enumerate((predicted & true, predicted, true)):
            self.sums[index, :-1] += flags.sum(dim=0)
        self.sums[0, -1] += (predicted == true).all(dim=-1).sum()
        self.sums[1, -1] += labels.shape[0]

    def values(self) -> dict[str, float]:
        counts = self.sums.double().cpu()
        found = metrics_of_counts(counts[:, :-1], counts[:2, -1], several=self._several)
        return {name: float(value) for name, value in found.items()}


def metrics_of_counts(counts: Tensor, rows: Tensor, *, several: bool) -> dict[str, Tensor]:
    """Compute accuracy, F1, precision, recall and MCC from counts.

    Args:
        counts: For each label how often it was correct, predicted, true: shape [3, …, labels]. Dimensions between these
            are independent evaluations.
        rows: Number of rows whose labels are all correct, and number of rows: shape [2, …].
        several: Whether a row may have several labels.
    """
    correct, predicted, true = counts
    num_correct, num_rows = rows
    by_label = scores_by_label(counts)
    if several:
        averaged_over = torch.ones_like(true, dtype=torch.bool)
    elif true.shape[-1] == 2:
        averaged_over = torch.tensor([False, True]).expand_as(true)
    else:
        averaged_over = (predicted + true) > 0  # not labels that no row has or was predicted to have
    num_averaged = averaged_over.sum(dim=-1)
    values = {
        name: torch.where(averaged_over, scores, 0).sum(dim=-1) / num_averaged for name, scores in by_label.items()
    }
    covariance = num_correct * num_rows - (predicted * true).sum(dim=-1)
    variances = (num_rows**2 - (predicted**2).sum(dim=-1)) * (num_rows**2 - (true**2).sum(dim=-1))
    mcc = torch.where(variances > 0, covariance / variances.sqrt(), 0)
    return values | {"accuracy": num_correct / num_rows, "mcc": torch.full_like(mcc, torch.nan) if several else mcc}


def scores_by_label(counts: Tensor) -> dict[str, Tensor]:
    """Compute precision, recall and F1 of each label from the counts of `metrics_of_counts`; 0 where undefined."""
    correct, predicted, true = counts
    return {
        "precision": correct / predicted.clamp(min=1),
        "recall": correct / true.clamp(min=1),
        "f1": 2 * correct / (predicted + true).clamp(min=1),
    }


def _one_hot(labels: Tensor, num_labels: int) -> Tensor:
    """One-hot encode without the range check of torch's own function, which is a host-device sync."""
    return labels[:, None] == torch.arange(num_labels, device=labels.device)


class _Areas:
    """Area under the ROC curve of the log-odds; for more than two labels the mean of one-vs-rest."""

    def __init__(self, num_labels: int, *, one_label: bool) -> None:
        self._one_label = one_label
        self._is_binary = one_label and num_labels == 2
        self.ranks = RankedScores(1 if self._is_binary else num_labels)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        scores = log_odds(logits.double(), one_label=self._one_label)
        if self._is_binary:
            is_true = labels[:, None]
        elif self._one_label:
            is_true = _one_hot(labels, scores.shape[1])
        else:
            is_true = labels > 0.5
        self.ranks.add(scores, is_true)

    def values(self) -> dict[str, float]:
        areas = self.ranks.areas()
        return {"auc": float(areas.mean()) if len(areas) else math.nan}


def log_odds(logits: Tensor, *, one_label: bool) -> Tensor:
    """Return the scores that AUC ranks rows by: shape [rows, 1] for two labels of which a row has one."""
    if one_label and logits.shape[-1] == 2:
        return logits[:, 1:] - logits[:, :1]
    if not one_label:
        return logits
    # For the most likely label, sum the others' probabilities: 1 - p would round to 0.
    highest, best = logits.max(dim=-1, keepdim=True)
    shares = (logits - highest).exp()
    odds = logits - highest - (shares.sum(dim=-1, keepdim=True) - shares).log()
    others = logits.scatter(-1, best, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return odds.scatter(-1, best, highest - others)


class _Moments:
    """Sums of errors, and the moments for Pearson's correlation."""

    def __init__(self, num_numbers: int) -> None:
        self._num_numbers = num_numbers
        self.sums = torch.zeros(8, num_numbers, dtype=torch.float64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        predicted = logits.double().reshape(-1, self._num_numbers)
        true = labels.double().reshape(-1, self._num_numbers)
        self.sums += moments(predicted, true, predicted - true).sum(dim=1)

    def values(self) -> dict[str, float]:
        return {name: float(value) for name, value in metrics_of_moments(self.sums.cpu()).items()}


def moments(predicted: Tensor, true: Tensor, error: Tensor) -> Tensor:
    """Return the terms whose sums over rows give the metrics of numbers: shape [8, rows, numbers]."""
    return torch.stack(
        (torch.ones_like(true), error**2, error.abs(), predicted, true, predicted**2, true**2, predicted * true)
    )


def metrics_of_moments(sums: Tensor) -> dict[str, Tensor]:
    """Compute the metrics of numbers from sums of `moments`: shape [8, …, numbers]; the mean over the numbers."""
    count, squared, absolute = sums[:3]
    predicted, true, predicted2, true2, product = sums[3:] / count
    spread = (predicted2 - predicted**2).clamp(min=0).sqrt() * (true2 - true**2).clamp(min=0).sqrt()
    pearson = torch.where(spread > 0, (product - predicted * true) / spread, torch.nan)
    return {
        "mse": (squared / count).mean(dim=-1),
        "mae": (absolute / count).mean(dim=-1),
        "pearson": pearson.mean(dim=-1),
    }


class _TokenHits:
    """How many tokens with loss were predicted correctly."""

    def __init__(self, shifts_labels: bool) -> None:
        self._shifts_labels = shifts_labels
        self.sums = torch.zeros(2, dtype=torch.int64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        if self._shifts_labels:
            logits, labels = logits[:, :-1], labels[:, 1:]
        counted = labels != -100
        self.add(((logits.argmax(dim=-1) == labels) & counted).sum(), counted.sum())

    def add(self, hits: Tensor, count: Tensor | int) -> None:
        self.sums[0] += hits
        self.sums[1] += count

    def values(self) -> dict[str, float]:
        hits, count = self.sums.tolist()
        return {"token_accuracy": _ratio(hits, count, empty=math.nan)}


def _ratio(numerator: float, denominator: float, *, empty: float = 0.0) -> float:
    return numerator / denominator if denominator else empty


def near_metrics(name: str, allowed: Sequence[str]) -> list[str]:
    """Return the metrics that a wrong name may mean, the likeliest first."""
    return [metric for metric in allowed if metric.startswith(name)] or get_close_matches(name, allowed, n=1)


def _no_metric(name: str, allowed: Sequence[str], where: str) -> RecipeError:
    near = near_metrics(name, allowed)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return RecipeError(f"there is no metric {name!r}{where}{hint}", f"use one of {', '.join(allowed)}")
