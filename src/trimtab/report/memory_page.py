"""One HTML page with the memory of a step: stacked areas over time, the parts at the peak, and the largest tensors.

`render_memory_page` takes records and returns text; every string in them is escaped.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from trimtab import __version__
from trimtab.report.memory_page_assets import SCRIPT, STYLE
from trimtab.report.page.document import MARK
from trimtab.report.part_colors import css_name
from trimtab.report.step_record import ALLOCATED, LikeTensors, Moment, StepRecord
from trimtab.units import format_bytes

_NUM_POINTS = 800  # more than a screen has, for a closer look
_NUM_TENSORS = 15
_WIDTH, _HEIGHT = 1000, 400  # size of the picture in its own coordinates; it is stretched to the page
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_UNITS = ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB"))
_NAMELESS = {
    "weights": "buffer for weights from host memory",
    "optimizer state": "buffer for state from host memory",
}
_OPS = {"_to_copy": "cast to another dtype", "compiled.fused": "fused kernel"}
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}  # if there is little space


@dataclass(frozen=True)
class MemoryPage:
    """The contents of a page.

    Attributes:
        title: Its heading.
        records: The steps to draw, one below another with the same scale.
        facts: Facts about the step, by name: model, device, plan …
        limit_bytes: Bytes that may be allocated: the budget minus memory outside the allocator; None if unknown.
        notes: Sentences below the pictures.
        problem: What is wrong with the step, above the pictures; empty if it fits.
    """

    title: str
    records: Sequence[StepRecord]
    facts: Mapping[str, str] = field(default_factory=dict)
    limit_bytes: int | None = None
    notes: Sequence[str] = ()
    problem: str = ""


def render_memory_page(page: MemoryPage) -> str:
    """Return the page as HTML, without references to external files."""
    peaks = [record.peak() for record in page.records]
    highest = max(peak.num_bytes for peak in peaks)
    shown_limit = page.limit_bytes if page.limit_bytes and page.limit_bytes <= 1.6 * highest else None
    scale = _Scale(max(highest, shown_limit or 0), shown_limit)
    pairs = list(zip(page.records, peaks, strict=True))
    pictures = [_picture(record, peak, scale, number) for number, (record, peak) in enumerate(pairs)]
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in page.facts.items())
    notes = "".join(f'<p class="muted">{escape(note)}</p>' for note in page.notes)
    body = "\n".join(
        [
            f"<h1>{escape(page.title)}</h1>",
            f"<dl>{facts}</dl>" if facts else "",
            f'<p class="problem">{escape(page.problem)}</p>' if page.problem else "",
            *pictures,
            "<h2>Parts at the peak</h2>",
            _comparison(page.records, peaks),
            _parts_table(page.records, peaks),
            *(_tensors_table(record, peak, is_only=len(pairs) == 1) for record, peak in pairs),
            notes,
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'{MARK} {escape(__version__)}">\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def describe_peak(record: StepRecord, peak: Moment) -> str:
    """One sentence about the peak: how much, and when."""
    size = format_bytes(peak.num_bytes)
    if not record.times:
        return f"{size} allocated"
    share = f"{peak.position:.0%} into the step"
    if record.is_timed:
        share += f" ({_seconds(peak.position * record.seconds)} of {_seconds(record.seconds)})"
    needed = _needed(record, peak)
    unit = _unit(needed)
    whole = f"; {_number(needed, unit)} {unit[1]} needed in all" if record.beyond else ""
    return f"{size} allocated at the peak, in {peak.stage}, {share}{whole}"


def _needed(record: StepRecord, peak: Moment) -> int:
    """Bytes that the step needs in all, which `trimtab plan` shows."""
    return peak.num_bytes + sum(record.beyond.values())


def describe_tensors(group: LikeTensors) -> str:
    """One line about tensors of one kind."""
    size = format_bytes(group.num_bytes)
    each = f"{group.count} × {size} = {format_bytes(group.total_bytes)}" if group.count > 1 else size
    where = ", ".join(text for text in (group.name or _NAMELESS.get(group.part, ""), _op(group)) if text)
    return f"{each}: {group.part}" + (f", {where}" if where else "")


def _op(group: LikeTensors) -> str:
    """The operation that characterizes a tensor: not the one that filled optimizer state with zeros."""
    if group.part not in ("activations", "logits and loss", "temporaries"):
        return ""
    return _OPS.get(group.op, group.op)


# ---------------------------------------------------------------------- one record


class _Scale:
    """Heights in the coordinates of a picture.

    Args:
        highest: The maximum number of bytes that is drawn.
        limit: Bytes to draw a line at.
    """

    def __init__(self, highest: int, limit: int | None) -> None:
        self.limit = limit
        self._top = 1.12 * max(highest, 1)
        rough = self._top / 6
        power = 2 ** math.floor(math.log2(rough))
        base = _GIB if self._top >= 2 * _GIB else _MIB if self._top >= 2 * _MIB else 1024
        steps = [base * mantissa * 10**exponent for exponent in range(-2, 5) for mantissa in (1, 2, 5)]
        step = min((step for step in steps if step >= rough), default=power)
        self.ticks = [step * number for number in range(int(self._top // step) + 1)]

    def share(self, num_bytes: float) -> float:
        """Height as a share of the picture."""
        return num_bytes / self._top

    def y(self, num_bytes: float) -> float:
        """Height in the coordinates of the picture, which count from the top."""
        return round(_HEIGHT * (1 - self.share(num_bytes)), 1)


def _picture(record: StepRecord, peak: Moment, scale: _Scale, number: int) -> str:
    heading = f"{record.source.capitalize()} on {record.device}" if record.device else record.source.capitalize()
    moments = record.timeline(_NUM_POINTS)
    picture = _plot(record, moments, peak, scale, number) if record.times else _bar(peak)
    words = escape(describe_peak(record, peak))
    return f"<h2>{escape(heading)}</h2>\n<p>{words}.</p>\n{_legend(moments)}\n{picture}"


def _legend(moments: Sequence[Moment]) -> str:
    items = [
        f'<span class="{css_name(part)}" style="white-space: nowrap"><span class="swatch"></span>{escape(part)}</span>'
        for part in ALLOCATED
        if any(moment.parts[part] for moment in moments)
    ]
    return f'<p class="muted">{" &ensp; ".join(items)}</p>'


def _bar(peak: Moment) -> str:
    whole = peak.num_bytes or 1
    spans = "".join(
        f'<span class="{css_name(part)}" style="width: {100 * size / whole:.2f}%" '
        f'title="{escape(part)}: {format_bytes(size)}"></span>'
        for part, size in peak.parts.items()
        if size
    )
    return f'<div class="bar">{spans}</div>'


def _plot(record: StepRecord, moments: Sequence[Moment], peak: Moment, scale: _Scale, number: int) -> str:
    spans = record.stage_spans()
    svg = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"Memory over the step: {describe_peak(record, peak)}")}">',
        *_shades(spans),
        *(f'<path class="grid" d="M0 {scale.y(tick)}H{_WIDTH}"/>' for tick in scale.ticks[1:]),
        *_areas(moments, scale),
        *(f'<path class="border" d="M{_WIDTH * begin:.1f} 0V{_HEIGHT}"/>' for _, begin, _ in spans[1:]),
    ]
    if scale.limit is not None:
        svg.append(f'<path class="limit" d="M0 {scale.y(scale.limit)}H{_WIDTH}"/>')
    labels = [_peak_label(peak, scale)]
    if scale.limit is not None:
        words = f"limit {format_bytes(scale.limit)}"
        labels.append(f'<span class="limit-name" style="bottom: {100 * scale.share(scale.limit):.2f}%">{words}</span>')
    points = f"points-{number}"
    heights = "".join(
        f'<span style="bottom: {100 * scale.share(tick):.2f}%">{format_bytes(int(tick)) if tick else "0"}</span>'
        for tick in scale.ticks
    )
    return (
        f'<figure><div class="frame"><div class="stages">{_stage_labels(spans)}</div>'
        f'<div class="heights">{heights}</div>'
        f'<div class="plot" tabindex="0" data-points="{points}">{"".join(svg)}</svg>{"".join(labels)}'
        f'<div class="chosen"></div><div class="cursor"></div><div class="tip"></div></div>'
        f'<div class="times">{_time_labels(record)}</div></div></figure>'
        f'<script type="application/json" id="{points}">{_points(record, moments, peak)}</script>'
    )


def _areas(moments: Sequence[Moment], scale: _Scale) -> list[str]:
    """One area for each part, as steps; the parts below it are the lower edge."""
    xs = [0.0, *(round(_WIDTH * moment.position, 2) for moment in moments[1:]), _WIDTH]
    lower = [0] * len(moments)
    areas = []
    for part in ALLOCATED:
        upper = [low + moment.parts[part] for low, moment in zip(lower, moments, strict=True)]
        if upper != lower:
            there = _steps(xs, [scale.y(value) for value in upper])
            back = _steps([_WIDTH - x for x in reversed(xs)], [scale.y(value) for value in reversed(lower)])
            returned = [(round(_WIDTH - x, 2), y) for x, y in back]
            areas.append(f'<path class="area {css_name(part)}" d="{_path([*there, *returned])}Z"/>')
        lower = upper
    return areas


def _steps(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of a line with one level between each x and the next, without redundant corners."""
    corners = [(xs[0], ys[0])]
    for x, before, after in zip(xs[1:], ys, ys[1:], strict=False):
        if after != before:
            corners += [(x, before), (x, after)]
    return [*corners, (xs[-1], ys[-1])]


