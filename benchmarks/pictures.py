"""Draws pictures of the documentation from stored results: `python benchmarks/pictures.py`.

With the files of benchmarks/peers.py as arguments it draws their speed, each to docs/images/speed-WORK.svg.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
GIB = 2**30
OF_TRIMTAB = ("h200-own", "h200-fast")  # files of tests/planner/golden
MAX_ERROR = 1.3  # percent; errors beyond it are written at the edge
TEXT, MUTED, OURS, PLAIN = "#1f2328", "#8c959f", "#0969da", "#bc4c00"
BESIDE = {"textcoords": "offset points", "va": "center"}


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
    peaks.plot([0.9, 150], [0.9, 150], color=MUTED, linewidth=1, zorder=1)
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
    errors.set_ylim(-MAX_ERROR, MAX_ERROR)
    for row in rows:
        if abs(error := 100 * row["error"]) > MAX_ERROR:
            edge = (row["measured"]["allocated"] / GIB, MAX_ERROR if error > 0 else -MAX_ERROR)
            arrow = {"arrowstyle": "->", "color": MUTED}
            errors.annotate(
                f"{error:+.1f}%", edge, (0, -24 if error > 0 else 24), arrowprops=arrow, ha="center", **BESIDE
            )
    errors.set_ylabel("error, %")
    median = statistics.median(abs(100 * row["error"]) for row in rows)
    worst = max((100 * row["error"] for row in rows), key=abs)
    errors.set_title(f"median {median:.2f}%, worst {worst:+.2f}%", fontsize=10)
    peaks.set_title(f"peak memory of a step: {len(rows)} measurements on H200s", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _groups(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, list[dict[str, Any]]]]:
    ours = [row for row in rows if row["file"] in OF_TRIMTAB]
    plain = [row for row in rows if row["file"] not in OF_TRIMTAB]
    return [
        (f"trimtab's step ({len(ours)})", OURS, "^", ours),
        (f"plain transformers ({len(plain)})", PLAIN, "o", plain),
    ]


def draw_precisions(path: Path) -> None:
    """Peak memory and speed of full and mixed precision."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "trimtab", "font.size": 10, "axes.edgecolor": MUTED, "text.color": TEXT}
    measured = json.loads((RESULTS / "precisions-h200.json").read_text())["variants"]
    numbers = {variant["name"]: variant["numbers"] for variant in measured}
    names = ["fp32", "tf32", "fp16", "bf16", "bf16-pure"]
    figure, (memory, speed) = pyplot.subplots(1, 2, figsize=(8, 2.9), facecolor="white", sharey=True)
    for place, name in enumerate(names):
        memory.barh(place, numbers[name]["allocated"]["median"] / GIB, color=OURS, height=0.62)
        speed.barh(place, numbers[name]["tokens/s"]["median"], color=PLAIN, height=0.62)
    memory.set_yticks(range(len(names)), names)
    memory.invert_yaxis()
    memory.set_xlabel("GiB at the peak of a step")
    speed.set_xlabel("tokens per second")
    speed.locator_params(axis="x", nbins=4)
    speed.xaxis.set_major_formatter("{x:,.0f}")
    for axes in (memory, speed):
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_speed(report: dict[str, Any], path: Path) -> None:
    """Tokens per second by tool, the fastest first; a whisker is the range over rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "trimtab", "font.size": 10, "axes.edgecolor": MUTED, "text.color": TEXT}
    tools = {name: row["tokens_per_s"] for name, row in report["summary"]["tools"].items() if "tokens_per_s" in row}
    names = sorted(tools, key=lambda name: tools[name]["median"])
    medians = [tools[name]["median"] for name in names]
    whiskers = [
        [tools[name]["median"] - tools[name]["low"] for name in names],
        [tools[name]["high"] - tools[name]["median"] for name in names],
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.42 * len(names)), facecolor="white")
    colors = [OURS if name.startswith("trimtab") else MUTED for name in names]
    axes.barh(names, medians, xerr=whiskers, color=colors, height=0.62, error_kw={"ecolor": TEXT, "capsize": 3})
    for place, name in enumerate(names):
        axes.annotate(f"{tools[name]['median']:,.0f}", (tools[name]["high"], place), (6, 0), **BESIDE)
    axes.set_xlim(0, 1.15 * max(row["high"] for row in tools.values()))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens per second, without padding")
    axes.set_title(_speed_title(report), fontsize=10, loc="left")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


SERIES = {  # a part of the variant's name, in the order of the legend: label, color, marker
    "calibrated, trained": ("palettes, calibrated and trained", "#8250df", "*"),
    "calibrated": ("palettes, calibrated", OURS, "^"),
    "palettes": ("palettes", "#54aeff", "v"),
    "nf4": ("nf4, nf4 double", PLAIN, "s"),
    "int8": ("int8", "#1a7f37", "D"),
    "round to nearest": ("round to nearest", MUTED, "o"),
    "min and max": ("round, min and max", "#d0d7de", "o"),
}


def draw_clustering(path: Path) -> None:
    """Bits a weight against the divergence from the original, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "trimtab", "font.size": 9, "axes.edgecolor": MUTED, "text.color": TEXT}
    models = json.loads((RESULTS / "clustering.json").read_text())["models"]
    models = {title: model for title, model in models.items() if _num_widths(model["results"]) > 1}
    figure, panels = pyplot.subplots(1, len(models), figsize=(9.2, 3.9), facecolor="white", squeeze=False)
    for axes, (title, model) in zip(panels[0], models.items(), strict=True):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in model["results"]:
            if "kl" in row:
                name = next(name for name in SERIES if name in row["name"])
                series.setdefault(name, []).append((row["bits"], row["kl"]))
        for name in (name for name in SERIES if name in series):
            label, color, marker = SERIES[name]
            bits, divergence = zip(*sorted(series[name]), strict=True)
            line = "none" if name == "nf4" else "-"
            axes.plot(bits, divergence, label=label, color=color, marker=marker, linestyle=line, linewidth=1)
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        axes.set_ylim(10 ** math.floor(math.log10(bottom)), 10 ** math.ceil(math.log10(top)))  # whole powers of ten
        axes.minorticks_off()
        axes.set_title(title.partition(", ")[0].partition(" that ")[0], fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("mean KL divergence from the original")
    panels[0][len(models) // 2].set_xlabel("bits a weight, palettes and scales included")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


FORMS = {  # the kinds of small-forms.json: what their names start with, and a color
    "palettes": (("cluster",), OURS),
    "8 and 4 bits": (("int8", "nf4", "fp8", "bnb"), PLAIN),
    "half precision": (("bf16", "fp16"), "#1a7f37"),
    "ONNX": (("onnx",), "#8250df"),
}


def draw_forms(path: Path) -> None:
    """Size on disk against the divergence from the original, for every form of one model that is not exact."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "trimtab", "font.size": 10, "axes.edgecolor": MUTED, "text.color": TEXT}
    report = json.loads((RESULTS / "small-forms.json").read_text())
    forms = {name: row for name, row in report["forms"].items() if row.get("disk_mb") and row["kl"] > 1e-6}
    figure, axes = pyplot.subplots(figsize=(8, 3.9), facecolor="white")
    for kind, (starts, color) in FORMS.items():
        of_it = {name: row for name, row in forms.items() if name.startswith(starts) and "by" not in name}
        sizes, divergences = [row["disk_mb"] for row in of_it.values()], [row["kl"] for row in of_it.values()]
        axes.scatter(sizes, divergences, label=kind, color=color, s=36, linewidths=0, zorder=2)
        for name, row in of_it.items():
            side = {"xytext": (-6, 0), "ha": "right"} if name == "bnb-int8" else {"xytext": (6, 0)}  # beside fp8
            axes.annotate(name, (row["disk_mb"], row["kl"]), **side, **BESIDE, fontsize=9)
    original = report["forms"]["original"]["disk_mb"]
    axes.axvline(original, color=MUTED, linewidth=1, linestyle=":", zorder=1)
    axes.annotate("original", (original, 1e-3), (-6, 0), ha="right", **BESIDE, fontsize=9, color=MUTED)
    axes.set_yscale("log")
    axes.set_xlim(0, 100)
    axes.set_xlabel("MB on disk")
    axes.set_ylabel("mean KL divergence from the original")
    axes.set_title(report["model"], fontsize=10, loc="left")
    axes.legend(frameon=False, loc="lower left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


LENGTHS = (30, 21, 17, 14, 12, 9, 7, 5)  # tokens of the rows in the picture of padding


def draw_padding(path: Path) -> None:
    """The same rows padded to the longest, and as one sequence without padding: tokens, and pairs of attention."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "trimtab", "font.size": 10, "axes.edgecolor": MUTED, "text.color": TEXT}
    colors = pyplot.get_cmap("tab20").colors
    longest, total = max(LENGTHS), sum(LENGTHS)
    figure, (padded, packed) = pyplot.subplots(2, 1, figsize=(9.6, 3.6), facecolor="white", height_ratios=(4, 1))
    for number, length in enumerate(LENGTHS):
        padded.barh(number, longest, color="#eaeef2", height=0.84)
        padded.barh(number, length, color=colors[2 * number], height=0.84)
        packed.barh(0, length, left=sum(LENGTHS[:number]), color=colors[2 * number], height=0.84)
        packed.text(sum(LENGTHS[:number]) + length / 2, 0, str(length), ha="center", va="center", fontsize=9)
    num_padded = longest * len(LENGTHS)
    padded.set_title(
        f"padding: longest    {len(LENGTHS)} × {longest} = {num_padded} tokens computed, {num_padded - total} of them "
        "padding",
        fontsize=10,
        loc="left",
        family="monospace",
    )
    packed.set_title(
        f"padding: none       {total} tokens computed, attention within each row",
        fontsize=10,
        loc="left",
        family="monospace",
    )
    padded.invert_yaxis()
    for axes in (padded, packed):
        axes.set_xlim(0, total)
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _num_widths(results: list[dict[str, Any]]) -> int:
    """How many numbers of bits were measured; of one, there is no line to draw."""
    return len({round(row["bits"]) for row in results if "kl" in row})


def _speed_title(report: dict[str, Any]) -> str:
    num_rounds = max(row.get("num_runs", 0) for row in report["summary"]["tools"].values())
    hardware = report["setting"]["hardware"].partition(";")[0].partition(",")[0]
    return f"{report['work']}, {hardware}, {num_rounds} round{'s' if num_rounds != 1 else ''}"


if __name__ == "__main__":
    if sys.argv[1:]:
        for result in map(Path, sys.argv[1:]):
            found = json.loads(result.read_text())
            draw_speed(found, IMAGES / f"speed-{found['work']}.svg")
    else:
        draw_accuracy(IMAGES / "predicted-against-measured.svg")
        draw_precisions(IMAGES / "precisions-h200.svg")
        draw_clustering(IMAGES / "technique-clustering.svg")
        draw_forms(IMAGES / "technique-quantization.svg")
        draw_padding(IMAGES / "technique-padding.svg")
