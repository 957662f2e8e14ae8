"""The prediction and loss of each evaluated row, which an evaluation of a classifier or regressor computes anyway."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_MAX_OUTPUTS = 256  # targets of a row; the outcomes of more would take gigabytes
_MOST_ON_DEVICE = 2**20  # numbers kept on the device; no plan includes their memory
ROW_LOSSES = ("cross-entropy", "binary-cross-entropy", "mse")


class RowOutcomes:
    """Collect the rows of one evaluation. Host-device syncs: one in `finish`, and one for every million numbers.

    Args:
        kind: Kind of the loss; nothing is collected unless it is one of `ROW_LOSSES`, or if a row has many targets.
        num_outputs: Number of labels or targets of a row.
    """

    def __init__(self, kind: str | None = None, num_outputs: int = 0) -> None:
        is_small = kind == "cross-entropy" or num_outputs <= _MAX_OUTPUTS
        self._kind = kind if kind in ROW_LOSSES and is_small else None
        self._num_outputs = num_outputs
        self._num_columns = 1 + (1 if kind == "cross-entropy" else num_outputs)
        self._parts: list[Tensor] = []  # on the device
        self._on_host: list[Tensor] = []
        self._rows: list[int] = []

    def add(self, logits: Tensor, labels: Tensor | None) -> None:
        """Add the next rows: their logits and labels. Logits in another form, from a user's own loss, are left out."""
        if self._kind is None or labels is None or logits.dim() != 2 or len(logits) != len(labels):
            return
        num_expected = len(labels) if self._kind == "cross-entropy" else logits.numel()
        if logits.shape[1] == self._num_outputs and labels.numel() == num_expected:
            self._parts.append(_columns(self._kind, logits.detach().float(), labels))
            if sum(part.numel() for part in self._parts) >= _MOST_ON_DEVICE:
                self._move_to_host()

    def _move_to_host(self) -> None:
        if self._parts:
            self._on_host.append(torch.cat(self._parts).cpu())
            self._parts.clear()

    def add_numbers(self, shard: Any) -> None:
        """Add the numbers of the rows of a batch whose logits were added: the current shard of the loader."""
        if self._kind is not None:
            self._rows += shard.content

    def finish(self, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor | None:
        """Return a table with one line per row: its number, its loss and its prediction; None if there are no outcomes.

        Args:
            gather: Concatenates the tensors of all ranks along dimension 0; their lengths may differ.
        """
        if self._kind is None:
            return None
        self._move_to_host()
        found = torch.cat([torch.zeros(0, self._num_columns), *self._on_host]).double()
        if len(found) != len(self._rows):  # the user's own loss returns logits that are not one line per row
            found, self._rows = found[:0], []
        table = gather(torch.cat([torch.tensor(self._rows, dtype=torch.float64)[:, None], found], 1))
        return table if len(table) else None


def _columns(kind: str, logits_BK: Tensor, labels: Tensor) -> Tensor:
    if kind == "cross-entropy":
        loss = functional.cross_entropy(logits_BK, labels, reduction="none")
        return torch.stack([loss, logits_BK.argmax(-1).float()], 1)
    targets = labels.float().reshape(logits_BK.shape)
    if kind == "mse":
        return torch.cat([(logits_BK - targets).square().mean(-1, keepdim=True), logits_BK], 1)
    loss = functional.binary_cross_entropy_with_logits(logits_BK, targets, reduction="none").mean(-1, keepdim=True)
    return torch.cat([loss, (logits_BK > 0).float()], 1)
