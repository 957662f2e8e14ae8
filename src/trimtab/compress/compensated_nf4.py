"""nf4 with error compensation: weights are rounded column by column, and later columns make up for earlier errors.

The scales are those of plain rounding, so the format is the same; only the choice among the 16 values differs. Inputs
of the layers on calibration rows show which errors matter.

Shapes: O rows (outputs) and I columns (inputs) of a weight, N positions of a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trimtab.compress.error_compensation import compensated, output_error

_BLOCK = 64  # number of weights that share a scale
_MAX_BYTES = 2**30  # bytes of Hessians in memory at a time


def in_groups(layers: Mapping[str, torch.nn.Linear]) -> Iterator[list[str]]:
    """Yield names of consecutive layers whose Hessians fit into memory together."""
    group, size = list[str](), 0
    for name, layer in layers.items():
        needed = 4 * layer.in_features**2
        if group and size + needed > _MAX_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += needed
    if group:
        yield group


@contextmanager
def recorded_inputs(layers: Mapping[str, torch.nn.Linear], masks: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
    """Sum x xᵀ over the inputs x of layers in the forward passes inside.

    Args:
        layers: The layers by name.
        masks: Its last element is the attention mask of the batch that runs; masked positions are left out.
    """
    sums = {
        name: torch.zeros(layer.in_features, layer.in_features, device=layer.weight.device)
        for name, layer in layers.items()
    }

    def recorder(name: str) -> Callable[[Any, Any], None]:
        def record(_: torch.nn.Module, inputs: Any) -> None:
            (values,) = inputs
            if masks and values.shape[:-1] == masks[-1].shape:
                values = values[masks[-1].bool()]
            values_NI = values.reshape(-1, values.shape[-1]).float()
            sums[name].addmm_(values_NI.T, values_NI)

        return record

    with ExitStack() as undo:
        for name, layer in layers.items():
            undo.callback(layer.register_forward_pre_hook(recorder(name)).remove)
        yield sums


@torch.no_grad()
def compensate(quantized: Any, weight_OI: Tensor, hessian_II: Tensor) -> bool:
    """Round the weight of a module in nf4 again, if that makes the error of its outputs smaller.

    Args:
        quantized: A `Linear4bit` that has not run yet; its packed values are replaced.
        weight_OI: The weight that was quantized.
        hessian_II: Sum of x xᵀ over its inputs.

    Returns:
        Whether the error is smaller than that of plain rounding.
    """
    packed, state = quantized.weight.data, quantized.weight.quant_state
    values = state.code.float()
    scales_OG = _scales_of(state).view(weight_OI.shape[0], -1)
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.uint8, device=weight_OI.device)
    limits = (values[1:] + values[:-1]) / 2

    def round_column(column_O1: Tensor, index: int) -> Tensor:
        scale_O1 = scales_OG[:, index // _BLOCK, None]
        code_O1 = torch.bucketize(column_O1 / scale_O1.clamp(min=1e-30), limits)
        codes_OI[:, index] = code_O1[:, 0].to(torch.uint8)
        rounded_O1: Tensor = values[code_O1] * scale_O1
        return rounded_O1

    plain_OI = values[_unpacked(packed).view(weight_OI.shape).long()] * scales_OG.repeat_interleave(_BLOCK, 1)
    rounded_OI = compensated(weight_OI, hessian_II, round_column)
    weight_OI = weight_OI.float()
    if not output_error(weight_OI, rounded_OI, hessian_II) < output_error(weight_OI, plain_OI, hessian_II):
        return False
    pairs = codes_OI.view(-1, 2)
    packed.copy_((pairs[:, 0] << 4 | pairs[:, 1]).view(packed.shape))
    return True


def _scales_of(state: Any) -> Tensor:
    """Return the stored scale of each block."""
    if not state.nested:
        return state.absmax.float()  # type: ignore[no-any-return]
    functional: Any = import_module("bitsandbytes").functional
    scales: Tensor = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return scales.float()


def _unpacked(packed: Tensor) -> Tensor:
    """Return the 4-bit values of bytes; the first of two is in the upper half."""
    bits = packed.view(torch.uint8).flatten()
    return torch.stack([bits >> 4, bits & 0xF], 1)
