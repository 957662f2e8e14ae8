"""Metrics from sums: each batch is added on the device where it was computed, and only the result is read.

Nothing is kept but sums of fixed size, and for AUC a bounded number of scores, so that an evaluation needs no more
memory however many rows it sees. Those of several processes are combined. Logits are [rows, labels], or [rows, length,
vocabulary].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Protocol

import torch
from torch import Tensor

from trimtab.data.auc import RankedScores
from trimtab.errors import LossError, RecipeError

_HIGHER_IS_BETTER = {
    "loss": False,
    "accuracy": True,
    "f1": True,
    "precision": True,
    "recall": True,
    "auc": True,
    "mcc": True,
    "mse": False,
    "mae": False,
    "pearson": True,
    "perplexity": False,
    "token_accuracy": True,
}
_OF_COUNTS = ("accuracy", "f1", "precision", "recall")
_ALLOWED = {
    "cross-entropy": ("loss", *_OF_COUNTS, "auc", "mcc"),
    "binary-cross-entropy": ("loss", *_OF_COUNTS, "auc"),
    "mse": ("loss", "mse", "mae", "pearson"),
    "token-cross-entropy": ("loss", "perplexity", "token_accuracy"),
}
_KINDS_OF_TASKS = {"classify": ("cross-entropy", "binary-cross-entropy"), "regress": ("mse",)}  # others: of tokens
_USUAL = {
    "cross-entropy": ("loss", "accuracy", "f1"),
    "binary-cross-entropy": ("loss", "f1", "accuracy"),
    "mse": ("loss", "mse", "mae", "pearson"),
    "token-cross-entropy": ("loss", "perplexity"),
}


def metric_names(kind: str) -> tuple[str, ...]:
    """The metrics that there are for a kind of loss."""
    return _ALLOWED[kind]


def metrics_of_task(task: str | None) -> list[str]:
    """The metrics that there may be for a task, as far as it is known without its rows; None is any task."""
    kinds = list(_ALLOWED) if task is None else _KINDS_OF_TASKS.get(task, ("token-cross-entropy",))
    return list(dict.fromkeys(name for kind in kinds for name in _ALLOWED[kind]))


def higher_is_better(name: str) -> bool:
    """Whether more of a metric is better.

    Raises:
        RecipeError: If there is no such metric.
    """
    if name not in _HIGHER_IS_BETTER:
        raise _no_metric(name, tuple(_HIGHER_IS_BETTER), "")
    return _HIGHER_IS_BETTER[name]


def check_own_metrics(metrics: Mapping[str, object]) -> None:
    """Refuse own metrics that would replace one of ours, and those that cannot be called.

    Raises:
        RecipeError: With another name.
    """
    for name, function in metrics.items():
        if name in _HIGHER_IS_BETTER:
            raise RecipeError(
                f"metrics: {name} is a metric of trimtab, which yours would replace",
                f"give it another name: metrics={{'my_{name}': …}}; evaluate.metric: {name} needs no function",
            )
        if not callable(function):
            raise RecipeError(
                f"metrics: {name} is a {type(function).__name__}",
                "give a function of (logits, batch) with one value a row",
            )


class Metrics:
    """Sums of an evaluation, and the metrics that follow from them.

    The loss is always among the results. F1, precision and recall are those of label 1 where there are two labels, and
    the mean over labels (macro) where there are more; with several labels a row, accuracy counts rows of which every
    label is right.

    Args:
        kind: The kind of loss: "cross-entropy", "binary-cross-entropy", "mse" or "token-cross-entropy".
        names: The metrics wanted; by default the usual ones of the kind.
        num_labels: How many labels, or numbers, the model gives for a row.
        shifts_labels: Whether position t of the logits answers for the label at t + 1.

    Raises:
        RecipeError: If a metric does not exist for this kind.
    """

    def __init__(
        self, kind: str, names: Sequence[str] | None = None, *, num_labels: int = 0, shifts_labels: bool = False
    ) -> None:
        wanted = _USUAL[kind] if names is None else tuple(names)
        for name in wanted:
            if name not in _ALLOWED[kind]:
                raise _no_metric(name, _ALLOWED[kind], " for this task")
        self.names = list(dict.fromkeys(("loss", *wanted)))
        self._totals = torch.zeros(2, dtype=torch.float64)  # loss and weight
        self._parts: list[_Part] = []
        if set(wanted) & {*_OF_COUNTS, "mcc"}:
            self._parts.append(_Counts(num_labels) if kind == "cross-entropy" else _LabelCounts(num_labels))
        self._areas = _Areas(num_labels, one_label=kind == "cross-entropy") if "auc" in wanted else None
        if kind == "mse" and set(wanted) - {"loss"}:
            self._parts.append(_Moments(max(num_labels, 1)))
        if "token_accuracy" in wanted:
            self._parts.append(_TokenHits(shifts_labels))

    @property
    def sums(self) -> list[Tensor]:
        """All that is kept but scores. Added element by element, those of several processes give the whole."""
        return [self._totals, *(part.sums for part in self._parts)]

    def combine(self, reduce: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]) -> None:
        """Turn what this process has seen into what all of them have seen.

        Args:
            reduce: Gives the sum of a tensor over the processes.
            gather: Gives the tensors of all processes, one below the other; their lengths may differ.
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
        """Add a batch. Nothing is read from the device, but for AUC once in about a million scores.

        Args:
            logits: What the model gave; empty where its loss was computed without any.
            batch: The batch with its "labels".
            loss_sum: The loss summed over the batch.
            weight: How many rows or tokens it is summed over.
            hits: How many of them are the most likely ones, where there are no logits to tell it from.

        Raises:
            LossError: If a metric is wanted that needs logits, and there are none.
        """
        device = loss_sum.device
        if self._totals.device != device:
            self._totals = self._totals.to(device)
            for part in self._parts:
                part.sums = part.sums.to(device)
        self._totals[0] += loss_sum.detach()
        self._totals[1] += weight
        for counted in self._counted:
            if logits.numel():
                counted.update(logits.detach(), batch["labels"])
            elif hits is not None and isinstance(counted, _TokenHits):
                counted.add(hits, weight)
            else:
                raise LossError(
                    f"{', '.join(self.names)} cannot all be told without logits, and this loss gives none",
                    "compute the loss of evaluations plainly (memory.loss: plain), or ask for loss and perplexity",
                )

    @property
    def _counted(self) -> list["_Counted"]:
        return [*self._parts, *([] if self._areas is None else [self._areas])]

    def compute(self) -> dict[str, float]:
        """The metrics of everything seen so far; nan where they are not defined."""
        loss_sum, weight = self._totals.tolist()
        values = {"loss": _ratio(loss_sum, weight, empty=math.nan)}
        values["perplexity"] = math.exp(values["loss"]) if not values["loss"] > 700 else math.inf
        for part in self._counted:
            values |= part.values()
        return {name: values[name] for name in self.names}


