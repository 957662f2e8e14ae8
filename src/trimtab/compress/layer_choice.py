"""Choose the format of each layer: the mix of formats with the least divergence for its size.

Each layer was measured alone in each format: its size, and the divergence of the model's outputs. Divergences of
several layers are assumed to add up, which is true while they are small; callers measure the chosen mix as a whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerForm:
    """One layer in one form.

    Args:
        format: Name of the format; None for the original.
        num_bytes: Its size.
        divergence: KL divergence of the model's outputs if only this layer has this form.
    """

    format: str | None
    num_bytes: int
    divergence: float


@dataclass(frozen=True)
class Move:
    """A change of one layer to a smaller form.

    Args:
        layer: Name of the layer.
        format: Its format afterwards.
        saved_bytes: Bytes that the change saves.
        divergence: Divergence that it adds.
    """

    layer: str
    format: str
    saved_bytes: int
    divergence: float

    @property
    def price(self) -> float:
        """Divergence per byte saved."""
        return self.divergence / self.saved_bytes


def ordered_moves(forms: Mapping[str, Sequence[LayerForm]]) -> list[Move]:
    """Return changes ordered by price; every prefix of the list is a mix of formats.

    Args:
        forms: The forms of each layer, the original among them.
    """
    moves = [move for layer, found in forms.items() for move in _moves_of(layer, found)]
    return sorted(moves, key=lambda move: move.price)  # the sort is stable, and prices of one layer never fall


def _moves_of(layer: str, forms: Sequence[LayerForm]) -> list[Move]:
    """Return the changes of one layer: the lower convex hull of divergence over size, from the original down.

    A form off the hull is never best: a mix of its neighbours has less divergence at the same size.
    """
    current = next(form for form in forms if form.format is None)
    moves: list[Move] = []
    while True:
        smaller = [form for form in forms if form.num_bytes < current.num_bytes and form.format is not None]
        possible = [
            Move(
                layer,
                str(form.format),
                current.num_bytes - form.num_bytes,
                max(0.0, form.divergence - current.divergence),
            )
            for form in smaller
        ]
        finite = [move for move in possible if move.divergence < float("inf")]
        if not finite:
            return moves
        moves.append(min(finite, key=lambda move: (move.price, -move.saved_bytes)))
        current = next(form for form in forms if form.format == moves[-1].format)


def formats_after(moves: Sequence[Move]) -> dict[str, str]:
    """Return the format of each layer that is changed by moves."""
    return {move.layer: move.format for move in moves}


def within_size(moves: Sequence[Move], original_bytes: int, max_bytes: int) -> list[Move] | None:
    """Return the moves that make a model small enough with little divergence; None if even all moves do not.

    Args:
        moves: Result of `ordered_moves`.
        original_bytes: Size of the model before.
        max_bytes: Size that the result may have.
    """
    size, chosen = original_bytes, list[Move]()
    for move in moves:
        if size <= max_bytes:
            break
        chosen.append(move)
        size -= move.saved_bytes
    if size > max_bytes:
        return None
    # The last move often saves more than was missing, so the most harmful moves can be undone.
    for move in sorted(chosen, key=lambda move: -move.divergence):
        is_last_of_layer = [other for other in chosen if other.layer == move.layer][-1] is move
        if is_last_of_layer and size + move.saved_bytes <= max_bytes:
            chosen.remove(move)
            size += move.saved_bytes
    return chosen


def longest_that_holds(num_moves: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number of moves for which `holds`, found by bisection; 0 moves always hold.

    A number above 0 is returned only if `holds` was called with it and was true.
    """
    if num_moves == 0 or holds(num_moves):
        return num_moves
    low, high = 0, num_moves
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
