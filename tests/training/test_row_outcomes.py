"""The outcome of each evaluated row, also where a user's own loss returns other logits than the task's."""

import pytest
import torch

from trimtab.training import row_outcomes
from trimtab.training.row_outcomes import RowOutcomes


class Shard:
    """The rows of a batch."""

    content = (4, 2)


@pytest.mark.parametrize("kind", ["cross-entropy", "binary-cross-entropy", "mse"])
def test_rows_in_the_form_of_the_task(kind):
    rows = RowOutcomes(kind, 3)
    logits = torch.tensor([[3.0, -1.0, -1.0], [-1.0, -1.0, 3.0]])
    rows.add(logits, torch.tensor([0, 1]) if kind == "cross-entropy" else torch.eye(3)[:2])
    rows.add_numbers(Shard)
    table = rows.finish()
    assert table[:, 0].tolist() == [4, 2]
    assert table[0, 1] < table[1, 1], "the second row is wrong"
    assert table.shape == (2, 3 if kind == "cross-entropy" else 5)


@pytest.mark.parametrize(
    ("kind", "logits", "labels"),
    [
        ("cross-entropy", torch.zeros(2, 2), torch.tensor([0, 2])),  # label 2 would be outside
        ("binary-cross-entropy", torch.zeros(2, 4), torch.zeros(2, 3)),
        ("mse", torch.zeros(2, 1), torch.zeros(2, 3)),
        ("mse", torch.zeros(2), torch.zeros(2)),
        ("cross-entropy", torch.zeros(2, 3), None),
    ],
)
def test_logits_of_another_form_are_left_out(kind, logits, labels):
    rows = RowOutcomes(kind, 3)
    rows.add(logits, labels)
    rows.add_numbers(Shard)
    assert rows.finish() is None


def test_outcomes_leave_the_device_and_those_of_many_targets_are_not_kept(monkeypatch):
    monkeypatch.setattr(row_outcomes, "_MOST_ON_DEVICE", 16)
    rows, many = RowOutcomes("mse", 3), RowOutcomes("binary-cross-entropy", 5000)
    for _ in range(9):
        rows.add(torch.ones(2, 3), torch.zeros(2, 3))
        many.add(torch.ones(2, 5000), torch.zeros(2, 5000))
        for each in (rows, many):
            each.add_numbers(Shard)
        assert sum(part.numel() for part in rows._parts) < 16
    assert rows.finish().shape == (18, 5)
    assert many.finish() is None
