"""Which layers are quantized: the cheapest first, within a size or as far as a bound holds."""

import math

from trimtab.compress.layer_choice import (
    LayerForm,
    formats_after,
    longest_that_holds,
    ordered_moves,
    within_size,
)


def forms(**layers):
    """Each layer has 100 bytes; values are (format, bytes, divergence)."""
    return {name: [LayerForm(None, 100, 0.0), *(LayerForm(*form) for form in found)] for name, found in layers.items()}


def test_cheap_layers_come_first_and_a_layer_goes_down_step_by_step():
    moves = ordered_moves(
        forms(
            tough=[("int8", 25, 0.001), ("int4", 13, 0.003)],
            fragile=[("int8", 25, 0.1), ("int4", 13, 5.0)],
        )
    )
    assert [(move.layer, move.format) for move in moves] == [
        ("tough", "int8"),
        ("tough", "int4"),
        ("fragile", "int8"),
        ("fragile", "int4"),
    ]
    assert formats_after(moves[:3]) == {"tough": "int4", "fragile": "int8"}


def test_a_form_that_a_mix_of_others_beats_is_skipped():
    moves = ordered_moves(forms(layer=[("int8", 90, 1.0), ("int4", 10, 1.5)]))
    assert [(move.format, move.saved_bytes) for move in moves] == [("int4", 90)]


def test_forms_without_a_finite_output_and_larger_ones_are_never_chosen():
    assert ordered_moves(forms(layer=[("int4", 10, math.inf), ("int8", 120, 0.0)])) == []


def test_within_size_undoes_harmful_moves_that_are_not_needed():
    # by price: small (1e-4), large (2e-4); both are below 250 bytes only with the large one, which alone is enough
    found = ordered_moves(
        {
            "small": [LayerForm(None, 100, 0.0), LayerForm("int8", 90, 0.001)],
            "large": [LayerForm(None, 200, 0.0), LayerForm("int8", 100, 0.02)],
        }
    )
    assert [move.layer for move in found] == ["small", "large"]
    chosen = within_size(found, 300, 200)
    assert chosen is not None
    assert formats_after(chosen) == {"large": "int8"}
    assert within_size(found, 300, 189) is None  # both save 110
    assert within_size(found, 300, 300) == []


def test_bisection_returns_only_what_it_has_seen_to_hold():
    for limit in range(11):
        seen = []

        def holds(num, limit=limit, seen=seen):
            seen.append(num)
            return num <= limit

        assert longest_that_holds(10, holds) == limit
        assert limit == 0 or limit in seen
        assert len(seen) <= 5
