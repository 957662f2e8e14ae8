"""Held-out rows in the report of a run: confusions, scores of each label, the worst rows, and sample generations."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.report.page.document import escape, fold, number, paragraph, table

MAX_MATRIX = 100  # labels of a confusion matrix; of more labels only the most frequent confusions are kept
_MAX_COUNTS = 12  # labels of a matrix whose cells have numbers; a larger one is a heat map
_MAX_NAME = 12  # characters of a label that heads a column; longer ones have a number instead
_MAX_TEXT = 600
_NUM_CONFUSIONS = 12


def held_out_rows(found: Mapping[str, Any]) -> str:
    """Return confusions, scores of each label and the worst rows of an evaluation; empty if there was none."""
    if not found:
        return ""
    labels, counts = found.get("labels") or [], found.get("confusion") or []
    pairs = found.get("confusions") or _confusions(labels, counts)
    head, worst = paragraph(_summary(found, counts), "soft"), _worst(found.get("worst") or [])
    if not counts:
        return head + _confusions_table(pairs) + worst
    scores = _scores(labels, counts)
    if len(labels) <= _MAX_COUNTS:
        return head + _columns(_matrix(labels, counts), f"<h3>By label</h3>{scores}") + worst
    folded = fold(f"Scores of all {len(labels)} labels, the lowest F1 first", scores)
    return head + _columns(_heat_map(labels, counts), _confusions_table(pairs)) + folded + worst


def _columns(left: str, right: str) -> str:
    return f'<div class="columns"><div>{left}</div><div>{right}</div></div>'


def _summary(found: Mapping[str, Any], counts: Sequence[Sequence[int]]) -> str:
    whose = f"The model of step {found['step']:,} on {found['num_rows']:,} held-out rows"
    right, total = sum(row[index] for index, row in enumerate(counts)), sum(map(sum, counts))
    return (
        f"{whose}: {right:,} correct, {total - right:,} wrong ({right / total:.1%} accuracy)." if total else f"{whose}."
    )


def _confusions(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> list[tuple[str, str, int]]:
    """Return the most frequent confusions of a matrix: true label, predicted label, rows."""
    wrong = [
        (labels[true], labels[predicted], count)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if true != predicted and count
    ]
    return sorted(wrong, key=lambda each: -each[2])[:_NUM_CONFUSIONS]


def _confusions_table(pairs: Sequence[tuple[str, str, int]]) -> str:
    rows = [[true, predicted, f"{count:,}"] for true, predicted, count in pairs]
    return f"<h3>Most frequent confusions</h3>{table(['true', 'predicted', 'rows'], rows, 'lln')}" if rows else ""


def _matrix(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    is_named = all(len(label) <= _MAX_NAME for label in labels)
    columns = labels if is_named else [str(place) for place in range(1, len(labels) + 1)]
    head = "".join(f'<th class="n" title="{escape(label)}">{escape(c)}</th>' for c, label in zip(columns, labels))  # noqa: B905
    rows = []
    for true, (label, row) in enumerate(zip(labels, counts, strict=True)):
        cells = []
        for predicted, count in enumerate(row):
            weight = "600" if true == predicted else "400"
            style = f"background:rgba(var(--shade),{0.55 * count / max(1, sum(row)):.3f});font-weight:{weight}"
            title = _cell_title(labels, true, predicted, row)
            cells.append(f'<td style="{style}" title="{escape(title)}">{count:,}</td>')
        name = label if is_named else f"{true + 1}. {label}"
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    return (
        '<h3>Confusion matrix</h3><div class="scroll"><table class="matrix">'
        f"<thead><tr><th>true ↓ predicted →</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell_title(labels: Sequence[str], true: int, predicted: int, row: Sequence[int]) -> str:
    return f"true {labels[true]}, predicted {labels[predicted]}: {row[predicted]:,} of {sum(row):,}"


def _heat_map(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Return the matrix as a picture; the color of a cell is its share of the rows with its true label."""
    num, margin = len(labels), 3
    cells = []
    for true, row in enumerate(counts):
        for predicted, count in enumerate(row):
            if count:
                place = f'x="{margin + predicted}" y="{margin + true}" opacity="{0.15 + 0.85 * count / sum(row):.2f}"'
                title = escape(_cell_title(labels, true, predicted, row))
                cells.append(f'<rect {place} width="1" height="1"><title>{title}</title></rect>')
    middle, size = margin + num / 2, margin + num
    note = (
        "One row and one column for each label, in the order of their ids; the stronger the color, the larger the "
        "share of the rows with this true label. Hover over a cell for its labels and count."
    )
    return (
        f'<h3>Confusion matrix</h3><svg class="heat" viewBox="0 0 {size} {size}" role="img" '
        f'aria-label="Confusion matrix of {num} labels; a table lists the most frequent confusions">'
        f'<rect class="frame" x="{margin}" y="{margin}" width="{num}" height="{num}"/>{"".join(cells)}'
        f'<text x="{middle}" y="{margin - 1}" text-anchor="middle">predicted</text>'
        f'<text transform="translate({margin - 1} {middle}) rotate(-90)" text-anchor="middle">true</text></svg>'
        + paragraph(note, "soft")
    )


def _scores(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    predicted = [sum(column) for column in zip(*counts, strict=True)]
    found = []
    for index, (label, row) in enumerate(zip(labels, counts, strict=True)):
        hits, support = row[index], sum(row)
        precision, recall = hits / predicted[index] if predicted[index] else 0.0, hits / support if support else 0.0
        f1 = 2 * hits / (support + predicted[index]) if support + predicted[index] else 0.0
        found.append((label, precision, recall, f1, support))
    if len(labels) > _MAX_COUNTS:
        found.sort(key=lambda each: each[3])
    rows = [[label, *(f"{score:.3f}" for score in scores), f"{support:,}"] for label, *scores, support in found]
    return table(["label", "precision", "recall", "F1", "rows"], rows)


def _worst(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    cells = [
        [number(row["loss"], 3), row["label"], row["predicted"], _shortened(row["text"]), row["location"]]
        for row in rows
    ]
    header = ["loss", "label", "predicted", "text", "row"]
    return f"<h3>Rows with the highest loss</h3>{table(header, cells, 'nlltl', 'cards')}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def samples_section(samples: Mapping[str, Any]) -> str:
    """Return generations of the model before and after training; empty if there are none."""
    rows = samples.get("rows") or []
    if not rows:
        return ""
    blocks = []
    for row in rows:
        parts = [("Prompt", row["prompt"]), ("Before training", row.get("before")), ("After training", row["after"])]
        parts.append(("In the data", row.get("expected")))
        inner = "".join(
            f"<dt>{name}</dt><dd>{escape(_shortened(text.strip()) or '(no text)')}</dd>"
            for name, text in parts
            if text is not None
        )
        blocks.append(f'<dl class="sample">{inner}</dl>')
    return paragraph(str(samples.get("note", "")), "soft") + "".join(blocks)
