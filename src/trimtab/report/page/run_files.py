"""Read the files of a run that its report shows; the report is made from these files only."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.checkpoint.checkpoints_folder import Checkpoint, CheckpointsFolder
from trimtab.errors import RecipeError
from trimtab.recipe.yaml_text import read_yaml
from trimtab.report.page.charts import Point
from trimtab.runs.journal import JOURNAL, complete_lines
from trimtab.runs.run_folder import CHECKPOINTS, actual_state, find_run

FACTS = "report.json"  # data that no other file of the run contains: the data card, held-out rows, sample generations
_COMMENT = re.compile(r"\s+# ")
_KEY = re.compile(r"(?P<indent> *)(?P<name>[^\s:][^:]*):(?: |$)")


@dataclass(frozen=True)
class RecipeValue:
    """A value of a recipe: its dotted key, the value as YAML, and where it came from."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class RunFiles:
    """The files of a run.

    Attributes:
        path: Its folder.
        status: run.json.
        state: running, finished, stopped, failed or killed.
        error: Why it failed; empty if it did not.
        plan: plan.json; empty if there is none.
        recipe: The values of recipe.yaml.
        curves: The values of metrics.jsonl by name; "time" is when a training step was recorded.
        notes: Remarks in metrics.jsonl: step and text.
        checkpoints: Its checkpoints, oldest first.
        card: trimtab.json of its best model; empty if there is none.
        facts: report.json; empty if there is none.
    """

    path: Path
    status: dict[str, Any]
    state: str
    error: str
    plan: dict[str, Any] = field(default_factory=dict)
    recipe: tuple[RecipeValue, ...] = ()
    curves: dict[str, list[Point]] = field(default_factory=dict)
    notes: tuple[tuple[int, str], ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    card: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last two parts of the folder: experiment and name."""
        return "/".join(self.path.absolute().parts[-2:])

    @property
    def best(self) -> Path:
        """The folder of the best model."""
        return self.path.absolute() / "best"

    def measured(self, name: str) -> Any:
        """Return a result in run.json; None while the run trains, when it is the result of an earlier attempt."""
        return None if self.state in ("running", "killed") else self.status.get(name)

    def last(self, name: str) -> float | None:
        """Return the last value of a curve."""
        return next((value for _, value in reversed(self.curves.get(name, [])) if value is not None), None)


def read_run(path: Path) -> RunFiles:
    """Read the files of a run, which may still be training.

    Raises:
        RecipeError: The folder holds no run.
    """
    status = find_run(path)
    if status is None:
        raise RecipeError(f"{path} is not a run", "pass the folder of a run; trimtab runs lists them")
    state, error = actual_state(path)
    curves, notes = _read_journal(path / JOURNAL)
    return RunFiles(
        path=path,
        status=status,
        state=state,
        error=error,
        plan=read_json(path / "plan.json"),
        recipe=read_recipe(path / "recipe.yaml"),
        curves=curves,
        notes=notes,
        checkpoints=tuple(CheckpointsFolder(path / CHECKPOINTS).checkpoints()),
        card=read_json(path / "best" / "trimtab.json"),
        facts=read_json(path / FACTS),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object; empty if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_journal(path: Path) -> tuple[dict[str, list[Point]], tuple[tuple[int, str], ...]]:
    """Return every curve and the notes. If a resumed run has repeated a step, the last value counts."""
    found: dict[str, dict[int, float | None]] = {}
    notes: dict[tuple[int, str], None] = {}
    for text, _ in complete_lines(path):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        step = line.get("step") if isinstance(line, dict) else None
        if not isinstance(step, int):
            continue
        for name, value in line.items():
            if name == "note":
                notes[step, str(value)] = None
            elif (
                name != "step"
                and (name != "time" or "loss" in line)
                and (is_number(value) or value in ("NaN", "Infinity", "-Infinity"))
            ):
                found.setdefault(name, {})[step] = value if is_number(value) else None
    return {name: sorted(points.items()) for name, points in found.items()}, tuple(notes)


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_recipe(path: Path) -> tuple[RecipeValue, ...]:
    """Read the values of a recipe that a run wrote, with the origins in its comments."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    found, outer = [], ""
    for line in lines:
        text, origin = _split_comment(line)
        match = _KEY.match(text)
        if match is None:
            continue
        value = text[match.end() :].strip()
        if not match["indent"]:
            outer = "" if value else f"{match['name']}."
        if value:
            found.append(RecipeValue(f"{outer if match['indent'] else ''}{match['name']}", value, origin))
    return tuple(found)


def _split_comment(line: str) -> tuple[str, str]:
    """Split a line at its comment; a # inside quotes does not start one: the part before it is not valid YAML."""
    for match in _COMMENT.finditer(line):
        before = line[: match.start()]
        try:
            read_yaml(before.strip(), "recipe.yaml")
        except RecipeError:
            continue
        return before, line[match.end() :].strip()
    return line, ""
