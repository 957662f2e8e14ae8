"""Attention over packed rows: rows of different lengths follow each other, and no token attends to another row.

A function of this module is registered in transformers' attention interface. It computes a packed batch if the call has
row boundaries (`cu_seq_lens_q`), else it calls the implementation that it replaced. Boundaries are arguments, so a
block that is recomputed in backward uses the same boundaries as its forward.

Two kernels are torch's. They are called directly instead of through `scaled_dot_product_attention`, because only then
do they accept row boundaries and (the flash kernel) dropout; they need no host-device sync. On CPUs, each row is one
call of `scaled_dot_product_attention`.

Short rows of encoders are computed by trimtab's kernels (`short_attention.py`).

Rows that are known to be equally long (`row_length`) are computed like a padded batch, by cuDNN if possible: 1.20 ms
instead of 1.98 for a layer of a Llama of 8 B parameters, 4 x 2,048 tokens, forward and backward on an H200.

Shapes: T tokens of all rows, R rows, L tokens of each, H heads, D head size.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.model.short_attention import can_compute, short_attention

_FLASH_CAPABILITY = (8, 0)
_HALF = (torch.float16, torch.bfloat16)
_NAME = "trimtab_packed"
# Arguments of transformers that change scores; no kernel here supports them.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
_NO_MASK, _CAUSAL = 0, 1  # `custom_mask_type` of torch's efficient kernel
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
aten = torch.ops.aten


class Kernel(IntEnum):
    """The kernels for attention over packed rows."""

    ROWS = 0  # one call for each row; needs their lengths on the host
    FLASH = 1  # half precision only; in fp32 EFFICIENT runs instead
    EFFICIENT = 2  # no windows in both directions


def kernel_for(
    device_type: str,
    compute_dtype: torch.dtype | None,
    capability: tuple[int, int] | None = None,
    has_flash: bool = True,
) -> Kernel | None:
    """The kernel for packed rows on a device; None if there is none.

    Args:
        device_type: As `torch.device.type`.
        compute_dtype: The dtype of matrix products; None is fp32.
        capability: Compute capability of an NVIDIA GPU.
        has_flash: Whether torch's flash kernel runs on the GPU.
    """
    if device_type == "cpu":
        return Kernel.ROWS
    if device_type != "cuda" or torch.version.hip is not None:
        return None
    is_new = capability is not None and capability >= _FLASH_CAPABILITY
    return Kernel.FLASH if has_flash and is_new and compute_dtype in _HALF else Kernel.EFFICIENT


def register_packed_attention(kernel: Kernel, previous: str) -> tuple[str, str]:
    """Add packed attention to transformers' interface.

    Args:
        kernel: Computes packed batches; on `meta` tensors its operations are called without data.
        previous: Name of the registered implementation for batches without row boundaries.

    Returns:
        Two names for `config._attn_implementation`. With the first, the model builds the masks of `previous`, and
        attention computes both kinds of batches. With the second the model builds no masks, and attention computes only
        packed batches.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # must not contain "flash", which transformers would mistake for its flash-attn integration
    name = f"{_NAME}_{kernel:d}_{previous}"
    unmasked = f"{name}_unmasked"
    AttentionInterface.register(name, _attention_function(kernel, ALL_ATTENTION_FUNCTIONS[previous]))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[previous])
    # Without a mask function, transformers builds no mask. A function that returns None would be too late: before it is
    # called, transformers compares positions, which is a host-device sync.
    AttentionInterface.register(unmasked, _attention_function(kernel, _refuse))
    return name, unmasked


