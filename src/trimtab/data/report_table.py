"""Format a `DataReport` with rich. Everything shown in colour also has a character, for logs without colours."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.data.report import DataReport, SetSizes, ShownExample, ShownToken

_MAX_TOKENS, _SPARE_TOKENS = 120, 20
_MAX_LABELS = 20
_MAX_CHARACTERS = 400
_BAR_WIDTH = 40
_SPECIAL, _LOSS, _FAINT, _WARNING = "bold cyan", "green", "dim", "bold yellow"


def render(report: DataReport) -> RenderableType:
    """Format the whole report, examples first."""
    parts: list[RenderableType] = [Text(f"task: {report.task}", style="bold")]
    columns = ((role, [name] if isinstance(name, str) else name) for role, name in report.columns.items())
    parts.append(Text("columns: " + ", ".join(f"{role} from {' + '.join(names)}" for role, names in columns)))
    for number, example in enumerate(report.examples, 1):
        parts += [Text(""), *_example(example, number)]
    parts += [Text(""), *_legend(report), Text(""), _sets(report), Text(""), _histogram(report)]
    if report.labels:
        parts += [Text(""), _labels(report)]
    parts += [Text(""), *_shared(report)]
    return Group(*parts)


def _example(example: ShownExample, number: int) -> list[RenderableType]:
    head = (
        f"example {number}" + (f" ({example.location})" if example.location else "") + f", {len(example.tokens)} tokens"
    )
    lines: list[RenderableType] = [Text(head, style="bold"), _token_line("  tokens: ", example.tokens)]
    if example.target:
        lines.append(_token_line("  target: ", example.target))
    lines.append(Text("  text: ").append(_shorten(example.text), style=_FAINT))
    if example.label is not None:
        lines.append(Text("  label: ").append(example.label, style=_LOSS))
    return lines


def _token_line(title: str, tokens: tuple[ShownToken, ...]) -> Text:
    """Format tokens, with ⟦ ⟧ around spans that carry loss; for long rows, only the start and the end."""
    line = Text(title)
    half = _MAX_TOKENS // 2
    # Hiding fewer than _SPARE_TOKENS is not worth the ellipsis.
    hidden = range(half, len(tokens) - half) if len(tokens) > _MAX_TOKENS + _SPARE_TOKENS else range(0)
    is_open = False
    for index, token in enumerate(tokens):
        if index in hidden:
            if index == hidden.start:
                line.append("⟧ " if is_open else "").append(f"… {len(hidden)} more … ", style=_FAINT)
                is_open = False
            continue
        if token.carries_loss != is_open:
            line.append("⟦" if token.carries_loss else "⟧ ")
            is_open = token.carries_loss
        line.append(token.text, style=_SPECIAL if token.is_special else _LOSS if token.carries_loss else "")
        if token.target is not None:
            line.append(f"→{token.target}", style=_LOSS)
        next_carries = index + 1 < len(tokens) and index + 1 not in hidden and tokens[index + 1].carries_loss
        line.append("" if is_open and not next_carries else " ")
    return line.append("⟧") if is_open else line


def _legend(report: DataReport) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(report.special_tokens, style=_SPECIAL)]
    if report.num_texts_with_special_tokens:
        lines.append(
            Text(
                f"{report.num_texts_with_special_tokens} texts contain special tokens, the first is "
                f"{report.first_text_with_special_tokens}: remove them from the data",
                style=_WARNING,
            )
        )
    if any(example.label is not None for example in report.examples):
        lines.append(Text("the loss is on the label, not on tokens"))
    else:
        lines.append(Text("⟦ ⟧ tokens with loss: what the model learns to generate"))
    return lines


def _sets(report: DataReport) -> Table:
    table = Table("", "train", "eval", box=None, pad_edge=False)
    sets = (report.train, report.eval)
    for name, cell in (
        ("rows", lambda s: f"{s.num_rows:,}"),
        ("examples", lambda s: f"{s.num_examples:,}"),
        ("truncated", _truncated),
        ("tokens", lambda s: f"{s.num_tokens:,}"),
        ("tokens with loss", lambda s: "–" if s.num_loss_tokens is None else f"{s.num_loss_tokens:,}"),
        ("shortest / median / 95% / longest", lambda s: f"{s.shortest} / {s.median} / {s.p95} / {s.longest}"),
    ):
        table.add_row(name, *("–" if facts is None else cell(facts) for facts in sets))
    return table


def _truncated(facts: SetSizes) -> str:
    return f"{facts.num_truncated:,} ({facts.num_truncated / max(facts.num_rows, 1):.1%})"


def _histogram(report: DataReport) -> Table:
    table = Table("tokens", "examples", "", box=None, pad_edge=False, title_justify="left")
    most = max((found.num_examples for found in report.histogram), default=1)
    for found in report.histogram:
        bar = "█" * round(_BAR_WIDTH * found.num_examples / most)
        bar = bar or ("▏" if found.num_examples else "")
        table.add_row(f"{found.first}–{found.last}", f"{found.num_examples:,}", bar)
    return table


def _labels(report: DataReport) -> Table:
    table = Table("label", "train", "eval", box=None, pad_edge=False)
    totals = [sum(count.num_train for count in report.labels), sum(count.num_eval for count in report.labels)]
    most_frequent = sorted(report.labels, key=lambda count: -count.num_train)
    for count in most_frequent[:_MAX_LABELS]:
        cells = (
            f"{n:,} ({n / max(total, 1):.1%})"
            for n, total in zip((count.num_train, count.num_eval), totals, strict=True)
        )
        table.add_row(Text(count.name), *cells)
    if len(most_frequent) > _MAX_LABELS:
        table.add_row(f"… {len(most_frequent) - _MAX_LABELS} more", "", "")
    return table


def _shared(report: DataReport) -> list[RenderableType]:
    if report.eval is None:
        return [Text("no eval set")]
    if not report.num_shared_texts:
        return [Text("no text is in both train and eval")]
    lines: list[RenderableType] = [
        Text(
            f"{report.num_shared_texts} texts are in both train and eval ({report.num_shared_eval_rows} eval rows): "
            "metrics on them are too optimistic",
            style=_WARNING,
        )
    ]
    for shared in report.shared_texts:
        lines.append(
            Text(f"  {shared.train_location} = {shared.eval_location}: ").append(
                _shorten(" ".join(shared.text.split()), 80), style=_FAINT
            )
        )
    return lines


def _shorten(text: str, limit: int = _MAX_CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
