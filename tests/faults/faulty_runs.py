"""What the processes of these tests do: they train, and are killed where a test says, by a real SIGKILL to themselves.

A moment that lies between two calls of the system is found with an audit hook, which Python calls before it opens,
renames or removes a file: nothing of trimtab is replaced.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import os
import resource
import shutil
import signal
import struct
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fork_server import run_command
from tiny_runs import TinyModels
from trimtab import Recipe, fit
from trimtab.data.tokens import TokenDataset
from trimtab.errors import TrimtabError
from trimtab.optim import offloaded_state
from trimtab.run import resume as resume_run

_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.utime", "ctypes.dlsym")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_true_time = time.time


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # another thread may be running; none of this one's lines will


class FileEvents:
    """Counts what is about to happen to files; dies before one of them.

    Args:
        folder: Reading counts only in there; anything that changes files counts everywhere.
        event: Die at an event of this name …
        path: … on a path that holds this text …
        nth: … when it comes for the nth time. Without `event` and `path` any event counts.
    """

    def __init__(self, folder: str, event: str = "", path: str = "", nth: int = 0) -> None:
        self._folder, self._event, self._path, self._nth = folder, event, path, nth
        self._lock = threading.Lock()
        self.num_events = 0
        self.is_on = True

    def __call__(self, event: str, arguments: tuple) -> None:
        if event not in _FILE_EVENTS or not self.is_on:
            return
        names = " ".join(str(os.fspath(a)) for a in arguments[:2] if isinstance(a, str | bytes | os.PathLike))
        if event == "open" and not (arguments[2] & _WRITES or self._folder in names):
            return
        if event == "ctypes.dlsym" and "renameat2" not in names:
            return
        if (not self._event or self._event == event) and self._path in names:
            with self._lock:
                self.num_events += 1
                if self.num_events == self._nth:
                    die()


class Watcher:
    """A callback that records each step, and does something after some of them.

    Args:
        out: The run's folder.
        steps: The file for the steps.
        at: For a step words and their arguments, separated by "; ": "die", "signal SIGTERM", "sleep 0.5", "saved 10"
            (wait for that checkpoint), "there PATH" (wait for that file), "limit 1000" (no file can be longer), "full"
            (nor can the metrics), "chmod 555 FOLDER", "fill FOLDER" (until its disk is full), "remove FILE", "vanish
            FOLDER", "clock SECONDS" (the time of day jumps). "end" instead of a step dies when all steps are done.
    """

    def __init__(self, out: str, steps: str, at: dict[str, str]) -> None:
        self._out = out
        self._steps = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._at = at

    def on_step(self, state) -> None:
        os.write(self._steps, f"{os.getpid()} {state.step}\n".encode())
        for order in filter(None, self._at.get(str(state.step), "").split("; ")):
            word, *arguments = order.split()
            getattr(self, f"_{word}")(*arguments)

    def on_end(self, state) -> None:
        if "end" in self._at:
            die()

    def _die(self) -> None:
        die()

    def _signal(self, name: str) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    def _sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def _saved(self, step: str) -> None:
        self._there(f"{self._out}/checkpoints/step-{step}")

    def _there(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.001)

    def _limit(self, num_bytes: str) -> None:
        limit_file_size(int(num_bytes))

    def _full(self) -> None:
        limit_file_size(os.path.getsize(f"{self._out}/metrics.jsonl"))

    def _chmod(self, mode: str, path: str) -> None:
        os.chmod(path, int(mode, 8))

    def _fill(self, folder: str) -> None:
        fill(Path(folder))

    def _remove(self, path: str) -> None:
        os.remove(path)

    def _vanish(self, folder: str) -> None:
        shutil.rmtree(folder)

    def _clock(self, seconds: str) -> None:
        set_clock(float(seconds))


class SignalAtOpen:
    """An audit hook that sends this process SIGTERM once, when a file is about to be opened.

    Args:
        path: Text that the file's path contains.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, event: str, arguments: tuple) -> None:
        if event == "open" and self._path and self._path in str(arguments[0]):
            self._path = ""
            os.kill(os.getpid(), signal.SIGTERM)


