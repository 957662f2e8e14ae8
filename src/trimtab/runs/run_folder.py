"""A run's folder: its recipe, its plan, its numbers, its best model, and a small file that says how far it is."""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.checkpoint.disk_errors import cure_of
from trimtab.checkpoint.folder import clear_leftovers, sync_path
from trimtab.runs.lock import LOCK, RunLock, lock_holder
from trimtab.errors import CheckpointError, RecipeError
from trimtab.log import say, say_once
from trimtab.tracking.upload.attachment import is_tracked, sent_of, shipping
from trimtab.tracking.upload.uploader import Companion, NoCompanion
from trimtab.runs.journal import JOURNAL, Journal, first_line_end
from trimtab.runs.lost_status import CHECKPOINTS as CHECKPOINTS
from trimtab.runs.lost_status import RECIPE, lasting_facts, rebuild_status

_STATUS = "run.json"
_STATES = ("running", "finished", "stopped", "failed", "killed")
_BEAT_S = 60.0
_STEP_WRITTEN_EVERY_S = 1.0
SILENT_S = 1800.0  # after which a run on another host is taken to be over
_SHIPPER_ENDS_S = 30.0  # one whose run was killed sees that in a second, and ends what it was about


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
    """Writes into a run's folder, which it holds until the run ends.

    Args:
        path: The folder.
        job: The launcher's id of the job, the same in all its attempts.
        goes_on: The folder holds a run that goes on; else it must not hold anything yet.
        again: The launcher has started the job again: whoever held the folder on another host is over.
    """

    def __init__(self, path: Path, job: str | None = None, *, goes_on: bool = False, again: bool = False) -> None:
        if not goes_on:
            check_free(path)
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            cure = cure_of(error, "choose another --out")
            raise RecipeError(f"{path} cannot be made: {error.strerror or error}", cure) from error
        self.path = path
        self._goes_on = goes_on
        self._lock = RunLock(path, take_over=again, patience_s=SILENT_S)
        try:
            self._lock.acquire()
        except CheckpointError:
            self._remove_made()
            raise
        self._ended = threading.Event()
        self._writing = threading.Lock()  # checkpoints are noted by the thread that writes them
        self._written_step = 0
        self._status: dict[str, Any] = {"id": uuid.uuid4().hex, "step": 0, "num_steps": 0, "started": time.time()}
        before = read_status(path)
        if goes_on:
            if before is None:
                say(f"{path / _STATUS} is missing or damaged: it is written again from the saved states")
            self._status |= before or rebuild_status(path) or {}
            self._status.pop("error", None)
            for place in (path, path / CHECKPOINTS):  # what a kill has left of a model or a state half written
                clear_leftovers(place)
        self._status |= {"path": str(path), "state": "running"} | ({} if job is None else {"job": job})
        self._journal = Journal(path)
        self._companion: Companion = NoCompanion()
        self._thread = threading.Thread(target=self._show_life, name="trimtab-run-folder", daemon=True)
        if not goes_on:
            self._claim(before)
        self._thread.start()

    def _show_life(self) -> None:
        """Note how far the run is; and for those who look from another host, that it lives: its steps may take long.

        On a thread, because to bring a file to the disk can take as long as a checkpoint that is being written there.
        """
        beaten_at = time.monotonic()
        while not self._ended.wait(_STEP_WRITTEN_EVERY_S):
            if self._status["step"] != self._written_step:
                self.update()
            self._note_best()
            if time.monotonic() - beaten_at >= _BEAT_S:
                self._lock.beat()
                beaten_at = time.monotonic()

    def _note_best(self) -> None:
        """Write down the checksums of the best model, by which a resumed run knows whether it is still whole."""
        step = self._status.get("best_step")
        if step is None or (self._status.get("best_files") or {}).get("step") == step:
            return
        from trimtab.checkpoint.export import weight_checksums  # imports torch

        try:
            found = {"step": step, "files": weight_checksums(self.best)}
        except OSError:  # a better one is taking its place, and is next
            return
        if found["files"]:
            self.update(best_files=found)

    def _let_go(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._lock.release()

    def _claim(self, before: dict[str, Any] | None) -> None:
        """Take the folder; the lock is held, but another run may have come and gone since it was found free."""
        if before is not None:
            self._let_go()
            raise RecipeError(f"{self.path} was taken by another run just now", "run it again")
        try:
            self.write_text(_STATUS, json.dumps(self._status))
        except CheckpointError:
            self._let_go()
            with contextlib.suppress(RecipeError):  # what cannot be removed was said with the lock
                clear_folder(self.path)
            self._remove_made()
            raise

    @property
    def best(self) -> Path:
        """Where the best model is."""
        return self.path / "best"

    def write_text(self, name: str, text: str) -> None:
        """Write a small file whole.

        Raises:
            CheckpointError: The disk is full, or the folder cannot be written.
        """
        try:
            self._write(name, text)
        except OSError as error:
            raise _not_written(self.path / name, error) from error

    def _write(self, name: str, text: str) -> None:
        # on the disk before it takes the place of the one before: a power cut leaves one of the two whole
        beside = self.path / f".{name}.writing"
        beside.write_text(text, encoding="utf-8")
        sync_path(beside)
        is_new = not (self.path / name).exists()
        beside.replace(self.path / name)
        if is_new:
            sync_path(self.path)

    def write_recipe(self, text: str) -> None:
        """Write the recipe; `run.json` says from its next update on that the file is as it was written here."""
        self.write_text(RECIPE, text)
        with self._writing:
            self._status["recipe_checksum"] = _checksum(text.encode())

    def facts_for_state(self) -> dict[str, Any]:
        """What a saved state keeps of `run.json`."""
        with self._writing:
            return lasting_facts(self._status)

    def start(self, config: dict[str, Any], num_steps: int, journal_position: int | None = None, step: int = 0) -> None:
        """The run begins, or goes on.

        Args:
            config: The recipe.
            num_steps: How many steps it will have.
            journal_position: Numbers beyond are of steps that are taken again; None begins a new journal.
            step: The step that it goes on from.
        """
        # whatever still ships the numbers of a run that was killed must have ended before they are cut
        with shipping(self.path, _SHIPPER_ENDS_S) if is_tracked(self.path) else contextlib.nullcontext():
            sent = sent_of(self.path)
            if journal_position is None and sent:
                journal_position = first_line_end(self.path / JOURNAL)
            try:
                if journal_position is None:
                    (self.path / JOURNAL).unlink(missing_ok=True)
                    self._journal.start(".", config)
                else:
                    self._journal.go_on(journal_position, step, sent)
            except OSError as error:
                raise _not_written(self.path / JOURNAL, error) from error
        if not os.path.isdir(self._status.get("directory", "")):  # a new run, or one that was moved with its files
            self._status["directory"] = str(Path.cwd())
        self.update(step=step, num_steps=max(num_steps, step), pid=os.getpid(), host=socket.gethostname())

    def go_on(self) -> None:
        """A loop of the user's own goes on, nobody knows where: lines that are the same as before are not repeated."""
        with shipping(self.path, _SHIPPER_ENDS_S) if is_tracked(self.path) else contextlib.nullcontext():
            self._journal.go_on_after_all()
        self.update(pid=os.getpid(), host=socket.gethostname())

    def track(self, companion: Companion) -> None:
        """Let the numbers be brought to a tracking server, until the run is over."""
        self._companion = companion
        companion.start()

    def record(self, values: dict[str, Any], step: int | None) -> None:
        """Write numbers of a step, or of none."""
        self._journal.log(values, step)
        if step is not None:
            self._status["step"] = step  # a thread writes it: the step need not wait for the disk

    def update(self, **facts: Any) -> None:
        """Note how far the run is."""
        with self._writing:
            self._written_step = self._status["step"]
            self._status.update(facts, updated=time.time())
            try:
                self._write(_STATUS, json.dumps(self._status))
            except OSError as error:  # a full disk must not end a run
                say_once(f"{self.path / _STATUS} cannot be written: {error.strerror or error}")

    def journal_position(self) -> int:
        """How many bytes of numbers have been written; what waited for room on the disk is written first."""
        self._journal.flush()
        path = self.path / JOURNAL
        return path.stat().st_size if path.exists() else 0

    def finish(self, state: str, **facts: Any) -> None:
        """The run is over."""
        self._journal.finish()
        self._note_best()
        self.update(state=state, **facts)
        self._companion.finish()
        self._let_go()

    def give_up(self) -> None:
        """Nothing has run: a run that was there stays as it is, else nothing is left behind."""
        if self._goes_on:
            self._let_go()
        else:
            self.remove()

    def remove(self) -> None:
        """Leave nothing behind, not even folders made for this one; one that was there before stays, empty."""
        self._journal.finish()
        self._let_go()
        try:
            clear_folder(self.path)
        except RecipeError as error:
            say(error.problem)
        self._remove_made()

    def _remove_made(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):  # another run has come to lie beside this one
                folder.rmdir()


def _not_written(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}", cure_of(error, "choose another --out")
    )


