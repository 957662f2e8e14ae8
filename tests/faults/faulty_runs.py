"""What the processes of these tests do: they train, and are killed where a test says, by a real SIGKILL to themselves.

A moment that lies between two calls of the system is found with an audit hook, which Python calls before it opens,
renames or removes a file: nothing of trimtab is replaced.
"""

import dataclasses
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import transformers.models.bert.modeling_bert  # noqa: F401  imported once, before the forks
import transformers.models.bert.tokenization_bert  # noqa: F401
from torch import nn

import trimtab.inference.load  # noqa: F401
from tiny_runs import TinyModels
from trimtab import Recipe, fit
from trimtab.errors import TrimtabError
from trimtab.run import resume as resume_run

_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.utime", "ctypes.dlsym")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


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
    """A callback: notes each step that is taken, and does something at one of them."""

    def __init__(self, steps: str, at: dict[int, str]) -> None:
        self._steps = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._at = at

    def on_step(self, state) -> None:
        os.write(self._steps, f"{os.getpid()} {state.step}\n".encode())
        what = self._at.get(state.step)
        if what == "die":
            die()
        elif what is not None and what.startswith("SIG"):
            for name in what.split():
                os.kill(os.getpid(), signal.Signals[name])
        elif what == "sleep":
            time.sleep(1.0)


class Lengths:
    """An own metric, the mean length of the rows; dies in an evaluation if told so."""

    def __init__(self, dies_at_call: int | None) -> None:
        self._num_calls = 0
        self._dies_at_call = dies_at_call

    def __call__(self, logits, batch):
        self._num_calls += 1
        if self._num_calls == self._dies_at_call:
            die()
        return batch["attention_mask"].sum(1).float()


class Poison:
    """An own loss that is not a number for a row that holds a token, and notes the rows that it has seen.

    Args:
        word: The id of the token; None poisons nothing.
        seen: Where to note the rows of each call, or nothing.
        skip_calls: Calls at the beginning that are no training.
    """

    def __init__(self, word: int | None, seen: str, skip_calls: int) -> None:
        self._word, self._seen, self._skip = word, seen, skip_calls

    def __call__(self, outputs, batch):
        loss = nn.functional.cross_entropy(outputs.logits, batch["labels"])
        if not outputs.logits.requires_grad:  # an evaluation
            return loss
        if self._skip > 0:
            self._skip -= 1
        elif self._seen:
            with open(self._seen, "a") as seen:
                for row, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True):
                    seen.write(json.dumps([token for token, there in zip(row, mask, strict=True) if there]) + "\n")
        if self._word is not None and bool((batch["input_ids"] == self._word).any()):
            loss = loss * float("nan")
        return loss


def train(
    recipe: dict,
    *,
    command: str = "fit",
    resume: bool | str = True,
    fresh: bool = False,
    options: dict | None = None,
    kill: dict | None = None,
    dies_in_evaluation: int | None = None,
    at: dict[str, str] | None = None,
    file_size_limit: int | None = None,
    poison: int | None = None,
    seen: str = "",
    skip_calls: int = 0,
    own_loss: bool = False,
    measure_at: list[int] = (),  # type: ignore[assignment]
    waits_for: str = "",
) -> None:
    """Train, and leave beside the run what a test wants to know.

    Args:
        recipe: With `out`.
        command: "fit" with the recipe, or "resume" with the folder.
        resume: For `fit`.
        fresh: For `fit`.
        options: For `resume`.
        kill: Arguments of `FileEvents`.
        dies_in_evaluation: The evaluation batch in which to die.
        at: What to do after a step: die, send signals to itself, sleep.
        file_size_limit: No file can be longer, as on a disk that is full.
        poison: A token whose rows have no loss.
        seen: File for the rows that were trained on.
        skip_calls: Of the loss, before training begins.
        own_loss: Whether to use the loss that notes and poisons.
        measure_at: Steps at which tensors are counted.
        waits_for: A file that has to be there before it begins.
    """
    torch.set_num_threads(1)
    out = recipe["out"]
    while waits_for and not Path(waits_for).exists():
        time.sleep(0.001)
    events = FileEvents(out, **(kill or {}))
    sys.addaudithook(events)
    if file_size_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))
    watcher = Watcher(f"{out}.steps", {int(step): what for step, what in (at or {}).items()})
    measure = Measure(list(measure_at))
    arguments = {
        "callbacks": [watcher, measure],
        "metrics": {"length": Lengths(dies_in_evaluation)},
        "progress": "plain",
        "device": "cpu",
    }
    if own_loss:
        arguments["loss"] = Poison(poison, seen, skip_calls)
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
    notes = {
        "fit": dataclasses.asdict(result.fit),
        "folder": str(result.folder),
        "num_events": events.num_events,
        "seconds": time.monotonic() - began,
        "measured": measure.found,
        "peak_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    Path(f"{out}.notes").write_text(json.dumps(notes))


class Measure:
    """Counts the bytes of all tensors that Python knows, each storage once."""

    def __init__(self, steps: list[int]) -> None:
        self._steps = steps
        self.found: dict[int, list[int]] = {}

    def on_step(self, state) -> None:
        if state.step in self._steps:
            import gc
            import warnings

            gc.collect()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old classes of torch warn when they are asked what they are
                tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            self.found[state.step] = [len(storages), sum(storages.values())]


def make_models(root: str, wanted: dict[str, dict], to: str) -> None:
    """Write models, and a file with their folders."""
    models = TinyModels(Path(root))
    Path(to).write_text(json.dumps({name: models.folder(**settings) for name, settings in wanted.items()}))
