"""docs/architecture.md: its table of layers is the one that imports are checked by, and its files exist."""

import re
from pathlib import Path

from test_shape import LAYERS, SOURCE

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


def test_the_layers_are_those_of_the_code():
    section = PAGE.partition("## Layers")[2].partition("\n## ")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in section.splitlines() if line.startswith("| `")]
    modules = {path.stem for path in SOURCE.iterdir()}
    expected = [[name for name in names if name in modules] for names in LAYERS[:-1]]  # but for __main__
    assert rows == [names for names in expected if names]


def test_the_files_exist():
    named = re.findall(r"`((?:src/trimtab/|tests/)?\w+/[\w/]*\w+\.py)`", PAGE)
    assert len(named) > 10
    root = SOURCE.parents[1]
    assert not [name for name in named if not (SOURCE / name).exists() and not (root / name).exists()]
