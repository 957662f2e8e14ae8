"""The search with a predictor that is a formula: what it chooses, what it leaves out, and how often it asks."""

from dataclasses import replace
from itertools import product

import pytest

from trimtab.planner.search import Estimate, Space, largest, search
from trimtab.techniques.base import Axis, Phase, StepSpec, Technique


def technique(name, *, slower=True, in_phase=Phase.KERNELS):
    class Made(Technique):
        key = name
        is_slower_with_each_value = slower
        phase = in_phase

    return Made()


RECOMPUTED = technique("recomputed", in_phase=Phase.RECOMPUTATION)
LOSS, STATE, TABLE = technique("loss", slower=False), technique("state"), technique("table", in_phase=Phase.PLACEMENT)
SIZES = (32, 16, 8, 4, 2, 1)


def space_of(
    recomputed=("none", "half", "all"), loss=("plain", "chunked"), state=("fp32",), table=("device",), sizes=SIZES
):
    axes = ((RECOMPUTED, recomputed), (LOSS, loss), (STATE, state), (TABLE, table))
    return Space(sizes, "bf16", tuple(Axis(technique, values) for technique, values in axes))


FULL = space_of()


def spec_of(rows, **values):
    plain = {"recomputed": "none", "loss": "plain", "state": "fp32", "table": "device"}
    return StepSpec.of(rows, "bf16", plain | values)


class Formula:
    """1,000 for the model, 100 a row for activations, 50 a row for logits; recomputation takes time and saves rows."""

    def __init__(self, budget, cost=None):
        self.budget, self.asked = budget, []
        self.cost = cost or {"none": 1.0, "half": 1.2, "all": 1.4}

    def bytes_of(self, spec):
        share = {"none": 1.0, "half": 0.5, "all": 0.1}[spec["recomputed"]]
        state = 500 if spec["state"] == "8bit" else 1000
        table = 0 if spec["table"] == "host" else 200
        logits = 50 * spec.micro_batch if spec["loss"] == "plain" else 10
        return int(state + table + 100 * share * spec.micro_batch + logits)

    def __call__(self, spec):
        assert spec not in self.asked, "asked twice"
        self.asked.append(spec)
        size = self.bytes_of(spec)
        seconds = self.cost[spec["recomputed"]] * (1 + 0.1 * 32 / spec.micro_batch)
        seconds *= 1.05 if spec["state"] == "8bit" else 1
        return Estimate(size <= self.budget, size, 0, {}, seconds, 1 / seconds)

    def best(self, space):
        """By looking at everything."""
        found = [self(spec.with_micro_batch(size)) for spec in space.sets() for size in space.micro_batches]
        return min((estimate.step_s for estimate in found if estimate.fits), default=None)


def chosen(budget, space=FULL, **options):
    predict = Formula(budget)
    ladder = search(space, predict, room=budget, **options)
    return (ladder.chosen.spec if ladder.chosen else None), predict, ladder


def test_plenty_of_memory_needs_few_questions():
    spec, predict, ladder = chosen(10**6)
    assert spec == spec_of(32)
    assert predict.asked == [spec_of(32), spec_of(32, loss="chunked")]
    assert len(ladder.rows) == 2


def test_a_technique_that_turns_out_faster_is_taken():
    """Whether it takes more memory or less: nothing but a prediction says that a technique is slow."""
    predict = Formula(10**6)

    def faster_in_chunks(spec):
        estimate = predict(spec)
        return replace(estimate, step_s=0.9 * estimate.step_s) if spec["loss"] == "chunked" else estimate

    assert search(FULL, faster_in_chunks, room=10**6).chosen.spec == spec_of(32, loss="chunked")
    compiled = Axis(technique("compiled", slower=False), ("no", "yes"))
    space = Space((4,), "bf16", (compiled,))

    def larger_and_faster(spec):
        size, seconds = (200, 0.5) if spec["compiled"] == "yes" else (100, 1.0)
        return Estimate(size <= 250, size, 0, {}, seconds, 1 / seconds)

    ladder = search(space, larger_and_faster, room=250)
    assert ladder.chosen.spec["compiled"] == "yes"
    assert [row.spec["compiled"] for row in ladder.front()] == ["yes", "no"]


