"""An evaluation as tables for the terminal, and as files: JSON, the worst rows as CSV, a plot of the confusions."""

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import atomic_folder, refuse_foreign, refuse_unwritable
from trimtab.inference.bootstrap import PairedDifference
from trimtab.inference.evaluate import EvaluatedRow, Evaluation
from trimtab.report.tables import Table

JSON_FILE, PLOT_FILE, ROWS_FILE = "evaluation.json", "confusion.png", "worst_rows.csv"
_MAX_SHOWN = 12  # maximum number of labels of a confusion matrix in a table
_MAX_NUMBERED = 25  # maximum number of labels of a plot with numbers in its cells
_MAX_TEXT = 80
Differences = Mapping[str, PairedDifference]


def metrics_table(found: Evaluation) -> Table:
    """Return every metric with its 95% interval."""
    rows = []
    for name, value in found.metrics.items():
        low, high = found.intervals.get(name, (float("nan"), float("nan")))
        rows.append([name, f"{value:.4f}", f"{low:.4f} to {high:.4f}" if low <= high else ""])
    return ["metric", "value", "95% interval"], rows


def labels_table(found: Evaluation) -> Table:
    """Return precision, recall, F1 and number of rows of each label."""
    rows = [
        [each.label, f"{each.precision:.4f}", f"{each.recall:.4f}", f"{each.f1:.4f}", f"{each.support:,}"]
        for each in found.by_label
    ]
    return ["label", "precision", "recall", "f1", "rows"], rows


def confusion_table(found: Evaluation) -> Table:
    """Return the confusion matrix; for many labels the most frequent confusions."""
    names = found.labels
    if len(names) <= _MAX_SHOWN:
        rows = [
            [name, *(f"{count:,}" for count in counts)] for name, counts in zip(names, found.confusion, strict=True)
        ]
        return ["true \\ predicted", *names], rows
    wrong = [
        (count, names[true], names[predicted])
        for true, counts in enumerate(found.confusion)
        for predicted, count in enumerate(counts)
        if true != predicted and count
    ]
    wrong.sort(key=lambda each: -each[0])
    return ["true", "predicted", "rows"], [[true, other, f"{count:,}"] for count, true, other in wrong[:_MAX_SHOWN]]


def worst_table(found: Evaluation) -> Table:
    """Return the rows with the highest loss, their texts shortened."""
    rows = []
    for row in found.worst:
        text = " ".join(row.text.split())
        text = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
        rows.append([f"{row.loss:.3f}", row.label, row.predicted, row.location, text])
    header = ["loss", "label", "predicted", "row", "text"]
    if not any(row.predicted for row in found.worst):  # language models have neither
        return [name for name in header if name not in ("label", "predicted")], [[row[0], *row[3:]] for row in rows]
    return header, rows


def differences_table(found: Differences) -> Table:
    """Return each metric of two models, their difference with its 95% interval, and whether it is significant."""
    rows = []
    for name, each in found.items():
        change = f"{each.second - each.first:+.4f}"
        interval = f"{each.low:+.4f} to {each.high:+.4f}"
        rows.append(
            [name, f"{each.first:.4f}", f"{each.second:.4f}", change, interval, f"{each.p_value:.2g}", each.test]
        )
    return ["metric", "first", "second", "difference", "95% interval", "p", "test"], rows


def as_dict(
    found: Evaluation, against: Evaluation | None = None, differences: Differences | None = None
) -> dict[str, Any]:
    """Return an evaluation as JSON types, with the second model's evaluation and the paired test, if any."""
    content = found.as_dict()
    if against is not None and differences is not None:
        content["against"] = against.as_dict()
        content["differences"] = {name: asdict(each) for name, each in differences.items()}
    return content


def check_evaluation_folder(folder: Path) -> None:
    """Refuse a folder with other files, or a read-only one; called before an evaluation that may take long."""
    refuse_foreign(folder, JSON_FILE, "evaluation")
    refuse_unwritable(folder)


def write_evaluation(
    folder: Path, found: Evaluation, against: Evaluation | None = None, differences: Differences | None = None
) -> list[Path]:
    """Write evaluation.json, worst_rows.csv, and confusion.png for a classifier; an older evaluation is replaced.

    Returns:
        The files.
    """
    with atomic_folder(folder, marker=JSON_FILE, what="evaluation") as place:
        text = json.dumps(as_dict(found, against, differences), indent=1, ensure_ascii=False)
        (place / JSON_FILE).write_text(text, encoding="utf-8")
        with (place / ROWS_FILE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(EvaluatedRow)])
            writer.writerows(asdict(row).values() for row in found.worst)
        if found.confusion:
            draw_confusion(found, place / PLOT_FILE)
        names = sorted(path.name for path in place.iterdir())
    return [folder / name for name in names]


def draw_confusion(found: Evaluation, file: Path) -> None:
    """Write a plot of the confusion matrix; the color of a cell is its share of the rows with its true label."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names, counts = found.labels, found.confusion
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    size = 2.5 + min(0.55 * len(names), 12)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the rows with this label", shrink=0.8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", parse_math=False)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_xlabel("predicted label")
    axes.set_ylabel("true label")
    if len(names) <= _MAX_NUMBERED:
        for true, row in enumerate(counts):
            for predicted, count in enumerate(row):
                color = "white" if shares[true][predicted] > 0.5 else "black"
                axes.text(predicted, true, f"{count:,}", ha="center", va="center", color=color)
    FigureCanvasAgg(figure).print_png(str(file))  # type: ignore[no-untyped-call]
