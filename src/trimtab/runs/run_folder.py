"""The folder of a run: recipe, plan, journal, best model, and `run.json` with the progress of the run."""

import contextlib
import errno
import itertools
import json
import os
import shutil
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.checkpoint.disk_errors import cure_for_os_error
from trimtab.checkpoint.folder import clear_leftovers, sync_path
from trimtab.checkpoint.process_identity import is_running
from trimtab.checksums import checksum_text
from trimtab.errors import CheckpointError, RecipeError, as_argument
from trimtab.log import log_info_once, say
from trimtab.runs.journal import JOURNAL, Journal, JournalMark, first_line_end
from trimtab.runs.lock import LOCK, RunLock, lock_holder
from trimtab.runs.lost_status import CHECKPOINTS as CHECKPOINTS
from trimtab.runs.lost_status import RECIPE, rebuild_status, run_facts, wrong_keys
from trimtab.runs.tracking_file import is_tracked, sent_bytes, upload_lock
from trimtab.runs.uploader import NoUploader, Uploader

_STATUS = "run.json"
_STATES = ("running", "finished", "stopped", "failed", "killed")
_BEAT_S = 60.0
_STEP_WRITTEN_EVERY_S = 1.0
HEARTBEAT_TIMEOUT_S = 1800.0  # without a heartbeat, after which a run on another host counts as dead
_UPLOADER_EXIT_S = 30.0  # the uploader of a killed run notices that within a second and exits


@dataclass(frozen=True)
class RunSummary:
    """A line of `trimtab runs`."""

    path: Path
    state: str  # running, finished, stopped, failed, killed
    step: int
    num_steps: int
    metric_name: str | None
    best_metric: float | None
    age_s: float


