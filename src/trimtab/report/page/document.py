"""The skeleton of a report: one HTML file without external references, with its style, script and data."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape as escape_html
from importlib.resources import files
from typing import Any

from trimtab import __version__
from trimtab.report.part_colors import PART_COLORS

PAGE = "report.html"  # its name in the folder of a run or of a comparison
MARK = '<meta name="generator" content="trimtab'  # the text by which a report is recognized
_ASSETS = "trimtab.report.page"
_NOT_ALLOWED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def escape(value: object) -> str:
    """Return text for HTML. Everything that comes from a user, a recipe or a data set goes through this function.

    Control characters and halves of surrogate pairs, which HTML and UTF-8 do not allow, become replacement characters.
    """
    return escape_html(_NOT_ALLOWED.sub("\ufffd", str(value)), quote=True)


def document(title: str, body: str, charts: Sequence[Mapping[str, Any]] = (), *, tag: str | None = None) -> str:
    """Return the whole page.

    Args:
        title: Title of the browser's tab.
        body: HTML of the page.
        charts: The charts that `body` has places for (`trimtab.report.page.charts`).
        tag: The version of this content, with which the page refreshes itself from its server; None for a static page.
    """
    css, js = (files(_ASSETS).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    watch = "" if tag is None else f' data-watch="{escape(tag)}"'
    return (
        f'<!doctype html>\n<html lang="en"{watch}>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'{MARK} {escape(__version__)}">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{PART_COLORS}{css}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"<footer>Written by trimtab {escape(__version__)}.</footer>\n</main>\n"
        f'<script type="application/json" id="chart-data">{script_json({"charts": list(charts)})}</script>\n'
        f"<script>\n{js}</script>\n</body>\n</html>\n"
    )


def script_json(value: Any) -> str:
    """Return JSON that cannot end the script element that contains it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def section(anchor: str, title: str, *parts: str) -> str:
    """Return a section with a heading; empty if all parts are."""
    content = "\n".join(part for part in parts if part)
    return f'<section id="{anchor}">\n<h2>{escape(title)}</h2>\n{content}\n</section>' if content else ""


def navigation(sections: Sequence[tuple[str, str, str]]) -> str:
    """Return links to the sections, each given as anchor, title and HTML; empty ones are left out."""
    links = [f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title, html in sections if html]
    return f"<nav>{' '.join(links)}</nav>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; empty without text."""
    return f"<p{_class(kind)}>{escape(text)}</p>" if text else ""


def code(text: str) -> str:
    """Return a block of code."""
    return f"<pre><code>{escape(text)}</code></pre>"


def fold(title: str, content: str) -> str:
    """Return content that is shown when its title is clicked; empty without content."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Return large figures, each given as name, value and a smaller remark."""
    cells = []
    for name, value, remark in facts:
        small = f"<small>{escape(remark)}</small>" if remark else ""
        cells.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>")
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kinds: str = "", css: str = "") -> str:
    """Return a table; empty without rows.

    Args:
        header: Titles of the columns; no header row if all are empty.
        rows: The cells.
        kinds: A letter for each column: `h` heading of its row, `n` number, `t` long text, `l` label or other text of a
            user, `k` key, `v` value, `-` plain. By default a heading, then numbers.
        css: A class of the table; `cards` stacks the cells of a row on a narrow screen.
    """
    if not rows:
        return ""
    kinds = kinds or "h" + "n" * (len(header) - 1)
    heads = "".join(f"<th{_class('n' if kind == 'n' else '')}>{escape(t)}</th>" for t, kind in zip(header, kinds))  # noqa: B905
    titles = header if css == "cards" else [""] * len(header)
    body = "".join(
        f"<tr>{''.join(_cell(*parts) for parts in zip(row, kinds, titles, strict=True))}</tr>\n" for row in rows
    )
    head = f"<thead><tr>{heads}</tr></thead>" if any(header) else ""
    return f'<div class="scroll"><table{_class(css)}>{head}<tbody>\n{body}</tbody></table></div>'


_CLASSES = {"n": "n", "t": "text", "l": "label", "k": "key", "v": "value"}


def _cell(text: str, kind: str, title: str) -> str:
    if kind == "h":
        return f'<th scope="row">{escape(text)}</th>'
    inner = escape(text)
    if kind in ("k", "l"):  # a long key or label may break after a dot or an underscore
        inner = re.sub(r"([._])", r"\1<wbr>", inner)
    attribute = f' data-title="{escape(title)}"' if title else ""
    return f"<td{_class(_CLASSES.get(kind, ''))}{attribute}>{inner}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def bars(rows: Sequence[tuple[str, Sequence[tuple[float, str, str]], str]]) -> str:
    """Return horizontal bars; the longest one has the full width.

    Args:
        rows: A name, parts and a text. A part is a size, a CSS color and a title.
    """
    largest = max((sum(size for size, _, _ in parts) for _, parts, _ in rows), default=0.0) or 1.0
    cells = []
    for name, parts, text in rows:
        inner = "".join(
            f'<i style="width:{100 * size / largest:.2f}%;background:{color}" title="{escape(title)}"></i>'
            for size, color, title in parts
            if size > 0
        )
        cells.append(f'<span>{escape(name)}</span><span class="bar">{inner}</span><span>{escape(text)}</span>')
    return f'<div class="bars">{"".join(cells)}</div>' if rows else ""


def number(value: Any, places: int = 4) -> str:
    """Return a number as text; a dash for None and for numbers that are not finite."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{places}f}" if abs(value) >= 10**-places or value == 0 else f"{value:.2e}"