class _Counted(Protocol):
    """What is kept of the rows, and the metrics that follow from it."""

    def update(self, logits: Tensor, labels: Tensor) -> None: ...

    def values(self) -> dict[str, float]: ...


class _Part(_Counted, Protocol):
    """Some of the sums."""

    sums: Tensor


class _Counts:
    """For each label: how often it was right, foretold, true. Enough for MCC too, without a confusion matrix."""

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels
        self.sums = torch.zeros(3, num_labels, dtype=torch.int64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        foretold = logits.argmax(dim=-1)
        ones = torch.ones_like(labels)
        self.sums[0].index_add_(0, labels, (foretold == labels).long())
        self.sums[1].index_add_(0, foretold, ones)
        self.sums[2].index_add_(0, labels, ones)

    def values(self) -> dict[str, float]:
        right, foretold, true = self.sums.double().cpu()
        total = true.sum()
        by_label = _by_label(right, foretold, true)
        if self._num_labels == 2:
            averaged = {name: float(values[1]) for name, values in by_label.items()}
        else:
            seen = (foretold + true) > 0  # a label that nobody has or foretells says nothing
            averaged = {name: float(values[seen].mean()) for name, values in by_label.items()}
        covariance = right.sum() * total - (foretold * true).sum()
        spreads = (total**2 - (foretold**2).sum()) * (total**2 - (true**2).sum())
        return averaged | {
            "accuracy": _ratio(float(right.sum()), float(total), empty=math.nan),
            "mcc": _ratio(float(covariance), math.sqrt(float(spreads))),
        }


class _LabelCounts:
    """The same where a row may have several labels; a label is foretold where its logit is above 0."""

    def __init__(self, num_labels: int) -> None:
        # The last column holds rows of which all labels are right, and all rows.
        self.sums = torch.zeros(3, num_labels + 1, dtype=torch.int64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        foretold, true = logits > 0, labels > 0.5
        for index, flags in enumerate((foretold & true, foretold, true)):
            self.sums[index, :-1] += flags.sum(dim=0)
        self.sums[0, -1] += (foretold == true).all(dim=-1).sum()
        self.sums[1, -1] += labels.shape[0]

    def values(self) -> dict[str, float]:
        right, foretold, true = self.sums[:, :-1].double().cpu()
        num_right, num_rows = self.sums[:2, -1].tolist()
        averaged = {name: float(values.mean()) for name, values in _by_label(right, foretold, true).items()}
        return averaged | {"accuracy": _ratio(num_right, num_rows, empty=math.nan)}


class _Areas:
    """The area under the ROC curve, by log-odds. More than two labels: the mean of each against the rest."""

    def __init__(self, num_labels: int, *, one_label: bool) -> None:
        self._one_label = one_label
        self._is_binary = one_label and num_labels == 2
        self.ranks = RankedScores(1 if self._is_binary else num_labels)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        scores = self._log_odds(logits.double())
        if self._is_binary:
            is_true = labels[:, None]
        elif self._one_label:
            is_true = labels[:, None] == torch.arange(scores.shape[1], device=labels.device)
        else:
            is_true = labels > 0.5
        self.ranks.add(scores, is_true)

    def _log_odds(self, logits: Tensor) -> Tensor:
        if self._is_binary:
            return logits[:, 1:] - logits[:, :1]
        if not self._one_label:
            return logits
        # Of the likeliest label the share of the others is not a difference to 1: it may be smaller than 1 can tell.
        highest, best = logits.max(dim=-1, keepdim=True)
        shares = (logits - highest).exp()
        odds = logits - highest - (shares.sum(dim=-1, keepdim=True) - shares).log()
        others = logits.scatter(-1, best, -torch.inf).logsumexp(dim=-1, keepdim=True)
        return odds.scatter(-1, best, highest - others)

    def values(self) -> dict[str, float]:
        areas = self.ranks.areas()
        return {"auc": float(areas.mean()) if len(areas) else math.nan}


class _Moments:
    """Sums of errors, and of the products of which Pearson's correlation is made."""

    def __init__(self, num_numbers: int) -> None:
        self._num_numbers = num_numbers
        self.sums = torch.zeros(8, num_numbers, dtype=torch.float64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        given = logits.double().reshape(-1, self._num_numbers)
        true = labels.double().reshape(-1, self._num_numbers)
        error = given - true
        terms = (torch.ones_like(true), error**2, error.abs(), given, true, given**2, true**2, given * true)
        self.sums += torch.stack([term.sum(dim=0) for term in terms])

    def values(self) -> dict[str, float]:
        sums = self.sums.cpu()
        count, squared, absolute = sums[:3]
        given, true, given2, true2, product = sums[3:] / count
        spread = (given2 - given**2).clamp(min=0).sqrt() * (true2 - true**2).clamp(min=0).sqrt()
        pearson = torch.where(spread > 0, (product - given * true) / spread, torch.nan)
        return {
            "mse": float((squared / count).mean()),
            "mae": float((absolute / count).mean()),
            "pearson": float(pearson.mean()),
        }


class _TokenHits:
    """How many of the tokens that carry loss are the most likely ones."""

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


def _by_label(right: Tensor, foretold: Tensor, true: Tensor) -> dict[str, Tensor]:
    """Precision, recall and F1 of each label; 0 where a label was never foretold, or never true."""
    return {
        "precision": right / foretold.clamp(min=1),
        "recall": right / true.clamp(min=1),
        "f1": 2 * right / (foretold + true).clamp(min=1),
    }


def _ratio(above: float, below: float, *, empty: float = 0.0) -> float:
    return above / below if below else empty


def _no_metric(name: str, allowed: Sequence[str], where: str) -> RecipeError:
    near = get_close_matches(name, allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return RecipeError(f"there is no metric {name!r}{where}{hint}", f"choose among {', '.join(allowed)}")
