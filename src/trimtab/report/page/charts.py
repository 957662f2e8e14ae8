"""Charts of a report as plain values that page.js draws, and their placeholders in the page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.report.page.document import escape

Point = tuple[int, float | None]  # a step and a value; None if that is not finite
Curves = Mapping[str, Sequence[Point]]
MAX_POINTS = 1500  # points of a curve; those left out lie between the two that are kept

# Titles and units of the values that every run records, in the order of the page.
_KNOWN = {
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "tokens_per_s": ("Throughput", "tokens/s"),
    "memory_bytes": ("Memory in use after a step", "bytes"),
}
_FROM_ZERO = ("tokens_per_s", "memory_bytes", "lr")
_NOT_DRAWN = (
    *("time", "epoch", "micro_batch", "loss", "eval_loss", "peak_memory_bytes", "peak_reserved_bytes"),
    *("predicted_peak_bytes", "measured_peak_bytes", "preflight_peak_bytes", "preflight_eval_peak_bytes"),
)
_EVAL = "eval_"
_NOT_SHARES = ("eval_loss", "eval_mae", "eval_mse", "eval_rmse")  # also if they happen to lie between 0 and 1


def chart(
    anchor: str,
    title: str,
    series: Sequence[tuple[str, int, Sequence[Point]]],
    *,
    unit: str = "",
    log: bool = False,
    zero: bool = False,
    bounds: tuple[float, float] | None = None,
    marks: Sequence[tuple[str, float]] = (),
) -> dict[str, Any]:
    """Return a chart.

    Args:
        anchor: Its name in the page.
        title: Its title.
        series: Name, number of the color, and points of each curve.
        unit: Unit of the values; "bytes" is written as MiB or GiB.
        log: Whether the scale is logarithmic at first.
        zero: Whether the scale starts at 0.
        bounds: Smallest and largest possible value.
        marks: Horizontal lines: text and value.
    """
    return {
        "id": anchor,
        "title": title,
        "unit": unit,
        "log": log,
        "zero": zero,
        "bounds": bounds,
        "marks": [{"label": label, "value": value} for label, value in marks],
        "series": [
            {"name": name, "color": color, "points": thin_out([_finite(point) for point in points])}
            for name, color, points in series
            if points
        ],
    }


def _finite(point: Point) -> Point:
    step, value = point
    if value is None or not math.isfinite(value):
        return step, None
    return step, float(f"{value:.7g}") if isinstance(value, float) else value  # more digits are not shown


def thin_out(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most about `most` of the points: the lowest and highest of each interval, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) * 2 // most)
    kept: list[Point] = [points[0]]
    for start in range(1, len(points) - 1, size):
        stretch = range(start, min(start + size, len(points) - 1))
        known = [index for index in stretch if points[index][1] is not None]
        chosen = (
            {min(known, key=lambda i: points[i][1] or 0.0), max(known, key=lambda i: points[i][1] or 0.0)}
            if known
            else set()
        )
        gaps = [index for index in stretch if points[index][1] is None][:1]
        kept += [points[index] for index in sorted({*chosen, *gaps})]
    return [*kept, points[-1]]


def places(charts: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of the page in which the charts are drawn; empty without charts."""
    if not charts:
        return ""
    figures = "\n".join(f'<figure data-chart="{escape(one["id"])}"></figure>' for one in charts)
    tools = (
        '<div class="tools"><span class="soft">By optimizer step. Hover or tap for values, drag to zoom. '
        "Keyboard: Tab to a chart, then ← →, + −, Esc.</span>"
        '<button type="button" data-reset hidden>reset zoom</button></div>'
    )
    hint = "<noscript><p>The curves need JavaScript. Their values are in metrics.jsonl.</p></noscript>"
    return f'{tools}{hint}\n<div class="charts">\n{figures}\n</div>'


def training_charts(
    runs: Sequence[tuple[str, Curves]], memory_marks: Sequence[tuple[str, float]] = ()
) -> list[dict[str, Any]]:
    """Return the charts of one run, or of several runs on the same axes.

    Args:
        runs: Name and curves of each run; a single run needs no name.
        memory_marks: Lines in the chart of memory.
    """
    names = list(dict.fromkeys(name for _, curves in runs for name in curves))
    charts = [_loss_chart(runs)] if len(runs) == 1 else _loss_charts(runs)
    shares = [name for name in names if name.startswith(_EVAL) and _is_share(runs, name)]
    if len(runs) == 1 and len(shares) > 1:
        series = [(_words(name), number, runs[0][1][name]) for number, name in enumerate(shares)]
        charts.append(chart("metrics", "Held-out metrics", series, bounds=(0, 1)))
        names = [name for name in names if name not in shares]
    evaluated = [name for name in names if name.startswith(_EVAL)]
    others = [name for name in names if name not in _KNOWN and name not in evaluated]
    for name in (*evaluated, *_KNOWN, *others):
        if name in _NOT_DRAWN or name not in names:
            continue
        title, unit = _KNOWN.get(name, (f"Held-out {_words(name)}" if name in evaluated else _words(name), ""))
        charts.append(
            chart(
                name,
                title,
                _of_runs(runs, name, title),
                unit=unit,
                log=name == "grad_norm" and _spans_decades(runs, name),
                zero=name in _FROM_ZERO,
                bounds=(0, 1) if name in shares else None,
                marks=memory_marks if name == "memory_bytes" else (),
            )
        )
    return [one for one in charts if one["series"]]


def _loss_chart(runs: Sequence[tuple[str, Curves]]) -> dict[str, Any]:
    curves = runs[0][1]
    series = [("training", 0, curves.get("loss", ())), ("held-out", 1, curves.get("eval_loss", ()))]
    return chart("loss", "Loss", series)


def _loss_charts(runs: Sequence[tuple[str, Curves]]) -> list[dict[str, Any]]:
    titles = {"loss": "Training loss", "eval_loss": "Held-out loss"}
    return [chart(name, title, _of_runs(runs, name, title)) for name, title in titles.items()]


def _of_runs(runs: Sequence[tuple[str, Curves]], name: str, title: str) -> list[tuple[str, int, Sequence[Point]]]:
    return [(run or title.lower(), number, curves.get(name, ())) for number, (run, curves) in enumerate(runs)]


def _values(runs: Sequence[tuple[str, Curves]], name: str) -> list[float]:
    return [value for _, curves in runs for _, value in curves.get(name, ()) if value is not None]


def _is_share(runs: Sequence[tuple[str, Curves]], name: str) -> bool:
    return name not in _NOT_SHARES and all(0 <= value <= 1 for value in _values(runs, name))


def _spans_decades(runs: Sequence[tuple[str, Curves]], name: str) -> bool:
    found = [value for value in _values(runs, name) if value > 0]
    return bool(found) and max(found) > 30 * min(found)


def _words(name: str) -> str:
    return name.removeprefix(_EVAL).replace("_", " ")
