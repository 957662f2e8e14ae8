"""The memory page: complete in itself, escaped, and with the numbers of its records."""

import json
import re
from html.parser import HTMLParser

import pytest

from trimtab.report.memory_page import MemoryPage, describe_peak, describe_tensors, render_memory_page
from trimtab.report.step_record import Allocation, LikeTensors, StepRecord

MIB = 2**20
HOSTILE = '</script><script>alert("1")</script>&'


def record(**changes):
    usual = {
        "source": "predicted",
        "device": "t4",
        "allocations": (
            Allocation(300 * MIB, "weights", "model.weight"),
            Allocation(100 * MIB, "activations", "model.layers.0.up", "mm", 0, 2),
            Allocation(100 * MIB, "activations", "model.layers.1.up", "mm", 1),
        ),
        "times": (0.0, 0.01, 0.02),
        "stages": (("forward", 0), ("backward", 2)),
        "beyond": {"outside the allocator": 850 * MIB},
    }
    return StepRecord(**usual | changes)


class Reader(HTMLParser):
    """Checks that tags are closed in order; collects them, and the text of scripts."""

    VOID = ("meta", "br", "path", "rect")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def test_a_page_needs_nothing_outside_of_it():
    text = render_memory_page(MemoryPage("A step", [record(), record(source="measured")], {"model": "tiny"}))
    tags = Reader(text).tags
    assert not [tag for tag, attributes in tags if {"src", "href"} & set(attributes)]
    assert not re.search(r"https?://|url\(|@import|import\(|fetch\(", text)
    assert [name for name, _ in tags].count("svg") == 2
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_everything_is_escaped():
    named = record(device=HOSTILE, allocations=(Allocation(MIB, "weights", HOSTILE, HOSTILE),), beyond={HOSTILE: 1})
    page = MemoryPage(HOSTILE, [named], {HOSTILE: HOSTILE}, notes=[HOSTILE])
    text = render_memory_page(page)
    assert "<script>alert" not in text
    assert [name for name, _ in Reader(text).tags].count("script") == 2, "the points and the code"
    assert text.count("&lt;script&gt;alert") >= 6


def test_the_points_are_the_moments():
    page = render_memory_page(MemoryPage("A step", [record()]))
    data = json.loads(re.search(r'id="points-0">(.*?)</script>', page)[1])
    assert data["parts"][data["peak"]][0] == 300
    assert max(map(sum, data["parts"])) == 500
    assert data["stages"] == ["forward", "backward"]
    assert len(data["at"]) == len(data["stage"]) == len(data["parts"])


def test_parts_of_the_table_add_up_to_the_peak():
    text = render_memory_page(MemoryPage("A step", [record()]))
    table = text.partition("Parts at the peak")[2].partition("</table>")[0]
    sizes = [float(size) for size in re.findall(r">([\d.]+)</td>", table)]
    assert sizes == [0.29, 0.2, 0.49, 0.83, 1.32], "in the unit of the largest: the last one is what a plan shows"
    assert "predicted, GiB" in table


def test_measured_is_compared_with_predicted():
    larger = record(source="measured", allocations=(Allocation(525 * MIB, "weights"),))
    text = render_memory_page(MemoryPage("A step", [record(), larger]))
    assert "The measured peak differs from the predicted one by +5.0%." in text
    assert "differs" not in render_memory_page(MemoryPage("A step", [record()]))


@pytest.mark.parametrize(("limit", "shown"), [(520 * MIB, True), (8000 * MIB, False), (None, False)])
def test_a_limit_that_is_near_is_drawn(limit, shown):
    text = render_memory_page(MemoryPage("A step", [record()], limit_bytes=limit))
    assert ('class="limit"' in text) is shown


def test_a_single_moment_is_a_bar():
    text = render_memory_page(
        MemoryPage(
            "Out of memory",
            [
                record(
                    times=(),
                    stages=(),
                    allocations=(Allocation(3 * MIB, "weights", "a"), Allocation(MIB, "activations")),
                )
            ],
        )
    )
    assert '<div class="bar">' in text
    assert "width: 75.00%" in text
    assert "<svg" not in text


def test_the_peak_in_words():
    words = describe_peak(record(), record().peak())
    assert (
        words
        == "500.0 MiB allocated at the peak, in forward, 50% into the step (10 ms of 20 ms); 1.32 GiB needed in all"
    )
    (first, second, *_) = record().largest(1, 9)
    assert describe_tensors(first) == "300.0 MiB: weights, model.weight"
    assert describe_tensors(second) == "2 × 100.0 MiB = 200.0 MiB: activations, model.layers.*.up, mm"


def test_every_stage_is_marked_however_short():
    text = render_memory_page(
        MemoryPage("A step", [record(stages=(("forward", 0), ("backward", 2), ("optimizer", 3)))])
    )
    stages = re.findall(r'data-begin="([\d.]+)" data-end="([\d.]+)" title="(\w+)', text)
    assert [name for *_, name in stages] == ["forward", "backward", "optimizer"]
    assert text.count('class="border"') == 2


def test_tensors_without_a_module_say_what_they_are():
    buffer = LikeTensors("", "empty", "weights", MIB, 2)
    assert describe_tensors(buffer) == "2 × 1.0 MiB = 2.0 MiB: weights, buffer for weights from host memory"
    cast = LikeTensors("model.norm", "_to_copy", "activations", MIB, 1)
    assert describe_tensors(cast) == "1.0 MiB: activations, model.norm, cast to another dtype"
