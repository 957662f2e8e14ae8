"""`trimtab check --resume`: train a few steps of a recipe twice, once killed and resumed, and compare every bit."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
from trimtab.checkpoint.folder import temporary_folder
from trimtab.checkpoint.tensor_file import as_bytes
from trimtab.errors import RecipeError, TrimtabError, UserError
from trimtab.log import logger, say
from trimtab.recipe.load import load_recipe
from trimtab.recipe.schema import Recipe
from trimtab.runs.journal import VOLATILE_KEYS
from trimtab.runs.run_folder import CHECKPOINTS

_SAVED_AT, _KILLED_AT, _NUM_STEPS = 3, 5, 8
_WRITTEN_WITHIN_S = 300.0
_REFUSED = "refused.json"  # the message of a UserError in the subprocess


@dataclass(frozen=True)
class Proof:
    """The result of the comparison."""

    num_tensors: int
    num_lines: int
    resumed_from: int
    difference: str = ""  # the first difference; empty if everything is equal


def prove_resume(recipe: Recipe, device: str | None = None) -> Proof:
    """Train a few steps of a recipe twice, once killed with SIGKILL and resumed, and compare the results.

    Args:
        recipe: The recipe; it is shortened, and the runs are removed afterwards.
        device: The device to train on.

    Raises:
        UserError: The recipe is not valid.
        TrimtabError: One of the runs failed.
    """
    with temporary_folder("proof") as home:
        (home / "recipe.yaml").write_text(yaml.safe_dump(_shorten_recipe(recipe), allow_unicode=True))
        say(f"training {_NUM_STEPS} steps without interruption …")
        _run(home, "whole", device)
        say(f"training them again, killed after step {_KILLED_AT} …")
        _run(home, "killed", device, kill_at=_KILLED_AT)
        say("… and resumed")
        output = _run(home, "killed", device, resume=True)
        if f"resuming from step-{_SAVED_AT}" not in output:
            raise TrimtabError(f"the killed run was not resumed from step {_SAVED_AT}:\n{output[-2000:]}")
        return _compare(home / "whole", home / "killed")


def _shorten_recipe(recipe: Recipe) -> dict[str, Any]:
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    train = {key: value for key, value in values.get("train", {}).items() if key not in ("epochs", "max_time")}
    values["train"] = train | {"max_steps": _NUM_STEPS, "log_every": 1, "deterministic": True}
    values["checkpoint"] = {"every": f"{_SAVED_AT} steps", "keep": 2}
    values["evaluate"] = values.get("evaluate", {}) | {"every": "2 steps", "samples": 0}
    values["limits"] = {"eval": 2} | {
        key: value for key, value in values.get("limits", {}).items() if key in ("train", "overfit_batches")
    }
    if values["limits"].get("overfit_batches"):
        values["limits"].pop("eval")
    values.pop("early_stopping", None)
    values["track"] = "none"
    return {key: value for key, value in values.items() if key not in ("out", "name")}


def _run(home: Path, name: str, device: str | None, kill_at: int | None = None, resume: bool = False) -> str:
    """Run the recipe in a subprocess; return its output."""
    arguments = [str(home), name, device or "", str(kill_at or 0), str(int(resume))]
    command = [sys.executable, "-m", "trimtab.commands.verify_resume", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if (home / _REFUSED).exists():
        raise UserError(*json.loads((home / _REFUSED).read_text()))
    expected = -signal.SIGKILL if kill_at else 0
    if done.returncode != expected:
        raise TrimtabError(f"the run ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


class _Killer:
    """Kill its own process after a step."""

    def __init__(self, at_step: int, saved: Path) -> None:
        self._at_step, self._saved = at_step, saved

    def on_step(self, state: Any) -> None:
        if state.step == self._at_step:
            deadline = time.monotonic() + _WRITTEN_WITHIN_S
            while not self._saved.exists() and time.monotonic() < deadline:  # written in the background
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def _run_child(home: str, name: str, device: str, kill_at: str, resume: str) -> None:
    from trimtab.run import fit

    loaded = load_recipe(Path(home) / "recipe.yaml", {"out": str(Path(home) / name)}, [])
    saved = Path(home) / name / CHECKPOINTS / f"step-{_SAVED_AT}"
    callbacks = [_Killer(int(kill_at), saved)] if int(kill_at) else []
    logger.addHandler(logging.StreamHandler())  # the parent process reads where the run was resumed
    logger.setLevel(logging.INFO)
    try:
        fit(loaded, callbacks=callbacks, progress="quiet", device=device or None, resume=bool(int(resume)))
    except UserError as error:
        (Path(home) / _REFUSED).write_text(json.dumps([error.problem, error.cure]))
        sys.exit(error.exit_code)


def _compare(whole: Path, resumed: Path) -> Proof:
    one, other = (_last_checkpoint(run) for run in (whole, resumed))
    num_tensors, difference = 0, ""
    for label, first, second in _pairs(one, other):
        num_tensors += 1
        difference = difference or _tensor_difference(label, first, second)
    lines = [_lines(run) for run in (whole, resumed)]
    if lines[0] != lines[1] and not difference:
        at = next((i for i, pair in enumerate(zip(*lines, strict=False)) if pair[0] != pair[1]), min(map(len, lines)))
        found = [run[at] if at < len(run) else "nothing" for run in lines]
        difference = f"line {at + 2} of metrics.jsonl: {found[0]} and, resumed, {found[1]}"
    return Proof(num_tensors, len(lines[0]), _SAVED_AT, difference)


def _last_checkpoint(run: Path) -> Path:
    newest = CheckpointsFolder(run / CHECKPOINTS).newest()
    if newest is None or newest.step != _NUM_STEPS:
        raise RecipeError(f"{run.name} has no checkpoint of step {_NUM_STEPS}", "use data with more batches")
    return newest.path


def _pairs(one: Path, other: Path) -> Iterator[tuple[str, Any, Any]]:
    from safetensors.torch import load_file

    for path in sorted(one.glob("*.safetensors")):
        tensors = [load_file(folder / path.name) if (folder / path.name).exists() else {} for folder in (one, other)]
        for key in dict.fromkeys([*tensors[0], *tensors[1]]):
            yield f"{path.stem}: {key}", tensors[0].get(key), tensors[1].get(key)


def _tensor_difference(label: str, one: Any, other: Any) -> str:
    import torch

    if one is None or other is None:
        return f"{label} is missing in one of the runs"
    if one.shape == other.shape and one.dtype == other.dtype and torch.equal(*map(as_bytes, (one, other))):
        return ""
    if one.shape != other.shape or not one.is_floating_point():
        return f"{label} differs"
    return f"{label} differs by up to {(one.double() - other.double()).abs().max().item():.3g}"


def _lines(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
    return [{key: value for key, value in line.items() if key not in VOLATILE_KEYS} for line in lines]


if __name__ == "__main__":
    _run_child(*sys.argv[1:])
