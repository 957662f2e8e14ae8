"""Rebuild a missing or damaged `run.json` from the other files of the run folder."""

import contextlib
import json
import time
import uuid
from pathlib import Path
from typing import Any

from trimtab.runs.journal import JOURNAL, complete_lines
from trimtab.runs.tracking_file import Tracking

CHECKPOINTS = "checkpoints"
RECIPE = "recipe.yaml"
RESTORING = ".restoring"  # exists while a mirror is being copied back into a run folder
_PROCESS_KEYS = ("path", "state", "step", "saved_step", "pid", "host", "updated", "error")


_LARGEST = 2**53
_KINDS: dict[str, tuple[type, ...]] = {  # of values in run.json, which others may have edited; None is allowed for each
    **dict.fromkeys(("id", "path", "directory", "host", "job", "error", "recipe_checksum", "metric_name"), (str,)),
    **dict.fromkeys(("step", "num_steps", "saved_step", "best_step", "pid"), (int,)),
    **dict.fromkeys(("started", "updated", "best_metric"), (int, float)),
    **dict.fromkeys(("best_files", "model_source"), (dict,)),
}


def wrong_keys(status: dict[str, Any]) -> list[str]:
    """Return the keys of `run.json`, or of its copy in a checkpoint, whose values a run cannot have written."""
    return [key for key, kinds in _KINDS.items() if status.get(key) is not None and not _fits(status[key], kinds)]


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    is_number = isinstance(value, int | float)
    return type(value) in kinds and (not is_number or value != value or abs(value) < _LARGEST)


def run_facts(status: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `run.json` that describes the run rather than the process; checkpoints keep a copy."""
    return {key: value for key, value in status.items() if key not in _PROCESS_KEYS}


def rebuild_status(path: Path) -> dict[str, Any] | None:
    """Derive the content of `run.json` from checkpoints, journal, plan and best model.

    Returns:
        None if the folder has no checkpoints of a run, or a mirror is only partly copied back.
    """
    if not (path / CHECKPOINTS).is_dir() or (path / RESTORING).exists():
        return None
    from trimtab.checkpoint.checkpoints_folder import (
        CheckpointsFolder,
    )  # imports torch, which reading an intact run.json does not need

    saved = CheckpointsFolder(path / CHECKPOINTS).checkpoints()
    valid = [checkpoint for checkpoint in saved if checkpoint.is_valid]
    if not saved:
        return None
    newest = (valid or saved)[-1]
    saved_facts = newest.facts.get("run")
    known = saved_facts if isinstance(saved_facts, dict) else {}
    known = {key: value for key, value in known.items() if key not in wrong_keys(known)}
    if not (known or (path / RECIPE).exists() or (path / JOURNAL).exists()):
        return None  # checkpoints of the user's own loop, which has no run.json
    lines = _journal_lines(path / JOURNAL)
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    first = lines[0].get("time") if lines else None
    planned = _read_json(path / "plan.json").get("num_steps")
    tracking = Tracking.read(path)
    status: dict[str, Any] = {
        "id": uuid.uuid4().hex if tracking is None else tracking.about.run,
        "num_steps": planned if isinstance(planned, int) else 0,
        "started": first if isinstance(first, int | float) else newest.facts.get("time", time.time()),
        **_facts_of_best(_read_json(path / "best" / "trimtab.json")),
        **known,
        "step": max([newest.step, *steps]),
        "saved_step": newest.step,
    }
    is_over = bool(valid) and 0 < status["num_steps"] <= newest.step
    return status | {"state": "finished" if is_over else "killed"}


def _facts_of_best(card: dict[str, Any]) -> dict[str, Any]:
    metric, metrics = card.get("metric"), card.get("metrics")
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    return {"metric_name": metric, "best_metric": value, "best_step": card.get("step")} if card else {}


def _journal_lines(path: Path) -> list[dict[str, Any]]:
    lines: list[Any] = []
    with contextlib.suppress(OSError):
        for text, _ in complete_lines(path):
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
