"""The search with a predictor that is a formula: what it chooses, what it leaves out, and how often it asks."""

from dataclasses import replace
from itertools import product

import pytest

from trimtab.planner.search import Candidate, Estimate, Space, largest, search

FULL = Space(
    rows=(32, 16, 8, 4, 2, 1),
    losses=("plain", "chunked"),
    recomputed=("none", "{every: 2}", "all"),
)


class Formula:
    """1,000 for the model, 100 a row for activations, 50 a row for logits; recomputation takes time and saves rows."""

    def __init__(self, budget, cost=None):
        self.budget, self.asked = budget, []
        self.cost = cost or {"none": 1.0, "{every: 2}": 1.2, "all": 1.4}

    def bytes_of(self, candidate):
        share = {"none": 1.0, "{every: 2}": 0.5, "all": 0.1}[candidate.recomputed]
        state = 500 if candidate.optimizer == "adamw8bit" else 1000
        table = 0 if candidate.offload == "embeddings" else 200
        logits = 50 * candidate.rows if candidate.loss == "plain" else 10
        return int(state + table + 100 * share * candidate.rows + logits)

    def __call__(self, candidate):
        assert candidate not in self.asked, "asked twice"
        self.asked.append(candidate)
        size = self.bytes_of(candidate)
        seconds = self.cost[candidate.recomputed] * (1 + 0.1 * 32 / candidate.rows)
        seconds *= 1.05 if candidate.optimizer == "adamw8bit" else 1
        return Estimate(size <= self.budget, size, 0, {}, seconds, 1 / seconds)

    def best(self, space):
        """By looking at everything."""
        levers = list(space.lever_sets())
        rows = [(candidate, self(candidate)) for one in levers for candidate in _sizes(one, space)]
        return min((estimate.step_s for _, estimate in rows if estimate.fits), default=None)


def _sizes(levers, space):
    return [replace(levers, rows=rows) for rows in space.rows]


def chosen(budget, space=FULL, **options):
    predict = Formula(budget)
    ladder = search(space, predict, room=budget, **options)
    return (ladder.chosen.candidate if ladder.chosen else None), predict, ladder


def test_plenty_of_memory_needs_few_questions():
    candidate, predict, ladder = chosen(10**6)
    assert candidate == Candidate(32)
    assert predict.asked == [Candidate(32), Candidate(32, loss="chunked")]
    assert len(ladder.rows) == 2


def test_the_loss_in_chunks_is_taken_where_it_is_faster():
    predict = Formula(10**6)

    def faster_in_chunks(candidate):
        estimate = predict(candidate)
        return replace(estimate, step_s=0.9 * estimate.step_s) if candidate.loss == "chunked" else estimate

    assert search(FULL, faster_in_chunks, room=10**6).chosen.candidate == Candidate(32, loss="chunked")


def test_the_loss_in_chunks_comes_before_recomputation():
    assert chosen(1200 + 3200 + 10)[0] == Candidate(32, loss="chunked")


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("budget", [1215, 1230, 1300, 1500, 1700, 2000, 2500, 3000, 4000, 4500, 6000])
@pytest.mark.parametrize(
    "space",
    [
        FULL,
        replace(FULL, optimizers=("adamw", "adamw8bit")),
        replace(FULL, offloads=("none", "embeddings"), optimizers=("adamw", "adamw8bit")),
        replace(FULL, rows=(32,)),
        replace(FULL, recomputed=("all",)),
    ],
)
def test_it_finds_what_looking_at_everything_finds(budget, space, thorough):
    candidate, predict, ladder = chosen(budget, space, thorough=thorough)
    everything = Formula(budget)
    wanted = everything.best(space)
    if wanted is None:
        assert candidate is None
    else:
        assert ladder.chosen.estimate.fits
        assert ladder.chosen.estimate.step_s <= wanted * 1.011
    assert len(predict.asked) <= len(everything.asked)


def test_it_asks_few_questions():
    """Of 36 candidates."""
    asked = [len(chosen(budget)[1].asked) for budget in range(1200, 6000, 50)]
    assert max(asked) <= 15
    assert sum(asked) / len(asked) < 9


def test_fewer_levers_win_where_speed_is_the_same():
    predict = Formula(1200 + 100 * 32 + 10, cost={"none": 1.0, "{every: 2}": 1.0, "all": 1.0})
    ladder = search(FULL, predict, room=predict.budget, thorough=True)
    assert ladder.chosen.candidate == Candidate(32, loss="chunked")


def test_recomputation_is_taken_where_small_micro_batches_are_slower():
    candidate, _, _ = chosen(1200 + 10 + 320)
    assert candidate == Candidate(32, loss="chunked", recomputed="all")
    candidate, _, _ = chosen(1200 + 10 + 1600)
    assert candidate == Candidate(16, loss="chunked"), "half the rows are faster than every second block again"


def test_what_is_fixed_is_kept():
    space = Space(rows=(4,), losses=("plain",), recomputed=("all",), kernels="liger", adapter="lora")
    candidate, predict, _ = chosen(10**6, space, thorough=True)
    assert candidate == Candidate(4, recomputed="all", kernels="liger", adapter="lora")
    assert predict.asked == [candidate]


def test_nothing_fits():
    candidate, predict, ladder = chosen(100)
    assert candidate is None
    assert ladder.smallest.candidate == Candidate(1, loss="chunked", recomputed="all")
    assert ladder.smallest.bytes_at_least == predict.bytes_of(ladder.smallest.candidate)


def test_a_thorough_ladder_goes_from_the_fastest_to_the_smallest():
    _, _, ladder = chosen(2000, thorough=True)
    seconds = [row.estimate.step_s for row in ladder.rows]
    assert seconds == sorted(seconds)
    levers = {(row.candidate.loss, row.candidate.recomputed) for row in ladder.rows}
    assert levers == set(product(FULL.losses, FULL.recomputed))
    assert ladder.smallest.candidate == Candidate(1, loss="chunked", recomputed="all")


def test_what_cannot_be_is_left_out():
    predict = Formula(1300)

    def without_chunks(candidate):
        return None if candidate.loss == "chunked" else predict(candidate)

    ladder = search(FULL, without_chunks, room=1300, thorough=True)
    assert {row.candidate.loss for row in ladder.rows} == {"plain"}


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
