"""The journal: a run's config once, and its numbers as they come, a line each, in a file that others read."""

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
from trimtab.log import say, say_once

JOURNAL = "metrics.jsonl"
OF_THE_MOMENT = {  # what is another number each time that a step is taken
    "time",
    "tokens_per_s",
    "peak_memory_bytes",
    "peak_reserved_bytes",
    "preflight_peak_bytes",
    "preflight_eval_peak_bytes",
}


class Journal:
    """One JSON object a line in `metrics.jsonl`, flushed as it is written, readable while the run goes on.

    Args:
        folder: Where the run's folder is made.
    """

    name = "journal"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._waiting: list[str] = []  # lines for which there was no room
        self._known: Counter[str] = Counter()  # lines of steps that are taken again

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """Open the file and write the config as its first line; a run that is still open is over."""
        self.finish()
        folder = self._folder / project_name
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / JOURNAL).open("ab", buffering=0)
        self._write({"config": config or {}})

    def go_on(self, position: int, step: int = 0, sent: int = 0) -> None:
        """Open the file of a run that goes on. Lines after `position` bytes are of steps that are taken again.

        Those that a server may have stay, and are not written a second time: its record and this one are the same.

        Args:
            position: How far the file had been written when the state was saved that the run goes on from.
            step: The step of that state.
            sent: How far a server may have the file.
        """
        path = self._folder / JOURNAL
        self._file = path.open("ab", buffering=0)
        size = path.stat().st_size
        if size < position:
            say(f"{path} has lost its last lines: numbers of steps before this one are missing")
        end = _line_end(path, max(position, min(sent, size)))
        if size > end:
            self._file.truncate(end)
        again = _steps_again(path, position, step) if sent else []
        self._known = Counter(text for text, _ in again)
        if again:
            first, last = min(number for _, number in again), max(number for _, number in again)
            say(f"numbers of steps {first:,}-{last:,} are kept from the first time: the tracking server has them")

    def go_on_after_all(self) -> None:
        """Open the file of a run that goes on from a place that is not known; lines that it has are not repeated."""
        path = self._folder / JOURNAL
        self._file = path.open("ab", buffering=0)
        self._file.truncate(_line_end(path, path.stat().st_size))
        self._known = Counter(text for text, _ in _steps_again(path, 0, 0))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Write a line."""
        if self._file is None:
            raise RecipeError("log was called before init_trackers", "call engine.init_trackers(PROJECT) first")
        self._write({"step": step, **values})

    def _write(self, line: dict[str, Any]) -> None:
        whole = {"time": round(time.time(), 3), **line}
        try:
            text = json.dumps(whole, default=plain, allow_nan=False)
        except ValueError:  # JSON has no word for NaN and infinity: they become text
            text = json.dumps(json.loads(json.dumps(whole, default=plain), parse_constant=str))
        if self._known and self._known[lasting := _lasting(json.loads(text))]:
            self._known[lasting] -= 1
            return
        self._waiting.append(text + "\n")
        self.flush()

    def flush(self) -> bool:
        """Write what waits for room on the disk.

        Returns:
            Whether nothing waits any longer.
        """
        if self._file is None or not self._waiting:
            return not self._waiting
        if not self._is_in_place() and not self._reopen():
            return False
        size = self._file.seek(0, os.SEEK_END)
        lines = "".join(self._waiting).encode()
        try:
            if self._file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._waiting.clear()
        except OSError as error:  # a full disk: the lines wait for room, and no half of one stays
            say_once(f"{self._file.name} cannot be written ({error.strerror or error}): its lines wait in memory")
            with contextlib.suppress(OSError):
                self._file.truncate(size)
        return not self._waiting

    def _is_in_place(self) -> bool:
        """Whether the open file is still the one of that name, and not one that was removed."""
        try:
            there, here = os.stat(self._file.name), os.fstat(self._file.fileno())
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def _reopen(self) -> bool:
        """Begin the file again that somebody has removed; False while there is no folder for it."""
        path = Path(self._file.name)
        try:
            again = path.open("ab", buffering=0)
        except OSError as error:
            say_once(f"{path} is gone, and cannot be written ({error.strerror or error}): its lines wait in memory")
            return False
        say(f"{path} was removed while the run went on: its numbers so far are lost, and it begins anew")
        self._file.close()
        self._file = again
        return True

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            if not self.flush():
                say(f"{len(self._waiting)} lines of numbers are lost: there was no room for them in {self._file.name}")
            self._file.close()
            self._file = None


def first_line_end(path: Path) -> int | None:
    """The end of the config, with which a journal begins; None where there is none."""
    try:
        with path.open("rb") as file:
            return len(file.readline()) or None
    except FileNotFoundError:
        return None


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal that can be read; none where there is no journal."""
    try:
        text = path.read_bytes()
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def _line_end(path: Path, position: int) -> int:
    """The end of the last whole line up to a position: somebody may have edited the file."""
    with path.open("rb") as file:
        return file.read(position).rfind(b"\n") + 1


def _steps_again(path: Path, position: int, step: int) -> list[tuple[str, int]]:
    """Lines of steps that are taken again, and their steps: written after the state, or kept by an earlier resume."""
    found, end = [], 0
    with path.open("rb") as file:
        for text in file:
            end += len(text)
            try:
                line = json.loads(text)
                number = line.get("step")
                if number is not None and (end > position or number > step):
                    found.append((_lasting(line), number))
            except (ValueError, AttributeError, TypeError):
                continue
    return found


def _lasting(line: dict[str, Any]) -> str:
    """What is the same in a line when its step is taken again, bit for bit."""
    return json.dumps({key: value for key, value in line.items() if key not in OF_THE_MOMENT}, sort_keys=True)


def plain(value: Any) -> Any:
    """A tensor or an array as lists, a number of theirs as a number; torch is not imported for that."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
