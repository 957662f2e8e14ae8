"""Quality against size and latency of several forms of a model: the Pareto front, the recommended form, and a plot."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.inference.model_measurement import ModelMeasurement
from trimtab.inference.quality_loss import main_metric, quality_loss
from trimtab.report.measurements_table import measurements_table
from trimtab.report.tables import Table

_LETTER_WIDTH, _NAME_HEIGHT = 0.018, 0.045  # size of a letter and of a name in the plot, as shares of the axes


def losses_of(measurements: Sequence[ModelMeasurement]) -> list[float]:
    """Return the loss of quality of each form against the first, the original."""
    return [quality_loss(measurements[0].quality, one.quality) for one in measurements]


def recommended(measurements: Sequence[ModelMeasurement], max_loss: float) -> ModelMeasurement:
    """Return the smallest form whose loss of quality is at most `max_loss`; among equal sizes, the closest one.

    The original, which is the first, is recommended if no other form meets the bound. NaN never meets a bound.
    """
    allowed = [one for one, loss in zip(measurements, losses_of(measurements), strict=True) if loss <= max_loss]
    return min(allowed or measurements[:1], key=lambda one: (one.disk_bytes or math.inf, _kl(one)))


def frontier(measurements: Sequence[ModelMeasurement]) -> list[ModelMeasurement]:
    """Return the forms that no other form beats in size, latency and quality together."""
    facts = [
        (one.disk_bytes or math.inf, one.latency_1_s, loss)
        for one, loss in zip(measurements, losses_of(measurements), strict=True)
    ]
    return [
        one
        for one, own in zip(measurements, facts, strict=True)
        if not any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in facts)
    ]


def frontier_table(measurements: Sequence[ModelMeasurement], max_loss: float) -> Table:
    """Return the table of measurements with the loss of quality, and which form is recommended."""
    header, rows = measurements_table(measurements)
    chosen, best = recommended(measurements, max_loss), frontier(measurements)
    notes = ["recommended" if one is chosen else "" if one in best else "beaten" for one in measurements]
    losses = [
        "" if one is measurements[0] else f"{loss:.2%}"
        for one, loss in zip(measurements, losses_of(measurements), strict=True)
    ]
    cells = zip(rows, losses, notes, strict=True)
    return [*header, "quality lost", ""], [[*row, loss, note] for row, loss, note in cells]


def draw_frontier(measurements: Sequence[ModelMeasurement], max_loss: float, file: Path) -> None:
    """Write a plot of quality against size and against latency.

    Forms that another form beats in everything are hollow, the recommended one is red; a line shows the bound.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    metric = main_metric(measurements[0].quality)
    original = measurements[0].quality[metric]
    bound = original - max_loss if metric != "loss" else original + max_loss * abs(original)
    for axes, places in (
        (left, [(one.disk_bytes or 0) / 1e6 for one in measurements]),
        (right, [one.latency_1_s * 1e3 for one in measurements]),
    ):
        axes.axhline(bound, color="#7f8c8d", linestyle="--", linewidth=1, label=f"bound: {max_loss:.2%} lost")
        _draw_points(
            axes,
            measurements,
            places,
            [one.quality[metric] for one in measurements],
            bound,
            recommended(measurements, max_loss),
        )
    left.set(xlabel="weights on disk, MB", ylabel=metric)
    right.set(xlabel="latency of one row, ms")
    left.legend(loc="best", fontsize=8, frameon=False)
    FigureCanvasAgg(figure).print_png(str(file))  # type: ignore[no-untyped-call]


def _draw_points(
    axes: Any,
    measurements: Sequence[ModelMeasurement],
    places: Sequence[float],
    heights: Sequence[float],
    bound: float,
    chosen: ModelMeasurement,
) -> None:
    best, right = frontier(measurements), max([place for place in places if math.isfinite(place)], default=0.0) or 1.0
    levels = [height for height in (*heights, bound) if math.isfinite(height)]
    spread = (max(levels) - min(levels)) or 1.0
    named: list[tuple[float, float, float]] = []
    for one, place, height in zip(measurements, places, heights, strict=True):
        color = "#c0392b" if one is chosen else "#1f4e79"
        axes.plot(place, height, "o", color=color, markerfacecolor=color if one in best or one is chosen else "white")
        x, y = place / right, (height - min(levels)) / spread
        end = x + len(one.name) * _LETTER_WIDTH
        # names that would overlap are written below each other
        num_near = sum(x < last and first < end and abs(y - level) < _NAME_HEIGHT for first, last, level in named)
        named.append((x, end, y))
        axes.annotate(one.name, (place, height), xytext=(6, 4 - 11 * num_near), textcoords="offset points", fontsize=8)
    axes.set_xlim(0, right * 1.2)
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)


def _kl(one: ModelMeasurement) -> float:
    return 0.0 if one.divergence is None else one.divergence.kl_mean
