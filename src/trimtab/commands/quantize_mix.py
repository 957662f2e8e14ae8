"""The layers that `trimtab quantize` quantizes: all, or the mix that meets a bound on quality or size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

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
from trimtab.engine.placement import to_device
from trimtab.errors import ModelError, RecipeError
from trimtab.inference.held_out import HeldOut, quality_of
from trimtab.inference.load import LoadedModel
from trimtab.inference.quality_loss import quality_loss
from trimtab.log import say
from trimtab.training.work_progress import tracked

CALIBRATION_ROWS = 128  # number of rows to whose inputs rounding is adapted
_SENSITIVITY_ROWS = 64  # number of these on which the sensitivity of a layer is measured


@dataclass(frozen=True)
class Bound:
    """The bound that a quantized model must meet; one of the two is set.

    Args:
        max_loss: Largest decrease of accuracy, f1 or correlation; for language models, largest relative increase of the
            loss on held-out rows.
        max_bytes: Largest size of the weight files.
    """

    max_loss: float | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.max_loss is None) == (self.max_bytes is None):
            raise RecipeError("a bound is either --max-loss or --size", "pass exactly one of them")


@dataclass(frozen=True)
class MixEvaluator:
    """The model and rows with which mixes are evaluated.

    Args:
        loaded: The model whose layers are switched.
        held_out: Rows on which quality is measured.
        calibration: Other rows, on which sensitivity is measured and to which rounding is adapted.
        quality: Metrics of the original model on the held-out rows.
    """

    loaded: LoadedModel
    held_out: HeldOut
    calibration: HeldOut
    quality: Mapping[str, float]

    def loss(self) -> float:
        """Return the loss of quality of the model in its current form."""
        after = quality_of(self.loaded, self.held_out)
        return quality_loss(self.quality, after)


def choose_mix(
    layers: QuantizedLayers, formats: Sequence[WeightFormat], evaluator: MixEvaluator, bound: Bound | None
) -> dict[str, WeightFormat]:
    """Return the format of each layer to quantize.

    Args:
        layers: The layers of the model, in their original form.
        formats: Formats to choose from.
        evaluator: Evaluates mixes.
        bound: The bound to meet; None uses every layer that the first format supports.

    Raises:
        ModelError: If no format supports any layer, or no mix meets the bound.
    """
    suited = {one.name: layers.suited(one) for one in formats}
    if not any(suited.values()):
        raise ModelError(f"no layer has a shape that {formats[0].name} can store", "choose another format")
    for one in formats:
        _calibrate(layers, one, evaluator)
    if bound is None:
        return dict.fromkeys(suited[formats[0].name], formats[0])
    moves = ordered_moves(_measure_layers(layers, formats, evaluator))
    by_name = {one.name: one for one in formats}
    if bound.max_bytes is not None:
        chosen = _for_size(layers, moves, bound.max_bytes)
    else:
        assert bound.max_loss is not None
        chosen = _for_quality(layers, moves, by_name, evaluator, bound.max_loss)
    return {layer: by_name[name] for layer, name in formats_after(chosen).items()}


def _calibrate(layers: QuantizedLayers, format: WeightFormat, evaluator: MixEvaluator) -> None:
    """Run the calibration rows through the layers of a format whose rounding depends on inputs."""
    loaded = evaluator.loaded

    @torch.inference_mode()
    def run(masks: list[torch.Tensor]) -> None:
        for _, batch in evaluator.calibration.batches():
            moved = to_device(batch, loaded.device)
            if "attention_mask" in moved:
                masks.append(moved["attention_mask"])
            loaded.model(**{name: value for name, value in moved.items() if name != "labels"})

    loaded.model.eval()
    num_better = layers.calibrate(format, run)
    if num_better:
        say(f"{format.name}: error-compensated rounding is used in {num_better} of {len(layers.suited(format))} layers")


def _measure_layers(
    layers: QuantizedLayers, formats: Sequence[WeightFormat], evaluator: MixEvaluator
) -> dict[str, list[LayerForm]]:
    """Measure the size and divergence of each layer in each format, while all others are original."""
    comparison = evaluator.calibration.compare_with(evaluator.loaded, _SENSITIVITY_ROWS)
    forms = {name: [LayerForm(None, layers.num_bytes(name, None), 0.0)] for name in layers.names}
    todo = [(name, one) for one in formats for name in layers.suited(one)]
    for name, one in tracked(todo, "sensitivity of layers"):
        layers.apply({name: one})
        divergence = comparison.compare(evaluator.loaded.model).kl_mean
        divergence = divergence if divergence == divergence else float("inf")  # NaN: never use this form
        forms[name].append(LayerForm(one.name, layers.num_bytes(name, one), divergence))
    layers.apply({})
    worst = max((form.divergence, name, form.format) for name, found in forms.items() for form in found[1:])
    say(f"sensitivity of {len(forms)} layers measured; the largest: {worst[1]} in {worst[2]}, KL {worst[0]:.2g}")
    return forms


def _for_size(layers: QuantizedLayers, moves: Sequence[Move], max_bytes: int) -> list[Move]:
    total = layers.model_bytes()
    chosen = within_size(moves, total, max_bytes)
    if chosen is None:
        least = total - sum(move.saved_bytes for move in moves)
        raise ModelError(
            f"with every layer quantized the model has {least / 1e6:.2f} MB, more than {max_bytes / 1e6:.2f} MB",
            "use a larger --size, a smaller format in --to, or --dtype bf16 for embeddings and heads",
        )
    if not chosen:
        raise ModelError(
            f"the model has only {total / 1e6:.2f} MB without quantization, within --size {max_bytes / 1e6:.2f} MB",
            "use a smaller --size",
        )
    return chosen


def _for_quality(
    layers: QuantizedLayers,
    moves: Sequence[Move],
    formats: Mapping[str, WeightFormat],
    evaluator: MixEvaluator,
    max_loss: float,
) -> list[Move]:
    """Return the largest number of moves that meets the quality bound; that mix was measured as a whole."""

    def holds(num: int) -> bool:
        chosen = formats_after(moves[:num])
        layers.apply({layer: formats[name] for layer, name in chosen.items()})
        lost = evaluator.loss()
        say(f"{num} of {len(moves)} steps: quality lost {lost:.2%}, at most {max_loss:.2%}")
        return lost <= max_loss  # False for NaN

    num = longest_that_holds(len(moves), holds)
    layers.apply({})
    if num == 0:
        raise ModelError(
            f"no layer can be quantized to {', '.join(formats)} within --max-loss {max_loss:.2%}",
            "use a larger --max-loss, more --rows, or another format",
        )
    return list(moves[:num])
