"""docs/memory.md says for cards of 4 to 80 GB what the planner predicts: `python benchmarks/cards.py` writes it."""

import importlib
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?= \|| tokens)")
OUTDATED = "run: python benchmarks/cards.py"


@pytest.fixture
def cards(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("cards")
    sys.modules.pop("cards")


def numbers_of(line):
    return [float(number.replace(",", "")) for number in NUMBER.findall(line)]


def assert_same_lines(written, made):
    """The same words and flags; numbers to their last digit, which differs between versions of libraries."""
    assert [NUMBER.sub("", line) for line in written] == [NUMBER.sub("", line) for line in made], OUTDATED
    for line, other in zip(written, made, strict=True):
        assert numbers_of(line) == pytest.approx(numbers_of(other), rel=0.02, abs=0.11), OUTDATED


def test_every_card_has_a_line_for_every_job(cards):
    assert [card.size_gb for card in cards.CARDS] == [4, 8, 16, 24, 48, 80]
    for card in cards.CARDS:
        lines = cards.written(card)
        for job in cards.JOBS:
            assert any(line.startswith(f"| {job.name}") for line in lines), f"{card.size_gb} GB: {job.name}; {OUTDATED}"


def test_a_line_is_what_the_planner_predicts(cards):
    """One prediction, of the first job: the others take a minute each."""
    card, job = cards.CARDS[1], cards.JOBS[0]
    line = next(line for line in cards.written(card) if line.startswith(f"| {job.name}"))
    sets = re.findall(r"--set (\S+?)(?=[ `])", line)
    found = cards.predict(job, card, tuple(sets))
    assert found.fits
    assert_same_lines([line], [cards.line_of(job.name, found)])


@pytest.mark.slow
@pytest.mark.parametrize("size_gb", [4, 8, 16, 24, 48, 80])
def test_the_page_is_what_the_planner_predicts(cards, size_gb):
    card = next(card for card in cards.CARDS if card.size_gb == size_gb)
    assert_same_lines(cards.written(card), cards.section(card))
