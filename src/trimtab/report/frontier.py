"""Quality against size and latency of several forms of one model: which are worth having, which to take, and a plot."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.inference.figures import ModelFigures
from trimtab.inference.quality_loss import main_metric, quality_loss
from trimtab.report.figures_table import figures_table
from trimtab.report.tables import Table


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
    """Write a plot of quality against size and against latency."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    metric, chosen = main_metric(figures[0].quality), recommended(figures, max_loss)
    sizes = [(one.disk_bytes or 0) / 1e6 for one in figures]
    _draw_points(left, figures, sizes, metric, chosen)
    _draw_points(right, figures, [one.latency_1_s * 1e3 for one in figures], metric, chosen)
    left.set(xlabel="weights on disk, MB", ylabel=metric)
    right.set(xlabel="latency of one row, ms")
    FigureCanvasAgg(figure).print_png(str(file))  # type: ignore[no-untyped-call]


def _draw_points(
    axes: Any, figures: Sequence[ModelFigures], places: Sequence[float], metric: str, chosen: ModelFigures
) -> None:
    for one, place in zip(figures, places, strict=True):
        color = "#c0392b" if one is chosen else "#1f4e79"
        axes.plot(place, one.quality[metric], "o", color=color)
        axes.annotate(one.name, (place, one.quality[metric]), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set_xlim(left=0)
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)


def _kl(one: ModelFigures) -> float:
    return 0.0 if one.divergence is None else one.divergence.kl_mean
