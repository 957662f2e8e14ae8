"""How long compiling takes, and the runs in which it is not even considered."""

import pytest

from tiny_models import config_of
from trimtab.model.compile_time import capture_seconds, compile_seconds, compiling_may_pay
from trimtab.model.load import load_skeleton


@pytest.fixture
def bert():
    return load_skeleton(config_of("bert"), "sequence-classification", {}, None)


def test_equal_blocks_are_compiled_once(bert):
    t5 = load_skeleton(config_of("t5"), "seq2seq-lm", {}, None)
    more = load_skeleton(config_of("bert") | {"num_hidden_layers": 7}, "sequence-classification", {}, None)
    assert 0 < compile_seconds(bert) == compile_seconds(more) <= compile_seconds(t5)


def test_every_captured_size_takes_time(bert):
    more = load_skeleton(config_of("bert") | {"num_hidden_layers": 7}, "sequence-classification", {}, None)
    once, often = capture_seconds(bert, 1), capture_seconds(bert, 9)
    assert 0 < once < capture_seconds(more, 1)
    assert often == pytest.approx(9 * once)


@pytest.mark.parametrize(
    ("num_steps", "capability", "has_triton", "expected"),
    [
        (100_000, (9, 0), True, True),
        (None, (9, 0), True, True),
        (100, (9, 0), True, False),
        (100_000, None, True, False),
        (100_000, (6, 1), True, False),
        (100_000, (9, 0), False, False),
    ],
)
def test_when_it_may_pay(num_steps, capability, has_triton, expected):
    assert compiling_may_pay(num_steps, capability, has_triton=has_triton) is expected
