"""Memory by its parts as stacked bars, in the colors that all reports share."""

from collections.abc import Mapping, Sequence

from trimtab.report.page.document import bars, escape
from trimtab.units import format_bytes

# Parts that live through a step are blue and green, transient ones warm colors, overhead grey.
_COLORS = {
    "weights": "var(--s0)",
    "gradients": "var(--s5)",
    "optimizer state": "var(--s2)",
    "activations": "var(--s1)",
    "logits and loss": "var(--s4)",
    "temporaries": "var(--s6)",
}
_OVERHEAD = "var(--s7)"


def memory_bars(rows: Sequence[tuple[str, Mapping[str, int | None]]]) -> str:
    """Return a bar for each of some names with the bytes of its parts, and a legend."""
    used = list(dict.fromkeys(part for _, parts in rows for part, size in parts.items() if size))
    drawn = []
    for name, parts in rows:
        sizes = [(part, size) for part, size in parts.items() if size]
        inner = [(size, _COLORS.get(part, _OVERHEAD), f"{part}: {format_bytes(size)}") for part, size in sizes]
        drawn.append((name, inner, format_bytes(sum(size for _, size in sizes))))
    legend = "".join(
        f'<span><i class="swatch" style="color:{_COLORS.get(part, _OVERHEAD)}"></i>{escape(part)}</span>'
        for part in used
    )
    if all(len(parts) == 1 for _, parts in rows):  # each bar has the name of its part
        return bars(drawn)
    return f'<div class="legend">{legend}</div>{bars(drawn)}' if used else ""
