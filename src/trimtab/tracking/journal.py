"""Where a run's numbers go: a tracker takes the config once and values as they come. The journal is a file of lines."""

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from trimtab.errors import RecipeError
from trimtab.log import say, say_once


class Tracker(Protocol):
    """Takes the numbers of a run."""

    name: str

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """A run begins."""

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Values at a step."""

    def finish(self) -> None:
        """The run is over."""


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

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """Open the file and write the config as its first line."""
        folder = self._folder / project_name
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("ab", buffering=0)
        self._write({"config": config or {}})

    def go_on(self, position: int) -> None:
        """Open the file of a run that goes on; lines after `position` bytes are of steps that are taken again."""
        path = self._folder / "metrics.jsonl"
        self._file = path.open("ab", buffering=0)
        if path.stat().st_size < position:
            say(f"{path} has lost its last lines: numbers of steps before this one are missing")
        elif path.stat().st_size > position:
            self._file.truncate(_line_end(path, position))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Write a line."""
        if self._file is None:
            raise RecipeError("log was called before init_trackers", "call engine.init_trackers(PROJECT) first")
        self._write({"step": step, **values})

    def _write(self, line: dict[str, Any]) -> None:
        whole = {"time": round(time.time(), 3), **line}
        try:
            text = json.dumps(whole, default=_plain, allow_nan=False)
        except ValueError:  # JSON has no word for NaN and infinity: they become text
            text = json.dumps(json.loads(json.dumps(whole, default=_plain), parse_constant=str))
        self._waiting.append(text + "\n")
        self.flush()

    def flush(self) -> bool:
        """Write what waits for room on the disk.

        Returns:
            Whether nothing waits any longer.
        """
        if self._file is None or not self._waiting:
            return not self._waiting
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

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            if not self.flush():
                say(f"{len(self._waiting)} lines of numbers are lost: there was no room for them in {self._file.name}")
            self._file.close()
            self._file = None


def _line_end(path: Path, position: int) -> int:
    """The end of the last whole line up to a position: somebody may have edited the file."""
    with path.open("rb") as file:
        return file.read(position).rfind(b"\n") + 1


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value.item() if hasattr(value, "item") else str(value)


def build_trackers(log_with: Any, folder: Path | None) -> list[Tracker]:
    """The trackers that `log_with` names: "journal", "all", a tracker object, or a list of these."""
    if log_with is None:
        return []
    trackers: list[Tracker] = []
    for choice in log_with if isinstance(log_with, list | tuple) else [log_with]:
        if not isinstance(choice, str) and all(hasattr(choice, verb) for verb in ("start", "log", "finish")):
            trackers.append(choice)
        elif choice in ("journal", "all"):
            trackers.append(Journal(folder or Path(".")))
        else:
            raise RecipeError(
                f"log_with={choice!r} is not known",
                'use "journal" (a metrics.jsonl file), or an object with start, log and finish',
            )
    return trackers
