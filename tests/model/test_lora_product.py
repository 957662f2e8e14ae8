"""The LoRA forward: equal to PEFT's, in the dtype of the base, saving only the input and the inner product."""

import copy
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from trimtab.model.lora_product import _PEFT_FORWARD, bind_product

NUM_IN, NUM_OUT, RANK = 48, 80, 4


class Projections(torch.nn.Module):
    """Three modules that share an input, and one behind them."""

    def __init__(self, linear=torch.nn.Linear):
        super().__init__()
        self.q, self.k, self.v = (linear(NUM_IN, NUM_OUT) for _ in range(3))
        self.out = linear(NUM_OUT, NUM_IN)

    def forward(self, x):
        return self.out(torch.tanh(self.q(x) * self.k(x)) + self.v(x))


def conv1d(num_in, num_out):
    from transformers.pytorch_utils import Conv1D

    return Conv1D(num_out, num_in)


def adapted(linear=torch.nn.Linear, dropout=0.0, alpha=7, ours=True, dtype=torch.float32, **settings):
    """The modules with an adapter of fp32 weights that are not zero."""
    import peft

    torch.manual_seed(3)
    model = Projections(linear).to(dtype)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=["q", "k", "v", "out"],
        fan_in_fan_out=linear is conv1d,
        **settings,
    )
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.1
    if ours:
        for layer in (model.q, model.k, model.v, model.out):
            assert bind_product(layer)
    return model


def inputs(dtype=torch.float32, requires_grad=True):
    torch.manual_seed(5)
    return (torch.randn(2, 6, NUM_IN, dtype=dtype)).requires_grad_(requires_grad)


def outcome(model, x, autocast=None):
    """Loss, and gradients of the input and all trainable parameters."""
    torch.manual_seed(11)  # dropout
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        output = model(x)
    loss = output.float().square().mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients | ({"input": x.grad} if x.requires_grad else {})


def assert_same(one, other, **tolerance):
    torch.testing.assert_close(one[0], other[0], **tolerance)
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], **tolerance)


EXACT = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("linear", [torch.nn.Linear, conv1d])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_equals_peft_in_fp32(linear, dropout):
    ours = outcome(adapted(linear, dropout), inputs())
    theirs = outcome(adapted(linear, dropout, ours=False), inputs())
    assert len(ours[1]) == 9
    assert_same(ours, theirs, **EXACT)


@pytest.mark.parametrize("shape", [(NUM_IN,), (5, NUM_IN), (6, 2, NUM_IN), (2, 3, 4, NUM_IN)])
def test_any_number_of_dimensions(shape):
    x = torch.randn(shape)
    x = x.transpose(0, 1) if x.dim() == 3 else x  # not contiguous
    torch.testing.assert_close(adapted()(x), adapted(ours=False)(x), **EXACT)


def test_no_rows():
    assert adapted()(torch.randn(0, 3, NUM_IN)).shape == (0, 3, NUM_IN)


def test_scaling_by_the_root_of_the_rank():
    one = outcome(adapted(use_rslora=True), inputs())
    assert_same(one, outcome(adapted(use_rslora=True, ours=False), inputs()), **EXACT)
    assert one[0] != outcome(adapted(), inputs())[0]


def test_input_without_gradient():
    ours = outcome(adapted(), inputs(requires_grad=False))
    assert len(ours[1]) == 8
    assert_same(ours, outcome(adapted(ours=False), inputs(requires_grad=False)), **EXACT)


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B", "lora_"])
def test_frozen_matrices(frozen):
    both = adapted(), adapted(ours=False)
    for model in both:
        for name, parameter in model.named_parameters():
            if frozen in name:
                parameter.requires_grad_(False)
    assert_same(outcome(both[0], inputs()), outcome(both[1], inputs()), **EXACT)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, None), (torch.bfloat16, True), (torch.float32, True)])
def test_half_precision_within_its_rounding(dtype, autocast):
    """The masters stay fp32, and so do their gradients; the values are those of a product in half precision."""
    half = torch.bfloat16 if autocast else None
    ours = outcome(adapted(dtype=dtype), inputs(dtype), half)
    exact = adapted(dtype=dtype, ours=False).float()
    reference = outcome(exact, inputs(dtype).detach().float().requires_grad_())
    assert all(gradient.dtype is torch.float32 for name, gradient in ours[1].items() if "lora_" in name)
    for name, gradient in ours[1].items():
        error = (gradient.float() - reference[1][name]).norm() / reference[1][name].norm()
        assert error < 0.02, name
    torch.testing.assert_close(ours[0], reference[0], rtol=0.02, atol=0)


