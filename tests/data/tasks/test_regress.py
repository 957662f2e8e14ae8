"""Regression: numbers of every kind, several of them, and rows without one."""

import pytest
import torch
from task_tokenizers import make_rows

from trimtab.data.tasks.build import build_task
from trimtab.errors import DataError

TEXTS = ["a good film", "a bad film", "dull"]


def test_numbers_beside_texts(bert):
    rows = make_rows(text=TEXTS, score=["2.5", 1, -0.25])
    task = build_task(None, rows)
    assert (task.name, task.loss_kind, task.default_metric) == ("regress", "mse", "mse")
    assert task.head() == {
        "num_labels": 1,
        "id2label": {0: "score"},
        "label2id": {"score": 0},
        "problem_type": "regression",
    }
    dataset = task.encode(rows, bert, 32)
    batch = task.collate([dataset[i] for i in range(3)])
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [2.5, 1.0, -0.25]
    assert batch["input_ids"][0].tolist() == bert("a good film")["input_ids"]


def test_several_numbers_of_pairs(bert):
    rows = make_rows(sentence1=TEXTS, sentence2=TEXTS, ease=[0.5, 1.5, 2.5], worth=[1, 2, 3])
    task = build_task("regress", rows, label=["ease", "worth"])
    dataset = task.encode(rows, bert, 32)
    batch = task.collate([dataset[i] for i in range(3)])
    assert batch["labels"].tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    assert "token_type_ids" in batch
    assert task.head()["num_labels"] == 2


@pytest.mark.parametrize("value", [None, "high", float("nan"), float("inf"), "nan", [1.0]])
def test_rows_without_a_number(bert, said, value):
    rows = make_rows(text=TEXTS, score=[0.5, 1.5, value])
    with pytest.raises(DataError, match="mine.csv, row 3: column 'score' contains .*, expected a number"):
        build_task("regress", rows).encode(rows, bert, 32)
    assert len(build_task("regress", rows, on_bad_rows="skip").encode(rows, bert, 32)) == 2
    assert len(said) == 1
