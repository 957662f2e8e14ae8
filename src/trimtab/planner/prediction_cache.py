"""Cache predicted steps between plans: the trace of a step, and the numbers that plans computed from it.

A step has two files. One contains the answers to what plans asked: its memory, whether it runs under a limit, its time
on a device. The other one contains its trace, for questions that no plan has asked yet, such as another budget. Both
are compressed JSON, named by a digest of everything that determines the step (`prediction_key.py`), so their contents
are never out of date. gzip's checksum finds damaged files; they are ignored and written again.
"""

import contextlib
import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.data.cache_folder import cache_folder
from trimtab.log import log_info_once
from trimtab.planner.trace.recorder import Trace
from trimtab.planner.trace.stored_trace import as_plain, from_plain

_MOST_BYTES = 256 * 2**20  # bytes of all files
_KEPT_SHARE = 0.75  # bytes of all files after old files were removed
_NUM_WRITES_BETWEEN_LOOKS = 200  # writes between two checks of the folder's size
_MOST_ANSWERS = 100  # answers about one step: a budget that is all free memory differs from run to run
_NOT_READABLE = (OSError, EOFError, ValueError, zlib.error)
_NOT_A_TRACE = (KeyError, IndexError, TypeError, ValueError)


class Answers:
    """Numbers about one step, by question; this class does not store them."""

    def get(self, question: str, compute: Callable[[], Any]) -> Any:
        """Return the answer to a question as a JSON value; compute and store it if it is unknown."""
        return compute()


class PredictionCache:
    """A cache that stores nothing: everything is traced."""

    def answers(self, key: str | None) -> Answers:
        """The answers about a step.

        Args:
            key: The digest of everything that determines the step; None if unknown.
        """
        return Answers()

    def trace(self, key: str | None, make: Callable[[], Trace]) -> Trace:
        """Return the trace of a step from the cache, or make and store it."""
        return make()


def open_prediction_cache() -> PredictionCache:
    """Open the cache in `predictions` of the cache folder; with TRIMTAB_CACHE=off, one that stores nothing."""
    folder = cache_folder()
    return PredictionCache() if folder is None else PredictionFolder(folder / "predictions")


class PredictionFolder(PredictionCache):
    """A cache in a folder, which several processes may use at the same time: files are replaced atomically.

    Args:
        folder: The folder; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_writes = 0

    def answers(self, key: str | None) -> Answers:  # noqa: D102
        return Answers() if key is None else _StoredAnswers(self, key)

    def trace(self, key: str | None, make: Callable[[], Trace]) -> Trace:  # noqa: D102
        if key is None:
            return make()
        name = f"{key}.trace"
        values = self.read(name)
        if values is not None:
            try:
                return from_plain(values)
            except _NOT_A_TRACE:
                pass
        trace = make()
        self.write(name, as_plain(trace))
        return trace

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the contents of a file; None if it does not exist or is damaged."""
        path = self._path(name)
        try:
            content = json.loads(gzip.decompress(path.read_bytes()))
        except _NOT_READABLE:
            return None
        with contextlib.suppress(OSError):  # the file may belong to another user
            os.utime(path)  # recently used files are removed last
        return content if isinstance(content, dict) else None

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write or replace a file; if the folder cannot be written to, nothing is stored."""
        path = self._path(name)
        data = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), compresslevel=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            if self._num_writes % _NUM_WRITES_BETWEEN_LOOKS == 0:
                remove_oldest(self._folder, _MOST_BYTES)
            self._num_writes += 1
        except OSError as error:
            why = error.strerror or error
            log_info_once(f"predictions are not cached in {self._folder}: {why}; set TRIMTAB_CACHE to another folder")

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.json.gz"


class _StoredAnswers(Answers):
    """Answers in a file."""

    def __init__(self, folder: PredictionFolder, key: str) -> None:
        self._folder, self._name = folder, f"{key}.answers"
        self._known: dict[str, Any] = folder.read(self._name) or {}

    def get(self, question: str, compute: Callable[[], Any]) -> Any:
        if question not in self._known:
            answer = compute()
            if len(self._known) >= _MOST_ANSWERS:
                self._known.clear()
            self._known[question] = answer
            self._folder.write(self._name, self._known)
        return self._known[question]


def remove_oldest(folder: Path, most_bytes: int) -> None:
    """Remove the least recently used files if all files together exceed this number of bytes.

    Files that another process removes at the same time are ignored.
    """
    found: list[tuple[float, int, Path]] = []
    for path in folder.glob("*/*"):
        try:
            status = path.stat()
        except OSError:
            continue
        found.append((status.st_mtime, status.st_size, path))
    excess = sum(size for _, size, _ in found) - most_bytes
    if excess <= 0:
        return
    excess += int((1 - _KEPT_SHARE) * most_bytes)
    for _, size, path in sorted(found):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size
