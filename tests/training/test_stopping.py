"""Best values and early stopping: what counts as better, and what a resumed run remembers."""

import json
import math

import pytest

from trimtab.errors import CheckpointError
from trimtab.training.stopping import Best, EarlyStopping


def stops_at(stopping, values):
    """The first evaluation after which the run stops, counted from 1, or None."""
    for number, value in enumerate(values, 1):
        if stopping.update({stopping.metric: value, "other": 0.0}):
            return number
    return None


@pytest.mark.parametrize(
    ("higher", "patience", "min_delta", "values", "expected"),
    [
        (True, 2, 0.0, [0.5, 0.6, 0.6, 0.6], 4),  # equal is no improvement
        (True, 2, 0.0, [0.5, 0.4, 0.6, 0.5, 0.5], 5),  # an improvement forgets the bad ones before it
        (True, 1, 0.0, [0.5, 0.4], 2),
        (True, 3, 0.0, [0.5, 0.6, 0.7, 0.8], None),
        (False, 2, 0.0, [1.0, 0.9, 0.95, 0.91], 4),
        (False, 2, 0.0, [1.0, 0.9, 0.8], None),
        (True, 2, 0.1, [0.5, 0.55, 0.59], 3),
        (True, 2, 0.25, [0.5, 0.75, 0.75], 3),  # exactly min_delta is not enough
        (True, 2, 0.1, [0.5, 0.55, 0.7], None),  # measured from the last improvement, not from the last value
        (False, 2, 0.0, [math.nan, math.nan], 2),
        (False, 2, 0.0, [math.nan, 0.5, math.nan, math.inf], 4),
        (True, 2, 0.0, [0.5, math.nan, 0.6, math.nan], None),
        (True, 2, 0.0, [math.inf, 0.5, 0.6], None),
    ],
)
def test_when_a_run_stops(higher, patience, min_delta, values, expected):
    assert stops_at(EarlyStopping("m", higher, patience, min_delta), values) == expected


@pytest.mark.parametrize("higher", [True, False])
def test_best_keeps_the_first_of_equals_and_no_nan(higher):
    sign = 1.0 if higher else -1.0
    best = Best("m", higher)
    assert (best.value, best.step) == (None, None)
    series = [math.nan, 0.5, 0.5, math.inf, math.nan, 0.7, 0.6, -math.inf]
    improved = [best.update({"m": sign * value}, step) for step, value in enumerate(series)]
    assert improved == [False, True, False, False, False, True, False, False]
    assert (best.value, best.step) == (sign * 0.7, 5)


def test_state_goes_through_json():
    stopping, best = EarlyStopping("m", True, 3), Best("m", True)
    for step, value in enumerate([0.5, 0.4]):
        stopping.update({"m": value})
        best.update({"m": value}, step)
    again, best_again = EarlyStopping("m", True, 3), Best("m", True)
    again.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
    best_again.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert stops_at(again, [0.45, 0.45]) == 2  # one bad evaluation was before
    assert (best_again.value, best_again.step) == (0.5, 0)
    assert not best_again.update({"m": 0.45}, 9)


@pytest.mark.parametrize("other", [("loss", True), ("m", False)])
def test_the_state_of_another_metric_is_refused(other):
    best, stopping = Best("m", True), EarlyStopping("m", True)
    for mine, theirs in ((best, Best(*other)), (stopping, EarlyStopping(*other))):
        with pytest.raises(CheckpointError, match="the highest m"):
            mine.load_state_dict(theirs.state_dict())
        assert mine.value is None
