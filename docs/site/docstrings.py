"""Google-style docstrings as Markdown."""

import inspect
import re

_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note):$")
_ITEM = re.compile(r"^(\*{0,2}\w[\w., ]*): (.*)$")


def markdown_of(docstring: str | None) -> str:
    """The docstring as paragraphs, with the items of each section as a list."""
    paragraphs: list[str] = []
    section, lines = "", list[str]()
    for line in [*inspect.cleandoc(docstring or "").splitlines(), "End:"]:
        heading = _SECTION.match(line)
        if heading or line == "End:":
            paragraphs.append(_as_markdown(section, lines))
            section, lines = (heading[1] if heading else ""), []
        else:
            lines.append(line)
    return "\n\n".join(text for text in paragraphs if text)


def summary_of(docstring: str | None) -> str:
    """The first paragraph, on one line."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())


def _as_markdown(section: str, lines: list[str]) -> str:
    text = inspect.cleandoc("\n".join(lines))
    if not text or not section:
        return text
    if section in ("Args", "Attributes", "Raises"):
        items = [f"- `{name}`: {' '.join(words)}" for name, words in _items(text)]
        title = {"Args": "Arguments", "Raises": "Raises", "Attributes": "Attributes"}[section]
        return f"**{title}**\n\n" + "\n".join(items)
    if section.startswith("Example"):
        return f"**Example**\n\n```py\n{text}\n```"
    return f"**{section}** {text}"


def _items(text: str) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        item = _ITEM.match(line)
        if item:
            found.append((item[1], [item[2]]))
        elif found:
            found[-1][1].append(line.strip())
    return found
