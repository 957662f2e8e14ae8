"""Memory by its parts as stacked bars, in the colors that all reports share."""

from collections.abc import Mapping, Sequence

from trimtab.report.page.document import bars, escape
from trimtab.report.part_colors import LIGHT, css_name
from trimtab.units import format_bytes


def memory_bars(rows: Sequence[tuple[str, Mapping[str, int | None]]]) -> str:
    """Return a bar for each of some names with the bytes of its parts, and a legend."""
    used = list(dict.fromkeys(part for _, parts in rows for part, size in parts.items() if size))
    drawn = []
    for name, parts in rows:
        sizes = [(part, size) for part, size in parts.items() if size]
        inner = [(size, _color(part), f"{part}: {format_bytes(size)}") for part, size in sizes]
        drawn.append((name, inner, format_bytes(sum(size for _, size in sizes))))
    legend = "".join(f'<span><i class="swatch" style="color:{_color(part)}"></i>{escape(part)}</span>' for part in used)
    if all(len(parts) == 1 for _, parts in rows):  # each bar has the name of its part
        return bars(drawn)
    return f'<div class="legend">{legend}</div>{bars(drawn)}' if used else ""


def _color(part: str) -> str:
    """The color of a part; grey for what is not a part of device memory."""
    return f"var(--{css_name(part)})" if part in LIGHT else "var(--s7)"
