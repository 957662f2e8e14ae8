"""Amounts with units: accepted syntax, refused syntax, and round trips."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import RecipeError
from trimtab.units import (
    Every,
    exact_bytes,
    exact_seconds,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_every,
    parse_seconds,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * 1024**3),
        ("8 gib", 8 * 1024**3),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        ("1.1GB", 1_100_000_000),  # exactly, although 1.1 has no exact float
        ("2TB", 2 * 10**12),
        ("1024", 1024),
        ("7 bytes", 7),
        (1024, 1024),
        (0, 0),
    ],
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 gigs", "8GiB 2", "1e999999999GB", True, None, -1, 1.5, "1.5"])
def test_what_is_no_size(text):
    with pytest.raises(RecipeError, match="8GiB"):
        parse_bytes(text)


def test_a_bare_letter_is_ambiguous():
    with pytest.raises(RecipeError, match="'8G' may be 8GiB or 8GB"):
        parse_bytes("8G")


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),  # never 1024.0 KiB
        (8 * 1024**3, "8.0 GiB"),
        (-1536, "-1.5 KiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_format_bytes(num_bytes, expected):
    assert format_bytes(num_bytes) == expected


@given(st.integers(min_value=0, max_value=2**60))
def test_bytes_round_trip(num_bytes):
    assert parse_bytes(exact_bytes(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3h", 10_800),
        ("10min", 600),
        ("10m", 600),
        ("1h30m", 5400),
        ("1 h 30 min", 5400),
        ("1d 2 hours 3 minutes 4 seconds", 93_784),
        ("90s", 90),
        ("0.5h", 1800),
        ("90", 90),
        (90, 90),
        (1.5, 1.5),
    ],
)
def test_parse_seconds(text, expected):
    assert parse_seconds(text) == expected


@pytest.mark.parametrize(
    "text", ["", "fast", "h", "3 weeks", "1h 2h", "30m1h", "-3h", -3, math.inf, math.nan, True, None, "00:01:00:00"]
)
def test_what_is_no_time(text):
    with pytest.raises(RecipeError, match="1h30m"):
        parse_seconds(text)


@pytest.mark.parametrize("parse", [parse_seconds, parse_every])
def test_a_clock_time_is_ambiguous(parse):
    with pytest.raises(RecipeError, match="'1:30' may be 1h30m or 1m30s"):
        parse("1:30")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (0.5, "0.5 s"),
        (9.96, "10 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (90, "1 min 30 s"),
        (3599.6, "1 h"),
        (5400, "1 h 30 min"),
        (84_800, "23 h 33 min"),
        (86_399, "1 d"),
        (200_000, "2 d 8 h"),
        (-90, "-1 min 30 s"),
        (math.inf, "unknown"),
    ],
)
def test_format_seconds(seconds, expected):
    assert format_seconds(seconds) == expected


@given(st.one_of(st.integers(0, 10**9).map(float), st.floats(1e-9, 1e9)))
def test_seconds_round_trip(seconds):
    assert parse_seconds(exact_seconds(seconds)) == seconds


@given(st.floats(0, 1e9))
def test_formatted_seconds_can_be_parsed(seconds):
    shown = parse_seconds(format_seconds(seconds))
    assert shown == pytest.approx(seconds, rel=0.05, abs=0.0501)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2%", 0.02), ("7 %", 0.07), (0.02, 0.02), ("0.02", 0.02), ("1e-3", 1e-3), (1, 1.0), (0, 0.0), ("100%", 1.0)],
)
def test_parse_share(text, expected):
    assert parse_share(text) == expected


@pytest.mark.parametrize("text", [2, -0.1, "200%", "", "half", True, None, math.nan])
def test_what_is_no_share(text):
    with pytest.raises(RecipeError, match="is not a share"):
        parse_share(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500 steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        ("500", Every(steps=500)),
        (500, Every(steps=500)),
        (500.0, Every(steps=500)),
        ("epoch", Every(epochs=1)),
        ("every epoch", Every(epochs=1)),
        ("2 epochs", Every(epochs=2)),
        ("0.5 epochs", Every(epochs=0.5)),
        ("10min", Every(seconds=600)),
        ("10 m", Every(seconds=600)),
        ("1h30m", Every(seconds=5400)),
    ],
)
def test_parse_every(text, expected):
    assert parse_every(text) == expected


@pytest.mark.parametrize(
    "text", ["", "sometimes", "500 stpes", 0, "0 steps", "0 epochs", "0s", -5, 0.5, "1.5 steps", True, None]
)
def test_what_is_no_interval(text):
    with pytest.raises(RecipeError, match="500 steps, epoch, 2 epochs or 10min"):
        parse_every(text)


@given(
    st.one_of(
        st.integers(1, 10**9).map(lambda n: Every(steps=n)),
        st.floats(1e-6, 1e6).map(lambda x: Every(epochs=x)),
        st.floats(1e-6, 1e6).map(lambda x: Every(seconds=x)),
    )
)
def test_intervals_round_trip(every):
    assert parse_every(str(every)) == every


def test_the_words_of_an_interval():
    every = Every(steps=1), Every(steps=5), Every(epochs=1), Every(epochs=0.5), Every(seconds=5400)
    assert [str(one) for one in every] == ["1 step", "5 steps", "epoch", "0.5 epochs", "1h30min"]


@pytest.mark.parametrize("settings", [{}, {"steps": 1, "epochs": 1}, {"steps": 0}, {"seconds": math.inf}])
def test_an_interval_counts_one_thing(settings):
    with pytest.raises(RecipeError, match="not an interval"):
        Every(**settings)