class FollowedFolder:
    """A run's folder as seen by a process that leaves the writing to the first one.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def best(self) -> Path:
        """Where the best model is."""
        return self.path / "best"

    def write_text(self, name: str, text: str) -> None:
        """The first process does that."""

    def write_recipe(self, text: str) -> None:
        """The first process does that."""

    def facts_for_state(self) -> dict[str, Any]:
        """The first process saves states."""
        return {}

    def start(self, config: dict[str, Any], num_steps: int, journal_position: int | None = None, step: int = 0) -> None:
        """The first process does that."""

    def track(self, companion: Companion) -> None:
        """The first process does that."""

    def record(self, values: dict[str, Any], step: int) -> None:
        """The first process does that."""

    def journal_position(self) -> int:
        """The first process knows it."""
        return 0

    def update(self, **facts: Any) -> None:
        """The first process does that."""

    def finish(self, state: str, **facts: Any) -> None:
        """The first process does that."""

    def give_up(self) -> None:
        """The first process does that."""

    def remove(self) -> None:
        """The first process does that."""


Folder = RunFolder | FollowedFolder


def clear_folder(path: Path) -> None:
    """Remove everything that a folder holds; last what tells that it is a run, so that a kill can be made up for.

    Raises:
        RecipeError: Something cannot be removed; it may be a state that another run would take for its own.
    """
    for inner in sorted(path.iterdir(), key=lambda inner: inner.name == _STATUS):
        try:
            shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink(missing_ok=True)
        except OSError as error:
            raise RecipeError(
                f"{error.filename or inner} cannot be removed: {error.strerror or error}",
                f"remove {path} by hand, or choose another --out",
            ) from error


def read_status(path: Path) -> dict[str, Any] | None:
    """What `run.json` says of a run; None if there is no such file, or a damaged one."""
    try:
        status = json.loads((path / _STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(status, dict) or status.get("state") not in _STATES:
        return None
    numbers = [status.get(name, 0) for name in ("step", "num_steps", "started")]
    return status if all(isinstance(number, int | float) for number in numbers) else None


def find_run(path: Path) -> dict[str, Any] | None:
    """What is known of the run in a folder: `run.json`, or, where that is lost, what its saved states tell.

    Returns:
        None if there is no run.
    """
    return read_status(path) or rebuild_status(path)


def is_recipe_as_written(path: Path) -> bool | None:
    """Whether the recipe in a run's folder is the one that the run wrote; None if that cannot be told."""
    known = (find_run(path) or {}).get("recipe_checksum")
    if known is None:
        return None
    try:
        return bool(_checksum((path / RECIPE).read_bytes()) == known)
    except OSError:
        return False


