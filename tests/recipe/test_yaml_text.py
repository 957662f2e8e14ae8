"""YAML: scalars of version 1.2, the place of every key, and that written values are read back."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import RecipeError
from trimtab.recipe.yaml_text import as_yaml, read_value, read_yaml


def values(text):
    return read_yaml(text, "r.yaml").values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5e-5", 5e-5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("3", 3),
        ("010", 10),  # 8 in YAML 1.1
        ("0x10", 16),
        ("0o17", 15),
        ("1:30", "1:30"),  # 90 in YAML 1.1
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("6%", "6%"),
        *((word, word) for word in ("yes", "no", "on", "off", "Yes", "NO", "y", "n")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'5'", "5"),
        ('"true"', "true"),
        ("none", "none"),
    ],
)
def test_scalars(text, expected):
    found = values(f"key: {text}")["key"]
    assert found == expected
    assert type(found) is type(expected)


def test_places_are_the_lines_of_keys():
    text = "# comment\nmodel: bert\n\ntrain:\n  lr: 1\n  betas: [0.9,\n    0.99]\n  freeze:\n    a.b: always\n"
    assert read_yaml(text, "r.yaml").places == {
        "model": "r.yaml:2",
        "train": "r.yaml:4",
        "train.lr": "r.yaml:5",
        "train.betas": "r.yaml:6",
        "train.betas.0": "r.yaml:6",
        "train.betas.1": "r.yaml:7",
        "train.freeze": "r.yaml:8",
        "train.freeze.a.b": "r.yaml:9",
    }


def test_keys_are_text():
    assert values("1: a\non: b\nnull: c") == {"1": "a", "on": "b", "null": "c"}


def test_duplicate_keys_are_noted_and_the_first_is_kept():
    document = read_yaml("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", "r.yaml")
    assert document.values == {"a": 1, "b": {"c": 1}}
    assert document.duplicates == [("b.c", "r.yaml:4", 3), ("a", "r.yaml:5", 1)]


def test_anchors_and_merges():
    text = "x: &x {a: 1, b: {c: 1, d: 2}}\ny: *x\nz:\n  <<: *x\n  b: {c: 3}\nw: {<<: [{a: 5}, *x]}\n"
    document = read_yaml(text, "r.yaml")
    assert document.values["y"] == {"a": 1, "b": {"c": 1, "d": 2}}
    assert document.values["z"] == {"a": 1, "b": {"c": 3}}
    assert document.values["w"] == {"a": 5, "b": {"c": 1, "d": 2}}  # of two sources the first wins
    assert document.places["z.a"] == "r.yaml:1"
    assert document.places["z.b"] == "r.yaml:5"
    assert "z.b.d" not in document.places
    assert document.duplicates == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml is empty"),
        ("# only a comment\n", "r.yaml is empty"),
        ("- a\n- b", "r.yaml is a list, not a mapping"),
        ("model:bert", "is a single value, not a mapping"),
        ("train:\n\tlr: 1", "r.yaml:2: a tab"),
        ("a: 1\nb: [1, 2\nc: 3", "r.yaml:3: not valid YAML"),
        ("a: 1\nb:2\n", "r.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: !!python/object:os.system {}", "r.yaml:1: the tag .*os.system is not supported"),
        ("a: !!timestamp 2024-01-01", "r.yaml:1: the tag tag:yaml.org,2002:timestamp is not supported"),
        ("a: &a [*a]", "r.yaml:1: a.0 contains itself"),
        ("? [a]\n: 1", "a key must be a single value"),
        ("a: {<<: 3}", "<< takes a mapping"),
        ("a: *nowhere", "r.yaml:1: not valid YAML: found undefined alias"),
        ("a: \x01", "r.yaml is not valid YAML"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(RecipeError, match=message):
        values(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3e-5", 3e-5),
        ("12", 12),
        ("true", True),
        ("null", None),
        ("", None),
        ("off", "off"),
        ("*.csv", "*.csv"),
        ("reviews.csv[:100]", "reviews.csv[:100]"),
        ("[ab].csv", "[ab].csv"),
        ("[a, b]", ["a", "b"]),
        ("{a: 1}", {"a": 1}),
        ("run #3: again", "run #3: again"),
        ("'5'", "5"),
        ("6%", "6%"),
    ],
)
def test_values_of_the_command_line(text, expected):
    assert read_value(text) == expected


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(
        ["yes", "no", "1:30", "5e-5", "0x1", "a: b", "a #b", "*.csv", "imdb:test", "10min", "a:", "-", "=", "<<"]
    ),
)
nested = st.recursive(
    plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3))
)


@given(nested)
def test_what_is_written_is_read_back(value):
    assert values(f"key: {as_yaml(value)}\n")["key"] == value


@given(plain)
def test_other_readers_read_it_too(value):
    assert yaml.safe_load(f"key: {as_yaml(value)}\n")["key"] == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(5e-5, "5.0e-05"), (3.0, "3.0"), ("3h", "3h"), ("500 steps", "500 steps"), ("no", '"no"'), (None, "null")],
)
def test_how_values_are_written(value, text):
    assert as_yaml(value) == text


@pytest.mark.parametrize(("first", "level"), [("[1, 1]", "[{}]"), ("{k: 1}", "{{<<: [{}]}}")])
def test_the_expansion_of_aliases_is_limited(first, level):
    """Less than a kilobyte that would expand to a billion values."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} {level.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 10)]
    with pytest.raises(RecipeError, match=r"r.yaml:\d+: more than 100,000 values after expanding aliases"):
        read_yaml("\n".join(lines), "r.yaml")


@pytest.mark.parametrize("text", ["key: " + "[" * 20_000, "".join(" " * depth + "a:\n" for depth in range(1200))])
def test_nesting_is_limited(text):
    with pytest.raises(RecipeError, match="r.yaml: values are nested too deeply"):
        read_yaml(text, "r.yaml")


def test_numbers_that_python_cannot_print():
    for number in ("1" * 5000, "0x" + "f" * 5000):
        with pytest.raises(RecipeError, match=r"r.yaml:2: an integer of \d,\d+ digits"):
            read_yaml(f"model: bert\nseed: {number}\n", "r.yaml")
        with pytest.raises(RecipeError, match="--set: an integer of"):
            read_value(number)
    assert read_yaml(f"seed: '{'1' * 5000}'", "r.yaml").values["seed"] == "1" * 5000
