"""The plan of a run in its report: what was decided and why, and predictions compared with measurements."""

import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from trimtab.report.page.document import fold, paragraph, table
from trimtab.report.page.memory_bars import memory_bars
from trimtab.report.page.run_files import RunFiles
from trimtab.runs.plan import Plan
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.apply import describe
from trimtab.techniques.optimizer_state import OptimizerState
from trimtab.units import format_bytes

_TRIAL_KEYS = ("micro_batch", "num_tokens", "total_bytes", "fits")


def comparison_with_prediction(run: RunFiles) -> str:
    """Return predicted and measured values side by side."""
    rows = _memory_rows(run)
    predicted_s, measured_s = run.plan.get("predicted_step_s"), measured_step_s(run)
    if predicted_s is not None or measured_s is not None:
        rows.append(_row("time of an optimizer step", predicted_s, measured_s, _seconds))
    if not any(row[2] != "–" for row in rows) and not any(row[1] != "–" for row in rows):
        return ""
    is_over = run.measured("train_seconds") is not None
    note = f"Step time: {'mean over the run, without evaluations and checkpoints' if is_over else 'median so far'}."
    if run.plan.get("origin") is None:
        note = f"{_why_not_predicted(run.plan)} {note}"
    if all(row[1] == "–" for row in rows):
        return paragraph(note, "soft") + table(["", "measured"], [[row[0], row[2]] for row in rows if row[2] != "–"])
    before = "trial steps" if run.plan.get("origin") == "measured" else "predicted"
    header = ["", before, "measured", "difference"]
    return paragraph(note, "soft") + table(header, rows) + _parts(run)


def measured_step_s(run: RunFiles) -> float | None:
    """Return the mean duration of an optimizer step; while the run trains, the median so far. None if unknown."""
    seconds, steps = run.measured("train_seconds"), run.status.get("step")
    if seconds and steps:
        return float(seconds / steps)
    times = [(step, at) for step, at in run.curves.get("time", []) if at is not None]
    found = [(end - start) / (last - first) for (first, start), (last, end) in pairwise(times) if end > start]
    return statistics.median(found) if found else None


def peak_of(run: RunFiles) -> tuple[int | None, int | None]:
    """Return the predicted and the measured peak of device memory; on a CPU, of the process."""
    plan, measured = run.plan, run.measured("peak_memory_bytes")
    if _is_cpu(plan):
        predicted = plan.get("predicted_total_bytes") or plan.get("measured_total_bytes")
    else:
        predicted = plan.get("predicted_peak_bytes") or plan.get("measured_peak_bytes")
    return predicted, measured


def _memory_rows(run: RunFiles) -> list[list[str]]:
    plan = run.plan
    is_cpu = _is_cpu(plan)
    title = "peak memory of the process" if is_cpu else "peak of allocated memory"
    rows = [_row(title, *peak_of(run), format_bytes)]
    reserved = run.last("peak_reserved_bytes")
    if not is_cpu and reserved is not None:
        rows.append(_row("peak of reserved memory", None, reserved, format_bytes))
    rehearsed = run.last("preflight_peak_bytes")
    if rehearsed is not None:
        rows.append(_row("largest micro-batch, tried before the first step", None, rehearsed, format_bytes))
    predicted, measured = plan.get("predicted_eval_peak_bytes"), run.last("preflight_eval_peak_bytes")
    if is_cpu:  # the prediction is for tensors, the measurement for the process
        predicted = None
    if predicted is not None or measured is not None:
        rows.append(_row("peak of evaluations", predicted, measured, format_bytes))
    for title, key in (
        ("device memory needed", "predicted_total_bytes"),
        ("host memory, at most", "predicted_host_bytes"),
        ("disk, at most", "predicted_disk_bytes"),
    ):
        if plan.get(key) is not None and not (is_cpu and key == "predicted_total_bytes"):
            rows.append(_row(title, plan[key], None, format_bytes))
    if plan.get("budget_bytes") is not None:
        rows.append(["memory budget", format_bytes(plan["budget_bytes"]), "–", "–"])
    return rows


