"""The dtypes of a model's computation and weights."""

import pytest
import torch

from trimtab import Engine
from trimtab.errors import RecipeError
from trimtab.model.precision import Precision

CPU = torch.device("cpu")


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.register_buffer("table", torch.arange(4.0))
        self.seen = None

    def forward(self, x):
        self.seen = self.linear(x.to(self.linear.weight.dtype))
        return {"logits": self.norm(self.seen)}


def test_pure_bf16_keeps_only_buffers_in_fp32():
    model = Small()
    model.linear.weight.grad = torch.ones(4, 4)
    Precision("bf16-pure", CPU).attach(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.linear.weight.grad.dtype is torch.bfloat16
    assert model.table.dtype is torch.float32
    out = model(torch.randn(2, 4))["logits"]
    assert model.seen.dtype is torch.bfloat16
    assert out.dtype is torch.float32
    out.sum().backward()
    assert model.norm.weight.grad.dtype is torch.bfloat16


def test_mixed_precision_converts_only_trainable_parameters_to_fp32():
    model = Small().to(torch.bfloat16)
    model.linear.requires_grad_(False)
    Precision("bf16", CPU).attach(model)
    assert (model.linear.weight.dtype, model.norm.weight.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("name", ["no", "bf16", "fp16", "bf16-pure"])
def test_detach_restores_the_forward(name):
    model, x = Small(), torch.randn(2, 4)
    forward = model.forward
    precision = Precision(name, CPU)
    precision.attach(model)
    precision.detach(model)
    assert model.forward == forward
    assert model(x.to(model.linear.weight.dtype))["logits"].dtype is model.linear.weight.dtype


def test_only_fp16_needs_scaling():
    assert [n for n in ("no", "bf16", "fp16", "bf16-pure") if Precision(n, CPU).needs_loss_scaling] == ["fp16"]
    assert Engine("bf16-pure", cpu=True).compute_dtype is torch.bfloat16
    assert Engine("no", cpu=True).compute_dtype is None


def test_tf32_is_refused_without_hardware_support():
    with pytest.raises(RecipeError, match="tf32 needs an NVIDIA GPU"):
        Precision("tf32", CPU)


def test_an_unknown_precision_is_refused():
    with pytest.raises(RecipeError, match="bf16-pure"):
        Precision("fp8", CPU)
