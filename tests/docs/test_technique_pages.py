"""docs/techniques/: one page for each technique, with a picture of our own tools, and keys that a recipe takes."""

import re
from pathlib import Path

import pytest

from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import read_yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "techniques").glob("*.md"))
NAMES = {
    *("mixed-precision", "gradient-accumulation", "gradient-checkpointing", "lora", "optimizers", "attention"),
    *("offload", "distillation", "quantization", "clustering"),
}


def test_the_pages_are_these_and_all_are_linked():
    assert {page.stem for page in PAGES} == NAMES
    overview = (ROOT / "docs" / "techniques.md").read_text()
    assert set(re.findall(r"\]\(techniques/([\w-]+)\.md\)", overview)) >= NAMES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_picture_and_says_when_to_use_it(page):
    text = page.read_text()
    assert "\n## When to use it\n" in text
    timelines, pictures = ((ROOT / "benchmarks" / f"{name}.py").read_text() for name in ("timelines", "pictures"))
    drawn = {*re.findall(r'"([\w-]+)": Picture\(', timelines), *re.findall(r"technique-([\w-]+)\.svg", pictures)}
    assert len(drawn) > 10
    pictures = re.findall(r"!\[[^\]]{40,}\]\(\.\./images/([\w.-]+)\)", text)
    assert pictures
    named = {re.sub(r"^technique-|\.svg$", "", picture) for picture in pictures}
    assert named <= drawn


CAPTIONS = [
    (page.name, caption, name)
    for page in [*PAGES, ROOT / "docs" / "techniques.md"]
    for caption, name in re.findall(r"!\[([^\]]+)\]\([./]*images/(technique-[\w-]+\.svg)\)", page.read_text())
]


@pytest.mark.parametrize(("page", "caption", "name"), CAPTIONS, ids=[name for _, _, name in CAPTIONS])
def test_captions_say_what_the_pictures_show(page, caption, name):
    """Peaks in the words for a picture are those that are written in it; without visible text there would be none."""
    drawing = (ROOT / "docs" / "images" / name).read_text()
    assert "scale(0.0)" not in drawing, "letters of no size"
    peaks = re.findall(r">([\d.]+) GiB<", drawing)
    assert set(re.findall(r"\d+\.\d", caption)) <= set(peaks), f"{page}: {caption}"


BLOCKS = [
    (page.stem, block)
    for page in PAGES
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_every_block_is_part_of_a_recipe(name, block):
    assert len(BLOCKS) >= len(NAMES) - 2  # quantization and clustering have commands
    values = read_yaml(block, name).values
    Recipe(**{"model": "bert-base-uncased", "data": {"train": "reviews.csv"}, **values})
