"""A run's folder: its recipe, its plan, its numbers, its best model, and a small file that says how far it is."""

import contextlib
import json
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import RecipeError
from trimtab.tracking.journal import Journal

_STATUS = "run.json"


@dataclass(frozen=True)
class RunSummary:
    """What `trimtab runs` shows of a run."""

    path: Path
    state: str  # running, finished, stopped, failed, killed
    step: int
    num_steps: int
    metric_name: str | None
    best_metric: float | None
    age_s: float


class RunFolder:
    """Writes into a run's folder.

    Args:
        path: The folder; it must not hold anything yet.
    """

    def __init__(self, path: Path) -> None:
        check_free(path)
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"{path} cannot be made: {error.strerror}", "choose another --out") from error
        self.path = path
        self._status: dict[str, Any] = {"state": "running", "step": 0, "num_steps": 0, "started": time.time()}
        try:
            with (path / _STATUS).open("x") as claim:
                json.dump(self._status | {"pid": os.getpid(), "host": socket.gethostname()}, claim)
        except FileExistsError as error:
            raise RecipeError(f"{path} was taken by another run just now", "run it again") from error
        self._journal = Journal(path)

    @property
    def best(self) -> Path:
        """Where the best model is."""
        return self.path / "best"

    def write_text(self, name: str, text: str) -> None:
        """Write a small file whole."""
        beside = self.path / f".{name}.writing"
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.path / name)

    def start(self, config: dict[str, Any], num_steps: int) -> None:
        """The run begins."""
        self._journal.start(".", config)
        self.update(num_steps=num_steps, pid=os.getpid(), host=socket.gethostname())

    def record(self, values: dict[str, Any], step: int) -> None:
        """Write numbers of a step."""
        self._journal.log(values, step)
        self.update(step=step)

    def update(self, **facts: Any) -> None:
        """Note how far the run is."""
        self._status.update(facts, updated=time.time())
        self.write_text(_STATUS, json.dumps(self._status))

    def finish(self, state: str, **facts: Any) -> None:
        """The run is over."""
        self._journal.finish()
        self.update(state=state, **facts)

    def remove(self) -> None:
        """Leave nothing behind, not even folders made for this one; one that was there before stays, empty."""
        self._journal.finish()
        for path in self.path.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        for folder in self._made:
            with contextlib.suppress(OSError):  # another run has come to lie beside this one
                folder.rmdir()


def check_free(path: Path) -> None:
    """Refuse a folder that is in use; asked before anything is loaded for a run that would go there.

    Raises:
        RecipeError: If there is something at `path` other than an empty folder.
    """
    try:
        is_used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise RecipeError(f"{path} cannot be used: {error.strerror}", "choose another --out") from error
    if is_used:
        raise RecipeError(f"{path} is not empty", "choose another --out, or remove the folder")


def default_folder(root: Path, experiment: str, name: str | None) -> Path:
    """`root/experiment/name`; without a name the next free number."""
    home = root / experiment
    if name is not None:
        return home / name
    number = 1
    while (home / f"{number:03d}").exists():
        number += 1
    return home / f"{number:03d}"


def list_runs(root: Path) -> list[RunSummary]:
    """Every run below a folder, newest first."""
    runs = []
    for status in root.rglob(_STATUS):
        try:
            runs.append(_summary(status.parent, json.loads(status.read_text())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # being written, or not ours
            continue
    return sorted(runs, key=lambda run: run.age_s)


def _summary(path: Path, status: dict[str, Any]) -> RunSummary:
    state = status["state"]
    if state == "running" and status.get("host") == socket.gethostname() and not _alive(status.get("pid", 0)):
        state = "killed"
    return RunSummary(
        path=path,
        state=state,
        step=status["step"],
        num_steps=status["num_steps"],
        metric_name=status.get("metric_name"),
        best_metric=status.get("best_metric"),
        age_s=time.time() - status["started"],
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0
