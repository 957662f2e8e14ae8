"""The report of one run as a page."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.report.page.charts import places, training_charts
from trimtab.report.page.data_section import data_card
from trimtab.report.page.document import document, escape, navigation, number, paragraph, section, table, tiles
from trimtab.report.page.held_out_section import held_out_rows, samples_section
from trimtab.report.page.plan_section import comparison_with_prediction, measured_step_s, peak_of, plan_section
from trimtab.report.page.recipe_section import recipe_section
from trimtab.report.page.run_files import RunFiles
from trimtab.report.page.usage import samples_command, usage_section
from trimtab.runs.run_folder import CHECKPOINTS
from trimtab.units import format_bytes, format_seconds


def run_page(run: RunFiles, tag: str | None = None) -> str:
    """Return the page of a run.

    Args:
        run: Its files.
        tag: As in `document`.
    """
    predicted, measured = peak_of(run)
    marks = [("predicted peak", predicted), ("measured peak", measured), ("budget", run.plan.get("budget_bytes"))]
    charts = training_charts([("", run.curves)], [(name, value) for name, value in marks if value])
    titled = [
        ("curves", "Curves", places(charts)),
        ("prediction", "Predicted and measured", comparison_with_prediction(run)),
        ("held-out", "Held-out rows", held_out_rows(run.facts.get("held_out") or {})),
        ("samples", "Samples", samples_section(_samples(run)) or samples_command(run)),
        ("data", "Data", data_card(run.facts.get("data") or {})),
        ("plan", "Plan", plan_section(run)),
        ("recipe", "Recipe", recipe_section(run.recipe)),
        ("checkpoints", "Checkpoints", _checkpoints(run)),
        ("notes", "Notes", _notes(run)),
        ("use", "Use the model", usage_section(run)),
    ]
    body = [_head(run), navigation(titled), *(section(*parts) for parts in titled)]
    return document(f"{run.name} – trimtab", "\n".join(part for part in body if part), charts, tag=tag)


def _samples(run: RunFiles) -> dict[str, Any]:
    """Return the samples of the best model; empty if there are none, or those of an earlier one."""
    samples: dict[str, Any] = run.facts.get("samples") or {}
    return samples if samples.get("step") == run.card.get("step") else {}


def _head(run: RunFiles) -> str:
    state = f'<span class="state {escape(run.state)}">{escape(run.state)}</span>'
    problem = f'<p class="problem">{escape(run.error)}</p>' if run.error else ""
    facts = paragraph(" · ".join(_facts(run)), "soft")
    return f"<h1>{escape(run.name)}{state}</h1>{facts}{problem}{tiles(run_tiles(run))}"


def _facts(run: RunFiles) -> list[str]:
    asked = {value.key: value.value for value in run.recipe}
    model, data = (asked.get(key, "").strip("\"'").rstrip("/").rpartition("/")[2] for key in ("model", "data.train"))
    task = (run.facts.get("data") or {}).get("task") or run.card.get("task")
    device = ", ".join(str(run.plan[key]) for key in ("device", "precision") if run.plan.get(key))
    num_processes = run.plan.get("num_processes", 1)
    machine = device if num_processes == 1 else f"{num_processes} processes, {device}"
    started = run.status.get("started")
    when = "" if not started else time.strftime("started %Y-%m-%d %H:%M UTC", time.gmtime(started))
    ended = run.status.get("stop_reason")
    reason = f"ended by {ended}" if ended and ended != "finished" else ""
    named = [("Model", model), ("task", task), ("data", data), ("device", machine)]
    return [f"{name} {value}" for name, value in named if value] + [word for word in (when, reason) if word]


def run_tiles(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return the main figures of a run: name, value and remark."""
    status, plan = run.status, run.plan
    found: list[tuple[str, str, str]] = []
    best, name = status.get("best_metric"), status.get("metric_name")
    if best is not None and name:
        found.append((f"Best held-out {name}", number(best), f"at step {number(status.get('best_step'))}"))
    loss, held_out = run.last("loss"), run.last("eval_loss")
    if loss is not None:
        remark = "last logged step" if held_out is None else f"held-out {number(held_out)}"
        found.append(("Training loss", number(loss), remark))
    step, total = status.get("step", 0), status.get("num_steps", 0)
    epochs = _digits(step / plan["steps_per_epoch"], 2) if step and plan.get("steps_per_epoch") else None
    words = "" if epochs is None else f", {epochs} epoch" + "s" * (epochs != "1")
    found.append(("Steps", f"{step:,}", f"of {total:,}{words}{_time_left(run)}"))
    found += _speed(run)
    predicted, measured = peak_of(run)
    if measured:
        remark = f"predicted {format_bytes(predicted)}" if predicted else ""
        found.append(("Peak memory", format_bytes(measured), remark))
    if plan.get("num_trainable") is not None:
        found.append(("Trainable", _short(plan["num_trainable"]), f"of {_short(plan['num_parameters'])} parameters"))
    return found


def _time_left(run: RunFiles) -> str:
    step_s, left = measured_step_s(run), run.status.get("num_steps", 0) - run.status.get("step", 0)
    return f", about {format_seconds(step_s * left)} left" if run.state == "running" and step_s and left > 0 else ""


def _speed(run: RunFiles) -> list[tuple[str, str, str]]:
    seconds, tokens = run.measured("train_seconds"), run.measured("num_tokens")
    if seconds and tokens:
        return [("Training time", format_seconds(seconds), f"{tokens / seconds:,.0f} tokens/s")]
    speed = run.last("tokens_per_s")
    return [] if speed is None else [("Throughput", f"{speed:,.0f}", "tokens/s")]


def _short(count: int) -> str:
    for size, letter in ((10**9, " B"), (10**6, " M")):
        if count >= size:
            return f"{_digits(count / size, 3)}{letter}"
    return f"{count:,}"


def _digits(value: float, num_digits: int) -> str:
    """Return a number with this many digits, or with all digits before the decimal point."""
    return f"{value:.{num_digits}g}" if value < 10**num_digits - 0.5 else f"{value:,.0f}"


def _checkpoints(run: RunFiles) -> str:
    status, name = run.status, run.status.get("metric_name")
    rows: list[Sequence[str]] = []
    if run.card and status.get("best_step") is not None:
        best = [number(status["best_step"]), number(status.get("best_metric")), _size(run.best)]
        rows.append(["best", *best, "", "the best model, to use"])
    for each in run.checkpoints:
        value: Any = each.metrics.get(name) if name else None
        saved = each.facts.get("time")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(saved)) if isinstance(saved, float) else ""
        purpose = f"damaged: {each.problem}" if each.problem else "to resume from"
        folder = f"{CHECKPOINTS}/{each.path.name}"
        rows.append([folder, number(each.step), number(value), format_bytes(each.num_bytes), when, purpose])
    header = ["folder", "step", str(name or "metric"), "size", "saved (UTC)", "purpose"]
    return table(header, rows, "lnnnll", "cards")


def _size(folder: Path) -> str:
    try:
        return format_bytes(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    except OSError:  # a training process replaces it
        return "–"


def _notes(run: RunFiles) -> str:
    return table(["step", "note"], [[f"{step:,}", text] for step, text in run.notes], "nt")