def _attention_function(kernel: Kernel, previous: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("cu_seq_lens_q") is None:
            return previous(module, query, key, value, attention_mask, **kwargs)
        if attention_mask is not None:
            raise ValueError("a packed batch has no attention mask: leave attention_mask out of it")
        found = next((name for name in _UNSUPPORTED if kwargs.get(name) is not None), None)
        if found is not None:
            raise ValueError(f"packed attention does not support {found}: use padded batches for this model")
        is_causal = kwargs.get("is_causal")
        query, key, value = _in_one_dtype(query, key, value)
        output_1THD = packed_attention(
            query,
            key,
            value,
            kwargs["cu_seq_lens_q"],
            kwargs["max_length_q"],
            kernel=kernel,
            row_length=kwargs.get("row_length"),
            max_row_length=kwargs.get("max_row_length"),
            is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
            window=kwargs.get("sliding_window"),
            scale=kwargs.get("scaling"),
            dropout=kwargs.get("dropout", 0.0),
        )
        return output_1THD, None

    return attention


def _refuse(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse calls without masks and boundaries, in which tokens would attend to other rows."""
    raise ValueError(f"the boundaries of packed rows did not reach {type(module).__name__}: use padded batches")


def _in_one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast would: its list contains `scaled_dot_product_attention`, but not the operations called here.

    Under autocast, rotary embeddings and norms return queries and keys in fp32, while values are in half precision.
    """
    device = tensors[0].device.type
    # not `is_autocast_available`, at which torch 2.11 splits the graph of a compiled block
    casts = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if casts else tensors[-1].dtype
    return tuple(tensor.to(dtype) for tensor in tensors)


def packed_attention(
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    boundaries: torch.Tensor,
    max_length: int,
    *,
    kernel: Kernel,
    row_length: int | None = None,
    max_row_length: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Compute attention inside each row of a packed batch.

    Args:
        query_1HTD: Queries of all rows.
        key_1HTD: Keys; with fewer heads if several query heads share one.
        value_1HTD: Values.
        boundaries: Start offsets of the rows, then T; int32. Rows may be empty.
        max_length: At least the length of the longest row, including filler: the output of tokens beyond it would be
            undefined on a GPU.
        kernel: The kernel.
        row_length: The length of every row, if all are equally long and nothing else is in the batch.
        max_row_length: If the last row is filler, a bound for the length of the others: the output for filler is then
            any finite number.
        **options: `is_causal`; `window`, the number of tokens that a token attends to in one direction, including
            itself, or None; `scale` of the scores, or None for 1/√D; `dropout`, a probability.

    Returns:
        The output as (1, T, H, D).
    """
    if row_length is not None and _is_plain(row_length, **options):
        return _equal_rows(query_1HTD, key_1HTD, value_1HTD, row_length, kernel, **options)
    if kernel is Kernel.ROWS:
        rows: torch.Tensor = _rows(query_1HTD, key_1HTD, value_1HTD, boundaries, max_length, **options)
        return rows
    is_half = query_1HTD.dtype in _HALF
    if kernel is Kernel.FLASH and is_half and _is_plain_encoder(max_row_length or max_length, **options):
        # not x[0], whose backward fills a tensor of zeros
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query_1HTD, key_1HTD, value_1HTD))
        if can_compute(query, key, max_row_length or max_length):
            longest, has_filler = max_row_length or max_length, max_row_length is not None
            used = {name: options[name] for name in ("scale", "dropout")}
            return short_attention(query, key, value, boundaries, longest, has_filler, **used)[None]
    compute = _flash if kernel is Kernel.FLASH and is_half else _efficient
    return compute(query_1HTD, key_1HTD, value_1HTD, boundaries, max_length, **options)


# ---------------------------------------------------------------------- rows of one length


def _is_plain(row_length: int, *, window: int | None, dropout: float, **_: Any) -> bool:
    """Whether a kernel for padded rows can compute it without a mask; with dropout, flash for packed rows is faster."""
    return not dropout and (window is None or window >= row_length)


def _is_plain_encoder(max_length: int, *, is_causal: bool, window: int | None, **_: Any) -> bool:
    return not is_causal and (window is None or window >= max_length)


def _equal_rows(
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    row_length: int,
    kernel: Kernel,
    *,
    is_causal: bool,
    scale: float | None,
    **_: Any,
) -> torch.Tensor:
    is_grouped = False  # set by branches: while compiling, the comparison is a symbol, which attention refuses
    if key_1HTD.shape[1] != query_1HTD.shape[1]:
        is_grouped = kernel is Kernel.FLASH
        if not is_grouped:  # other kernels do not support groups
            key_1HTD, value_1HTD = (_repeat_heads(x, query_1HTD) for x in (key_1HTD, value_1HTD))
    query, key, value = (
        torch.unflatten(x.squeeze(0), 1, (-1, row_length)).transpose(0, 1) for x in (query_1HTD, key_1HTD, value_1HTD)
    )
    prefer_cudnn: AbstractContextManager[Any] = nullcontext()
    if kernel is Kernel.FLASH and not torch.compiler.is_compiling():  # torch's compiler would split its graph here
        prefer_cudnn = sdpa_kernel(_CUDNN_FIRST, set_priority=True)
    with prefer_cudnn:
        output_RHLD = functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
        )
    num_heads, num_tokens, size = query_1HTD.shape[1:]
    return output_RHLD.transpose(1, 2).reshape(1, num_tokens, num_heads, size)


# ---------------------------------------------------------------------- kernels of a GPU


def _flash(
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    boundaries: torch.Tensor,
    max_length: int,
    *,
    is_causal: bool,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    # not x[0], whose backward fills a tensor of zeros
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query_1HTD, key_1HTD, value_1HTD))
    # For single-token rows the kernel would assume as many tokens as rows, and rows may be empty.
    longest = max(2, max_length)
    side = -1 if window is None or window >= longest else window - 1
    output: torch.Tensor = aten._flash_attention_forward(
        query,
        key,
        value,
        boundaries,
        boundaries,
        longest,
        longest,
        dropout,
        is_causal,
        False,
        scale=scale,
        window_size_left=side,
        window_size_right=0 if is_causal else side,
    )[0]
    return output[None]


def _efficient(
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    boundaries: torch.Tensor,
    max_length: int,
    *,
    is_causal: bool,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    key_1HTD, value_1HTD = (_repeat_heads(x, query_1HTD) for x in (key_1HTD, value_1HTD))
    query, key, value = (x.transpose(1, 2) for x in (query_1HTD, key_1HTD, value_1HTD))
    longest = min(max_length, query.shape[1])  # the kernel rejects larger ones
    if window is not None and window >= longest:
        window = None
    # Observed on an H200 with torch 2.11: forward and backward drop different weights for 6% of the weights of packed
    # rows.
    if dropout and query.device.type != "meta":
        raise ValueError("torch's efficient attention kernel drops other weights in backward: use half precision")
    if window is not None and not is_causal:
        raise ValueError("torch's efficient attention kernel has no windows in both directions: use half precision")
    mask = _CAUSAL if is_causal else _NO_MASK
    output: torch.Tensor = _EfficientAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, boundaries, longest, dropout, mask, scale, window
    )
    return output


class _EfficientAttention(torch.autograd.Function):
    """Torch's efficient kernel, with a correct derivative: its own ignores the window."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: torch.Tensor,
        longest: int,
        dropout: float,
        mask: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        output, logsumexp, seed, offset, _, _ = aten._efficient_attention_forward(
            query,
            key,
            value,
            None,
            boundaries,
            boundaries,
            longest,
            longest,
            dropout,
            mask,
            True,
            scale=scale,
            window_size=window,
        )
        ctx.save_for_backward(query, key, value, output, boundaries, logsumexp, seed, offset)
        ctx.settings = (longest, dropout, mask, scale, window)
        return output  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *others = ctx.saved_tensors
        gradients = _efficient_attention_backward(grad, query, key, value, others, *ctx.settings)
        return (*gradients, *(None,) * 6)


@torch.library.custom_op("trimtab::efficient_attention_backward", mutates_args=())
def _efficient_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: list[torch.Tensor],
    longest: int,
    dropout: float,
    mask: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A custom operation around torch's, because torch's shape function for it lacks an argument.

    A compiler and a trace on `meta` need shapes.
    """
    output, boundaries, logsumexp, seed, offset = others
    gradients = aten._efficient_attention_backward(
        grad,
        query,
        key,
        value,
        None,
        output,
        boundaries,
        boundaries,
        longest,
        longest,
        logsumexp,
        dropout,
        seed,
        offset,
        mask,
        False,
        scale=scale,
        window_size=window,
    )
    return gradients[0], gradients[1], gradients[2]


@_efficient_attention_backward.register_fake
def _(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


# ---------------------------------------------------------------------- rows on a CPU


# lengths are values: a block would be compiled again for every batch
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _rows(
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    boundaries: torch.Tensor,
    max_length: int,
    *,
    is_causal: bool,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    key_1HTD, value_1HTD = (_repeat_heads(x, query_1HTD) for x in (key_1HTD, value_1HTD))
    lengths = _lengths(boundaries, query_1HTD.shape[2])
    if max(lengths) > max_length:
        raise ValueError(f"a row has {max(lengths)} tokens, but max_length_q is {max_length}")
    outputs = []
    # not slices: the backward of a slice allocates the gradient of all tokens, for each row
    parts = (torch.split(x, lengths, 2) for x in (query_1HTD, key_1HTD, value_1HTD))
    for query, key, value in zip(*parts, strict=True):
        length = query.shape[2]
        if not length:
            continue
        mask = None if window is None or window >= length else _window_mask(length, window, is_causal, query.device)
        output = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=is_causal and mask is None, scale=scale
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, 1)


def _lengths(boundaries: torch.Tensor, num_tokens: int) -> list[int]:
    """Lengths of rows; equal ones on `meta`, where offsets have no values."""
    if boundaries.device.type == "meta":
        num_rows = boundaries.numel() - 1
        return [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
    lengths: list[int] = boundaries.diff().tolist()
    return lengths


def _window_mask(length: int, window: int, is_causal: bool, device: torch.device) -> torch.Tensor:
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril(0 if is_causal else window - 1).triu(1 - window)


def _repeat_heads(shared_1HTD: torch.Tensor, query_1HTD: torch.Tensor) -> torch.Tensor:
    num_queries = query_1HTD.shape[1] // shared_1HTD.shape[1]
    return shared_1HTD if num_queries == 1 else shared_1HTD.repeat_interleave(num_queries, 1)
