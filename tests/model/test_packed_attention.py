"""Attention over packed rows: against plain attention with a mask, on the CPU and without data."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from packed_rows import assert_close
from trimtab.model.packed_attention import Kernel, kernel_for, packed_attention, register_packed_attention

LENGTHS = (9, 0, 1, 17, 5)
OPTIONS = {"is_causal": False, "window": None, "scale": None, "dropout": 0.0}


def boundaries(lengths=LENGTHS, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def inputs(num_heads=4, num_shared=4, width=8, lengths=LENGTHS, **settings):
    torch.manual_seed(0)
    shapes = [(1, heads, sum(lengths), width) for heads in (num_heads, num_shared, num_shared)]
    return [torch.randn(shape, **settings).requires_grad_() for shape in shapes]


def plain_attention(query, key, value, lengths, is_causal, window, scale):
    """All pairs of tokens, with a mask that says which pairs are in one row, in order, and near enough."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(row))[:, None] - torch.arange(len(row))
    allowed = row[:, None] == row
    if is_causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance.abs() < window
    scores = query @ key.transpose(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
    weights = scores.masked_fill(~allowed.to(scores.device), -math.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("num_shared", [4, 1])
@pytest.mark.parametrize("window", [None, 4, 7])
@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_of_one_length_equal_plain_attention(is_causal, window, num_shared, monkeypatch):
    lengths = (7, 7, 7)
    tensors = inputs(num_shared=num_shared, lengths=lengths)
    options = {"is_causal": is_causal, "window": window, "scale": 0.7}
    shapes, compute = [], functional.scaled_dot_product_attention

    def noted(query, *args, **kwargs):
        shapes.append(tuple(query.shape))
        return compute(query, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    found = packed_attention(*tensors, boundaries(lengths), 7, kernel=Kernel.ROWS, row_length=7, dropout=0.0, **options)
    in_one_call = window is None or window >= 7
    assert shapes == ([(3, 4, 7, 8)] if in_one_call else [(1, 4, 7, 8)] * 3)
    wanted = plain_attention(*tensors, lengths, **options)
    assert_close(found, wanted, 1e-5, "output")
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad((output * weights).sum(), tensors) for output in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 1e-5, "gradient", at_least=1.0)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("num_shared", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_equal_plain_attention(is_causal, window, num_shared, scale):
    tensors = inputs(num_shared=num_shared)
    options = {"is_causal": is_causal, "window": window, "scale": scale}
    found = packed_attention(*tensors, boundaries(), 17, kernel=Kernel.ROWS, dropout=0.0, **options)
    wanted = plain_attention(*tensors, LENGTHS, **options)
    assert_close(found, wanted, 1e-5, "output")
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad((output * weights).sum(), tensors) for output in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 1e-5, "gradient", at_least=1.0)  # with windows of one token they are 0


@pytest.mark.parametrize("window", [None, 6])
def test_dropout_of_rows(window):
    """Values are the unit vectors, so the output is the matrix of weights."""
    lengths, probability, num_draws = (12, 4), 0.3, 600
    query, key, _ = inputs(1, 1, 16, lengths)
    value = torch.eye(16)[None, None]
    options = OPTIONS | {"is_causal": True, "window": window}
    wanted = packed_attention(query, key, value, boundaries(lengths), 12, kernel=Kernel.ROWS, **options).detach()
    options["dropout"] = probability
    draws = torch.stack(
        [
            packed_attention(query, key, value, boundaries(lengths), 12, kernel=Kernel.ROWS, **options).detach()
            for _ in range(num_draws)
        ]
    )
    is_weight = wanted > 0
    share = float((draws[:, is_weight] == 0).float().mean())
    count = num_draws * int(is_weight.sum())
    assert abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / count)
    deviation = wanted * math.sqrt(probability / (1 - probability) / num_draws)
    assert ((draws.mean(0) - wanted).abs() <= 5 * deviation + 1e-6).all()
    assert not draws[:, ~is_weight].any()


def test_rows_longer_than_announced():
    """A GPU kernel would leave the output of the last tokens undefined."""
    with pytest.raises(ValueError, match="a row has 17 tokens, but max_length_q is 16"):
        packed_attention(*inputs(), boundaries(), 16, kernel=Kernel.ROWS, **OPTIONS)


# ---------------------------------------------------------------------- without data


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(Kernel.FLASH, torch.bfloat16), (Kernel.FLASH, torch.float32), (Kernel.EFFICIENT, torch.float32)],
)
@pytest.mark.parametrize("window", [None, 4])
def test_kernels_without_data(kernel, dtype, window, recomputes):
    tensors = inputs(num_shared=2, device="meta", dtype=dtype)
    dropout = 0.1 if dtype is torch.bfloat16 else 0.0
    options = {"is_causal": True, "window": window, "scale": 0.5, "dropout": dropout}

    def run(*tensors):
        return packed_attention(*tensors, boundaries(device="meta"), 17, kernel=kernel, **options)

    output = checkpoint(run, *tensors, use_reentrant=False) if recomputes else run(*tensors)
    assert output.shape == (1, sum(LENGTHS), 4, 8)
    names = output.grad_fn.name(), output.grad_fn.next_functions[0][0].name()
    assert any(
        ("Flash" if kernel is Kernel.FLASH and dtype is torch.bfloat16 else "Efficient") in name for name in names
    )
    output.sum().backward()
    assert all(tensor.grad.shape == tensor.shape for tensor in tensors)