class RunFolder:
    """Write the files of a run; hold the folder's lock until the run ends.

    Args:
        path: The folder.
        job: The launcher's id of the job, the same in all its attempts.
        resumes: Whether to resume the run in the folder; otherwise the folder must be empty or missing.
        restarted: Whether the launcher has restarted the job, so that a lock held on another host is stale.
    """

    def __init__(self, path: Path, job: str | None = None, *, resumes: bool = False, restarted: bool = False) -> None:
        if not resumes:
            check_free(path)
        self._created = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            cure = cure_for_os_error(error, "choose another --out")
            raise RecipeError(f"{path} cannot be created: {error.strerror or error}", cure) from error
        self.path = path
        self._resumes = resumes
        self._lock = RunLock(path, take_over=restarted, patience_s=HEARTBEAT_TIMEOUT_S)
        try:
            self._lock.acquire()
        except CheckpointError:
            self._remove_created()
            raise
        self._ended = threading.Event()
        self._writing = threading.Lock()  # the thread that writes checkpoints also calls `update`
        self._written_step = 0
        self._status: dict[str, Any] = {"id": uuid.uuid4().hex, "step": 0, "num_steps": 0, "started": time.time()}
        before = read_status(path)
        if resumes:
            if before is None:
                say(f"{path / _STATUS} is missing or damaged: it is rebuilt from the checkpoints")
            self._status |= before or rebuild_status(path) or {}
            self._status.pop("error", None)
            for folder in (path, path / CHECKPOINTS):  # partly written models and checkpoints of a killed process
                clear_leftovers(folder)
        self._status |= {"path": str(path), "state": "running"} | ({} if job is None else {"job": job})
        self._journal = Journal(path)
        self._uploader: Uploader = NoUploader()
        self._thread = threading.Thread(target=self._write_progress, name="trimtab-run-folder", daemon=True)
        if not resumes:
            self._claim(before)
        self._thread.start()

    def _write_progress(self) -> None:
        """Write the step to `run.json`, and touch the lock as a heartbeat for other hosts.

        Runs on a thread because an fsync can take as long as a checkpoint that is being written to the same disk.
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
        """Write the checksums of the best model to `run.json`, so that a resumed run can detect damage."""
        step = self._status.get("best_step")
        if step is None or (self._status.get("best_files") or {}).get("step") == step:
            return
        from trimtab.checkpoint.export import weight_checksums  # imports torch

        try:
            found = {"step": step, "files": weight_checksums(self.best)}
        except OSError:  # a better model is just replacing it, and is noted the next time
            return
        if found["files"]:
            self.update(best_files=found)

    def _release(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._lock.release()

    def _claim(self, before: dict[str, Any] | None) -> None:
        """Write the first `run.json`; another run may have used the folder between `check_free` and the lock."""
        if before is not None:
            self._release()
            raise RecipeError(f"{self.path} was just taken by another run", "run the command again")
        try:
            self.write_text(_STATUS, json.dumps(self._status))
        except CheckpointError:
            self._release()
            with contextlib.suppress(RecipeError):  # `release` has reported what cannot be removed
                clear_folder(self.path)
            self._remove_created()
            raise

    @property
    def best(self) -> Path:
        """Folder of the best model."""
        return self.path / "best"

    def write_text(self, name: str, text: str) -> None:
        """Write a small file atomically.

        Raises:
            CheckpointError: The disk is full, or the folder is not writable.
        """
        try:
            self._write(name, text)
        except OSError as error:
            raise _write_error(self.path / name, error) from error

    def _write(self, name: str, text: str) -> None:
        # synced before the rename: after a power cut, either the old or the new file is complete
        temporary = self.path / f".{name}.writing"
        temporary.write_text(text, encoding="utf-8")
        sync_path(temporary)
        is_new = not (self.path / name).exists()
        temporary.replace(self.path / name)
        if is_new:
            sync_path(self.path)

    def write_recipe(self, text: str) -> None:
        """Write the recipe; the next update of `run.json` includes its checksum."""
        self.write_text(RECIPE, text)
        with self._writing:
            self._status["recipe_checksum"] = _checksum(text.encode())

    def facts_for_checkpoint(self) -> dict[str, Any]:
        """Return the part of `run.json` that a checkpoint stores."""
        with self._writing:
            return run_facts(self._status)

    def start(self, config: dict[str, Any], num_steps: int, mark: JournalMark | None = None, step: int = 0) -> None:
        """Open the journal and record that the run has started or resumed.

        Args:
            config: The recipe.
            num_steps: Total number of steps.
            mark: The journal at the checkpoint; None starts the journal from the first step.
            step: Step of that checkpoint.
        """
        with self._journal_lock():
            sent = sent_bytes(self.path)
            if mark is None and sent:
                end = first_line_end(self.path / JOURNAL)
                mark = None if end is None else JournalMark(end)
            try:
                if mark is None:
                    (self.path / JOURNAL).unlink(missing_ok=True)
                    self._journal.start(".", config)
                else:
                    self._journal.reopen(mark, step, sent)
            except OSError as error:
                raise _write_error(self.path / JOURNAL, error) from error
        if not os.path.isdir(self._status.get("directory") or ""):  # a new run, or one that was moved with its files
            self._status["directory"] = str(Path.cwd())
        self.update(step=step, num_steps=max(num_steps, step), pid=os.getpid(), host=socket.gethostname())

    def resume_own_loop(self) -> None:
        """Reopen the journal for the user's own loop, whose step is unknown; repeated lines are not written again."""
        with self._journal_lock():
            self._journal.reopen(None)
        self.update(pid=os.getpid(), host=socket.gethostname())

    def _journal_lock(self) -> contextlib.AbstractContextManager[None]:
        """Wait until the uploader of a killed run has exited, before the journal is truncated."""
        return upload_lock(self.path, _UPLOADER_EXIT_S) if is_tracked(self.path) else contextlib.nullcontext()

    def track(self, uploader: Uploader) -> None:
        """Start an uploader, which `finish` ends."""
        self._uploader = uploader
        uploader.start()

    def record(self, values: dict[str, Any], step: int | None) -> None:
        """Write metrics to the journal."""
        self._journal.log(values, step)
        if step is not None:
            self._status["step"] = step  # reaches run.json on the thread, so that no step waits for an fsync

    def update(self, **facts: Any) -> None:
        """Write facts and the current step to `run.json`."""
        with self._writing:
            self._written_step = self._status["step"]
            self._status.update(facts, updated=time.time())
            try:
                self._write(_STATUS, json.dumps(self._status))
            except OSError as error:  # a full disk must not end a run
                log_info_once(f"{self.path / _STATUS} cannot be written: {error.strerror or error}")

    def journal_mark(self) -> JournalMark:
        """Write pending lines, and return the size and the checksum of the journal."""
        return self._journal.mark()

    def finish(self, state: str, *, before_upload: Callable[[], None] = lambda: None, **facts: Any) -> None:
        """Write the final state, end the uploader and release the folder.

        Args:
            state: The final state.
            before_upload: Called after the state is written; files that it writes to the folder are also uploaded.
            facts: More facts for `run.json`.
        """
        self._journal.finish()
        self._note_best()
        self.update(state=state, **facts)
        with contextlib.ExitStack() as stack:  # both, the last one first, also after Ctrl-C
            stack.callback(self._release)
            stack.callback(self._uploader.finish)
            before_upload()

    def give_up(self) -> None:
        """Release the folder before anything has run: a resumed run stays unchanged, a new one is removed."""
        if self._resumes:
            self._release()
        else:
            self.remove()

    def remove(self) -> None:
        """Delete the run and the folders that were created for it."""
        self._journal.finish()
        self._release()
        try:
            clear_folder(self.path)
        except RecipeError as error:
            say(error.problem)
        self._remove_created()

    def _remove_created(self) -> None:
        for folder in self._created:
            with contextlib.suppress(OSError):  # another run was created in it in the meantime
                folder.rmdir()


