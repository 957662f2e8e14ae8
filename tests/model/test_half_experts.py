"""Fused experts under autocast compute in half precision, as linear layers do; without autocast nothing changes."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_experts import SHAPES, moe_model, token_batch
from trimtab.model.adapter_configs import LoraSpec
from trimtab.model.adapters import add_adapter
from trimtab.model.precision import Precision

CPU = torch.device("cpu")


class GroupedProducts(TorchDispatchMode):
    """Records the dtypes of the inputs of grouped products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.dtypes |= {matrix.dtype for matrix in args[:2]}
        return func(*args, **(kwargs or {}))


def loss_of(model, backward=True):
    seen = GroupedProducts()
    with seen:
        loss = model(**token_batch()).loss
    if backward:
        loss.backward()
    return loss.detach(), seen.dtypes


def in_precision(model, name):
    Precision(name, CPU).attach(model)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_half_precision_and_gradients_are_those_of_fp32_rounded(shape):
    # Each token goes to all experts: otherwise one rounding may choose another expert, as it may on another processor.
    plain, mixed = (moe_model(shape, num_experts_per_tok=4) for _ in range(2))
    in_precision(mixed, "bf16")
    (exact, exact_dtypes), (rounded, dtypes) = loss_of(plain), loss_of(mixed)
    assert exact_dtypes == {torch.float32}
    assert dtypes == {torch.bfloat16}
    assert rounded == pytest.approx(exact, rel=8 * torch.finfo(torch.bfloat16).eps)
    for (name, one), other in zip(plain.named_parameters(), mixed.parameters(), strict=True):
        if ".experts." in name and other.grad is not None:
            assert other.grad.dtype is torch.float32
            assert (one.grad - other.grad).norm() < 4 * torch.finfo(torch.bfloat16).eps * one.grad.norm(), name


def test_experts_without_autocast_are_unchanged():
    model = moe_model()
    before = loss_of(model, backward=False)[0]
    precision = Precision("bf16", CPU)
    precision.attach(model)
    with torch.autocast("cpu", enabled=False):
        experts = next(module for module in model.modules() if hasattr(module, "has_gate"))
        hidden = torch.randn(6, 32)
        chosen, weights = torch.zeros(6, 1, dtype=torch.long), torch.ones(6, 1)
        inside = experts(hidden, chosen, weights)
    precision.detach(model)
    assert "forward" not in experts.__dict__
    assert torch.equal(inside, experts(hidden, chosen, weights))
    assert torch.equal(loss_of(model, backward=False)[0], before)


def test_a_copy_casts_its_own_weights():
    model = in_precision(moe_model(), "bf16")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if ".experts." in name:
                parameter.zero_()
    one, other = loss_of(model)[0], loss_of(copied)
    assert other[1] == {torch.bfloat16}
    assert not torch.equal(one, other[0])


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations_are_left_to_autocast(implementation):
    model = moe_model(implementation=implementation)
    loss, dtypes = loss_of(in_precision(model, "bf16"))
    assert loss.isfinite()
    assert not dtypes


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_adapted_experts_compute_in_half_precision(base):
    model = moe_model().to(base)
    adapter = add_adapter(model, LoraSpec(rank=2, experts=True))
    loss, dtypes = loss_of(in_precision(model, "bf16"))
    assert loss.isfinite()
    assert dtypes == {torch.bfloat16}
    trained = [tensor for name, tensor in adapter.tensors().items() if ".experts." in name]
    assert trained
    assert all(tensor.grad.dtype is torch.float32 for tensor in trained)


def test_rows_that_half_precision_does_not_align_stay_fp32():
    loss, dtypes = loss_of(in_precision(moe_model(intermediate_size=44), "bf16"))
    assert loss.isfinite()
    assert dtypes == {torch.float32}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.compile about transformers
def test_compiled_experts_compute_in_half_precision():
    model = in_precision(moe_model(num_experts_per_tok=4), "bf16")
    expected, _ = loss_of(model)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    products = []

    def backend(graph, inputs):
        products.extend(str(node.target) for node in graph.graph.nodes if "grouped_mm" in str(node.target))
        return graph

    for block in model.model.layers:
        block.compile(backend=backend)
    loss = model(**token_batch()).loss
    loss.backward()
    loss = loss.detach()
    assert products
    assert not any("fallback" in name for name in products), "which is for other dtypes than bf16"
    assert loss == pytest.approx(expected, rel=4 * torch.finfo(torch.bfloat16).eps)
    for one, other in zip(gradients, [p.grad for p in model.parameters() if p.grad is not None], strict=True):
        assert (one - other).norm() <= 4 * torch.finfo(torch.bfloat16).eps * one.norm()