def fill(folder: Path, leave_bytes: int = 0) -> None:
    """Fill a small disk, except for some bytes."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    os.truncate(filler, filler.stat().st_size - leave_bytes)


def set_clock(seconds: float) -> None:
    """Shift the time of day of this process; monotonic clocks are not affected."""
    time.time = lambda: _true_time() + seconds


def limit_file_size(num_bytes: int) -> None:
    """The system refuses to make any file of this process longer, as on a full disk; -1 takes that back."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def be_nobody_special() -> None:
    """Let the permissions of files count for this process even if root has started it."""
    if os.geteuid() == 0:
        header = struct.pack("=II", 0x20080522, 0)  # the third version of capabilities; this process
        assert ctypes.CDLL(None).capset(header, bytes(24)) == 0


class Lengths:
    """A custom metric, the mean length of the rows, which can die in an evaluation."""

    def __init__(self, dies_at_call: int | None) -> None:
        self._num_calls = 0
        self._dies_at_call = dies_at_call

    def __call__(self, logits, batch):
        self._num_calls += 1
        if self._num_calls == self._dies_at_call:
            die()
        return batch["attention_mask"].sum(1).float()


class NotingLoss:
    """An own loss: notes the rows that are trained on, and is not a number where one of them has a certain length.

    It is a callback too, so that it knows to which step the rows belong.

    Args:
        seen: The file for the rows, the lists of tokens of one step a line; "" notes nothing.
        bad_length: Of the rows that have no loss, in tokens; None for no rows.
        skip_calls: Calls at the beginning that are no training.
    """

    def __init__(self, seen: str = "", bad_length: int | None = None, skip_calls: int = 0) -> None:
        self._seen, self._bad_length, self._skip = seen, bad_length, skip_calls
        self._rows: list[list[int]] = []

    def __call__(self, outputs, batch):
        loss = nn.functional.cross_entropy(outputs.logits, batch["labels"])
        if not outputs.logits.requires_grad:  # an evaluation
            return loss
        if self._skip > 0:
            self._skip -= 1
            return loss
        rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        tokens = [row[mask.bool()].tolist() for row, mask in rows]
        self._rows += tokens
        is_bad = any(len(row) == self._bad_length for row in tokens)
        return loss * math.nan if is_bad else loss

    def on_step(self, state) -> None:
        if self._seen:
            with open(self._seen, "a") as seen:
                seen.write(json.dumps({"step": state.step, "rows": self._rows}) + "\n")
        self._rows = []


def train(
    recipe: dict,
    *,
    command: str = "fit",
    resume: bool | str = True,
    fresh: bool = False,
    options: dict | None = None,
    kill: dict | None = None,
    stop_at_open: str = "",
    dies_in_evaluation: int | None = None,
    at: dict[str, str] | None = None,
    clock: float = 0.0,
    nobody_special: bool = False,
    loss: dict | None = None,
    measure_at: list[int | str] | None = None,
    waits_for: str = "",
    output: str = "",
    notes: str = "",
) -> None:
    """Train as `trimtab train` or `trimtab resume` does, to the same exit codes, and leave notes for the test.

    Args:
        recipe: With `out`.
        command: "fit" with the recipe, or "resume" with the folder.
        resume: For `fit`.
        fresh: For `fit`.
        options: For `resume`.
        kill: Arguments of `FileEvents`.
        stop_at_open: SIGTERM comes when a file is opened whose path contains this text.
        dies_in_evaluation: The evaluation batch in which to die.
        at: What to do after a step, as `Watcher` takes it.
        clock: By how many seconds the time of day is wrong from the start.
        nobody_special: Without the privileges of root, whom permissions do not stop.
        loss: Arguments of `NotingLoss`, which then replaces the loss of the task.
        measure_at: As `Measure` takes it.
        waits_for: A file that has to exist before training starts.
        output: A file for stdout and stderr.
        notes: Path prefix of the notes; by default the run's folder.
    """
    offloaded_state.MIN_ELEMENTS = 256  # the parameters of tiny models are smaller than those that are worth it
    torch.set_num_threads(1)
    if clock:
        set_clock(clock)
    out, notes = recipe["out"], notes or recipe["out"]
    while waits_for and not Path(waits_for).exists():
        time.sleep(0.001)
    events = FileEvents(out, **(kill or {}))
    sys.addaudithook(events)
    sys.addaudithook(SignalAtOpen(stop_at_open))
    if nobody_special:
        be_nobody_special()
    if output:
        redirect(output, (1, 2))
    measure = Measure(measure_at or [])
    arguments = {
        "callbacks": [Watcher(out, f"{notes}.steps", at or {}), measure],
        "metrics": {"length": Lengths(dies_in_evaluation)},
        "progress": "plain",
        "device": "cpu",
    }
    if loss is not None:
        arguments["loss"] = NotingLoss(**loss)
        arguments["callbacks"].insert(0, arguments["loss"])
    began = time.monotonic()
    try:
        if command == "fit":
            result = fit(Recipe(**recipe), resume=resume, fresh=fresh, **arguments)
        else:
            result = resume_run(recipe["out"], **(options or {}), **arguments)
    except TrimtabError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    events.is_on = False
    found = {
        "fit": dataclasses.asdict(result.fit),
        "folder": str(result.folder),
        "num_events": events.num_events,
        "seconds": time.monotonic() - began,
        "measured": measure.found,
    }
    Path(f"{notes}.notes").write_text(json.dumps(found))


