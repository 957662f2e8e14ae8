"""The journal of a run, `metrics.jsonl`: the config on the first line, then one JSON object for each logged step."""

import contextlib
import errno
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.checksums import checksum_text, crc_of
from trimtab.errors import RecipeError
from trimtab.log import log_info_once, say

JOURNAL = "metrics.jsonl"
# Values that differ each time the same step is computed; all others are reproduced bit for bit by a resumed run.
VOLATILE_KEYS = {
    "time",
    "tokens_per_s",
    "memory_bytes",
    "peak_memory_bytes",
    "peak_reserved_bytes",
    "preflight_peak_bytes",
    "preflight_eval_peak_bytes",
}


_MAX_RANGES = 5


class JournalMark(NamedTuple):
    """The part of a journal that belongs to a checkpoint: its size in bytes, and its checksum ("" if unknown)."""

    num_bytes: int
    checksum: str = ""


class Journal:
    """Append one JSON object per line to `metrics.jsonl`, unbuffered, so that other processes can read it meanwhile.

    Args:
        folder: Parent of the project folders that `start` creates.
    """

    name = "journal"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._crc = 0  # of everything in the file
        self._pending: list[str] = []  # lines that a full disk has refused
        self._known: Counter[str] = Counter()  # lines of repeated steps that the file already has

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """Open the file and write the config; closes the file of an earlier run."""
        self.finish()
        folder = self._folder / project_name
        folder.mkdir(parents=True, exist_ok=True)
        self._open(folder / JOURNAL)
        self._write({"config": config or {}})

    def reopen(self, mark: JournalMark | None, step: int = 0, sent: int = 0) -> None:
        """Open the file of a run that is resumed.

        Lines after `mark` belong to steps that will be computed again. Those that a tracking server may have are
        kept and not written a second time, so that the server and the file stay equal; the others are removed.

        Args:
            mark: The file when the checkpoint was saved; None keeps every line (the step is unknown).
            step: Step of the checkpoint.
            sent: Offset up to which a server may have the file.
        """
        path = self._folder / JOURNAL
        position = None if mark is None else mark.num_bytes
        size, start = path.stat().st_size if path.exists() else 0, position or 0
        if size < start:
            say(f"{path} has lost its last lines: metrics of steps before step {step:,} are missing")
        end = _line_end(path, size if position is None else max(position, min(sent, size)))
        if mark is not None:
            _report_damage(path, mark)
        if size > end:
            os.truncate(path, end)
        self._open(path)
        repeated = _repeated_lines(path, start, step) if sent or position is None else []
        self._known = Counter(text for text, _ in repeated)
        if repeated and position is not None:
            first, last = min(number for _, number in repeated), max(number for _, number in repeated)
            steps = f"step {first:,}" if first == last else f"steps {first:,}-{last:,}"
            say(f"metrics of {steps} are kept: the tracking server has them already")

    def _open(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._crc = crc_of(path)

    def mark(self) -> JournalMark:
        """Write pending lines, and return the size of the file and its checksum."""
        self.flush()
        if self._file is None:
            return JournalMark(0)
        try:
            return JournalMark(os.stat(self._file.name).st_size, checksum_text(self._crc))
        except OSError:  # it was deleted, and cannot be created again
            return JournalMark(0)

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Write one line."""
        if self._file is None:
            raise RecipeError("log was called before init_trackers", "call engine.init_trackers(PROJECT) first")
        self._write({"step": step, **values})

    def _write(self, values: dict[str, Any]) -> None:
        line = {"time": round(time.time(), 3), **values}
        try:
            text = json.dumps(line, default=plain, allow_nan=False)
        except ValueError:  # JSON has no NaN and no infinity: write them as strings
            text = json.dumps(json.loads(json.dumps(line, default=plain), parse_constant=str))
        if self._known and self._known[key := _reproducible_part(json.loads(text))]:
            self._known[key] -= 1
            return
        self._pending.append(text + "\n")
        self.flush()

    def flush(self) -> bool:
        """Write lines that a full disk has refused before.

        Returns:
            Whether every line is written.
        """
        if self._file is None or not self._pending:
            return not self._pending
        if not self._is_in_place() and not self._recreate():
            return False
        size = self._file.seek(0, os.SEEK_END)
        lines = "".join(self._pending).encode()
        try:
            if self._file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._crc = zlib.crc32(lines, self._crc)
            self._pending.clear()
        except OSError as error:  # keep the lines in memory, and no partial line on the disk
            log_info_once(
                f"{self._file.name} cannot be written ({error.strerror or error}): its lines are kept in memory"
            )
            with contextlib.suppress(OSError):
                self._file.truncate(size)
        return not self._pending

    def _is_in_place(self) -> bool:
        """Whether the path still refers to the open file, which someone may have deleted."""
        try:
            return os.path.samestat(os.stat(self._file.name), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def _recreate(self) -> bool:
        """Create the file again after it was deleted; False while that is not possible."""
        path = Path(self._file.name)
        before = self._file
        try:
            self._open(path)
        except OSError as error:
            log_info_once(
                f"{path} was removed and cannot be created ({error.strerror or error}): its lines are kept in memory"
            )
            return False
        say(f"{path} was removed during the run: the metrics so far are lost, and a new file is started")
        before.close()
        return True

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            if not self.flush():
                say(f"{len(self._pending)} lines of metrics are lost: no room on the disk of {self._file.name}")
            self._file.close()
            self._file = None


def first_line_end(path: Path) -> int | None:
    """Return the offset after the config, the first line of a journal; None if there is no journal."""
    return next((end for _, end in complete_lines(path, max_bytes=1)), None)


def complete_lines(path: Path, start: int = 0, max_bytes: int = -1) -> Iterator[tuple[bytes, int]]:
    """Yield each complete line from an offset on, and the offset after it; nothing if there is no file.

    Args:
        path: The file, which another process may be writing.
        start: First byte to read.
        max_bytes: Stop after about this many bytes, but not before the end of the first line; -1 reads everything.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read(max_bytes)
            if b"\n" not in text:
                text += file.readline()
    except FileNotFoundError:
        return
    for line in text.split(b"\n")[:-1]:
        start += len(line) + 1
        yield line, start


def _report_damage(path: Path, mark: JournalMark) -> None:
    """Report lines that cannot be read, or that are not what the run wrote, up to a mark."""
    try:
        with path.open("rb") as file:
            text = file.read(mark.num_bytes)
    except FileNotFoundError:
        return
    damaged = [number for number, line in enumerate(text.split(b"\n")[:-1], 1) if not _is_readable(line)]
    if damaged:
        lines = "line" if len(damaged) == 1 else "lines"
        say(f"{path} is damaged: {lines} {_ranges(damaged)} cannot be read; what was logged there is missing")
    elif len(text) == mark.num_bytes and mark.checksum not in ("", checksum_text(zlib.crc32(text))):
        num_lines = text.count(b"\n")
        say(
            f"{path} is damaged or was edited: its first {num_lines:,} lines are not those that the run wrote, so some "
            "of their metrics may be wrong"
        )


def _ranges(numbers: list[int]) -> str:
    """Write increasing numbers as ranges, such as "3-5, 9"; at most the first few."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    more = f" and {len(runs) - _MAX_RANGES} more" if len(runs) > _MAX_RANGES else ""
    return ", ".join("-".join(map(str, run)) for run in runs[:_MAX_RANGES]) + more


def _is_readable(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _line_end(path: Path, position: int) -> int:
    """Return the end of the last complete line up to a position, which an edit of the file may have moved."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return file.read(position).rfind(b"\n") + 1


def _repeated_lines(path: Path, position: int, step: int) -> list[tuple[str, int]]:
    """Return lines of steps that will be computed again: after `position`, or kept there by an earlier resume."""
    found = []
    for text, end in complete_lines(path):
        try:
            line = json.loads(text)
            number = line.get("step")
            if number is not None and (end > position or number > step):
                found.append((_reproducible_part(line), number))
        except (ValueError, AttributeError, TypeError):
            continue
    return found


def _reproducible_part(line: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in line.items() if key not in VOLATILE_KEYS}, sort_keys=True)


def plain(value: Any) -> Any:
    """Convert a tensor or array to Python numbers, without importing torch; anything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
