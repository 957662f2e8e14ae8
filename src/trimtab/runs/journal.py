"""The journal of a run, `metrics.jsonl`: the config on the first line, then one JSON object for each logged step."""

import contextlib
import errno
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


class Journal:
    """Append one JSON object per line to `metrics.jsonl`, unbuffered, so that other processes can read it meanwhile.

    Args:
        folder: Parent of the project folders that `start` creates.
    """

    name = "journal"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._pending: list[str] = []  # lines that a full disk has refused
        self._known: Counter[str] = Counter()  # lines of repeated steps that the file already has

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """Open the file and write the config; closes the file of an earlier run."""
        self.finish()
        folder = self._folder / project_name
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / JOURNAL).open("ab", buffering=0)
        self._write({"config": config or {}})

    def reopen(self, position: int | None, step: int = 0, sent: int = 0) -> None:
        """Open the file of a run that is resumed.

        Lines after `position` belong to steps that will be computed again. Those that a tracking server may have are
        kept and not written a second time, so that the server and the file stay equal; the others are removed.

        Args:
            position: Size of the file when the checkpoint was saved; None keeps every line (the step is unknown).
            step: Step of the checkpoint.
            sent: Offset up to which a server may have the file.
        """
        path = self._folder / JOURNAL
        self._file = path.open("ab", buffering=0)
        size, start = path.stat().st_size, position or 0
        if size < start:
            say(f"{path} has lost its last lines: metrics of steps before step {step:,} are missing")
        end = _line_end(path, size if position is None else max(position, min(sent, size)))
        if size > end:
            self._file.truncate(end)
        repeated = _repeated_lines(path, start, step) if sent or position is None else []
        self._known = Counter(text for text, _ in repeated)
        if repeated and position is not None:
            first, last = min(number for _, number in repeated), max(number for _, number in repeated)
            steps = f"step {first:,}" if first == last else f"steps {first:,}-{last:,}"
            say(f"metrics of {steps} are kept: the tracking server has them already")

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
        try:
            file = path.open("ab", buffering=0)
        except OSError as error:
            log_info_once(
                f"{path} was removed and cannot be created ({error.strerror or error}): its lines are kept in memory"
            )
            return False
        say(f"{path} was removed during the run: the metrics so far are lost, and a new file is started")
        self._file.close()
        self._file = file
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


def _line_end(path: Path, position: int) -> int:
    """Return the end of the last complete line up to a position, which an edit of the file may have moved."""
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
