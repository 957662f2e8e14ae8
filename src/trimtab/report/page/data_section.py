"""The data of a run in its report: rows, lengths, labels and truncated rows; confusions and samples of the model."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.report.page.document import bars, escape, number, paragraph, table

# maximum number of labels of a confusion matrix; with more labels, only the most frequent confusions are kept
MAX_MATRIX = 30
_MAX_LABELS = 40
_MAX_TEXT = 600


def data_card(card: Mapping[str, Any]) -> str:
    """Return the card; empty if the run has none."""
    if not card:
        return ""
    sets = [(name, card[key]) for key, name in (("train", "training"), ("eval", "held-out")) if card.get(key)]
    rows = [
        ["rows", *(f"{of['num_rows']:,}" for _, of in sets)],
        ["examples", *(f"{of['num_examples']:,}" for _, of in sets)],
        [f"truncated at {card['max_length']:,} tokens", *(_truncated(of) for _, of in sets)],
        ["tokens", *(f"{of['num_tokens']:,}" for _, of in sets)],
        ["tokens with loss", *(_count(of.get("num_loss_tokens")) for _, of in sets)],
        *([f"{title} length", *(f"{of[key]:,}" for _, of in sets)] for title, key in _LENGTHS),
    ]
    rows = [row for row in rows if any(cell != "–" for cell in row[1:])]
    columns = ", ".join(_column(role, names) for role, names in card.get("columns", {}).items())
    facts = paragraph(f"Task: {card['task']}. {f'Columns: {columns}.' if columns else ''}")
    return (
        facts
        + '<div class="columns"><div>'
        + f"<h3>Sizes</h3>{table(['', *(name for name, _ in sets)], rows)}"
        + "</div><div>"
        + _histogram(card.get("histogram", ()))
        + "</div></div>"
        + _labels(card.get("labels", ()))
    )


_LENGTHS = (("shortest", "shortest"), ("median", "median"), ("95% quantile of the", "p95"), ("longest", "longest"))


def _column(role: str, names: Any) -> str:
    text = names if isinstance(names, str) else " and ".join(map(str, names))
    return text if text == role else f"{text} ({role})"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _truncated(of: Mapping[str, Any]) -> str:
    return f"{of['num_truncated']:,} ({of['num_truncated'] / max(of['num_rows'], 1):.1%})"


def _histogram(bins: Sequence[Mapping[str, int]]) -> str:
    first = next((place for place, each in enumerate(bins) if each["num_examples"]), 0)
    rows = [
        (
            f"{each['first']:,}–{each['last']:,}" if each["first"] != each["last"] else f"{each['first']:,}",
            [(each["num_examples"], "var(--s0)", f"{each['num_examples']:,} examples")],
            f"{each['num_examples']:,}",
        )
        for each in bins[first:]
    ]
    return f"<h3>Lengths of training examples, in tokens</h3>{bars(rows)}" if rows else ""


def _labels(labels: Sequence[Mapping[str, Any]]) -> str:
    if not labels:
        return ""
    totals = {key: sum(each[key] for each in labels) or 1 for key in ("num_train", "num_eval")}
    most = sorted(labels, key=lambda each: -each["num_train"])
    rows = []
    for each in most[:_MAX_LABELS]:
        shares = (f"{each[key]:,} ({each[key] / total:.1%})" for key, total in totals.items())
        rows.append([str(each["name"]), *shares])
    more = f"{len(most) - _MAX_LABELS} more labels are not shown." if len(most) > _MAX_LABELS else ""
    return f"<h3>Labels</h3>{table(['label', 'training', 'held-out'], rows)}{paragraph(more, 'soft')}"


# ---------------------------------------------------------------------- held-out rows


def held_out_rows(found: Mapping[str, Any]) -> str:
    """Return confusions, scores of each label and the worst rows of an evaluation; empty if there was none."""
    if not found:
        return ""
    whose = f"The model of step {found['step']:,} on {found['num_rows']:,} held-out rows."
    labels, counts = found.get("labels") or [], found.get("confusion") or []
    parts = [paragraph(whose, "soft")]
    if counts:
        matrix, scores = _matrix(labels, counts), _scores(labels, counts)
        parts.append(f'<div class="columns"><div>{matrix}</div><div>{scores}</div></div>')
    if pairs := found.get("confusions"):
        rows = [[true, predicted, f"{count:,}"] for true, predicted, count in pairs]
        parts.append(f"<h3>Most frequent confusions</h3>{table(['true', 'predicted', 'rows'], rows, '--n')}")
    return "".join(parts) + _worst(found.get("worst") or [])


def _matrix(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    head = "".join(f'<th class="n truth">{escape(label)}</th>' for label in labels)
    rows = []
    for true, (label, row) in enumerate(zip(labels, counts, strict=True)):
        cells = []
        for predicted, count in enumerate(row):
            share = count / max(1, sum(row))
            title = f"true {label}, predicted {labels[predicted]}: {count:,} of {sum(row):,}"
            weight = "600" if true == predicted else "400"
            style = f"background:rgba(var(--shade),{0.55 * share:.3f});font-weight:{weight}"
            cells.append(f'<td style="{style}" title="{escape(title)}">{count:,}</td>')
        rows.append(f'<tr><th class="truth">{escape(label)}</th>{"".join(cells)}</tr>')
    return (
        '<h3>Confusion matrix</h3><div class="scroll"><table class="matrix">'
        f"<thead><tr><th>true ↓ predicted →</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _scores(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    predicted = [sum(column) for column in zip(*counts, strict=True)]
    rows = []
    for index, (label, row) in enumerate(zip(labels, counts, strict=True)):
        hits, support = row[index], sum(row)
        precision, recall = hits / predicted[index] if predicted[index] else 0.0, hits / support if support else 0.0
        f1 = 2 * hits / (support + predicted[index]) if support + predicted[index] else 0.0
        rows.append([label, f"{precision:.3f}", f"{recall:.3f}", f"{f1:.3f}", f"{support:,}"])
    return f"<h3>By label</h3>{table(['label', 'precision', 'recall', 'F1', 'rows'], rows)}"


def _worst(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    cells = [
        [number(row["loss"], 3), row["label"], row["predicted"], _shortened(row["text"]), row["location"]]
        for row in rows
    ]
    return f"<h3>Rows with the highest loss</h3>{table(['loss', 'label', 'predicted', 'text', 'row'], cells, 'n--t-')}"


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
            f"<dt>{name}</dt><dd>{escape(_shortened(text.strip()))}</dd>" for name, text in parts if text is not None
        )
        blocks.append(f'<dl class="sample">{inner}</dl>')
    return paragraph(str(samples.get("note", "")), "soft") + "".join(blocks)
