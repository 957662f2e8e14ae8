"""Triton kernels of attention over packed short rows, with dropout. Imported only if Triton is installed.

torch's flash kernel divides rows into tiles of 128 tokens and adds gradients of queries in fp32 through memory; for
rows of a few hundred tokens most of its time is overhead. Here tiles have 64 tokens. Backward has two kernels: one for
the gradient of a tile of queries, one for those of a tile of keys and values, so nothing is added in memory and results
are the same in every run.

Dropout hashes (seed, query, key), so a weight that is dropped in forward is dropped in backward, whatever the tiles.

Shapes: T tokens of all rows, H heads, D head size, R rows. Scores are in units of log2.
"""

import importlib
from typing import Any

import torch

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

# (tokens of a tile of queries, tokens of a tile of keys, warps, stages), fixed: nothing is timed
FORWARD = (64, 64, 4, 3)
QUERIES = (64, 64, 4, 2)
KEYS = (64, 64, 4, 2)

# fmt: off


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """A hash of 32 bits: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _is_kept(row_keys, column_keys, threshold):  # type: ignore[no-untyped-def]
    """Whether weights are kept; the keys of rows and columns are already hashed."""
    x = (row_keys ^ column_keys) * 0x7FEB352D
    return ((x ^ (x >> 15)) * 0x846CA68B) >= threshold.to(tl.uint32)


@triton.jit
def _query_keys(seed, token, head, num_heads):  # type: ignore[no-untyped-def]
    return _mixed((token * num_heads + head).to(tl.uint32) ^ _mixed(seed.to(tl.uint32)))


@triton.jit
def _column_keys(seed, position):  # type: ignore[no-untyped-def]
    return _mixed((position + 1).to(tl.uint32) * 0x9E3779B9 ^ (seed >> 32).to(tl.uint32))


@triton.jit  # type: ignore[untyped-decorator]
def _zero_rows(target, first, length, begin, step, head, num_heads, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Write zeros for the tokens of filler, which may be longer than any row: every program writes some tiles."""
    d = tl.arange(0, D)
    for start in range(begin, length, step):
        at = start + tl.arange(0, BLOCK)
        place = ((first + at).to(tl.int64)[:, None] * num_heads + head) * D + d[None, :]
        zeros = tl.zeros((BLOCK, D), tl.float32).to(target.dtype.element_ty)
        tl.store(target + place, zeros, mask=(at < length)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    query, key, value, output, logsumexp, boundaries, seeds, scale, threshold, kept_scale,
    query_t, query_h, key_t, key_h, value_t, value_h, num_heads, num_tokens,
    HAS_DROPOUT: tl.constexpr, HAS_FILLER: tl.constexpr,  # noqa: N803
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,  # noqa: N803
):
    head, row = tl.program_id(1), tl.program_id(2)
    first = tl.load(boundaries + row)
    length = tl.load(boundaries + row + 1) - first
    begin = tl.program_id(0) * BLOCK_M
    if begin >= length:
        return
    if HAS_FILLER:  # noqa: SIM102 (a constant for the compiler)
        if row == tl.num_programs(2) - 1:
            _zero_rows(output, first, length, begin, tl.num_programs(0) * BLOCK_M, head, num_heads, D, BLOCK_M)
            return
    at, d = begin + tl.arange(0, BLOCK_M), tl.arange(0, D)
    token, is_query = (first + at).to(tl.int64), at < length
    q = tl.load(query + head * query_h + token[:, None] * query_t + d[None, :], mask=is_query[:, None], other=0.0)
    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    summed = tl.zeros((BLOCK_M, D), tl.float32)
    if HAS_DROPOUT:
        seed = tl.load(seeds)
        row_keys = _query_keys(seed, first + at, head, num_heads)
    for start in range(0, length, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        other, is_key = (first + n).to(tl.int64), n < length
        k = tl.load(key + head * key_h + other[:, None] * key_t + d[None, :], mask=is_key[:, None], other=0.0)
        scores = tl.where(is_key[None, :], tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new[:, None]), tl.exp2(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        if HAS_DROPOUT:
            kept = _is_kept(row_keys[:, None], _column_keys(seed, n)[None, :], threshold)
            weights = tl.where(kept, weights, 0.0)
        v = tl.load(value + head * value_h + other[:, None] * value_t + d[None, :], mask=is_key[:, None], other=0.0)
        summed = tl.dot(weights.to(v.dtype), v, summed * shrink[:, None])
        largest = new
    place = (token[:, None] * num_heads + head) * D + d[None, :]
    result = summed * (kept_scale / total)[:, None]
    tl.store(output + place, result.to(output.dtype.element_ty), mask=is_query[:, None])
    tl.store(logsumexp + head.to(tl.int64) * num_tokens + token, largest + tl.log2(total), mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_queries(  # type: ignore[no-untyped-def]
    grad, query, key, value, output, logsumexp, deltas, grad_query, boundaries, seeds,
    scale, plain_scale, threshold, kept_scale,
    query_t, query_h, key_t, key_h, value_t, value_h, num_heads, num_tokens,
    HAS_DROPOUT: tl.constexpr, HAS_FILLER: tl.constexpr,  # noqa: N803
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,  # noqa: N803
):
    """Compute the gradient of queries; also write the sums of gradient times output, which the other kernel reads."""
    head, row = tl.program_id(1), tl.program_id(2)
    first = tl.load(boundaries + row)
    length = tl.load(boundaries + row + 1) - first
    begin = tl.program_id(0) * BLOCK_M
    if begin >= length:
        return
    if HAS_FILLER:  # noqa: SIM102 (a constant for the compiler)
        if row == tl.num_programs(2) - 1:
            _zero_rows(grad_query, first, length, begin, tl.num_programs(0) * BLOCK_M, head, num_heads, D, BLOCK_M)
            return
    at, d = begin + tl.arange(0, BLOCK_M), tl.arange(0, D)
    token, is_query = (first + at).to(tl.int64), at < length
    place = (token[:, None] * num_heads + head) * D + d[None, :]
    per_head = head.to(tl.int64) * num_tokens + token
    q = tl.load(query + head * query_h + token[:, None] * query_t + d[None, :], mask=is_query[:, None], other=0.0)
    g = tl.load(grad + place, mask=is_query[:, None], other=0.0)
    o = tl.load(output + place, mask=is_query[:, None], other=0.0)
    lse = tl.load(logsumexp + per_head, mask=is_query, other=0.0)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(deltas + per_head, delta, mask=is_query)
    summed = tl.zeros((BLOCK_M, D), tl.float32)
    if HAS_DROPOUT:
        seed = tl.load(seeds)
        row_keys = _query_keys(seed, first + at, head, num_heads)
    for start in range(0, length, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        other, is_key = (first + n).to(tl.int64), n < length
        k = tl.load(key + head * key_h + other[:, None] * key_t + d[None, :], mask=is_key[:, None], other=0.0)
        v = tl.load(value + head * value_h + other[:, None] * value_t + d[None, :], mask=is_key[:, None], other=0.0)
        weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
        change = tl.dot(g, tl.trans(v))
        if HAS_DROPOUT:
            kept = _is_kept(row_keys[:, None], _column_keys(seed, n)[None, :], threshold)
            change = tl.where(kept, change * kept_scale, 0.0)
        scores = weights * (change - delta[:, None])
        scores = tl.where(is_key[None, :], scores, 0.0)
        summed = tl.dot(scores.to(k.dtype), k, summed)
    tl.store(grad_query + place, (summed * plain_scale).to(grad_query.dtype.element_ty), mask=is_query[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _backward_keys(  # type: ignore[no-untyped-def]
    grad, query, key, value, logsumexp, deltas, grad_key, grad_value, boundaries, seeds,
    scale, plain_scale, threshold, kept_scale,
    query_t, query_h, key_t, key_h, value_t, value_h, num_heads, num_tokens,
    HAS_DROPOUT: tl.constexpr, HAS_FILLER: tl.constexpr,  # noqa: N803
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,  # noqa: N803
):
    """Compute the gradients of keys and values; tiles are transposed: keys by queries."""
    head, row = tl.program_id(1), tl.program_id(2)
    first = tl.load(boundaries + row)
    length = tl.load(boundaries + row + 1) - first
    begin = tl.program_id(0) * BLOCK_N
    if begin >= length:
        return
    if HAS_FILLER:  # noqa: SIM102 (a constant for the compiler)
        if row == tl.num_programs(2) - 1:
            _zero_rows(grad_key, first, length, begin, tl.num_programs(0) * BLOCK_N, head, num_heads, D, BLOCK_N)
            _zero_rows(grad_value, first, length, begin, tl.num_programs(0) * BLOCK_N, head, num_heads, D, BLOCK_N)
            return
    n, d = begin + tl.arange(0, BLOCK_N), tl.arange(0, D)
    token, is_key = (first + n).to(tl.int64), n < length
    k = tl.load(key + head * key_h + token[:, None] * key_t + d[None, :], mask=is_key[:, None], other=0.0)
    v = tl.load(value + head * value_h + token[:, None] * value_t + d[None, :], mask=is_key[:, None], other=0.0)
    summed_k = tl.zeros((BLOCK_N, D), tl.float32)
    summed_v = tl.zeros((BLOCK_N, D), tl.float32)
    if HAS_DROPOUT:
        seed = tl.load(seeds)
        column_keys = _column_keys(seed, n)
    for start in range(0, length, BLOCK_M):
        at = start + tl.arange(0, BLOCK_M)
        other, is_query = (first + at).to(tl.int64), at < length
        per_head = head.to(tl.int64) * num_tokens + other
        q = tl.load(query + head * query_h + other[:, None] * query_t + d[None, :], mask=is_query[:, None], other=0.0)
        g = tl.load(grad + (other[:, None] * num_heads + head) * D + d[None, :], mask=is_query[:, None], other=0.0)
        # queries beyond the row have a weight of 0
        lse = tl.load(logsumexp + per_head, mask=is_query, other=float("inf"))
        delta = tl.load(deltas + per_head, mask=is_query, other=0.0)
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
        change = tl.dot(v, tl.trans(g))
        dropped = weights
        if HAS_DROPOUT:
            row_keys = _query_keys(seed, first + at, head, num_heads)
            kept = _is_kept(row_keys[None, :], column_keys[:, None], threshold)
            dropped = tl.where(kept, weights * kept_scale, 0.0)
            change = tl.where(kept, change * kept_scale, 0.0)
        summed_v = tl.dot(dropped.to(g.dtype), g, summed_v)
        scores = weights * (change - delta[None, :])
        summed_k = tl.dot(scores.to(q.dtype), q, summed_k)
    place = (token[:, None] * num_heads + head) * D + d[None, :]
    tl.store(grad_key + place, (summed_k * plain_scale).to(grad_key.dtype.element_ty), mask=is_key[:, None])
    tl.store(grad_value + place, summed_v.to(grad_value.dtype.element_ty), mask=is_key[:, None])


# fmt: on
_LOG2_E = 1.4426950408889634


def _numbers(scale: float, dropout: float) -> tuple[float, int, float]:
    """The scale in units of log2, the hash threshold from which a weight is kept, and the factor of kept weights."""
    threshold = min(round(dropout * 2**32), 2**32 - 1)
    return scale * _LOG2_E, threshold, 1 / (1 - threshold / 2**32)


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Strides of tokens and heads; the elements of a head are contiguous."""
    return [tensor.stride(dim) for tensor in tensors for dim in (0, 1)]


def forward(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    boundaries: torch.Tensor,
    seed: torch.Tensor,
    max_length: int,
    has_filler: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the logarithms (base 2) of the sums of exponentials, as (T, H, D) and (H, T)."""
    num_tokens, num_heads, size = query_THD.shape
    output = torch.empty((num_tokens, num_heads, size), dtype=query_THD.dtype, device=query_THD.device)
    logsumexp = torch.empty((num_heads, num_tokens), dtype=torch.float32, device=query_THD.device)
    log2_scale, threshold, kept_scale = _numbers(scale, dropout)
    block_m, block_n, num_warps, num_stages = FORWARD
    grid = (triton.cdiv(max_length, block_m), num_heads, len(boundaries) - 1)
    _forward[grid](
        query_THD, key_THD, value_THD, output, logsumexp, boundaries, seed, log2_scale, threshold, kept_scale,
        *_strides(query_THD, key_THD, value_THD), num_heads, num_tokens,
        HAS_DROPOUT=dropout > 0, HAS_FILLER=has_filler, D=size, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return output, logsumexp


def backward(
    grad_THD: torch.Tensor,
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    output_THD: torch.Tensor,
    logsumexp: torch.Tensor,
    boundaries: torch.Tensor,
    seed: torch.Tensor,
    max_length: int,
    has_filler: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    num_tokens, num_heads, size = query_THD.shape
    grad_THD, output_THD = grad_THD.contiguous(), output_THD.contiguous()
    grad_query, grad_key, grad_value = (
        torch.empty((num_tokens, num_heads, size), dtype=x.dtype, device=x.device)
        for x in (query_THD, key_THD, value_THD)
    )
    deltas = torch.empty_like(logsumexp)
    log2_scale, threshold, kept_scale = _numbers(scale, dropout)
    numbers = (log2_scale, scale, threshold, kept_scale)
    sizes = (*_strides(query_THD, key_THD, value_THD), num_heads, num_tokens)
    block_m, block_n, num_warps, num_stages = QUERIES
    rows = (num_heads, len(boundaries) - 1)
    _backward_queries[(triton.cdiv(max_length, block_m), *rows)](
        grad_THD, query_THD, key_THD, value_THD, output_THD, logsumexp, deltas, grad_query, boundaries, seed,
        *numbers, *sizes,
        HAS_DROPOUT=dropout > 0, HAS_FILLER=has_filler, D=size, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    block_m, block_n, num_warps, num_stages = KEYS
    _backward_keys[(triton.cdiv(max_length, block_n), *rows)](
        grad_THD, query_THD, key_THD, value_THD, logsumexp, deltas, grad_key, grad_value, boundaries, seed,
        *numbers, *sizes,
        HAS_DROPOUT=dropout > 0, HAS_FILLER=has_filler, D=size, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return grad_query, grad_key, grad_value