def redirect(path: str, streams: tuple[int, ...]) -> None:
    for stream in streams:
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)


def command(words: list[str], output: str, also_errors: bool = True) -> None:
    """Run `trimtab WORDS…` with its output, and by default its errors, in a file."""
    redirect(output, (1, 2) if also_errors else (1,))
    run_command(words)


class SignalAtFile:
    """An audit hook that sends this process a signal before the nth change to a file below a folder.

    Args:
        folder: The folder; a temporary folder counts too if its name begins with ".trimtab.".
        nth: The change; 0 sends nothing.
        number: The signal.
    """

    def __init__(self, folder: str, nth: int, number: int) -> None:
        self._folder, self._nth, self._number = folder, nth, number
        self.num_events = 0

    def __call__(self, event: str, arguments: tuple) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree"):
            return
        if event == "open" and not arguments[2] & _WRITES:
            return
        name = str(os.fspath(arguments[0])) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        if name.startswith(self._folder) or "/.trimtab." in name:
            self.num_events += 1
            if self.num_events == self._nth:
                os.kill(os.getpid(), self._number)


def disturbed_command(words: list[str], folder: str, nth: int, number: int, count: str) -> None:
    """Run `trimtab WORDS…`, which gets a signal as `SignalAtFile` says; the file `count` gets the number of changes."""
    hook = SignalAtFile(folder, nth, number)
    sys.addaudithook(hook)
    try:
        run_command(words)
    finally:
        Path(count).write_text(str(hook.num_events))


class Measure:
    """A callback: counts the tensors that Python knows after some steps, and the rows that were read for the first one.

    Args:
        steps: After which steps; "first" for the rows that were read until the first step.
    """

    def __init__(self, steps: list[int | str]) -> None:
        self._steps = steps
        self.found: dict[str, Any] = {}
        self._num_rows_read = 0
        if "first" in steps:
            sys.setprofile(self._note_reading)

    def _note_reading(self, frame, event: str, argument) -> None:
        self._num_rows_read += event == "call" and frame.f_code is TokenDataset.__getitem__.__code__

    def on_step(self, state) -> None:
        if "first" in self._steps and "num_rows_read" not in self.found:
            sys.setprofile(None)
            self.found["num_rows_read"] = self._num_rows_read
        if state.step in self._steps:
            gc.collect()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old classes of torch warn when they are asked what they are
                tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            self.found[str(state.step)] = {"num_storages": len(storages), "num_bytes": sum(storages.values())}


def make_models(root: str, wanted: dict[str, dict], to: str) -> None:
    """Write models, and a file with their folders."""
    models = TinyModels(Path(root))
    Path(to).write_text(json.dumps({name: models.folder(**settings) for name, settings in wanted.items()}))
