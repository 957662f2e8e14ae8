"""docs/training.md lists every metric, the one that chooses the best model, and which way is better."""

import re
from pathlib import Path

import pytest

from tiny_runs import reviews
from trimtab.data.metrics import METRIC_NAMES, Metrics, higher_is_better
from trimtab.data.sources import load_rows
from trimtab.data.tasks.build import TASK_NAMES, build_task

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
SECTION = PAGE.partition("## Metrics")[2].partition("\n## ")[0]
TABLE = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if "| `" in line or "**" in line
]
KINDS = {
    "classify, one label per row": "cross-entropy",
    "classify, several labels per row": "binary-cross-entropy",
    "regress": "mse",
    "causal-lm, chat, seq2seq, masked-lm": "token-cross-entropy",
}


def names_in(cell):
    return re.findall(r"`(\w+)`", cell)


def test_every_kind_of_task_has_a_row():
    assert [row[0] for row in TABLE] == list(KINDS)
    assert {name for row in TABLE for name in re.split(r"[ ,]+", row[0]) if name in TASK_NAMES} == set(TASK_NAMES)


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_the_names_are_those_of_the_code(row):
    kind = KINDS[row[0]]
    assert names_in(row[1]) == Metrics(kind, num_labels=3).names
    every = [*names_in(row[1]), *names_in(row[2])]
    assert set(Metrics(kind, every, num_labels=3).names) == set(every)
    assert set(every) == set(METRIC_NAMES[kind])


@pytest.mark.parametrize(
    ("row", "rows"),
    [
        (0, reviews(8)),
        (1, [{"text": "a b", "label": ["x", "y"][: 1 + index % 2]} for index in range(8)]),
        (2, [{"text": "a b", "label": index / 7} for index in range(8)]),
        (3, [{"text": "a b"}] * 8),
    ],
)
def test_the_one_in_bold_chooses(row, rows):
    task = build_task(None, load_rows(rows))
    assert task.loss_kind == KINDS[TABLE[row][0]]
    assert re.findall(r"\*\*`(\w+)`\*\*", TABLE[row][1]) == [task.default_metric]


def test_which_way_is_better():
    line = next(line for line in SECTION.splitlines() if line.startswith("- Higher is better"))
    every = {name for kind in KINDS.values() for name in METRIC_NAMES[kind]}
    assert set(names_in(line)) == {name for name in every if not higher_is_better(name)}
