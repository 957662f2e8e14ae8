"""Several runs side by side on one page."""

from collections.abc import Sequence
from os.path import commonpath

from trimtab.report.page.charts import places, training_charts
from trimtab.report.page.document import document, escape, navigation, number, paragraph, section, table
from trimtab.report.page.plan_section import measured_step_s, peak_of
from trimtab.report.page.recipe_section import differences
from trimtab.report.page.run_files import RunFiles
from trimtab.units import format_bytes, format_seconds


def runs_page(runs: Sequence[RunFiles], tag: str | None = None) -> str:
    """Return the page of several runs.

    Args:
        runs: Their files.
        tag: As in `document`.
    """
    names = short_names(runs)
    charts = training_charts([(name, run.curves) for name, run in zip(names, runs, strict=True)])
    titled = [
        ("results", "Results", _results(names, runs)),
        ("curves", "Curves", places(charts)),
        ("recipes", "Recipe keys that differ", differences(names, [run.recipe for run in runs])),
    ]
    title = f"{len(runs)} runs"
    folders = ", ".join(str(run.path) for run in runs)
    body = [f"<h1>{escape(title)}</h1>", paragraph(folders, "soft"), navigation(titled), *(section(*s) for s in titled)]
    return document(f"{title} – trimtab", "\n".join(part for part in body if part), charts, tag=tag)


def short_names(runs: Sequence[RunFiles]) -> list[str]:
    """Return the part of each folder that distinguishes the runs; a run that is given twice gets a number."""
    paths = [run.path.absolute() for run in runs]
    shared = commonpath([path.parent for path in paths])
    names = [str(path.relative_to(shared)) for path in paths]
    return [f"{name} ({index})" if names.count(name) > 1 else name for index, name in enumerate(names, 1)]


def _results(names: Sequence[str], runs: Sequence[RunFiles]) -> str:
    metric = next((run.status["metric_name"] for run in runs if run.status.get("metric_name")), "metric")
    header = ["run", "state", f"best {metric}", "at step", "loss", "held-out loss", "steps", "time", "per step"]
    header += ["tokens/s", "peak memory"]
    rows = [[name, *_row(run, metric)] for name, run in zip(names, runs, strict=True)]
    return table(header, rows, "h-" + "n" * (len(header) - 2))


def _row(run: RunFiles, metric: str) -> list[str]:
    status, (_, measured) = run.status, peak_of(run)
    is_same = status.get("metric_name") == metric and status.get("best_metric") is not None
    seconds, tokens, step_s = run.measured("train_seconds"), run.measured("num_tokens"), measured_step_s(run)
    return [
        run.state,
        number(status.get("best_metric") if is_same else None),
        number(status.get("best_step") if is_same else None),
        number(run.last("loss")),
        number(run.last("eval_loss")),
        f"{status.get('step', 0):,}/{status.get('num_steps', 0):,}",
        format_seconds(seconds) if seconds else "–",
        f"{step_s * 1e3:,.1f} ms" if step_s else "–",
        f"{tokens / seconds:,.0f}" if seconds and tokens else number(run.last("tokens_per_s"), 0),
        format_bytes(measured) if measured else "–",
    ]
