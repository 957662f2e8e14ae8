"""Attention over short packed rows: the kernels in Triton's interpreter, which needs no GPU, and a trace on `meta`.

Triton decides at its import whether it interprets, so tests of the kernels run in a subprocess with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy
import pytest
import torch

from packed_rows import assert_close
from trimtab.model.packed_attention import Kernel, packed_attention
from trimtab.model.short_attention import can_compute, short_attention

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter reads bounds of loops as arrays of one number.
HAS_NUMPY = tuple(map(int, numpy.__version__.split(".")[:2])) < (2, 4)
needs_triton = pytest.mark.skipif(
    not (find_spec("triton") and HAS_NUMPY), reason="needs Triton, whose interpreter needs NumPy before 2.4"
)
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the subprocess of the first test")
LENGTHS, NUM_HEADS, SIZE, SCALE = (70, 1, 0, 130, 5), 2, 16, 0.3
ALL_BITS = 2**32 - 1


@needs_triton
@pytest.mark.skipif(IS_INTERPRETED, reason="starts the other")
def test_the_kernels_in_the_interpreter():
    options = ("-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def boundaries(lengths=LENGTHS):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def tensors(lengths=LENGTHS):
    torch.manual_seed(0)
    return list(torch.randn(sum(lengths), NUM_HEADS, 3, SIZE).unbind(2))  # strides of a joint projection


def mixed(x):
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & ALL_BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & ALL_BITS
    return x ^ (x >> 16)


def is_kept(seed, first, length, head, dropout):
    """The hash of the kernels in plain operations."""
    rows = mixed(((first + torch.arange(length)) * NUM_HEADS + head) ^ mixed(torch.tensor(seed & ALL_BITS)))
    columns = mixed((((torch.arange(length) + 1) * 0x9E3779B9) & ALL_BITS) ^ (seed >> 32))
    x = ((rows[:, None] ^ columns) * 0x7FEB352D) & ALL_BITS
    return (((x ^ (x >> 15)) * 0x846CA68B) & ALL_BITS) >= round(dropout * 2**32)


def plain_attention(query, key, value, lengths, seed, dropout):
    outputs, first = [], 0
    for length in lengths:
        q, k, v = (x[first : first + length].transpose(0, 1) for x in (query, key, value))
        weights = (q @ k.transpose(1, 2) * SCALE).softmax(-1)
        if dropout and length:
            kept = torch.stack([is_kept(seed, first, length, head, dropout) for head in range(NUM_HEADS)])
            weights = weights * kept / (1 - round(dropout * 2**32) / 2**32)
        outputs.append((weights @ v).transpose(0, 1))
        first += length
    return torch.cat(outputs)


@interpreted
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.3, 0.8])
def test_equal_to_plain_attention(dropout):
    from trimtab.model import short_attention_kernels as kernels

    inputs, seed = tensors(), torch.tensor([5_432_109_876_543_210])
    exact = [x.clone().requires_grad_() for x in inputs]
    wanted = plain_attention(*exact, LENGTHS, int(seed), dropout)
    output, logsumexp = kernels.forward(*inputs, boundaries(), seed, 150, False, SCALE, dropout)
    assert_close(output, wanted, 1e-5, "output")
    grad = torch.randn_like(wanted)
    found = kernels.backward(grad, *inputs, output, logsumexp, boundaries(), seed, 150, False, SCALE, dropout)
    for one, other in zip(found, torch.autograd.grad(wanted, exact, grad), strict=True):
        assert_close(one, other, 1e-5, "gradient")


@interpreted
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_filler_of_any_length_is_zero():
    from trimtab.model import short_attention_kernels as kernels

    lengths = (70, 3, 300)
    inputs, seed = tensors(lengths), torch.tensor([1])
    output, logsumexp = kernels.forward(*inputs, boundaries(lengths), seed, 70, True, SCALE, 0.0)
    assert_close(output[:73], plain_attention(*inputs, lengths, 1, 0.0)[:73], 1e-5, "output")
    grad = torch.ones_like(output)
    gradients = kernels.backward(grad, *inputs, output, logsumexp, boundaries(lengths), seed, 70, True, SCALE, 0.0)
    for found in (output, *gradients):
        assert not found[73:].any()
        assert found[:73].any()


def test_dropped_weights_look_random():
    """Shares of rows, columns and all, and products of neighbours, are those of independent numbers."""
    kept = torch.stack([is_kept(987_654_321_987, 0, 256, head, 0.1) for head in range(2)]).double()
    scaled = (kept - 0.9) / 0.3
    assert abs(float(scaled.mean())) < 5 / scaled.numel() ** 0.5
    for sums in (scaled.sum(1), scaled.sum(2)):
        assert 0.7 < float(sums.var()) / 256 < 1.3
    for neighbours in (scaled[:, 1:] * scaled[:, :-1], scaled[:, :, 1:] * scaled[:, :, :-1], scaled[:1] * scaled[1:]):
        assert abs(float(neighbours.mean())) < 5 / neighbours.numel() ** 0.5


# ---------------------------------------------------------------------- without data


@pytest.mark.parametrize("is_causal", [False, True])
def test_encoders_use_it_on_a_gpu(is_causal):
    """A trace on `meta` sees the operation for rows in both directions only."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    shapes = torch.empty(1, 4, 40, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    options = {"is_causal": is_causal, "window": None, "scale": None, "dropout": 0.1}
    with Names():
        output = packed_attention(shapes, shapes, shapes, starts, 20, kernel=Kernel.FLASH, **options)
        output.sum().backward()
    assert output.shape == (1, 40, 4, 64)
    assert shapes.grad.shape == shapes.shape
    used = {"trimtab::short_attention_forward", "trimtab::short_attention_backward"}
    assert used <= set(names) if not is_causal else not used & set(names)


@pytest.mark.parametrize(("size", "length"), [(96, 512), (64, 4096)])
def test_what_the_kernels_do_not_compute(size, length):
    query = torch.empty(40, 4, size, device="meta")
    assert not can_compute(query, query, length)
    assert not can_compute(query[:, :, :64], query[:, :2, :64], 512), "grouped heads"
    assert not can_compute(torch.empty(40, 4, 64), torch.empty(40, 4, 64), 512), "on a CPU"


def test_dropout_draws_from_the_generator():
    """One number, so recomputed and resumed steps drop the same weights; nothing without dropout."""
    query = torch.empty(8, 2, 16, device="meta")
    before = torch.get_rng_state()
    short_attention(
        query, query, query, torch.empty(3, dtype=torch.int32, device="meta"), 4, False, scale=1.0, dropout=0.0
    )
    assert torch.equal(torch.get_rng_state(), before)
