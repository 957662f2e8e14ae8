"""Lines about rows that can be used, but perhaps not as the user means."""

import pytest
from task_tokenizers import make_rows

from trimtab.data.notices import data_notices
from trimtab.data.tasks.build import build_task

TEXTS = [f"film {i}" for i in range(24)]


def notices(rows, evaluation=None, *, is_held_out=False):
    return data_notices(build_task(None, rows), rows, evaluation, is_held_out=is_held_out)


def test_every_column_that_is_not_used_is_named():
    rows = make_rows(text=TEXTS, label=["a", "b"] * 12, rating=range(24), id=range(24))
    assert notices(rows) == ("mine.csv: columns that are not used: 'rating', 'id'",)
    assert notices(make_rows(text=TEXTS, label=["a", "b"] * 12)) == ()


def test_rows_in_both_sets_are_counted():
    rows, evaluation = make_rows(text=TEXTS), make_rows(text=["film 1", "film 2", "film 1", "other"])
    assert notices(rows, evaluation)[0].startswith("3 rows of data.eval are also in data.train: ")
    assert notices(rows, evaluation, is_held_out=True)[0].startswith("3 of the 4 rows held out for evaluation have")
    assert notices(rows, make_rows(text=["other"])) == ()


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        (["pos", "neg", "NA"] * 8, "'NA' is trained like any other label"),
        (["pos", "neg", "nan", "N/A"] * 6, "'N/A', 'nan' are trained like any other label"),
        (["pos", "neg", "Pos"] * 8, "'Pos', 'pos' are different labels"),
        (["pos"] * 22 + ["neg"] * 2, "22 training rows have 'pos' and 2 'neg' (11:1; see train.class_weights)"),
        ([["a"], ["A", "b"]] * 12, "'A', 'a' are different labels"),
    ],
)
def test_labels_that_are_probably_mistakes(labels, line):
    (found,) = notices(make_rows(text=TEXTS, label=labels))
    assert line in found


def test_labels_that_are_as_they_should_be():
    assert notices(make_rows(text=TEXTS, label=["pos"] * 21 + ["neg"] * 3)) == ()  # 7:1
    assert notices(make_rows(text=TEXTS, NA=[0, 1] * 12, na=[1, 0] * 12, label=["none", "some"] * 12))[0].endswith(
        "columns that are not used: 'NA', 'na'"
    )
