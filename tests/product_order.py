"""Matrix products on the CPU that round differently, as those of another processor do.

Each processor sums the terms of a product in an order of its own. Here the inner dimension of both operands is permuted
before torch's kernel sums over it, and a bias is added last: the result is as exact as before, and has the same bits
for the same values and shapes, but other bits are rounded off. A test that fails under another order has a tolerance
that fits one processor.

`PRODUCT_ORDER=1` (or another number) in the environment of pytest selects an order; see `make test-variations`.
Convolutions and factorizations keep theirs.
"""

import os
import warnings
from contextlib import contextmanager
from functools import cache, partial

import torch

ORDER = int(os.environ.get("PRODUCT_ORDER", "0"))  # 0: the processor's own

# Operators by the position of the first operand; the second follows. No overload is computed by another one.
_PRODUCTS = ("mm", "mm.out", "bmm", "bmm.out", "dot")
_PRODUCTS_AND_BIAS = ("addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out", "baddbmm_")
_PRODUCTS_AND_BIAS += ("addmv", "addmv.out", "addmv_")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_library = torch.library.Library("aten", "IMPL")  # its kernels are registered as long as it lives
_is_suspended = False


def change() -> None:
    """Replace the kernels of this process, if an order is selected."""
    if not ORDER:
        return
    weights = torch.linspace(-1, 1, 4096).view(64, 64)
    before = weights @ weights
    for name in _PRODUCTS:
        _register(name, _permuted, 0)
    for name in _PRODUCTS_AND_BIAS:
        _register(name, _with_bias_last, 1)
    _register(_ATTENTION, _attention, 0)
    _register(f"{_ATTENTION}_backward", _attention_backward, 1)
    assert not torch.equal(weights @ weights, before), "torch does not call the kernels of this file"


@contextmanager
def suspended():
    """Compute as torch does: permuting allocates, which a measurement of memory would count."""
    global _is_suspended
    _is_suspended = True
    try:
        yield
    finally:
        _is_suspended = False


def _register(name, replacement, first: int) -> None:
    """Register a function of torch's kernel, the permuted operands and all other arguments."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys, *arguments, **options):
        left, right = arguments[first : first + 2]
        if _is_suspended or left.shape[-1] < 3 or not left.is_floating_point():  # two terms have but one sum
            return kernel.call_boxed(keys, *arguments, **options)

        def call(*operands, **changed):
            return kernel.call_boxed(keys, *arguments[:first], *operands, *arguments[first + 2 :], **options | changed)

        order = _order_of(left.shape[-2:].numel(), left.shape[-1], right.numel())
        return replacement(call, order, left, right, arguments, options)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        _library.impl(name, product, "CPU", with_keyset=True)


@cache
def _order_of(num_outputs: int, num_terms: int, num_weights: int) -> torch.Tensor:
    """A permutation of the terms, another one for other sizes."""
    seed = hash((ORDER, num_outputs, num_terms, num_weights)) % 2**63  # of integers: the same in each process
    return torch.randperm(num_terms, generator=torch.Generator().manual_seed(seed), device="cpu")


def _permuted(call, order, left, right, arguments, options):
    return call(left.index_select(-1, order), right.index_select(-1 if right.dim() == 1 else -2, order))


def _with_bias_last(call, order, left, right, arguments, options):
    bias, beta = arguments[0], options.get("beta", 1)
    bias = bias * beta if beta else None  # a copy, because the result may take the bias's place
    sums = _permuted(partial(call, beta=0), order, left, right, arguments, options)
    return sums if bias is None else sums.add_(bias)


def _attention(call, order, query, key, arguments, options):
    return call(_same_strides(query, order), _same_strides(key, order))


def _attention_backward(call, order, query, key, arguments, options):
    gradients = call(_same_strides(query, order), _same_strides(key, order))
    for gradient in gradients[:2]:
        gradient.copy_(gradient.index_select(-1, order.argsort()))
    return gradients


def _same_strides(operand, order):
    """Permute, and keep the strides, which those of the results follow."""
    return torch.index_select(operand, -1, order, out=torch.empty_like(operand))
