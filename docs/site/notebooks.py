"""Makes a notebook of each tutorial: `python docs/site/notebooks.py` writes docs/tutorials/*.ipynb.

The Markdown file is the only source. Its blocks become cells: Python as it is, commands with an exclamation mark, a
block with a title as a file that the cell writes; everything else is text. Notebooks have no outputs.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
_FENCE = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```\n', re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A part of a tutorial.

    Attributes:
        kind: "text", "python", "sh" or "file".
        text: Its contents, without the fence.
        name: The name of a file.
    """

    kind: str
    text: str
    name: str = ""


def blocks_of(page: str) -> Iterator[Block]:
    """The parts of a tutorial in order. Fences that are neither run nor written belong to the text around them."""
    text = ""
    begin = 0
    for fence in _FENCE.finditer(page):
        kind = "file" if fence["title"] else fence["language"]
        text += page[begin : fence.start()]
        begin = fence.end()
        if kind not in ("python", "sh", "file"):
            text += fence[0]
            continue
        if text.strip():
            yield Block("text", text.strip())
        text = ""
        yield Block(kind, fence["text"].rstrip("\n"), fence["title"] or "")
    if (text + page[begin:]).strip():
        yield Block("text", (text + page[begin:]).strip())


def commands_of(text: str) -> list[str]:
    """The commands of a block, one per line; a backslash at the end of a line continues it."""
    return [line.strip() for line in re.sub(r" *\\\n *", " ", text).splitlines() if line.strip()]


def notebook_of(page: str) -> str:
    """The notebook of a tutorial, as JSON."""
    cells = [_cell(index, block) for index, block in enumerate(blocks_of(page))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _cell(index: int, block: Block) -> dict[str, object]:
    if block.kind == "text":
        return {"cell_type": "markdown", "id": f"cell-{index}", "metadata": {}, "source": _lines(block.text)}
    text = block.text
    if block.kind == "sh":
        text = "\n".join(f"!{command}" for command in commands_of(text))
    elif block.kind == "file":
        text = f"%%writefile {block.name}\n{text}"
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": f"cell-{index}",
        "metadata": {},
        "outputs": [],
        "source": _lines(text),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Write the notebooks next to the tutorials."""
    for path in sorted(TUTORIALS.glob("*.md")):
        if path.name != "index.md":
            path.with_suffix(".ipynb").write_text(notebook_of(path.read_text()))


if __name__ == "__main__":
    main()
