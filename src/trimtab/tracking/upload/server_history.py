"""What a server knows of a run beyond what the run's folder says.

A run that comes back from its mirror, or from any older copy of its folder, takes steps again whose numbers the server
has already. They are found when the run is attached again, and are not sent a second time.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from trimtab.runs.journal import JOURNAL, OF_THE_MOMENT
from trimtab.tracking.mlflow.server import MlflowServer, Row, valid_key
from trimtab.tracking.upload.attachment import Attachment
from trimtab.tracking.upload.journal_rows import rows_of, whole_lines

_Mark = tuple[str, int, float | str]
_TAIL_BYTES = 1 << 20  # of a journal, in which its last numbers are found


class RowsAhead:
    """Numbers that a server has and that the training will write once more, at another time of day.

    Args:
        rows: Of the server.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._marks: Counter[_Mark] = Counter(map(_mark, rows))

    def __bool__(self) -> bool:
        return bool(self._marks)

    def copy(self) -> Self:
        """Another one with the same rows, to be kept once the server has answered."""
        other = type(self)()
        other._marks = self._marks.copy()
        return other

    @property
    def steps(self) -> list[int]:
        """Which steps they are of."""
        return sorted({step for _, step, _ in self._marks})

    def without(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of a line that the server does not have. Those that it has count as found, and are looked for once.

        A line whose numbers are all others, as of a run that goes on with another learning rate, is sent whole.
        """
        if not self._marks:
            return list(rows)
        lasting = [row for row in rows if row.key not in OF_THE_MOMENT]
        new = {id(row) for row in lasting if not self._take(_mark(row))}
        if lasting and len(new) == len(lasting):
            return list(rows)  # another line, whatever its speed was
        new |= {id(row) for row in rows if row.key in OF_THE_MOMENT and not self._take(_mark(row))}
        return [row for row in rows if id(row) in new]

    def _take(self, mark: _Mark) -> bool:
        if mark not in self._marks:
            return False
        self._marks[mark] -= 1
        if not self._marks[mark]:
            del self._marks[mark]
        return True


def look_ahead(server: MlflowServer, run_id: str, folder: Path, at: Attachment) -> RowsAhead:
    """Ask a server what it knows beyond the lines that it was sent, as far as this folder knows.

    For a run that was never lost this is one request: its last numbers are those that were sent last.

    Args:
        server: Where the run is.
        run_id: The run there.
        folder: The run's folder.
        at: How far the server has got; `ahead_since_ms` is set if it is further than that.
    """
    journal = folder / JOURNAL
    since = at.ahead_since_ms
    newest = server.newest_rows(run_id)
    if since is None:
        since, sent = _last_sent(journal, at.sent)
        newest = [row for row in newest if (row.key, row.step, row.timestamp_ms) not in sent]
    keys = [row.key for row in newest if row.timestamp_ms >= since]
    if not keys:
        at.ahead_since_ms = None
        return RowsAhead()
    ahead = RowsAhead(row for key in keys for row in server.history(run_id, key) if row.timestamp_ms >= since)
    for rows in _lines_up_to(journal, at.acked):
        if rows[0].timestamp_ms >= since:
            ahead.without(rows)
    at.ahead_since_ms = since if ahead else None
    return ahead


def _last_sent(journal: Path, sent: int) -> tuple[int, set[tuple[str, int, int]]]:
    """The time of the last line that was sent, and the rows of that moment."""
    last: list[Row] = []
    for rows in _lines_up_to(journal, sent, max(0, sent - _TAIL_BYTES)):
        is_same_moment = bool(last) and rows[0].timestamp_ms == last[0].timestamp_ms
        last = [*last, *rows] if is_same_moment else rows
    return (last[0].timestamp_ms if last else 0), {(row.key, row.step, row.timestamp_ms) for row in last}


def _lines_up_to(journal: Path, end: int, start: int = 0) -> Iterator[list[Row]]:
    """The rows of each line that has some, up to an offset; half a line at the start is none."""
    for text, line_end in whole_lines(journal, start, whole=True):
        if line_end > end:
            return
        rows = [Row(valid_key(row.key), row.value, row.timestamp_ms, row.step) for row in rows_of(text)]
        if rows:
            yield rows


def _mark(row: Row) -> _Mark:
    """What is the same in a row when its step is taken again; MLflow keeps the largest number for infinity."""
    if row.key in OF_THE_MOMENT:
        return row.key, row.step, ""
    if math.isnan(row.value):
        return row.key, row.step, "nan"
    return row.key, row.step, max(-sys.float_info.max, min(sys.float_info.max, row.value))
