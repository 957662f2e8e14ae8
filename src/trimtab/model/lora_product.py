"""The product of a low-rank adapter, in the format of the base's own product and with little kept for backward.

PEFT multiplies in the format of the adapter's weights: fp32 masters make an fp32 copy of every input. Here the masters
are rounded to the format in which the base computes, once for each product, and the product is added to what the base
gave without another tensor of that size. Kept for backward are the input, in that format (one tensor, which the
projections of a block share), and its image under the first matrix.

Shapes: x (tokens, in), down = A (rank, in), up = B (out, rank), inner = x A^T (tokens, rank).
"""

import threading
from types import MethodType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import TensorWeakRef

from trimtab.model.nf4 import dequantized, is_nf4

_PEFT_FORWARD = "_trimtab_peft_forward"
_last_input = threading.local()
# torch's own selective checkpointing keeps outputs of the base, and fails where they change behind its back.
_KEEP_OUTPUTS = {"_CachingTorchDispatchMode", "_CachedTorchDispatchMode"}


def bind_product(layer: Any) -> bool:
    """Let one of PEFT's LoRA modules compute its product as described above.

    PEFT's own forward stays in use for all that is not covered: merged or disabled adapters, several at once, variants
    such as DoRA, a bias in the adapter, a base that trains, torch.compile.

    Args:
        layer: A module of PEFT with an adapter.

    Returns:
        Whether it is a module for which there is such a product.
    """
    from transformers.pytorch_utils import Conv1D

    if not isinstance(layer.get_base_layer(), torch.nn.Linear | Conv1D) or _PEFT_FORWARD in layer.__dict__:
        return False
    # Bound methods follow their object through copy.deepcopy; a closure over the module would not.
    layer.__dict__[_PEFT_FORWARD] = layer.forward
    layer.forward = MethodType(_forward, layer)
    return True


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    name = _covered(layer)
    if name is None or args or kwargs or not x.is_floating_point() or not x.numel():
        return layer.__dict__[_PEFT_FORWARD](x, *args, **kwargs)
    base, dropout = layer.base_layer, layer.lora_dropout[name]
    dropped = dropout(x) if layer.training and isinstance(dropout, torch.nn.Dropout) else None
    seen = x if dropped is None else dropped
    dtype, modes = _compute_dtype(base, x), _get_current_dispatch_mode_stack()
    # Who watches (selective checkpointing, a tracer) has to see the same operations each time.
    rounded = seen.detach().to(dtype) if modes else _rounded(seen, dtype)
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    keeps_outputs = any(type(mode).__name__ in _KEEP_OUTPUTS for mode in modes)
    apply: Any = _BaseAndAdapter.apply
    rows = apply(x, dropped, rounded, down, up, base, layer.scaling[name], dtype, keeps_outputs)
    return rows.view(*x.shape[:-1], -1)


def _covered(layer: Any) -> str | None:
    """The name of the one adapter that is active, or None where PEFT has to compute."""
    active = layer.active_adapters
    if len(active) != 1 or active[0] not in layer.lora_A or layer.disable_adapters or layer.merged:
        return None
    name: str = active[0]
    is_plain = name not in layer.lora_variant and not layer.lora_bias[name]
    return name if is_plain and _is_frozen(layer.base_layer) and not torch.compiler.is_compiling() else None


def _is_frozen(base: Any) -> bool:
    """Whether nothing of a base trains, so that it and its adapter can be one step of the graph."""
    return not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)


def _compute_dtype(base: Any, x: torch.Tensor) -> torch.dtype:
    """The format in which the base multiplies; a 4-bit module has its own and gives back that of its input."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    own: torch.dtype | None = getattr(base, "compute_dtype", None)
    return base.weight.dtype if own is None else own


def _memory_of(result: torch.Tensor) -> torch.Tensor | None:
    """The tensor that the base has just made; with a bias it gives a view of a sum that it made as a matrix."""
    if not result._is_view():
        return result
    whole = result._base
    is_all = whole is not None and whole.numel() == result.numel() and result.is_contiguous()
    return whole if is_all else None


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The input in the format of the product, cut off from the graph; modules that share an input share this too.

    Nothing is kept alive here: the tensor is found again only while autograd keeps it for the first of the modules.
    """
    if x.dtype == dtype:
        return x.detach()
    source, version, made = getattr(_last_input, "seen", (None, None, None))
    if source is not None and made is not None and source() is x and version == x._version:
        found: torch.Tensor | None = made()
        if found is not None and found.dtype == dtype:
            return found
    rounded = x.detach().to(dtype)
    _last_input.seen = TensorWeakRef(x), x._version, TensorWeakRef(rounded)
    return rounded


class _BaseAndAdapter(torch.autograd.Function):
    """A frozen base and its adapter in one step: base(x) + scale * x A^T B^T.

    As two steps autograd would hold two gradients of the input and add them, which at a wide input is the largest
    temporary of a block. With dropout the adapter has an input of its own, and there are two.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        rounded: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        base: Any,
        scale: float,
        dtype: torch.dtype,
        keeps_outputs: bool,
    ) -> torch.Tensor:
        """What both give, in any shape with the same rows: autograd forbids much with a view that is made in here."""
        result = base(x)
        memory = None if keeps_outputs else _memory_of(result)
        with torch.autocast(x.device.type, enabled=False):  # every format is chosen here
            inner = _rows(rounded) @ down.to(dtype).t()
            if memory is None:
                memory = result.clone()
            _add_product(memory, inner, up.to(dtype), scale)
        _, _, _, needs_down, needs_up, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rounded if needs_down else None, inner if needs_up else None, down, up)
        ctx.base, ctx.scale, ctx.dtype, ctx.shape, ctx.input_dtype = base, scale, dtype, x.shape, x.dtype
        return memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rounded, inner, down, up = ctx.saved_tensors
        needs_x, needs_dropped, _, needs_down, needs_up, *_ = ctx.needs_input_grad
        grad_x = grad_dropped = grad_down = grad_up = None
        with torch.autocast(grad.device.type, enabled=False):
            rows = _rows(grad).to(ctx.dtype)
            grad_inner = (rows @ up.to(ctx.dtype)).mul_(ctx.scale)
            if needs_up:
                grad_up = (rows.t() @ inner).to(up.dtype).mul_(ctx.scale)
            if needs_down:
                grad_down = (grad_inner.t() @ _rows(rounded)).to(down.dtype)
            if needs_dropped:
                grad_dropped = (grad_inner @ down.to(ctx.dtype)).view(ctx.shape).to(ctx.input_dtype)
            if needs_x:
                grad_x = rows @ _matrix_of(ctx.base, ctx.dtype)
                if not needs_dropped:
                    grad_x.addmm_(grad_inner, down.to(ctx.dtype))
                grad_x = grad_x.view(ctx.shape).to(ctx.input_dtype)
        return grad_x, grad_dropped, None, grad_down, grad_up, None, None, None, None


def _matrix_of(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a base as (out, in)."""
    if is_nf4(base):
        return dequantized(base.weight, dtype)
    weight: torch.Tensor = base.weight.to(dtype)
    return weight if isinstance(base, torch.nn.Linear) else weight.t()  # Conv1D keeps it the other way round


def _add_product(result: torch.Tensor, inner: torch.Tensor, up: torch.Tensor, scale: float) -> None:
    """Add scale * inner up^T in place; in one pass where the formats are the same."""
    rows = result.view(-1, result.shape[-1])
    if rows.dtype == inner.dtype:
        rows.addmm_(inner, up.t(), alpha=scale)
    else:
        rows.add_(inner @ up.t(), alpha=scale)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