def test_the_front_is_what_nothing_else_beats():
    _, _, ladder = chosen(2000, thorough=True)
    points = {(row.least_bytes, row.estimate.step_s) for row in ladder.rows}
    unbeaten = {
        (size, seconds)
        for size, seconds in points
        if not any(other != (size, seconds) and other[0] <= size and other[1] <= seconds for other in points)
    }
    assert 1 < len(unbeaten) < len(points)
    front = ladder.front()
    assert [(row.least_bytes, row.estimate.step_s) for row in front] == sorted(unbeaten, key=lambda point: point[1])
    fastest = next(row for row in front if row.estimate.fits)
    assert ladder.chosen.estimate.step_s <= fastest.estimate.step_s * 1.011, "gains within the noise are none"


def test_the_loss_in_chunks_comes_before_recomputation():
    assert chosen(1200 + 3200 + 10)[0] == spec_of(32, loss="chunked")


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("budget", [1215, 1230, 1300, 1500, 1700, 2000, 2500, 3000, 4000, 4500, 6000])
@pytest.mark.parametrize(
    "space",
    [
        FULL,
        space_of(state=("fp32", "8bit")),
        space_of(state=("fp32", "8bit"), table=("device", "host")),
        space_of(sizes=(32,)),
        space_of(recomputed=("all",)),
    ],
)
def test_it_finds_what_looking_at_everything_finds(budget, space, thorough):
    spec, predict, ladder = chosen(budget, space, thorough=thorough)
    everything = Formula(budget)
    wanted = everything.best(space)
    if wanted is None:
        assert spec is None
    else:
        assert ladder.chosen.estimate.fits
        assert ladder.chosen.estimate.step_s <= wanted * 1.011
    assert len(predict.asked) <= len(everything.asked)


def test_it_asks_few_questions():
    """Of 36 specifications."""
    asked = [len(chosen(budget)[1].asked) for budget in range(1200, 6000, 50)]
    assert max(asked) <= 17
    assert sum(asked) / len(asked) < 10


def test_fewer_techniques_win_where_speed_is_the_same():
    predict = Formula(1200 + 100 * 32 + 10, cost={"none": 1.0, "half": 1.0, "all": 1.0})
    ladder = search(FULL, predict, room=predict.budget, thorough=True)
    assert ladder.chosen.spec == spec_of(32, loss="chunked")


def test_recomputation_is_taken_where_small_micro_batches_are_slower():
    assert chosen(1200 + 10 + 320)[0] == spec_of(32, loss="chunked", recomputed="all")
    spec = chosen(1200 + 10 + 1600)[0]
    assert spec == spec_of(16, loss="chunked"), "half the rows are faster than recomputing every second block"


def test_what_is_fixed_is_kept():
    space = space_of(recomputed=("all",), loss=("plain",), table=("host",), sizes=(4,))
    spec, predict, _ = chosen(10**6, space, thorough=True)
    assert spec == spec_of(4, recomputed="all", table="host")
    assert predict.asked == [spec]


def test_nothing_fits():
    spec, predict, ladder = chosen(100)
    assert spec is None
    assert ladder.smallest.spec == spec_of(1, loss="chunked", recomputed="all")
    assert ladder.smallest.least_bytes == predict.bytes_of(ladder.smallest.spec)


def test_a_thorough_ladder_goes_from_the_fastest_to_the_smallest():
    _, _, ladder = chosen(2000, thorough=True)
    seconds = [row.estimate.step_s for row in ladder.rows]
    assert seconds == sorted(seconds)
    found = {(row.spec["loss"], row.spec["recomputed"]) for row in ladder.rows}
    assert found == set(product(("plain", "chunked"), ("none", "half", "all")))
    assert ladder.smallest.spec == spec_of(1, loss="chunked", recomputed="all")


def test_what_a_model_does_not_allow_is_left_out():
    predict = Formula(1300)

    def without_chunks(spec):
        return None if spec["loss"] == "chunked" else predict(spec)

    ladder = search(FULL, without_chunks, room=1300, thorough=True)
    assert {row.spec["loss"] for row in ladder.rows} == {"plain"}


