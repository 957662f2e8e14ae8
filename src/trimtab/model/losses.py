"""Losses of the tasks. The model runs without labels; the loss is computed here in fp32 as a mean over items.

Each loss has a weight: the number of items (rows or tokens) in the mean, so micro-batches can be combined exactly.
Shapes: B rows, L positions, V tokens or classes, K labels or targets of a row.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional

from trimtab.errors import LossError, RecipeError
from trimtab.model.chunked_loss import HeadLoss
from trimtab.model.forward import IGNORED, Batch, logits_of, run_model
from trimtab.model.precision import half_precision_outputs
from trimtab.model.router_loss import router_loss
from trimtab.model.token_cross_entropy import fused_cross_entropy

OwnLoss = Callable[[Any, Batch], torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]]


@dataclass(frozen=True)
class StepLoss:
    """The loss of one batch.

    Args:
        value: The differentiable loss: the mean over the items, plus the auxiliary router loss of a MoE model.
        weight: Number of items (rows or tokens) in the mean; a tensor if it was counted on the device.
        logits: Detached logits; empty if the loss was computed without logits.
        hits: Number of correctly predicted items, if counted.
        item_mean: The mean over the items alone, if `value` contains more than that.
    """

    value: torch.Tensor
    weight: torch.Tensor | int
    logits: torch.Tensor
    hits: torch.Tensor | None = None
    item_mean: torch.Tensor | None = None

    def loss_sum(self) -> torch.Tensor:
        """`value` times the number of items; 0 for a batch without items, even if its value is NaN."""
        return self._times_weight(self.value)

    def reported(self) -> torch.Tensor:
        """The value that a training step reports: the sum, which can be added over micro-batches."""
        return self.loss_sum()

    def item_loss_sum(self) -> torch.Tensor:
        """Sum over the items without the router loss, for metrics: independent of the split into batches."""
        return self._times_weight(self.value if self.item_mean is None else self.item_mean)

    def _times_weight(self, mean: torch.Tensor) -> torch.Tensor:
        total = mean.detach().float() * self.weight
        if isinstance(self.weight, torch.Tensor):
            return torch.where(self.weight > 0, total, torch.zeros_like(total))
        return total if self.weight else torch.zeros_like(total)


class Loss(Protocol):
    """Run a model on a batch and return its loss."""

    def __call__(self, model: torch.nn.Module, batch: Batch) -> StepLoss:
        """Compute the loss of `batch` without changing it."""


def build_loss(
    kind: str,
    *,
    shifts_labels: bool = False,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> Loss:
    """Build the loss of a task; its arguments are those of `build_measure`."""
    measure = build_measure(
        kind, shifts_labels=shifts_labels, label_smoothing=label_smoothing, class_weights=class_weights
    )
    return _ModelLoss(measure)


def build_measure(
    kind: str,
    *,
    shifts_labels: bool = False,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> "Measure":
    """Build the function of logits and labels that computes the mean loss and the number of items in it.

    Args:
        kind: "cross-entropy" (one class per row), "binary-cross-entropy" (several labels per row), "mse", or
            "token-cross-entropy" (one class per position; positions with label -100 are ignored).
        shifts_labels: Whether the logits at position t predict the label at t + 1, as in causal language models.
        label_smoothing: As in `torch.nn.CrossEntropyLoss`; for the two cross-entropies with one class only.
        class_weights: A weight above 0 for each class, for "cross-entropy" only: the mean is weighted as in
            `torch.nn.CrossEntropyLoss`, and the weights of the rows, not the rows, are counted.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise RecipeError(
            f"label_smoothing {label_smoothing} is not valid", "set train.label_smoothing to at least 0 and less than 1"
        )
    if class_weights is not None:
        if kind != "cross-entropy":
            raise RecipeError(f"class_weights have no effect on a {kind} loss", "leave train.class_weights out")
        return _WeightedRows(label_smoothing, class_weights)
    if kind == "cross-entropy":
        return partial(_row_cross_entropy, label_smoothing)
    if kind == "token-cross-entropy":
        return partial(_token_cross_entropy, label_smoothing, shifts_labels)
    if kind not in ("binary-cross-entropy", "mse"):
        known = "cross-entropy, binary-cross-entropy, mse, token-cross-entropy"
        raise RecipeError(f"unknown kind of loss: {kind!r}", f"use one of {known}")
    if label_smoothing:
        raise RecipeError(f"label_smoothing has no effect on a {kind} loss", "set train.label_smoothing to 0")
    return _binary_cross_entropy if kind == "binary-cross-entropy" else _mean_squared_error