def _checksum(content: bytes) -> str:
    return f"crc32:{zlib.crc32(content):08x}"


def is_own_loop(status: dict[str, Any]) -> bool:
    """Whether a run is that of a loop of the user's own, which no recipe can go on with."""
    return bool(status.get("own_loop"))


def how_it_stands(path: Path) -> tuple[str, str]:
    """Whether a run is running, finished, stopped, failed or killed, and why it failed, as far as one can tell here."""
    status = read_status(path) or {}
    state, reason = status.get("state", "failed"), status.get("error", "")
    if state != "running":
        return state, reason
    holder = lock_holder(path)
    is_alive = holder is not None and (
        holder.state == "running" or (holder.state == "elsewhere" and holder.silent_s < SILENT_S)
    )
    return ("running", "") if is_alive else ("killed", "killed: its process ended without a word")


def unfinished_run(home: Path, job: str | None = None) -> Path | None:
    """The newest run below `home` that is not finished; with `job`, of that job alone."""
    found = []
    for folder in home.glob("*/"):
        run = find_run(folder)
        if run is None or is_own_loop(run):
            continue
        if run["state"] != "finished" and job in (None, run.get("job")):
            found.append((run.get("started", 0.0), folder))
    return max(found)[1] if found else None


def check_free(path: Path) -> None:
    """Refuse a folder that is in use; asked before anything is loaded for a run that would go there.

    Raises:
        RecipeError: If there is something at `path` other than an empty folder; a run there is named.
    """
    try:
        is_used = path.exists() and (not path.is_dir() or not all(map(_is_of_a_lock, path.iterdir())))
    except OSError as error:
        raise RecipeError(f"{path} cannot be used: {error.strerror}", "choose another --out") from error
    if not is_used:
        return
    run = find_run(path) if path.is_dir() else None
    if run is None:
        raise RecipeError(f"{path} is not empty", "choose another --out, or remove the folder")
    where = f"step {run.get('step', 0):,} of {run.get('num_steps', 0):,}"
    if run["state"] == "finished":
        cure = f"another --out; --fresh to replace it; or train on: trimtab resume {path} --set train.epochs=…"
        raise RecipeError(f"{path} holds a finished run ({where})", cure)
    problem, cure = f"{path} holds a run that is not finished ({where})", "--resume to go on, --fresh to replace it, "
    holder = lock_holder(path)
    if holder is not None and holder.state == "running":  # also one that was started at the same moment as this one
        problem += f": process {holder.process.pid} of this machine trains it"
        cure = f"wait until it is done, or stop it (kill {holder.process.pid}), then run this again; "
    raise RecipeError(problem, f"{cure}or choose another --out")


def _is_of_a_lock(inner: Path) -> bool:
    """Whether a file is what a run leaves that is killed before it has claimed a folder; the lock itself decides."""
    return inner.name in (LOCK, f".{_STATUS}.writing") or inner.name.startswith(f".{LOCK}.")


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
    for folder in sorted({path.parent for name in (_STATUS, CHECKPOINTS) for path in root.rglob(name)}):
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # not ours
            status = find_run(folder)
            if status is not None:
                runs.append(_summary(folder, status))
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
