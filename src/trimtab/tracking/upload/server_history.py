"""Find metrics that a server has and the run folder does not.

A run that was restored from a mirror, or from any older copy, computes steps again whose metrics the server already
has. They are found when the upload starts again, and not sent a second time.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from trimtab.runs.journal import JOURNAL, VOLATILE_KEYS, complete_lines
from trimtab.runs.tracking_file import ServerState
from trimtab.tracking.mlflow.server import MlflowServer, Row
from trimtab.tracking.upload.metric_rows import rows_of

_Mark = tuple[str, int, float | str]
_TAIL_BYTES = 1 << 20  # of the journal, which contain the lines that were sent last


class RowsAhead:
    """Rows on the server that training will write again, with other timestamps.

    Args:
        rows: Rows of the server.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._marks: Counter[_Mark] = Counter(map(_mark, rows))

    def __bool__(self) -> bool:
        return bool(self._marks)

    def copy(self) -> Self:
        """Return an independent copy."""
        other = type(self)()
        other._marks = self._marks.copy()
        return other

    @property
    def steps(self) -> list[int]:
        """Steps of the rows, sorted."""
        return sorted({step for _, step, _ in self._marks})

    def without(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a line that the server lacks, and remove the others from this object.

        A line in which every reproducible value differs, as after a change of the learning rate, is returned whole.
        """
        if not self._marks:
            return list(rows)
        lasting = [row for row in rows if row.key not in VOLATILE_KEYS]
        new = {id(row) for row in lasting if not self._take(_mark(row))}
        if lasting and len(new) == len(lasting):
            return list(rows)
        new |= {id(row) for row in rows if row.key in VOLATILE_KEYS and not self._take(_mark(row))}
        return [row for row in rows if id(row) in new]

    def _take(self, mark: _Mark) -> bool:
        if mark not in self._marks:
            return False
        self._marks[mark] -= 1
        if not self._marks[mark]:
            del self._marks[mark]
        return True


def find_rows_ahead(server: MlflowServer, run_id: str, folder: Path, state: ServerState) -> RowsAhead:
    """Ask a server for rows beyond those that this folder has sent, and set `state.ahead_since_ms` if there are any.

    For a folder that was never restored this is one request: the newest rows on the server are those that were sent
    last.
    """
    journal = folder / JOURNAL
    since = state.ahead_since_ms
    newest = server.newest_rows(run_id)
    if since is None:
        since, sent = _last_sent(journal, state.sent)
        newest = [row for row in newest if (row.key, row.step, row.timestamp_ms) not in sent]
    keys = [row.key for row in newest if row.timestamp_ms >= since]
    ahead = RowsAhead(row for key in keys for row in server.history(run_id, key) if row.timestamp_ms >= since)
    if ahead:
        for rows in _rows_by_line(journal, state.acked):
            if rows[0].timestamp_ms >= since:
                ahead.without(rows)
    state.ahead_since_ms = since if ahead else None
    return ahead


def _last_sent(journal: Path, sent: int) -> tuple[int, set[tuple[str, int, int]]]:
    """Return the timestamp of the last line that was sent, and the rows with that timestamp."""
    last: list[Row] = []
    for rows in _rows_by_line(journal, sent, max(0, sent - _TAIL_BYTES)):
        is_same_time = bool(last) and rows[0].timestamp_ms == last[0].timestamp_ms
        last = [*last, *rows] if is_same_time else rows
    return (last[0].timestamp_ms if last else 0), {(row.key, row.step, row.timestamp_ms) for row in last}


def _rows_by_line(journal: Path, end: int, start: int = 0) -> Iterator[list[Row]]:
    """Yield the rows of each line between two offsets that has any; a partial first line has none."""
    for text, line_end in complete_lines(journal, start):
        if line_end > end:
            return
        rows = rows_of(text)
        if rows:
            yield rows


def _mark(row: Row) -> _Mark:
    """Return what identifies a row when its step is computed again; MLflow stores the largest float for infinity."""
    if row.key in VOLATILE_KEYS:
        return row.key, row.step, ""
    if math.isnan(row.value):
        return row.key, row.step, "nan"
    return row.key, row.step, max(-sys.float_info.max, min(sys.float_info.max, row.value))