def _path(corners: Sequence[tuple[float, float]]) -> str:
    text, (x, y) = f"M{corners[0][0]:g} {corners[0][1]:g}", corners[0]
    for next_x, next_y in corners[1:]:
        if next_x != x:
            text += f"H{next_x:g}"
        if next_y != y:
            text += f"V{next_y:g}"
        x, y = next_x, next_y
    return text


def _shades(spans: Sequence[tuple[str, float, float]]) -> list[str]:
    return [
        f'<rect class="shade" x="{_WIDTH * begin:.1f}" y="0" width="{_WIDTH * (end - begin):.1f}" height="{_HEIGHT}"/>'
        for number, (_, begin, end) in enumerate(spans)
        if number % 2
    ]


def _stage_labels(spans: Sequence[tuple[str, float, float]]) -> str:
    """The names of the stages; a press on one shows it alone, and another one the whole step."""
    return "".join(
        f'<button type="button" style="left: {100 * begin:.2f}%; width: {100 * (end - begin):.2f}%" '
        f'data-begin="{begin:.5f}" data-end="{end:.5f}" title="{escape(name)}: show it alone, or the whole step again">'
        f"<b>{escape(name)}</b><i>{escape(_SHORT.get(name, name[:3]))}</i></button>"
        for name, begin, end in spans
    )


