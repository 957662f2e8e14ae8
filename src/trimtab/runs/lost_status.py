"""`run.json` from what else a run's folder holds, where the file itself is missing or damaged."""

import json
import time
import uuid
from pathlib import Path
from typing import Any

from trimtab.tracking.upload.attachment import Tracking
from trimtab.runs.journal import JOURNAL, whole_lines

CHECKPOINTS = "checkpoints"
RECIPE = "recipe.yaml"
RESTORING = ".restoring"  # in a folder into which a mirror is being copied back
# says what a process was about, not what the run is
_OF_THE_PROCESS = ("path", "state", "step", "saved_step", "pid", "host", "updated", "error")


def lasting_facts(status: dict[str, Any]) -> dict[str, Any]:
    """The part of `run.json` that a saved state keeps, so that the file can be written again from it."""
    return {key: value for key, value in status.items() if key not in _OF_THE_PROCESS}


def rebuild_status(path: Path) -> dict[str, Any] | None:
    """What `run.json` would say of the run in a folder, from its saved states, its journal and its best model.

    Returns:
        None if nothing was saved there, or a mirror is only half copied back.
    """
    if not (path / CHECKPOINTS).is_dir() or (path / RESTORING).exists():
        return None
    from trimtab.checkpoint.checkpoints_folder import Shelf  # imports torch, which is not needed as long as run.json is whole

    saved = Shelf(path / CHECKPOINTS).checkpoints()
    valid = [checkpoint for checkpoint in saved if checkpoint.is_valid]
    if not saved:
        return None
    newest = (valid or saved)[-1]
    known = newest.facts.get("run", {})
    if not (known or (path / RECIPE).exists() or (path / JOURNAL).exists()):
        return None  # states of a loop of the user's own, which has no run.json
    lines = list(whole_lines(path / JOURNAL))
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    first = lines[0].get("time") if lines else None
    planned = _read(path / "plan.json").get("num_steps")
    tracking = Tracking.read(path)
    status: dict[str, Any] = {
        "id": uuid.uuid4().hex if tracking is None else tracking.about.run,
        "num_steps": planned if isinstance(planned, int) else 0,
        "started": first if isinstance(first, int | float) else newest.facts.get("time", time.time()),
        **_facts_of_best(_read(path / "best" / "trimtab.json")),
        **known,
        "step": max([newest.step, *steps]),
        "saved_step": newest.step,
    }
    is_over = bool(valid) and 0 < status["num_steps"] <= newest.step
    return status | {"state": "finished" if is_over else "killed"}


def _facts_of_best(about: dict[str, Any]) -> dict[str, Any]:
    metric, metrics = about.get("metric"), about.get("metrics")
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    return {"metric_name": metric, "best_metric": value, "best_step": about.get("step")} if about else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
