"""The Triton kernels of the token cross-entropy against torch in fp64, in Triton's interpreter, which needs no GPU.

Triton decides at its import whether it interprets, so the tests run in a subprocess with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional

from rounding import rounding_error

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the subprocess of the first test")


@pytest.mark.skipif(IS_INTERPRETED, reason="starts the others")
def test_the_kernels_in_the_interpreter():
    options = ("-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, __file__]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.fixture
def kernels():
    from trimtab.model import cross_entropy_kernel

    return cross_entropy_kernel


def logits_and_labels(num_tokens, vocab, dtype, size=3.0):
    torch.manual_seed(0)
    logits = (torch.randn(num_tokens, vocab) * size).to(dtype)
    labels = torch.randint(0, vocab, (num_tokens,))
    labels[::3] = -100
    return logits, labels


def expected(logits, labels, smoothing, factors):
    logits = logits.double().requires_grad_()
    losses = functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    losses.backward(factors.double())
    return losses.detach(), logits.grad


def assert_close(found, wanted, dtype, num_roundings):
    """Up to roundings of the numbers themselves; the interpreter truncates to bf16, which counts for two."""
    bound = num_roundings * torch.finfo(dtype).eps * wanted.abs() + rounding_error(wanted, 8, torch.float32)
    assert bool(((found.double() - wanted).abs() <= bound).all())


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 300, 8192, 20_001])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_and_gradients(kernels, dtype, vocab, smoothing):
    logits, labels = logits_and_labels(6, vocab, dtype)
    factors = torch.rand(6) * 3
    losses, gradient = expected(logits, labels, smoothing, factors)
    found, norms = kernels.token_losses(logits, labels, smoothing)
    assert found.dtype is torch.float32
    assert_close(found, losses, torch.float32, 8)
    separate = torch.empty_like(logits)
    kernels.write_gradient(logits, labels, norms, smoothing, factors, separate)
    assert_close(separate, gradient, dtype, 2 if dtype is torch.bfloat16 else 1 if dtype is torch.float16 else 16)
    kernels.write_gradient(logits, labels, norms, smoothing, factors, logits)
    assert torch.equal(logits, separate), "in place as elsewhere"


def assert_computed(kernels, logits, labels):
    """Losses, and the gradient written over the logits."""
    losses, gradient = expected(logits, labels, 0.0, torch.ones(6))
    found, norms = kernels.token_losses(logits, labels, 0.0)
    assert_close(found, losses, torch.float32, 8)
    kernels.write_gradient(logits, labels, norms, 0.0, 1.0, logits)
    assert_close(logits, gradient, torch.float32, 16)


@interpreted
def test_large_logits_do_not_round_the_gradient(kernels):
    logits, labels = logits_and_labels(6, 300, torch.float32)
    logits += 10_000.0  # fp32 has steps of 1e-3 here
    assert_computed(kernels, logits, labels)


@interpreted
def test_minus_infinity(kernels):
    """As the masked tokens of a vocabulary: a whole block of them first."""
    logits, labels = logits_and_labels(6, 20_001, torch.float32)
    logits[:, :9000] = float("-inf")
    labels = labels.where(labels < 0, labels.clamp(min=9000))
    assert_computed(kernels, logits, labels)


@interpreted
def test_one_factor_for_all_and_factors_that_share_memory(kernels):
    logits, labels = logits_and_labels(6, 300, torch.float32)
    _, norms = kernels.token_losses(logits, labels, 0.0)
    found = []
    for factors in (torch.full((6,), 16.0), 16.0, torch.tensor(16.0).expand(6), torch.full((6, 2), 16.0)[:, 0]):
        found.append(torch.empty_like(logits))
        kernels.write_gradient(logits, labels, norms, 0.0, factors, found[-1])
    assert all(torch.equal(other, found[0]) for other in found[1:])


@interpreted
def test_rows_with_gaps_between_them(kernels):
    logits, labels = logits_and_labels(6, 300, torch.float32)
    wide = torch.full((6, 310), float("nan"))
    wide[:, :300] = logits
    losses, norms = kernels.token_losses(logits, labels, 0.0)
    found, _ = kernels.token_losses(wide[:, :300], labels, 0.0)
    assert torch.equal(found, losses)
    kernels.write_gradient(wide[:, :300], labels, norms, 0.0, 1.0, wide[:, :300])
    kernels.write_gradient(logits, labels, norms, 0.0, 1.0, logits)
    assert torch.equal(wide[:, :300], logits)
    assert wide[:, 300:].isnan().all(), "nothing is written outside"


@interpreted
def test_labels_outside_the_vocabulary_are_nan_and_ignored_rows_are_zero(kernels):
    logits = torch.randn(4, 50)
    logits[3] = float("nan")
    losses, norms = kernels.token_losses(logits, torch.tensor([50, -1, 3, -100]), 0.0)
    assert losses.isnan().tolist() == [True, True, False, False]
    kernels.write_gradient(logits, torch.tensor([50, -1, 3, -100]), norms, 0.0, 1.0, logits)
    assert logits.isnan().all(dim=1).tolist() == [True, True, False, False]
    assert not logits[3].any()


@interpreted
def test_no_tokens(kernels):
    logits, labels = torch.zeros(0, 50), torch.zeros(0, dtype=torch.long)
    losses, norms = kernels.token_losses(logits, labels, 0.0)
    kernels.write_gradient(logits, labels, norms, 0.0, 1.0, logits)
    assert losses.shape == (0,)