def test_dropout_needs_the_flash_kernel():
    options = {"is_causal": True, "window": None, "scale": None, "dropout": 0.1}
    with pytest.raises(ValueError, match="drops other weights in backward"):
        packed_attention(*inputs(), boundaries(), 17, kernel=Kernel.EFFICIENT, **options)


@pytest.mark.parametrize(("kernel", "dtype"), [(Kernel.FLASH, torch.float16), (Kernel.EFFICIENT, torch.float32)])
@pytest.mark.parametrize("window", [None, 4])
def test_kernels_under_a_compiler(kernel, dtype, window):
    """A compiler asks for the shapes of results, with tensors that have a device but no data."""
    options = {"is_causal": True, "window": window, "scale": 0.5, "dropout": 0.0}
    with FakeTensorMode():
        tensors = inputs(num_shared=2, dtype=dtype)
        offsets = torch.empty(len(LENGTHS) + 1, dtype=torch.int32)
        output = packed_attention(*tensors, offsets, 17, kernel=kernel, **options)
        gradients = torch.autograd.grad(output.sum(), tensors)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in tensors]
    assert {gradient.device.type for gradient in gradients} == {"cpu"}


@pytest.mark.parametrize("num_shared", [4, 2])
def test_rows_of_one_length_are_one_graph(num_shared):
    """Also with a symbolic number of heads, which torch's attention refuses to compare itself."""
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (4, num_shared, num_shared))
    options = {"is_causal": True, "window": None, "scale": 0.3, "dropout": 0.0, "row_length": 6}
    ends = torch.tensor([0, 6, 12], dtype=torch.int32)
    compiled = torch.compile(packed_attention, backend="eager", dynamic=True, fullgraph=True)
    found = compiled(query, key, value, ends, 6, kernel=Kernel.FLASH, **options)
    torch.testing.assert_close(found, packed_attention(query, key, value, ends, 6, kernel=Kernel.FLASH, **options))


def test_windows_in_both_directions_need_flash():
    tensors = inputs(device="meta")
    with pytest.raises(ValueError, match="no windows in both directions"):
        packed_attention(*tensors, boundaries(device="meta"), 17, kernel=Kernel.EFFICIENT, **OPTIONS | {"window": 4})


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "has_flash", "kernel"),
    [
        ("cpu", None, None, True, Kernel.ROWS),
        ("cuda", torch.bfloat16, (9, 0), True, Kernel.FLASH),
        ("cuda", torch.float16, (8, 0), True, Kernel.FLASH),
        ("cuda", torch.float16, (7, 5), True, Kernel.EFFICIENT),
        ("cuda", torch.bfloat16, (9, 0), False, Kernel.EFFICIENT),
        ("cuda", None, (9, 0), True, Kernel.EFFICIENT),
        ("mps", torch.float16, None, True, None),
    ],
)
def test_choice_of_kernels(device, dtype, capability, has_flash, kernel):
    assert kernel_for(device, dtype, capability, has_flash) == kernel


# ---------------------------------------------------------------------- transformers' interface


def registered(kernel=Kernel.ROWS):
    return [AttentionInterface()[name] for name in register_packed_attention(kernel, "sdpa")]


def test_names():
    name, unmasked = register_packed_attention(Kernel.FLASH, "sdpa")
    assert "flash" not in name + unmasked  # transformers would take it for the package flash-attn
    assert AttentionMaskInterface()[name] is AttentionMaskInterface()["sdpa"]
    assert unmasked not in AttentionMaskInterface()._global_mapping


def test_without_boundaries_the_previous_function_runs():
    query, key, value = inputs()
    both, packed_only = registered()
    module = SimpleNamespace(is_causal=True)
    found, _ = both(module, query, key, value, None, scaling=0.3)
    wanted, _ = AttentionInterface()["sdpa"](module, query, key, value, None, scaling=0.3)
    assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="did not reach SimpleNamespace"):
        packed_only(module, query, key, value, None)


@pytest.mark.parametrize("argument", [None, True, False])
@pytest.mark.parametrize("attribute", [{}, {"is_causal": True}, {"is_causal": False}])
def test_causality_comes_from_the_call_or_the_module(attribute, argument):
    tensors = inputs()
    rows = {"cu_seq_lens_q": boundaries(), "max_length_q": 17}
    found, _ = registered()[0](SimpleNamespace(**attribute), *tensors, None, is_causal=argument, **rows)
    is_causal = attribute.get("is_causal", True) if argument is None else argument
    assert_close(found, plain_attention(*tensors, LENGTHS, is_causal, None, None), 1e-5, "output")


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_unknown_scores_are_refused(name):
    rows = {"cu_seq_lens_q": boundaries(), "max_length_q": 17, name: 1.0}
    with pytest.raises(ValueError, match=f"does not support {name}"):
        registered()[1](SimpleNamespace(), *inputs(), None, **rows)


def test_masks_are_refused():
    rows = {"cu_seq_lens_q": boundaries(), "max_length_q": 17}
    with pytest.raises(ValueError, match="leave attention_mask out"):
        registered()[0](SimpleNamespace(), *inputs(), torch.ones(1), **rows)


def test_dtypes_follow_autocast():
    query, key, value = inputs()
    rows = {"cu_seq_lens_q": boundaries(), "max_length_q": 17}
    attention, module = registered()[0], SimpleNamespace()
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(module, query, key, value, None, **rows)[0].dtype is torch.bfloat16
    assert attention(module, query, key, value.bfloat16(), None, **rows)[0].dtype is torch.bfloat16