def _row(title: str, predicted: float | None, measured: float | None, form: Any) -> list[str]:
    ratio = measured / predicted if predicted and measured else None
    change = "–" if ratio is None else f"{ratio - 1:+.1%}" if 0.3 < ratio < 3 else f"× {ratio:,.2g}"
    return [title, *("–" if value is None else form(value) for value in (predicted, measured)), change]


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _parts(run: RunFiles) -> str:
    parts, total = run.plan.get("predicted_parts") or {}, peak_of(run)[0]
    if not parts:
        return ""
    rest = total - sum(parts.values()) if total and _is_cpu(run.plan) else 0
    note = f"Tensors of a training step. The other {format_bytes(rest)} are Python, PyTorch and other libraries."
    drawn = memory_bars([(name, {name: size}) for name, size in parts.items() if size])
    return f"<h3>Predicted peak by part</h3>{paragraph(note if rest > 0 else '', 'soft')}{drawn}"


def _is_cpu(plan: Mapping[str, Any]) -> bool:
    return str(plan.get("device", "")).startswith("cpu")


def _why_not_predicted(plan: Mapping[str, Any]) -> str:
    if _is_cpu(plan):
        return "No prediction: on a CPU, trimtab predicts memory and time only if memory.budget is set."
    return "No prediction: the recipe left nothing to the planner, or the step could not be traced."


def plan_section(run: RunFiles) -> str:
    """Return what was decided for the run, and why."""
    if not run.plan:
        return ""
    return table(["", ""], _description(run.plan), "h-") + paragraph(_why(run.plan)) + _trials(run.plan) + _choices(run)


def _description(values: Mapping[str, Any]) -> list[list[str]]:
    try:
        plan = Plan.from_dict(values)
    except (KeyError, TypeError, ValueError):  # from a version with other values
        return []
    optimizer = plan.spec[OptimizerState.key]
    size = f"{plan.micro_batch_tokens:,} tokens" if plan.micro_batch_tokens else f"{plan.micro_batch_size:,} rows"
    techniques = "; ".join(describe(plan.spec, {OptimizerState.key: optimizer}))
    share = plan.num_trainable / max(plan.num_parameters, 1)
    return [
        ["device", plan.device if plan.num_processes == 1 else f"{plan.num_processes} processes, {plan.device}"],
        ["precision", plan.precision],
        ["optimizer", optimizer],
        ["trainable parameters", f"{plan.num_trainable:,} of {plan.num_parameters:,} ({share:.2%})"],
        ["batch", f"{plan.batch_size:,} rows, in micro-batches of at most {size} per process"],
        ["steps", f"{plan.num_steps:,}, {plan.steps_per_epoch:,} per epoch; {plan.warmup_steps:,} warmup steps"],
        ["techniques", techniques or "none"],
        ["rows", f"at most {plan.max_length:,} tokens; {plan.padding_share:.1%} of a batch is padding"],
        ["metric for the best model", plan.metric],
    ]


def _why(plan: Mapping[str, Any]) -> str:
    if plan.get("why"):
        return str(plan["why"])
    if plan.get("origin") == "measured":
        return (
            "The step could not be traced, so trial steps on the device were measured, and the first that fits is used."
        )
    if plan.get("origin") is None and _is_cpu(plan):
        return (
            "No search, since this is a CPU and memory.budget is not set: the whole batch is one micro-batch, and no "
            "activations are recomputed."
        )
    return ""


def _trials(plan: Mapping[str, Any]) -> str:
    rows = []
    for trial in plan.get("measured_steps") or ():
        others = [f"{key}: {value}" for key, value in trial.items() if key not in _TRIAL_KEYS]
        needed = trial.get("total_bytes")
        rows.append(
            [
                str(trial.get("micro_batch", "")),
                ", ".join(others) or "–",
                "out of memory" if needed is None else format_bytes(needed),
                "yes" if trial.get("fits") else "no",
            ]
        )
    return table(["micro-batch", "changed techniques", "needed", "fits"], rows, "n-n-")


def _choices(run: RunFiles) -> str:
    """Return every technique: the value in the recipe, and the value that the run uses."""
    asked = {value.key: value for value in run.recipe}
    rows = []
    for technique in TECHNIQUES:
        used = run.plan.get(technique.key)
        if used is None:
            continue
        value = asked.get(technique.setting)
        origin = "" if value is None else value.origin
        rows.append([technique.setting, "" if value is None else value.value, str(used), origin])
    micro = asked.get("memory.micro_batch")
    if micro is not None:
        rows.insert(0, [micro.key, micro.value, str(run.plan.get("micro_batch_size", "")), micro.origin])
    found = table(["key", "in the recipe", "used", "set by"], rows, "kvv-")
    return fold("All techniques: value in the recipe, and value used", found)
