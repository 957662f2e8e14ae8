"""The data of a run in its report: rows, lengths, labels and truncated rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.report.page.document import bars, fold, paragraph, table

_MAX_LABELS = 200
_MAX_UNFOLDED = 12  # labels of a table that is not folded


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
    facts = paragraph(f"Task: {card['task']}. {f'Columns: {columns}.' if columns else ''}{_how_split(sets)}")
    return (
        facts
        + "".join(map(paragraph, card.get("notices", ())))
        + '<div class="columns"><div>'
        + f"<h3>Sizes</h3>{table(['', *(name for name, _ in sets)], rows)}"
        + "</div><div>"
        + _histogram(card.get("histogram", ()))
        + "</div></div>"
        + _labels(card.get("labels", ()))
    )


_LENGTHS = (("shortest", "shortest"), ("median", "median"), ("95% quantile of the", "p95"), ("longest", "longest"))


def _how_split(sets: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    if all(of["num_rows"] == of["num_examples"] for _, of in sets):
        return ""
    return " An example is what the model sees as one sequence: rows are joined or split into examples."


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
    found = table(["label", "training", "held-out"], rows) + paragraph(more, "soft")
    if len(most) > _MAX_UNFOLDED:
        title = f"{len(most):,} labels, with {most[-1]['num_train']:,} to {most[0]['num_train']:,} training rows each"
        found = fold(title, found)
    return f"<h3>Labels</h3>{found}"
