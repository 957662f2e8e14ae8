"""Draws pictures of the documentation from stored results: `python benchmarks/pictures.py`."""

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
GIB = 2**30
TEXT, MUTED, OURS, PLAIN = "#1f2328", "#8c959f", "#0969da", "#bc4c00"


def draw_accuracy(path: Path) -> None:
    """Predicted against measured peak memory, and the errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "trimtab", "font.size": 10, "axes.edgecolor": MUTED, "text.color": TEXT}
    rows = json.loads((RESULTS / "planner-accuracy.json").read_text())["rows"]
    rows = [row for row in rows if row.get("predicted") and row.get("error") is not None]
    figure, (peaks, errors) = pyplot.subplots(1, 2, figsize=(9.6, 4.2), facecolor="white", width_ratios=(3, 2))
    for label, color, marker, of_it in _groups(rows):
        measured = [row["measured"]["allocated"] / GIB for row in of_it]
        predicted = [row["predicted"]["allocated"] / GIB for row in of_it]
        options = {"color": color, "marker": marker, "s": 28, "alpha": 0.75, "linewidths": 0}
        peaks.scatter(measured, predicted, label=label, zorder=2, **options)
        errors.scatter(measured, [100 * row["error"] for row in of_it], zorder=2, **options)
    peaks.plot([1.2, 150], [1.2, 150], color=MUTED, linewidth=1, zorder=1)
    for axes in (peaks, errors):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("measured, GiB")
        axes.spines[["top", "right"]].set_visible(False)
    peaks.set_yscale("log", base=2)
    peaks.yaxis.set_major_formatter("{x:g}")
    peaks.set_ylabel("predicted without a GPU, GiB")
    peaks.legend(frameon=False, loc="upper left")
    errors.axhline(0, color=MUTED, linewidth=1, zorder=1)
    errors.set_ylim(-1.05, 1.05)
    errors.set_ylabel("error, %")
    median = statistics.median(abs(100 * row["error"]) for row in rows)
    worst = max((100 * row["error"] for row in rows), key=abs)
    errors.set_title(f"median {median:.2f}%, worst {worst:+.2f}%", fontsize=10)
    peaks.set_title(f"peak memory of a step: {len(rows)} measurements on H200s", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _groups(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, list[dict[str, Any]]]]:
    ours = [row for row in rows if row["row"].startswith("own ")]
    plain = [row for row in rows if not row["row"].startswith("own ")]
    return [
        (f"trimtab's step ({len(ours)})", OURS, "^", ours),
        (f"plain transformers ({len(plain)})", PLAIN, "o", plain),
    ]


if __name__ == "__main__":
    draw_accuracy(IMAGES / "predicted-against-measured.svg")