@pytest.mark.parametrize("room", [999, 1100, 1101, 5000, 123_456, 10**7])
@pytest.mark.parametrize("first", [1, 8, 5000])
def test_the_largest_number(room, first):
    asked = []

    def measure(number):
        asked.append(number)
        size = 1000 + 100 * number
        return size, size <= room

    wanted = min((room - 1000) // 100, 20_000) if room >= 1100 else None
    assert largest(measure, room, first=first, most=20_000) == wanted
    assert len(asked) == len(set(asked))
    if wanted is not None:
        assert len(asked) <= 6


@pytest.mark.parametrize("room", [10_000, 2_000_000, 40_000_000])
def test_the_largest_where_memory_is_quadratic_and_numbers_come_in_steps(room):
    asked = []

    def measure(number):
        asked.append(number)
        size = 1000 + 10 * number + number**2
        return size, size <= room

    found = largest(measure, room, first=512, most=131_072, step=64)
    assert found % 64 == 0
    assert measure(found)[1]
    assert not measure(found + 64)[1]
    assert len(asked) <= 14


def test_values_between_two_ends_are_not_predicted_where_the_line_is_far_from_fitting():
    """With 32 rows, half of the blocks recomputed need 2,800 by the line; only with fewer rows they are predicted."""
    formula = Formula(1900)
    found = search(space_of(loss=("chunked",)), formula, room=1900)
    assert found.chosen is not None
    halves = [spec.micro_batch for spec in formula.asked if spec["recomputed"] == "half"]
    assert halves
    assert 32 not in halves
    every = search(space_of(loss=("chunked",)), Formula(1900), room=1900, thorough=True)
    assert every.chosen == found.chosen
    assert spec_of(32, recomputed="half", loss="chunked") in [row.spec for row in every.rows]


FIVE = {"none": 0.0, "eighth": 0.125, "half": 0.5, "most": 0.75, "all": 1.0}


@pytest.mark.parametrize("floor", [0, 10, 40, 80])
@pytest.mark.parametrize("budget", [700, 900, 1200, 1500, 1900, 2200, 2600, 3200, 4000])
def test_bounds_leave_out_only_what_does_not_fit(budget, floor):
    """The peak is the larger of two moments, of which one does not depend on recomputation: a convex function."""
    axes = (Axis(RECOMPUTED, tuple(FIVE), tuple(FIVE.items())), Axis(TABLE, ("device", "host")))
    space = Space((32, 16, 8, 4, 2, 1), "bf16", axes)
    asked = []

    def predict(spec):
        asked.append(spec)
        share = FIVE[spec["recomputed"]]
        size = (300 if spec["table"] == "host" else 500) + spec.micro_batch * max(100 * (1.05 - share), floor)
        seconds = (1 + 0.4 * share) * (1 + 0.05 * 32 / spec.micro_batch)
        return Estimate(size <= budget, int(size), 0, {}, seconds, 1 / seconds)

    everything = [predict(spec.with_micro_batch(size)) for spec in space.sets() for size in space.micro_batches]
    wanted = min((estimate.step_s for estimate in everything if estimate.fits), default=None)
    num_all = len(asked)
    asked.clear()
    found = search(space, predict, room=budget)
    assert (found.chosen is None) == (wanted is None)
    assert wanted is None or found.chosen.estimate.step_s <= wanted * 1.011
    assert len(asked) < num_all / 2


def test_a_value_that_needs_too_much_of_the_host_does_not_rule_out_others():
    """It needs less of the device than they do, and is predicted first."""
    space = space_of(loss=("chunked",), table=("device", "host"))
    found = []
    for thorough in (False, True):
        formula = Formula(1900)

        def predict(spec, formula=formula):
            estimate = formula(spec)
            return replace(estimate, fits=estimate.fits and spec["table"] == "device")

        found.append(search(space, predict, room=1900, thorough=thorough).chosen.estimate.step_s)
    assert found[0] <= 1.011 * found[1]
