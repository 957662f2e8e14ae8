"""nf4 with error compensation, judged with bitsandbytes' own dequantization."""

import torch

from trimtab.compress.compensated_nf4 import compensate, in_groups, recorded_inputs
from trimtab.compress.error_compensation import output_error
from trimtab.compress.weight_formats import FORMATS


def linear(num_in=128, num_out=32):
    torch.manual_seed(0)
    return torch.nn.Linear(num_in, num_out)


def dequantized(module):
    import bitsandbytes

    return bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)


def test_errors_of_outputs_are_smaller_and_the_scales_are_the_same():
    layer = linear()
    inputs = torch.randn(400, 128) @ torch.randn(128, 128)  # correlated
    hessian = inputs.T @ inputs
    module = FORMATS["nf4"].quantized(layer)
    plain, scales = dequantized(module), module.weight.quant_state.absmax.clone()
    weight = layer.weight.detach()
    assert compensate(module, weight, hessian)
    better = dequantized(module)
    assert output_error(weight, better, hessian) < 0.7 * output_error(weight, plain, hessian)
    assert torch.equal(module.weight.quant_state.absmax, scales)


def test_without_correlation_each_weight_is_rounded_to_the_nearest_value():
    """Plain rounding divides by scales before they are rounded to 8 bits, so a few of its values are not nearest."""
    layer = linear()
    module = FORMATS["nf4"].quantized(layer)
    plain, weight = dequantized(module), layer.weight.detach()
    compensate(module, weight, torch.eye(128))
    slack = torch.finfo(torch.float32).eps * weight.abs().max()
    assert ((dequantized(module) - weight).abs() <= (plain - weight).abs() + slack).all()


def test_worse_rounding_is_not_taken(monkeypatch):
    layer = linear()
    module = FORMATS["nf4"].quantized(layer)
    before = dequantized(module)
    monkeypatch.setattr("trimtab.compress.compensated_nf4.compensated", lambda weight, *_: torch.zeros_like(weight))
    assert not compensate(module, layer.weight.detach(), torch.eye(128))
    assert torch.equal(dequantized(module), before)


def test_inputs_at_masked_positions_are_left_out():
    layer, masks = linear(64, 8), []
    values = torch.randn(2, 3, 64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with recorded_inputs({"layer": layer}, masks) as sums:
        masks.append(mask)
        layer(values)
        masks.append(torch.ones(2, 1))  # of another length: the input of a head
        layer(values[:, 0])
    kept = torch.cat([values[mask.bool()], values[:, 0]])
    torch.testing.assert_close(sums["layer"], kept.T @ kept)
    layer(values)
    torch.testing.assert_close(sums["layer"], kept.T @ kept)  # outside nothing is recorded


def test_few_hessians_are_in_memory_at_a_time(monkeypatch):
    monkeypatch.setattr("trimtab.compress.compensated_nf4._MAX_BYTES", 4 * 2 * 64**2)
    layers = {str(index): torch.nn.Linear(width, 8) for index, width in enumerate((64, 64, 64, 256, 64))}
    assert list(in_groups(layers)) == [["0", "1"], ["2"], ["3"], ["4"]]
