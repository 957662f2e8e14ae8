"""Which layers `trimtab quantize` quantizes: all, or the mix that keeps a bound on quality or size."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.compress.layer_choice import (
    LayerForm,
    Move,
    formats_after,
    longest_that_holds,
    ordered_moves,
    within_size,
)
from trimtab.compress.quantized_layers import QuantizedLayers
from trimtab.compress.weight_formats import WeightFormat
from trimtab.errors import ModelError, RecipeError
from trimtab.inference.comparison import ModelComparison
from trimtab.inference.held_out import HeldOut, quality_of
from trimtab.inference.load import LoadedModel
from trimtab.log import say

_CALIBRATION_ROWS = 64  # that the sensitivity of a layer is measured on
_SECONDS_BETWEEN_LINES = 10
# What a bound on quality applies to, by kind of loss. Tokens have none that is between 0 and 1: their loss is used.
_MAIN_METRICS = {"cross-entropy": "accuracy", "binary-cross-entropy": "f1", "mse": "pearson"}
Mix = dict[str, WeightFormat]


@dataclass(frozen=True)
class Bound:
    """What a quantized model has to keep; one of the two is set.

    Args:
        max_loss: Largest drop of accuracy, f1 or correlation; for language models, the largest relative rise of the
            loss on held-out rows.
        max_bytes: Largest size of the weight files.
    """

    max_loss: float | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.max_loss is None) == (self.max_bytes is None):
            raise RecipeError("a bound is either --max-loss or --size", "give one of them")


def quality_loss(kind: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the quality that was lost: the drop of the main metric, or the relative rise of the loss of tokens.

    Args:
        kind: Kind of loss of the task.
        before: Metrics of the original.
        after: Metrics of the quantized model.
    """
    metric = _MAIN_METRICS.get(kind)
    return (after["loss"] - before["loss"]) / before["loss"] if metric is None else before[metric] - after[metric]


def choose_mix(
    loaded: LoadedModel,
    layers: QuantizedLayers,
    formats: Sequence[WeightFormat],
    held_out: HeldOut,
    quality: Mapping[str, float],
    bound: Bound | None,
) -> Mix:
    """Return the format of each layer that is to be quantized.

    Args:
        loaded: The model.
        layers: Its layers, in their original form.
        formats: Formats to choose from.
        held_out: Rows to measure on.
        quality: Metrics of the original model.
        bound: What to keep; None takes every layer that the first format suits.

    Raises:
        ModelError: If no layer suits a format, or no mix keeps the bound.
    """
    suited = {one.name: layers.suited(one) for one in formats}
    if not any(suited.values()):
        raise ModelError(f"no layer has a shape that {formats[0].name} can store", "choose another format")
    if bound is None:
        return dict.fromkeys(suited[formats[0].name], formats[0])
    forms = _measure_layers(layers, formats, held_out.compare_with(loaded, _CALIBRATION_ROWS), loaded)
    moves = ordered_moves(forms)
    by_name = {one.name: one for one in formats}
    if bound.max_bytes is not None:
        chosen = _for_size(layers, loaded, moves, bound.max_bytes)
    else:
        assert bound.max_loss is not None
        search = _QualitySearch(loaded, layers, by_name, moves, held_out, quality, bound.max_loss)
        chosen = search.run()
    return {layer: by_name[name] for layer, name in formats_after(chosen).items()}


def _measure_layers(
    layers: QuantizedLayers, formats: Sequence[WeightFormat], comparison: ModelComparison, loaded: LoadedModel
) -> dict[str, list[LayerForm]]:
    """Measure the size and the divergence of each layer in each format, while all others are original."""
    forms = {name: [LayerForm(None, layers.num_bytes(name, None), 0.0)] for name in layers.names}
    todo = [(name, one) for one in formats for name in layers.suited(one)]
    said = time.monotonic()
    for done, (name, one) in enumerate(todo, start=1):
        layers.apply({name: one})
        divergence = comparison.compare(loaded.model).kl_mean
        divergence = divergence if divergence == divergence else float("inf")  # NaN: never this form
        forms[name].append(LayerForm(one.name, layers.num_bytes(name, one), divergence))
        if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            say(f"sensitivity of layers: {done} of {len(todo)}")
    layers.apply({})
    worst = max((form.divergence, name, form.format) for name, found in forms.items() for form in found[1:])
    say(f"sensitivity of {len(forms)} layers measured; the largest: {worst[1]} in {worst[2]}, KL {worst[0]:.2g}")
    return forms


def _for_size(layers: QuantizedLayers, loaded: LoadedModel, moves: Sequence[Move], max_bytes: int) -> list[Move]:
    total = layers.model_bytes()
    chosen = within_size(moves, total, max_bytes)
    if chosen is None:
        least = total - sum(move.saved_bytes for move in moves)
        raise ModelError(
            f"with every layer quantized the model has {least / 1e6:.2f} MB, more than {max_bytes / 1e6:.2f} MB",
            "a larger --size, a smaller format in --to, or --dtype bf16 for embeddings and heads",
        )
    if not chosen:
        raise ModelError(
            f"the model has {total / 1e6:.2f} MB, not more than {max_bytes / 1e6:.2f} MB, without being quantized",
            "a smaller --size",
        )
    return chosen


@dataclass(frozen=True)
class _QualitySearch:
    """The largest number of moves that keeps the quality, measured on all rows."""

    loaded: LoadedModel
    layers: QuantizedLayers
    formats: Mapping[str, WeightFormat]
    moves: Sequence[Move]
    held_out: HeldOut
    quality: Mapping[str, float]
    max_loss: float

    def run(self) -> list[Move]:
        """Search by bisection; the result was measured as a whole."""
        num = longest_that_holds(len(self.moves), self._holds)
        self.layers.apply({})
        if num == 0:
            raise ModelError(
                f"no layer can be quantized to {', '.join(self.formats)} within --max-loss {self.max_loss:.2%}",
                "a larger --max-loss, more --rows, or another format",
            )
        return list(self.moves[:num])

    def _holds(self, num: int) -> bool:
        chosen = formats_after(self.moves[:num])
        self.layers.apply({layer: self.formats[name] for layer, name in chosen.items()})
        after = quality_of(self.loaded, self.held_out)
        lost = quality_loss(self.held_out.task.loss_kind, self.quality, after)
        say(f"{num} of {len(self.moves)} steps: quality lost {lost:.2%}, at most {self.max_loss:.2%}")
        return lost <= self.max_loss  # False for NaN
