"""Fused operations of BERT's blocks: one product for queries, keys and values; dropout, sum and norm; bias and GELU.

Modules are recognized by the code of their forward, which many encoders share with BERT (RoBERTa, ELECTRA, XLM-R …),
and only those of one model are changed. Results are those of the plain modules up to rounding; dropout draws one number
from torch's generator for each call, which seeds a hash, so recomputed and resumed steps drop the same numbers.

The kernels (`encoder_kernels.py`) are registered as custom torch operations, so that a compiler calls them unchanged
and a trace on `meta` knows their results. On a CPU the same operations run with torch's own kernels, for tests.

Shapes: T tokens (of all rows), C channels.
"""

from collections.abc import Callable
from functools import cache
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trimtab.model.forward_code import code_of
from trimtab.model.module_hooks import has_hooks

_HIGHEST_SEED = 2**62
_PARTNERS, _READY, _HALF = "_trimtab_partners", "_trimtab_ready", "_trimtab_half"


def use_fused_encoder(model: torch.nn.Module) -> int:
    """Make the blocks of a model compute with fused operations; return the number of changed modules."""
    changes = [change for module in model.modules() if (change := _change_of(module)) is not None]
    for change in changes:
        change()
    return len(changes)


def has_encoder_blocks(model: torch.nn.Module) -> bool:
    """Whether `use_fused_encoder` would change a model."""
    return any(_change_of(module) is not None for module in model.modules())


def _change_of(module: torch.nn.Module) -> Callable[[], None] | None:
    """The change for one module; None if there is none."""
    if "forward" in module.__dict__:  # changed by another technique
        return None
    attention, output, intermediate = _codes_of_bert()
    code = code_of(type(module).forward)
    if code == output and _has(module, LayerNorm=torch.nn.LayerNorm, dropout=torch.nn.Dropout):
        return lambda: _bind(module, _norm_of_sum)
    if code == intermediate and _has(module, dense=torch.nn.Linear) and _is_gelu(module.intermediate_act_fn):
        return lambda: _bind(module, _activation)
    if code == attention and _has(module, **dict.fromkeys(("query", "key", "value"), torch.nn.Linear)):
        return lambda: _join_projections(module)
    return None


@cache
def _codes_of_bert() -> tuple[Any, Any, Any]:
    from transformers.models.bert import modeling_bert as bert

    classes = (bert.BertSelfAttention, bert.BertSelfOutput, bert.BertIntermediate)
    attention, output, intermediate = (code_of(kind.forward) for kind in classes)
    return attention, output, intermediate


def _has(module: torch.nn.Module, **kinds: type) -> bool:
    """Whether attributes have exactly these types: adapters and quantized modules compute something else."""
    return all(type(getattr(module, name, None)) is kind for name, kind in kinds.items())


def _is_gelu(activation: Any) -> bool:
    return getattr(activation, "act", None) is functional.gelu


