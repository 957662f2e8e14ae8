"""Notices about rows that can be used, but perhaps not as the user means; logged by `check`, `train`, `data show`."""

import json
from dataclasses import dataclass

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Task
from trimtab.data.tasks.columns import column_list, list_values, strings_in

_MAX_COLUMNS = 50
_OUTPUT_ROLES = {"label", "target", "answer"}


@dataclass(frozen=True)
class SharedText:
    """A text that is in both sets."""

    text: str
    train_location: str
    eval_location: str


def data_notices(task: Task, train: Rows, evaluation: Rows | None, *, is_held_out: bool = False) -> tuple[str, ...]:
    """Return a line about each thing that a user should know before training.

    Args:
        task: The task.
        train: The training rows.
        evaluation: The rows for evaluation, if there are any.
        is_held_out: Whether these were split off from the training rows.
    """
    found: list[str] = []
    used = {name for columns in task.columns.values() for name in column_list(columns)}
    unused = [name for name in train.names if name not in used]
    if unused:
        found.append(f"{train.origin}: columns that are not used: {list_values(unused, _MAX_COLUMNS)}")
    num_shared = shared_texts(task, train, evaluation)[1]
    if num_shared and is_held_out:
        found.append(
            f"{num_shared:,} of the {len(evaluation or ()):,} rows held out for evaluation have the text of a training "
            f"row, because {train.origin} contains it twice: metrics on them are too optimistic; remove duplicates"
        )
    elif num_shared:
        found.append(f"{num_shared:,} rows of data.eval are also in data.train: metrics on them are too optimistic")
    return (*found, *task.notices(train))


def input_columns(task: Task) -> list[str]:
    """Return the columns of the model's input, without those of its output."""
    roles = {role: columns for role, columns in task.columns.items() if role not in _OUTPUT_ROLES} or task.columns
    return [name for columns in roles.values() for name in column_list(columns)]


def shared_texts(task: Task, train_rows: Rows, eval_rows: Rows | None) -> tuple[list[SharedText], int]:
    """Return the distinct texts that are in both sets, and the number of eval rows with such a text."""
    names = [name for name in input_columns(task) if name in train_rows.columns]
    if eval_rows is None or not names or any(name not in eval_rows.columns for name in names):
        return [], 0
    first_row: dict[str, int] = {}
    for index in range(len(train_rows)):
        first_row.setdefault(_row_key(train_rows, names, index), index)
    found: dict[str, int] = {}
    num_rows = 0
    for index in range(len(eval_rows)):
        key = _row_key(eval_rows, names, index)
        if key in first_row:
            num_rows += 1
            found.setdefault(key, index)
    shared = []
    for key, index in found.items():
        text = " | ".join(text for name in names for text in strings_in(eval_rows.columns[name][index]))
        shared.append(SharedText(text, train_rows.location(first_row[key]), eval_rows.location(index)))
    return shared, num_rows


def _row_key(rows: Rows, names: list[str], index: int) -> str:
    values = [rows.columns[name][index] for name in names]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(values, sort_keys=True, default=str)