def loss_from_function(function: OwnLoss) -> Loss:
    """Make a loss from a user's function.

    Args:
        function: Takes the output of the model (called without labels) and the batch (with labels). Returns the mean
            loss of the batch, or the mean and the number of items in it (by default the number of rows). No router loss
            is added: it is in the output of the model (`outputs.aux_loss`).

    Raises:
        RecipeError: `function` is not callable.
    """
    if not callable(function):
        raise RecipeError(
            f"loss={function!r} is not a function", "pass a function of (outputs, batch) that returns the mean loss"
        )
    return _OwnLoss(function)


Measured = tuple[torch.Tensor, torch.Tensor | int]
Measure = Callable[[torch.Tensor, torch.Tensor], Measured]


class _ModelLoss:
    """A loss computed from logits and labels."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def __call__(self, model: torch.nn.Module, batch: Batch) -> StepLoss:
        require_labels(batch)
        outputs = run_model(model, batch)
        logits = require_logits(model, outputs)
        # In half precision the sum over classes would be rounded. fp32 logits are not copied.
        mean, weight = self._measure(logits.float(), batch["labels"])
        return with_router_loss(StepLoss(mean, weight, logits.detach()), router_loss(model, outputs))


class FusedTokenLoss:
    """Token cross-entropy from logits in their dtype; backward writes its gradient over them."""

    def __init__(self, label_smoothing: float, shifts_labels: bool) -> None:
        self._label_smoothing, self._shifts_labels = label_smoothing, shifts_labels

    def __call__(self, model: torch.nn.Module, batch: Batch) -> StepLoss:
        """Compute the loss of `batch`; logits are returned only without gradients, and then in fp32."""
        require_labels(batch)
        trains = torch.is_grad_enabled()
        with half_precision_outputs() if trains else nullcontext():
            outputs = run_model(model, batch)
        logits_BLV = require_logits(model, outputs)
        labels_BL = _token_labels(self._shifts_labels, logits_BLV, batch["labels"])
        losses = fused_cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), self._label_smoothing)
        weight = (labels_BL != IGNORED).sum()
        kept = torch.empty(0) if trains else logits_BLV  # backward overwrites them
        step = StepLoss(losses.sum() / weight.clamp(min=1), weight, kept)
        return with_router_loss(step, router_loss(model, outputs))


class LossWithoutLogits:
    """Token cross-entropy, computed in the output layer without all logits."""

    def __init__(self, loss: HeadLoss, shifts_labels: bool) -> None:
        self._loss = loss
        self._shifts_labels = shifts_labels

    def __call__(self, model: torch.nn.Module, batch: Batch) -> StepLoss:
        """Compute the loss of `batch`."""
        require_labels(batch)
        labels_BL = next_tokens(batch["labels"]) if self._shifts_labels else batch["labels"]
        total, hits, of_routers = self._loss(model, batch, labels_BL)
        weight = (labels_BL != IGNORED).sum()
        return with_router_loss(StepLoss(total / weight.clamp(min=1), weight, torch.empty(0), hits), of_routers)


def with_router_loss(step: StepLoss, of_routers: torch.Tensor | None) -> StepLoss:
    """Add the auxiliary loss of a MoE model, if it has one."""
    if of_routers is None:
        return step
    return replace(step, value=step.value + of_routers.to(step.value.device), item_mean=step.value.detach())


class _OwnLoss:
    """A loss computed by a function of the user."""

    def __init__(self, function: OwnLoss) -> None:
        self._function = function

    def __call__(self, model: torch.nn.Module, batch: Batch) -> StepLoss:
        outputs = run_model(model, batch)
        result = self._function(outputs, batch)
        num_rows = next(iter(batch.values())).shape[0]
        value, weight = result if isinstance(result, tuple) else (result, num_rows)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise LossError(f"your loss function returned {found}", "return a tensor with one number: the mean loss")
        logits = logits_of(outputs)
        return StepLoss(value.reshape(()), weight, torch.empty(0) if logits is None else logits.detach())


class _WeightedRows:
    """The measure of one class per row, with weights of the classes."""

    def __init__(self, label_smoothing: float, class_weights: Sequence[float]) -> None:
        self._label_smoothing = label_smoothing
        self._weights = torch.tensor(class_weights, dtype=torch.float32)

    def __call__(self, logits_BV: torch.Tensor, labels_B: torch.Tensor) -> Measured:
        _check_rows(logits_BV, labels_B)
        if self._weights.device != logits_BV.device:
            self._weights = self._weights.to(logits_BV.device)
        weights_V = self._weights
        mean = functional.cross_entropy(logits_BV, labels_B, weights_V, label_smoothing=self._label_smoothing)
        return mean, weights_V[labels_B].sum()


def _row_cross_entropy(label_smoothing: float, logits_BV: torch.Tensor, labels_B: torch.Tensor) -> Measured:
    _check_rows(logits_BV, labels_B)
    return functional.cross_entropy(logits_BV, labels_B, label_smoothing=label_smoothing), labels_B.shape[0]


def _check_rows(logits_BV: torch.Tensor, labels_B: torch.Tensor) -> None:
    if logits_BV.dim() != 2 or labels_B.shape != logits_BV.shape[:1]:
        raise _shapes_differ(logits_BV, labels_B, "(rows, classes) and (rows)")


def _token_cross_entropy(
    label_smoothing: float, shifts_labels: bool, logits_BLV: torch.Tensor, labels_BL: torch.Tensor
) -> Measured:
    labels_BL = _token_labels(shifts_labels, logits_BLV, labels_BL)
    logits, labels = logits_BLV.flatten(0, 1), labels_BL.flatten()
    total = functional.cross_entropy(
        logits, labels, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum"
    )
    weight = (labels_BL != IGNORED).sum()
    return total / weight.clamp(min=1), weight  # a batch without labels has loss 0, not NaN


def _token_labels(shifts_labels: bool, logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
    """The label of each row of logits."""
    if logits_BLV.dim() != 3 or labels_BL.shape != logits_BLV.shape[:2]:
        raise _shapes_differ(logits_BLV, labels_BL, "(rows, positions, tokens) and (rows, positions)")
    return next_tokens(labels_BL) if shifts_labels else labels_BL


def next_tokens(labels_BL: torch.Tensor) -> torch.Tensor:
    """The label of the next position, for each position. Slicing the logits instead would copy them."""
    return functional.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)


def _binary_cross_entropy(logits_BK: torch.Tensor, labels_BK: torch.Tensor) -> Measured:
    if labels_BK.shape != logits_BK.shape:
        raise _shapes_differ(logits_BK, labels_BK, "(rows, labels) for both")
    value = functional.binary_cross_entropy_with_logits(logits_BK, labels_BK.to(logits_BK.dtype))
    return value, labels_BK.shape[0]


def _mean_squared_error(logits: torch.Tensor, labels: torch.Tensor) -> Measured:
    if labels.dim() == 1 and logits.dim() == 2 and logits.shape[1] == 1:
        logits = logits.squeeze(1)
    if labels.shape != logits.shape:  # mse_loss would broadcast (B, 1) and (B) to (B, B)
        raise _shapes_differ(logits, labels, "(rows, 1) and (rows), or (rows, targets) for both")
    return functional.mse_loss(logits, labels.to(logits.dtype)), labels.shape[0]


def require_labels(batch: Batch) -> None:
    """Refuse a batch without labels."""
    if "labels" not in batch:
        raise LossError(f"the batch has no labels, only {', '.join(batch)}", "add `labels` in the collator")


def require_logits(model: torch.nn.Module, outputs: Any) -> torch.Tensor:
    """The logits in the output of a model."""
    logits = logits_of(outputs)
    if logits is None:
        raise LossError(f"{type(model).__name__} returns no logits", "pass your own loss function")
    return logits


def _shapes_differ(logits: torch.Tensor, labels: torch.Tensor, wanted: str) -> LossError:
    return LossError(
        f"logits of shape {list(logits.shape)} do not match labels of shape {list(labels.shape)}",
        f"the shapes must be {wanted}: check the task and the number of labels",
    )