def _is_plain_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer that nothing else computes or observes: its weights can be used directly."""
    return type(module) is torch.nn.Linear and "forward" not in module.__dict__ and not has_hooks(module)


def _bind(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    # Bound methods follow their object through copy.deepcopy; a closure over the module would not.
    module.forward = MethodType(forward, module)


# ---------------------------------------------------------------------- results in half precision Under autocast a norm
# returns fp32, and the linear layer after it converts the result. The kernel writes both dtypes, and adds up the
# gradients of both. Modules pass on one tensor, and the other is an attribute of it, which the linear layer reads.


def _give_half(result: Tensor, half: Tensor) -> None:
    if not result.is_inference():  # inference tensors, which have no version counter
        result.__dict__[_HALF] = half, result._version


def _take_half(x: Tensor) -> Tensor:
    """The same numbers in half precision if the module that computed x has them, else x itself.

    x itself is returned if it keeps its gradient, or if x or its requires_grad was changed.
    """
    half, version = x.__dict__.pop(_HALF, (None, None))
    if half is None or version != x._version or half.requires_grad != x.requires_grad:
        return x
    return x if x.retains_grad else half


# ---------------------------------------------------------------------- queries, keys and values


def _join_projections(attention: Any) -> None:
    """Compute three projections of the same input as one product, when the first one is called.

    Modules keep their weights and names. The other two return the results that are already computed.
    """
    attention.query.__dict__[_PARTNERS] = [attention.key, attention.value]
    _bind(attention.query, _project_all)
    for other in (attention.key, attention.value):
        other.__dict__[_READY] = {}
        _bind(other, _take_ready)


def _project_all(self: Any, x: Tensor) -> Tensor:
    others = self.__dict__[_PARTNERS]
    weight = torch.cat([self.weight, *(other.weight for other in others)])
    bias = None if self.bias is None else torch.cat([self.bias, *(other.bias for other in others)])
    parts = functional.linear(_take_half(x), weight, bias).chunk(3, -1)
    for other, part in zip(others, parts[1:], strict=True):
        other.__dict__[_READY][get_ident()] = x, part  # replaces the leftovers of a forward that failed
    return parts[0]


def _take_ready(self: Any, x: Tensor) -> Tensor:
    projected, ready = self.__dict__[_READY].pop(get_ident(), (None, None))
    if projected is x:
        return ready  # type: ignore[no-any-return]
    return functional.linear(x, self.weight, self.bias)


# ---------------------------------------------------------------------- norm(dropout(dense(x)) + residual)


def _norm_of_sum(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    dense, norm = self.dense, self.LayerNorm
    is_plain = _is_plain_linear(dense)
    if has_hooks(norm, self.dropout):
        plain: Tensor = type(self).forward(self, hidden_states, input_tensor)
        return plain
    x = functional.linear(hidden_states, dense.weight) if is_plain else dense(hidden_states)
    bias = dense.bias if is_plain else None
    dropout = self.dropout.p if self.dropout.training else 0.0
    # the fp32 result is not read in this case
    seed = torch.randint(_HIGHEST_SEED, (1,), device=x.device) if dropout else norm.weight
    total = torch.promote_types(x.dtype, input_tensor.dtype)
    is_autocast = torch.is_autocast_enabled(x.device.type)
    dtypes = total, torch.float32 if is_autocast else total, x.dtype if is_autocast else None
    tensors = x.flatten(0, -2), bias, input_tensor.flatten(0, -2), norm.weight, norm.bias, seed
    fused: Any = _NormOfSum.apply
    result, half = fused(*tensors, float(dropout), float(norm.eps), *dtypes)
    result = result.view(input_tensor.shape)
    if is_autocast:
        _give_half(result, half.view(input_tensor.shape))
    return result  # type: ignore[no-any-return]


class _NormOfSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        gain: Tensor,
        offset: Tensor,
        seed: Tensor,
        dropout: float,
        eps: float,
        *dtypes: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        tensors = (x.contiguous(), bias, residual.contiguous(), gain, offset, seed)
        result, half, total, means, scales = _norm_forward(*tensors, dropout, eps, *dtypes)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, means, scales, gain, seed)
        ctx.dropout, ctx.dtypes, ctx.has_bias = dropout, (x.dtype, residual.dtype), bias is not None
        return result, half

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_half: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = [None if g is None else g.contiguous() for g in (grad, grad_half)]
        grad_x, grad_residual, sums = _norm_backward(*gradients, *ctx.saved_tensors, ctx.dropout, *ctx.dtypes)
        of_gain, of_offset, of_bias = sums.unbind(0)
        return grad_x, of_bias if ctx.has_bias else None, grad_residual, of_gain, of_offset, *(None,) * 6


@torch.library.custom_op("trimtab::norm_of_sum_forward", mutates_args=())
def _norm_forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    offset: Tensor,
    seed: Tensor,
    dropout: float,
    eps: float,
    total_dtype: torch.dtype,
    result_dtype: torch.dtype,
    half_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from trimtab.model import encoder_kernels

    empty = _empty_norm(x, total_dtype, result_dtype, half_dtype)
    result, half, total, *statistics = empty
    tensors = x, bias, residual, gain, offset, seed
    encoder_kernels.norm_forward(*tensors, dropout, eps, total, result, half, *statistics)
    return empty


@_norm_forward.register_fake
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_norm(x, *others[-3:])


def _empty_norm(x: Tensor, *dtypes: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    total_dtype, result_dtype, half_dtype = dtypes
    result, total = (x.new_empty(x.shape, dtype=dtype) for dtype in (result_dtype, total_dtype))
    half = x.new_empty(0) if half_dtype is None else x.new_empty(x.shape, dtype=half_dtype)
    means, scales = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return result, half, total, means, scales


@_norm_forward.register_kernel("cpu")
def _(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    offset: Tensor,
    seed: Tensor,
    dropout: float,
    eps: float,
    total_dtype: torch.dtype,
    result_dtype: torch.dtype,
    half_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    values = x.float() if bias is None else x.float() + bias.float()
    if dropout:
        values = values * kept(seed, x.shape, dropout) / (1.0 - dropout)
    total = (values + residual.float()).to(total_dtype)
    means = total.float().mean(1)
    centered = total.float() - means[:, None]
    scales = torch.rsqrt(centered.square().mean(1) + eps)
    result = centered * scales[:, None] * gain.float() + offset.float()
    half = x.new_empty(0) if half_dtype is None else result.to(half_dtype, copy=True)
    return result.to(result_dtype), half, total, means, scales


@torch.library.custom_op("trimtab::norm_of_sum_backward", mutates_args=())
def _norm_backward(
    grad: Tensor | None,
    grad_half: Tensor | None,
    total: Tensor,
    means: Tensor,
    scales: Tensor,
    gain: Tensor,
    seed: Tensor,
    dropout: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    from trimtab.model import encoder_kernels

    grad_x, grad_residual = (total.new_empty(total.shape, dtype=dtype) for dtype in (x_dtype, residual_dtype))
    tensors = grad, grad_half, total, means, scales, gain, seed
    return grad_x, grad_residual, encoder_kernels.norm_backward(*tensors, dropout, grad_x, grad_residual)


@_norm_backward.register_fake
def _(grad: Tensor | None, grad_half: Tensor | None, total: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_residual = (total.new_empty(total.shape, dtype=dtype) for dtype in others[-2:])
    return grad_x, grad_residual, total.new_empty((3, total.shape[1]), dtype=torch.float32)


@_norm_backward.register_kernel("cpu")
def _(
    grad: Tensor | None,
    grad_half: Tensor | None,
    total: Tensor,
    means: Tensor,
    scales: Tensor,
    gain: Tensor,
    seed: Tensor,
    dropout: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    above = sum((g.float() for g in (grad, grad_half) if g is not None), torch.zeros_like(total, dtype=torch.float32))
    scale = scales[:, None]
    normed = (total.float() - means[:, None]) * scale
    scaled = above * gain.float()
    along, common = (scaled * normed).mean(1, keepdim=True), scaled.mean(1, keepdim=True)
    below = (scaled - common - normed * along) * scale
    grad_residual = below.to(residual_dtype, copy=True)
    if dropout:
        below = below * kept(seed, total.shape, dropout) / (1.0 - dropout)
    grad_x = below.to(x_dtype, copy=True)
    return grad_x, grad_residual, torch.stack([(above * normed).sum(0), above.sum(0), grad_x.float().sum(0)])


# ---------------------------------------------------------------------- gelu(dense(x))


def _activation(self: Any, hidden_states: Tensor) -> Tensor:
    dense = self.dense
    if not _is_plain_linear(dense) or dense.bias is None or has_hooks(self.intermediate_act_fn):
        plain: Tensor = type(self).forward(self, hidden_states)
        return plain
    x = functional.linear(_take_half(hidden_states), dense.weight)
    fused: Any = _BiasGelu.apply
    return fused(x.flatten(0, -2), dense.bias).view(x.shape)  # type: ignore[no-any-return]


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, bias)
        return _gelu_forward(x, bias)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, of_bias = _gelu_backward(grad.contiguous(), *ctx.saved_tensors)
        return grad_x, of_bias


@torch.library.custom_op("trimtab::bias_gelu_forward", mutates_args=())
def _gelu_forward(x: Tensor, bias: Tensor) -> Tensor:
    from trimtab.model import encoder_kernels

    result = torch.empty_like(x)
    encoder_kernels.gelu_forward(x, bias, result)
    return result


@_gelu_forward.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@_gelu_forward.register_kernel("cpu")
def _(x: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(x.float() + bias.float()).to(x.dtype)


@torch.library.custom_op("trimtab::bias_gelu_backward", mutates_args=())
def _gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from trimtab.model import encoder_kernels

    grad_x = torch.empty_like(x)
    return grad_x, encoder_kernels.gelu_backward(grad, x, bias, grad_x)


@_gelu_backward.register_fake
def _(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32)


@_gelu_backward.register_kernel("cpu")
def _(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    values = x.float() + bias.float()
    grad_x = torch.ops.aten.gelu_backward(grad.float(), values).to(x.dtype)
    return grad_x, grad_x.float().sum(0)


# ---------------------------------------------------------------------- dropout as the kernels draw it


def kept(seed: Tensor, shape: torch.Size, dropout: float) -> Tensor:
    """Which elements (T, C) dropout keeps, by the rule of the kernels."""

    def mixed(x: Tensor) -> Tensor:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    token, channel = (torch.arange(size, device=seed.device) for size in shape)
    of_token = mixed(token ^ mixed(seed & 0xFFFFFFFF))
    of_channel = mixed((((channel + 1) * 0x9E3779B9) & 0xFFFFFFFF) ^ ((seed >> 32) & 0xFFFFFFFF))
    return mixed(of_token[:, None] ^ of_channel[None, :]) >= int(dropout * 2**32)