class Made(TorchDispatchMode):
    """Every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.tensors.append((tuple(result.shape), result.dtype))
        return result


def test_no_fp32_copy_of_the_input():
    x = inputs(torch.bfloat16)
    for ours, wanted in ((True, set()), (False, {NUM_IN, NUM_OUT})):
        model = adapted(dtype=torch.bfloat16, ours=ours)
        with Made() as made:
            model(x)
        wide = {shape[-1] for shape, dtype in made.tensors if dtype is torch.float32 and shape[:-1] in ((2, 6), (12,))}
        assert wide - {RANK} == wanted


def kept_bytes(model, x, autocast=None):
    """Bytes that autograd keeps, each storage once, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None),
    ):
        output = model(x)
    del output
    return sum(size for size, _ in kept.values())


class Shared(Projections):
    """Nothing but the three projections; the sum needs nothing for its gradient."""

    def forward(self, x):
        return self.q(x) + self.k(x) + self.v(x)


@pytest.mark.parametrize(
    ("x_dtype", "base_dtype", "autocast"),
    [
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),  # the output of a norm under autocast
    ],
)
def test_saves_the_input_once_and_the_inner_products(x_dtype, base_dtype, autocast):
    model = adapted(dtype=base_dtype)
    model.__class__ = Shared
    element = 4 if base_dtype is torch.float32 else 2
    x = inputs(x_dtype) * 1  # no leaf
    assert kept_bytes(model, x, autocast) == element * 12 * (NUM_IN + 3 * RANK)


def test_a_changed_shared_input_is_converted_again():
    model = adapted(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = inputs(requires_grad=False)
        first = model.q(x)
        x.mul_(2)
        second, expected = model.q(x), adapted(dtype=torch.bfloat16).q(x.clone())
    assert torch.equal(second, expected)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("linear", [torch.nn.Linear, conv1d, functools.partial(torch.nn.Linear, bias=False)])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_adds_in_place(linear, with_gradients):
    """The base's output is taken over: no second tensor of its size."""
    layer = adapted(linear).q
    seen = []
    layer.base_layer.register_forward_hook(lambda module, args, output: seen.append(output.data_ptr()))
    with torch.set_grad_enabled(with_gradients):
        assert layer(inputs()).data_ptr() == seen[0]


def _keep_products(ctx, function, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if function in products else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing(selective, dropout):
    """Also torch's own selective form, which refuses outputs that were changed in place."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products) if selective else noop_context_fn
    model = adapted(dropout=dropout)
    plain = outcome(copy.deepcopy(model), inputs())
    own = model.forward
    model.forward = lambda x: checkpoint(own, x, use_reentrant=False, context_fn=contexts)
    assert_same(outcome(model, inputs()), plain, rtol=0, atol=0)


def test_unsupported_cases_use_the_forward_of_peft():
    model, theirs = adapted().eval(), adapted(ours=False).eval()
    x = inputs(requires_grad=False)
    for change in (
        lambda layer: layer.enable_adapters(False),
        lambda layer: layer.enable_adapters(True),
        lambda layer: layer.merge(),
        lambda layer: layer.unmerge(),
    ):
        for other in (model, theirs):
            for layer in (other.q, other.k, other.v, other.out):
                change(layer)
        torch.testing.assert_close(model(x), theirs(x), **EXACT)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_variants(settings):
    one, other = adapted(**settings), adapted(ours=False, **settings)
    assert_same(outcome(one, inputs()), outcome(other, inputs()), **EXACT)


def test_copies_compute_with_their_own_weights():
    model = adapted()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.q.lora_B["default"].weight.zero_()
    x = inputs()
    assert copied.q.forward.__self__ is copied.q
    assert copied.q.__dict__[_PEFT_FORWARD].__self__ is copied.q
    assert not torch.equal(model.q(x), copied.q(x))
    torch.testing.assert_close(copied.q(x), copied.q.base_layer(x))


def test_binding_twice_or_something_else():
    model = adapted()
    assert not bind_product(model.q)
    import peft

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(7, 4)

    words = Words()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["words"]), words)
    assert not bind_product(words.words)
