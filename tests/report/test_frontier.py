"""Which forms of a model are worth having, and which one is recommended."""

import math

import pytest

from trimtab.inference.comparison import OutputDivergence
from trimtab.inference.model_measurement import ModelMeasurement
from trimtab.inference.quality_loss import quality_loss
from trimtab.report.frontier import draw_frontier, frontier, frontier_table, recommended


def form(name, size, latency, accuracy, kl=None):
    closeness = None if kl is None else OutputDivergence(kl, kl, 1.0, 10, 10)
    return ModelMeasurement(name, size, size, latency, 32 * latency, {"accuracy": accuracy, "f1": accuracy}, closeness)


FORMS = [
    form("original", 90, 4.0, 0.90),
    form("half", 45, 4.0, 0.90, 1e-6),
    form("int8", 23, 2.0, 0.895, 1e-3),
    form("slow int8", 23, 3.0, 0.893, 1e-2),
    form("4 bits", 12, 4.0, 0.88, 1e-1),
]


@pytest.mark.parametrize(
    ("bound", "name"), [(0.0, "half"), (0.006, "int8"), (0.01, "int8"), (0.021, "4 bits"), (-1, "original")]
)
def test_the_smallest_that_holds_the_bound(bound, name):
    assert recommended(FORMS, bound).name == name


def test_a_broken_model_is_never_recommended():
    assert recommended([FORMS[0], form("broken", 1, 1.0, math.nan)], 1.0).name == "original"


def test_a_form_that_is_beaten_in_everything_is_not_on_the_frontier():
    assert [one.name for one in frontier(FORMS)] == ["half", "int8", "4 bits"]


def test_table_and_plot(tmp_path):
    header, rows = frontier_table(FORMS, 0.01)
    assert all(len(row) == len(header) for row in rows)
    assert [row[-1] for row in rows] == ["beaten", "", "recommended", "beaten", ""]
    assert rows[2][-2] == "0.50%"
    draw_frontier([*FORMS, form("broken", 1, 1.0, math.nan)], 0.01, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_names_in_the_plot_do_not_overlap(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    names, plain = [], Axes.annotate
    monkeypatch.setattr(Axes, "annotate", lambda *args, **options: names.append(plain(*args, **options)) or names[-1])
    close = [form("original", 90, 4.0, 0.9000), form("int8-dynamic", 59, 3.2, 0.9001), form("int8", 59, 3.8, 0.9001)]
    draw_frontier([*close, form("cluster-6", 18, 4.1, 0.8997)], 0.01, tmp_path / "frontier.png")
    boxes = [(name.axes, name.get_window_extent()) for name in names]
    assert len(boxes) == 8
    for number, (axes, box) in enumerate(boxes):
        assert not any(other_axes is axes and box.overlaps(other) for other_axes, other in boxes[:number])


def test_a_loss_is_compared_by_its_increase():
    assert quality_loss({"loss": 2.0, "perplexity": 7.4}, {"loss": 2.1, "perplexity": 8.2}) == pytest.approx(0.05)
    assert quality_loss({"loss": 2.0, "accuracy": 0.9}, {"loss": 1.0, "accuracy": 0.8}) == pytest.approx(0.1)


def test_rows_with_several_labels_are_compared_by_f1():
    one = {"loss": 2.0, "accuracy": 0.5, "f1": 0.9}
    assert quality_loss(one, one | {"f1": 0.8}) == pytest.approx(0.1)
    assert quality_loss(one | {"mcc": 0.5}, one | {"f1": 0.8}) == 0.0
