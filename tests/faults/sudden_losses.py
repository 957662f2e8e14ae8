"""What the processes of `test_sudden_losses.py` do: they train while folders vanish, disks fill up and clocks jump."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from faulty_runs import Lengths, be_nobody_special

from fork_server import run_command
from trimtab import Recipe, fit
from trimtab.errors import TrimtabError
from trimtab.run import resume as resume_run

_true_time = time.time


class Disturber:
    """A callback that does something after some steps.

    Args:
        at: For a step a word and its arguments: "vanish FOLDER", "lock FOLDER" (read-only), "unlock FOLDER",
            "clock SECONDS" (the time of day jumps), "signal NAME", "sleep SECONDS", "fill FOLDER", "remove FILE";
            several are separated by "; ".
    """

    def __init__(self, at: dict[str, str]) -> None:
        self._at = at

    def on_step(self, state) -> None:
        for order in filter(None, self._at.get(str(state.step), "").split("; ")):
            word, *arguments = order.split()
            getattr(self, f"_{word}")(*arguments)

    def _vanish(self, folder: str) -> None:
        shutil.rmtree(folder)

    def _lock(self, folder: str) -> None:
        Path(folder).chmod(0o555)

    def _unlock(self, folder: str) -> None:
        Path(folder).chmod(0o755)

    def _clock(self, seconds: str) -> None:
        set_clock(float(seconds))

    def _signal(self, name: str) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    def _sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def _remove(self, path: str) -> None:
        os.remove(path)

    def _fill(self, folder: str) -> None:
        fill(Path(folder))


class SignalAtOpen:
    """An audit hook that sends this process SIGTERM once, when a file is about to be opened.

    Args:
        path: What the file's path has to hold.
    """

    def __init__(self, path: str) -> None:
        self._path: str | None = path

    def __call__(self, event: str, arguments: tuple) -> None:
        if event == "open" and self._path is not None and self._path in str(arguments[0]):
            self._path = None
            os.kill(os.getpid(), signal.SIGTERM)


def fill(folder: Path, leave_bytes: int = 0) -> None:
    """Fill a small disk, but for some bytes."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    os.truncate(filler, filler.stat().st_size - leave_bytes)


def set_clock(seconds: float) -> None:
    """Let the time of day of this process be another one; clocks that only measure durations go on."""
    time.time = lambda: _true_time() + seconds


def train(
    recipe: dict,
    *,
    command: str = "fit",
    at: dict[str, str] | None = None,
    clock: float = 0.0,
    nobody_special: bool = False,
    output: str = "",
    stop_at_open: str = "",
    **options,
) -> None:
    """Train as `trimtab train` or `trimtab resume` does, to the same exit codes.

    Args:
        recipe: With `out`.
        command: "fit" with the recipe, or "resume" with the folder.
        at: What `Disturber` takes.
        clock: By how much the time of day is wrong from the start on.
        nobody_special: Without the powers of root, whom permissions do not stop.
        output: The file for everything that it says.
        stop_at_open: SIGTERM comes when a file is opened whose path holds this text.
        options: Of `fit` or `resume`.
    """
    torch.set_num_threads(1)
    set_clock(clock)
    if nobody_special:
        be_nobody_special()
    if output:
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    if stop_at_open:
        sys.addaudithook(SignalAtOpen(stop_at_open))
    metrics = {"length": Lengths(None)}  # as the runs have that these are compared with
    options |= {"callbacks": [Disturber(at or {})], "metrics": metrics, "progress": "plain", "device": "cpu"}
    try:
        if command == "fit":
            result = fit(Recipe(**recipe), **options)
        else:
            result = resume_run(recipe["out"], **options)
    except TrimtabError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"save failure: {result.fit.save_failure}")


def command(words: list[str], output: str, also_errors: bool = True) -> None:
    """As `trimtab WORDS…`, whose output, and by default its errors, go to a file."""
    for stream in (1, 2) if also_errors else (1,):
        os.dup2(os.open(output, os.O_WRONLY), stream)
    run_command(words)