def _write_error(path: Path, error: OSError) -> CheckpointError:
    problem = f"{path} cannot be written: {error.strerror or error}"
    return CheckpointError(problem, cure_for_os_error(error, "choose another --out"))


class ReadOnlyRunFolder:
    """The run folder on ranks other than 0, which write nothing.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def best(self) -> Path:
        """Folder of the best model."""
        return self.path / "best"

    def facts_for_checkpoint(self) -> dict[str, Any]:
        """Return nothing: rank 0 saves the facts."""
        return {}

    def journal_mark(self) -> JournalMark:
        """Return nothing: rank 0 saves it."""
        return JournalMark(0)

    def _leave_to_rank_0(self, *_: Any, **__: Any) -> None:
        pass

    write_text = write_recipe = start = track = record = update = _leave_to_rank_0
    finish = give_up = remove = _leave_to_rank_0


Folder = RunFolder | ReadOnlyRunFolder


def clear_folder(path: Path) -> None:
    """Delete the content of a run folder; `run.json` last, so that a kill in between leaves a recognisable run.

    Raises:
        RecipeError: Something cannot be removed. A new run could mistake it for its own checkpoint.
    """
    for inner in sorted(path.iterdir(), key=lambda inner: inner.name == _STATUS):
        try:
            shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink(missing_ok=True)
        except OSError as error:
            raise RecipeError(
                f"{error.filename or inner} cannot be removed: {error.strerror or error}",
                f"remove {path} yourself, or choose another --out",
            ) from error


def read_status(path: Path) -> dict[str, Any] | None:
    """Read `run.json`; None if it is missing or damaged."""
    try:
        status = json.loads((path / _STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(status, dict) or status.get("state") not in _STATES:
        return None
    required = [status.get(name, 0) for name in ("step", "num_steps", "started")]
    return None if wrong_keys(status) or None in required else status


def find_run(path: Path) -> dict[str, Any] | None:
    """Read `run.json`, or rebuild its content from the checkpoints; None if the folder holds no run."""
    return read_status(path) or rebuild_status(path)


def is_recipe_unchanged(path: Path) -> bool | None:
    """Whether the recipe in a run folder is the one that the run wrote; None if its checksum is unknown."""
    known = (find_run(path) or {}).get("recipe_checksum")
    if known is None:
        return None
    try:
        return bool(_checksum((path / RECIPE).read_bytes()) == known)
    except OSError:
        return False


def _checksum(content: bytes) -> str:
    return checksum_text(zlib.crc32(content))


def is_own_loop(status: dict[str, Any]) -> bool:
    """Whether a run was made by the user's own loop, which no recipe can resume."""
    return bool(status.get("own_loop"))


def actual_state(path: Path) -> tuple[str, str]:
    """Return the state of a run and its error; a run that claims to be running but whose process died is `killed`."""
    status = find_run(path) or {}
    state, reason = status.get("state", "failed"), status.get("error", "")
    if state != "running":
        return state, reason
    holder = lock_holder(path)
    is_alive = holder is not None and (
        holder.state == "running" or (holder.state == "elsewhere" and holder.silent_s < HEARTBEAT_TIMEOUT_S)
    )
    return ("running", "") if is_alive else ("killed", "killed: its process ended without reporting an error")


