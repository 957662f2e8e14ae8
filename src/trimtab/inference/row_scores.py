"""The predictions of a model for each row, and the metrics of any weighting of the rows, such as a resample.

Shapes: N rows, K labels or numbers of a row, R weightings, B rows of a batch, L positions, V tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.data.metrics import METRIC_NAMES, log_odds, metrics_of_counts, metrics_of_moments, moments
from trimtab.engine.placement import to_device
from trimtab.errors import LossError
from trimtab.inference.held_out import HeldOut, num_outputs
from trimtab.inference.load import LoadedModel
from trimtab.model.forward import IGNORED, logits_of, run_model
from trimtab.training.work_progress import working


@dataclass(frozen=True, eq=False)
class RowScores:
    """Predictions of a model for rows, on the host in fp64.

    Args:
        kind: The kind of loss, as in `Task.loss_kind`.
        loss_N: Loss of each row; for language models, the sum over its tokens.
        count_N: Number of predictions of each row: 1, or its tokens.
        hits_N: How many of them are correct; 0 for numbers.
        outputs_NK: Logits of the labels, or predicted numbers; empty for language models.
        targets_NK: 1 for each label that a row has, or the true numbers; empty for language models.
    """

    kind: str
    loss_N: Tensor
    count_N: Tensor
    hits_N: Tensor
    outputs_NK: Tensor
    targets_NK: Tensor

    def __len__(self) -> int:
        return len(self.loss_N)

    @property
    def predicted_NK(self) -> Tensor:
        """1 for each predicted label."""
        if self.kind == "binary-cross-entropy":
            return (self.outputs_NK > 0).double()
        return functional.one_hot(self.outputs_NK.argmax(-1), self.outputs_NK.shape[-1]).double()

    def counts(self, weights_RN: Tensor) -> Tensor:
        """Return how often each label was correct, predicted, true: shape [3, R, K]."""
        predicted, true = self.predicted_NK, self.targets_NK
        return torch.stack([weights_RN @ flags for flags in (predicted * true, predicted, true)])

    def metrics(self, weights_RN: Tensor, *, auc: bool = True) -> dict[str, Tensor]:
        """Compute every metric of the task with each weighting of the rows: shape [R] each.

        Args:
            weights_RN: How often each row counts.
            auc: Whether to compute the area under the ROC curve, which takes longest.
        """
        values = {"loss": (weights_RN @ self.loss_N) / (weights_RN @ self.count_N)}
        if self.kind == "token-cross-entropy":
            values["perplexity"] = values["loss"].exp()
            values["token_accuracy"] = (weights_RN @ self.hits_N) / (weights_RN @ self.count_N)
        elif self.kind == "mse":
            values |= self._metrics_of_numbers(weights_RN)
        else:
            several = self.kind == "binary-cross-entropy"
            rows = torch.stack([weights_RN @ self.hits_N, weights_RN.sum(-1)])
            values |= metrics_of_counts(self.counts(weights_RN), rows, several=several)
            if auc:
                values["auc"] = self._areas(weights_RN)
        return {name: values[name] for name in METRIC_NAMES[self.kind] if name in values}

    def _metrics_of_numbers(self, weights_RN: Tensor) -> dict[str, Tensor]:
        predicted, true = self.outputs_NK, self.targets_NK
        # Correlation does not depend on the means; without them its sums do not cancel.
        terms = moments(predicted - predicted.mean(0), true - true.mean(0), predicted - true)
        return metrics_of_moments(torch.stack([weights_RN @ term for term in terms]))

    def _areas(self, weights_RN: Tensor) -> Tensor:
        """Return the mean area under the ROC curve over the labels that some rows have and others do not."""
        one_label = self.kind == "cross-entropy"
        scores = log_odds(self.outputs_NK, one_label=one_label).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        targets = self.targets_NK[:, -scores.shape[1] :]  # of two labels only the second is scored
        weights_RN = weights_RN.float()
        columns = zip(scores.T.contiguous(), targets.T, strict=True)
        areas = [_area(weights_RN, *column) for column in columns]
        return torch.stack(areas).nanmean(0)


def _area(weights_RN: Tensor, scores_N: Tensor, is_true_N: Tensor) -> Tensor:
    """Return the share of pairs of a positive and a negative row that are in order; ties count half.

    Args:
        weights_RN: How often each row counts: whole numbers, whose sums are exact in fp32.
        scores_N: Score of each row.
        is_true_N: 1 for positive rows.
    """
    order = scores_N.argsort()
    ordered = scores_N[order]
    at_P = is_true_N[order].nonzero().flatten()  # the positions of the positive rows among all
    weights_RP = weights_RN[:, order[at_P]]
    scores_P = ordered[at_P]
    below_RP = _weight_below(weights_RN[:, order], ordered, scores_P) - _weight_below(weights_RP, scores_P, scores_P)
    positive_R = weights_RP.sum(1, dtype=torch.float64)
    num_pairs_R = positive_R * (weights_RN.sum(1, dtype=torch.float64) - positive_R)
    return (weights_RP * below_RP).sum(1, dtype=torch.float64) / num_pairs_R


def _weight_below(weights_RN: Tensor, sorted_N: Tensor, scores_P: Tensor) -> Tensor:
    """Return the weight of the rows with lower scores, and half that of equal scores, for each of some scores."""
    sums = functional.pad(weights_RN.cumsum(1), (1, 0))
    first, last = (torch.searchsorted(sorted_N, scores_P, right=right) for right in (False, True))
    return (sums[:, first] + sums[:, last]) / 2


@torch.inference_mode()
def score_rows(loaded: LoadedModel, held_out: HeldOut, batch_size: int = 32) -> RowScores:
    """Predict every row."""
    task = held_out.task
    kind = task.loss_kind
    is_token_task = kind == "token-cross-entropy"
    parts = []
    order: list[int] = []
    loaded.model.eval()
    with working("predicting rows, the longest first", len(held_out)) as work, loaded.errors_explained():
        for indices, batch in held_out.batches(batch_size, num_outputs(loaded, task) if is_token_task else 0):
            moved = to_device(batch, loaded.device)
            logits = logits_of(run_model(loaded.model, moved))
            if logits is None:
                name = type(loaded.model).__name__
                raise LossError(f"{name} returns no logits", "use a model with a head for its task")
            order += indices
            if is_token_task:
                parts.append(_score_tokens(logits, moved["labels"], task.shifts_labels))
            else:
                parts.append(_score_labels(kind, logits.float(), moved["labels"]))
            work.advance(len(indices))
    back = torch.tensor(order).argsort()
    return RowScores(kind, *(torch.cat(column)[back] for column in zip(*parts, strict=True)))


def _score_tokens(logits_BLV: Tensor, labels_BL: Tensor, shifts_labels: bool) -> tuple[Tensor, ...]:
    if shifts_labels:
        labels_BL = functional.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)
    has_label = labels_BL != IGNORED
    logits, labels = logits_BLV[has_label].float(), labels_BL[has_label]  # only positions with a label are converted
    row = has_label.nonzero()[:, 0]
    found = (
        functional.cross_entropy(logits, labels, reduction="none"),
        torch.ones_like(row),
        logits.argmax(-1) == labels,
    )
    empty = torch.zeros(len(labels_BL), dtype=torch.float64)
    sums = [empty.clone().index_add_(0, row.cpu(), values.cpu().double()) for values in found]
    return *sums, torch.zeros(len(labels_BL), 0), torch.zeros(len(labels_BL), 0)


def _score_labels(kind: str, logits_BK: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    outputs = logits_BK.cpu().double()
    labels = labels.cpu()
    if kind == "cross-entropy":
        loss = functional.cross_entropy(outputs, labels, reduction="none")
        targets = functional.one_hot(labels, outputs.shape[-1]).double()
        hits = (outputs.argmax(-1) == labels).double()
    else:
        targets = labels.double().reshape(outputs.shape)
        if kind == "mse":
            loss, hits = (outputs - targets).square().mean(-1), torch.zeros(len(outputs), dtype=torch.float64)
        else:
            loss = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(-1)
            hits = ((outputs > 0) == (targets > 0.5)).all(-1).double()
    return loss, torch.ones_like(loss), hits, outputs, targets
