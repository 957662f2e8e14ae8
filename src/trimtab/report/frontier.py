"""Quality against size and latency of several forms of one model: the Pareto front, the recommended one, and a plot."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.inference.figures import ModelFigures
from trimtab.inference.quality_loss import main_metric, quality_loss
from trimtab.report.figures_table import figures_table
from trimtab.report.tables import Table

_NAME_WIDTH, _NAME_HEIGHT = 0.15, 0.04  # of a name in the plot, as shares of the axes


def losses_of(figures: Sequence[ModelFigures]) -> list[float]:
    """Return the loss of quality of each form against the first, the original."""
    return [quality_loss(figures[0].quality, one.quality) for one in figures]


def recommended(figures: Sequence[ModelFigures], max_loss: float) -> ModelFigures:
    """Return the smallest form whose loss of quality is at most `max_loss`; of equal sizes the one that is closest.

    The original, the first, is recommended if no other form holds the bound. A loss that is not a number holds none.
    """
    allowed = [one for one, loss in zip(figures, losses_of(figures), strict=True) if loss <= max_loss]
    return min(allowed or figures[:1], key=lambda one: (one.disk_bytes or math.inf, _kl(one)))


def frontier(figures: Sequence[ModelFigures]) -> list[ModelFigures]:
    """Return the forms that no other one beats in size, latency and quality together."""
    facts = [
        (one.disk_bytes or math.inf, one.latency_1_s, loss)
        for one, loss in zip(figures, losses_of(figures), strict=True)
    ]
    return [
        one
        for one, own in zip(figures, facts, strict=True)
        if not any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in facts)
    ]


def frontier_table(figures: Sequence[ModelFigures], max_loss: float) -> Table:
    """Return the table of figures with the loss of quality, and which form is recommended."""
    header, rows = figures_table(figures)
    chosen, best = recommended(figures, max_loss), frontier(figures)
    notes = ["recommended" if one is chosen else "" if one in best else "beaten" for one in figures]
    losses = ["" if one is figures[0] else f"{loss:.2%}" for one, loss in zip(figures, losses_of(figures), strict=True)]
    cells = zip(rows, losses, notes, strict=True)
    return [*header, "quality lost", ""], [[*row, loss, note] for row, loss, note in cells]


def draw_frontier(figures: Sequence[ModelFigures], max_loss: float, file: Path) -> None:
    """Write a plot of quality against size and against latency.

    Forms that another one beats in everything are hollow, the recommended one is red; a line shows the bound.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    metric = main_metric(figures[0].quality)
    original = figures[0].quality[metric]
    bound = original - max_loss if metric != "loss" else original + max_loss * abs(original)
    for axes, places in (
        (left, [(one.disk_bytes or 0) / 1e6 for one in figures]),
        (right, [one.latency_1_s * 1e3 for one in figures]),
    ):
        axes.axhline(bound, color="#7f8c8d", linestyle="--", linewidth=1, label=f"bound: {max_loss:.2%} lost")
        _draw_points(axes, figures, places, [one.quality[metric] for one in figures], recommended(figures, max_loss))
    left.set(xlabel="weights on disk, MB", ylabel=metric)
    right.set(xlabel="latency of one row, ms")
    left.legend(loc="best", fontsize=8, frameon=False)
    FigureCanvasAgg(figure).print_png(str(file))  # type: ignore[no-untyped-call]


def _draw_points(
    axes: Any,
    figures: Sequence[ModelFigures],
    places: Sequence[float],
    heights: Sequence[float],
    chosen: ModelFigures,
) -> None:
    best, right = frontier(figures), max([place for place in places if math.isfinite(place)], default=0.0) or 1.0
    spread = (max(heights) - min(heights)) or 1.0
    named: list[tuple[float, float]] = []
    for one, place, height in zip(figures, places, heights, strict=True):
        color = "#c0392b" if one is chosen else "#1f4e79"
        axes.plot(place, height, "o", color=color, markerfacecolor=color if one in best or one is chosen else "white")
        x, y = place / right, (height - min(heights)) / spread
        # a name is about a sixth of the width; names of points at one place are written below each other
        num_near = sum(abs(x - other) < _NAME_WIDTH and abs(y - level) < _NAME_HEIGHT for other, level in named)
        named.append((x, y))
        axes.annotate(one.name, (place, height), xytext=(6, 4 - 11 * num_near), textcoords="offset points", fontsize=8)
    axes.set_xlim(0, right * 1.2)
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)


def _kl(one: ModelFigures) -> float:
    return 0.0 if one.divergence is None else one.divergence.kl_mean