def _time_labels(record: StepRecord) -> str:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    if not record.is_timed:
        return '<span style="left: 0">start of the step</span><span style="left: 100%">end</span>'
    return "".join(
        f'<span style="left: {100 * share:g}%">{_seconds(share * record.seconds)}</span>' for share in shares
    )


def _peak_label(peak: Moment, scale: _Scale) -> str:
    side = " left" if peak.position < 0.08 else " right" if peak.position > 0.92 else ""
    place = f"left: {100 * peak.position:.2f}%; top: {100 * (1 - scale.share(peak.num_bytes)):.2f}%"
    return f'<span class="peak{side}" style="{place}">{format_bytes(peak.num_bytes)}</span>'


def _points(record: StepRecord, moments: Sequence[Moment], peak: Moment) -> str:
    stages = list(dict.fromkeys(moment.stage for moment in moments))
    data = {
        "names": list(ALLOCATED),
        "stages": stages,
        "peak": next((index for index, moment in enumerate(moments) if moment.change == peak.change), 0),
        "at": [round(moment.position, 5) for moment in moments],
        "seconds": record.seconds if record.is_timed else 0,
        "stage": [stages.index(moment.stage) for moment in moments],
        "parts": [[round(moment.parts[part] / _MIB, 2) for part in ALLOCATED] for moment in moments],
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _seconds(seconds: float) -> str:
    if not seconds:
        return "0"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


# ---------------------------------------------------------------------- tables


def _tensors_table(record: StepRecord, peak: Moment, *, is_only: bool) -> str:
    rows = []
    unit = _unit(peak.num_bytes)
    for group in record.largest(peak.change, _NUM_TENSORS):
        each = f"{group.count} × {format_bytes(group.num_bytes)}" if group.count > 1 else ""
        detail = ", ".join(text for text in (group.part, _op(group), each) if text)
        rows.append(
            f'<tr class="{css_name(group.part)}"><td class="number">{_number(group.total_bytes, unit)}</td>'
            f'<td><div class="named"><span class="swatch"></span><span>{_name(group)}<br>'
            f"<small>{escape(detail)}</small></span></div></td></tr>"
        )
    which = "" if is_only else f", {record.source}"
    return (
        f"<h2>Largest tensors at the peak{escape(which)}</h2>\n"
        '<p class="muted">Tensors of equal blocks are in one row; * is the number of the block.</p>\n'
        f'<table class="tensors"><thead><tr><th class="number">{unit[1]}</th><th>module or parameter</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _name(group: LikeTensors) -> str:
    if not group.name:
        return "loss" if group.part == "logits and loss" else _NAMELESS.get(group.part, "no module")
    return f"<code>{escape(group.name)}</code>"


def _unit(largest: int) -> tuple[int, str]:
    """The unit of all numbers of a table, so that they can be compared and added up."""
    return next((unit for unit in _UNITS if largest >= unit[0]), _UNITS[-1])


def _number(num_bytes: int, unit: tuple[int, str]) -> str:
    number = num_bytes / unit[0]
    return f"{number:,.2f}" if number >= 0.01 or not num_bytes else "< 0.01"


def _comparison(records: Sequence[StepRecord], peaks: Sequence[Moment]) -> str:
    """The difference between a measured step and the predicted one; empty unless there are both."""
    sizes = {record.source: peak.num_bytes for record, peak in zip(records, peaks, strict=True) if record.times}
    if set(sizes) != {"predicted", "measured"}:
        return ""
    return (
        f"<p>The measured peak differs from the predicted one by {sizes['measured'] / sizes['predicted'] - 1:+.1%}.</p>"
    )


def _parts_table(records: Sequence[StepRecord], peaks: Sequence[Moment]) -> str:
    pairs = list(zip(records, peaks, strict=True))
    unit = _unit(max(_needed(record, peak) for record, peak in pairs))

    def row(name: str, sizes: Sequence[int | None], css: str) -> str:
        cells = "".join(f'<td class="number">{"" if size is None else _number(size, unit)}</td>' for size in sizes)
        return f'<tr class="{css}"><td>{name}</td>{cells}</tr>'

    rows = [
        row(f'<span class="swatch"></span>{escape(part)}', [peak.parts.get(part, 0) for peak in peaks], css_name(part))
        for part in ALLOCATED
        if any(peak.parts.get(part) for peak in peaks)
    ]
    rows.append(row("allocated", [peak.num_bytes for peak in peaks], "sum"))
    beyond = list(dict.fromkeys(name for record in records for name in record.beyond))
    rows += [row(escape(name), [record.beyond.get(name) for record in records], "") for name in beyond]
    if beyond:
        sums = [_needed(record, peak) if record.beyond else None for record, peak in pairs]
        rows.append(row("needed in all", sums, "sum"))
    heads = "".join(f'<th class="number">{escape(record.source)}, {unit[1]}</th>' for record in records)
    return f"<table><thead><tr><th>part</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