def unfinished_run(home: Path, job: str | None = None) -> Path | None:
    """Return the newest unfinished run in a folder of runs; with `job`, the newest of that job."""
    runs = [(folder, run) for folder in home.glob("*/") if (run := find_run(folder)) and not is_own_loop(run)]
    found = [
        (run.get("started", 0.0), folder)
        for folder, run in runs
        if run["state"] != "finished" and job in (None, run.get("job"))
    ]
    return max(found)[1] if found else None


def _require_writable(path: Path) -> None:
    whole = path.absolute()
    nearest = next(place for place in (whole, *whole.parents) if place.exists())
    number = 0 if nearest.is_dir() else errno.ENOTDIR
    if not number and not os.access(nearest, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        number = errno.EACCES
    if number:
        error = OSError(number, os.strerror(number), str(whole))
        cure = cure_for_os_error(error, "choose another --out")
        raise RecipeError(f"{path} cannot be created: {error.strerror}", cure)


def check_free(path: Path) -> None:
    """Check that a new run can use a folder; called before anything is loaded.

    Raises:
        RecipeError: `path` exists and is not an empty folder, or cannot be created.
    """
    try:
        is_used = path.exists() and (not path.is_dir() or not all(map(_is_lock_file, path.iterdir())))
    except OSError as error:
        raise RecipeError(f"{path} cannot be used: {error.strerror}", "choose another --out") from error
    if not is_used:
        _require_writable(path)
        return
    if not path.is_dir():
        raise RecipeError(f"{path} is a file, and a run needs a folder", "choose another --out")
    run = find_run(path)
    if run is None:
        raise RecipeError(f"{path} is not empty, and is not a run", "choose another --out, or remove the folder")
    progress = f"step {run.get('step', 0):,} of {run.get('num_steps', 0):,}"
    if run["state"] == "finished":
        longer = f"trimtab resume {as_argument(path)} --set train.epochs=…"
        cure = f"choose another --out, pass --fresh to replace it, or train longer: {longer}"
        raise RecipeError(f"{path} contains a finished run ({progress})", cure)
    problem = f"{path} contains an unfinished run ({progress})"
    cure = "pass --resume to resume it, --fresh to replace it, "
    holder = lock_holder(path)
    if holder is not None and holder.state == "running":
        problem += f", which process {holder.process.pid} on this machine is training"
        cure = f"wait until it is done, or stop it (kill {holder.process.pid}), then run the command again; "
    raise RecipeError(problem, f"{cure}or choose another --out")


def _is_lock_file(inner: Path) -> bool:
    """Whether a file may be of a run that was killed before it wrote `run.json`; `RunLock` checks if it is alive."""
    return inner.name in (LOCK, f".{_STATUS}.writing") or inner.name.startswith(f".{LOCK}.")


def default_folder(root: Path, experiment: str, name: str | None) -> Path:
    """Return `root/experiment/name`; without a name, the next free number."""
    home = root / experiment
    if name is not None:
        return home / name
    return next(path for number in itertools.count(1) if not (path := home / f"{number:03d}").exists())


def list_runs(root: Path) -> list[RunSummary]:
    """List every run below a folder, newest first."""
    runs = []
    for folder in sorted({path.parent for name in (_STATUS, CHECKPOINTS) for path in root.rglob(name)}):
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # a run.json of another program
            status = find_run(folder)
            if status is not None:
                runs.append(_summarize(folder, status))
    return sorted(runs, key=lambda run: run.age_s)


def _summarize(path: Path, status: dict[str, Any]) -> RunSummary:
    state = status["state"]
    if lock_holder(path) is not None:
        state = actual_state(path)[0]
    elif state == "running" and status.get("host") == socket.gethostname() and not is_running(status.get("pid", 0)):
        state = "killed"  # without a lock: the run itself, or its mirror
    return RunSummary(
        path=path,
        state=state,
        step=status["step"],
        num_steps=status["num_steps"],
        metric_name=status.get("metric_name"),
        best_metric=status.get("best_metric"),
        age_s=time.time() - status["started"],
    )
