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
    such as DoRA, a bias in the adapter.

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
    if name is None or args or kwargs or not x.is_floating_point():
        return layer.__dict__[_PEFT_FORWARD](x, *args, **kwargs)
    base = layer.base_layer
    dropout = layer.lora_dropout[name]
    drops = layer.training and isinstance(dropout, torch.nn.Dropout)
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    if _is_frozen(base) and not drops and x.numel() and not torch.compiler.is_compiling():
        dtype, modes = _frozen_dtype(base, x), _get_current_dispatch_mode_stack()
        rounded = x.detach().to(dtype) if modes else _rounded(x, dtype)
        both: Any = _FrozenAndProduct.apply
        both_rows = both(x, rounded, down, up, base, layer.scaling[name], dtype, _keeps_outputs(modes))
        return both_rows.view(*x.shape[:-1], -1)
    result = base(x)
    if x.numel() == 0:
        return result
    if drops:
        x = dropout(x)
    dtype = _compute_dtype(base, x, result)
    modes = _get_current_dispatch_mode_stack()
    # Who watches (selective checkpointing, a tracer) has to see the same operations each time.
    is_watched = bool(modes) or torch.compiler.is_compiling()
    rounded = x.detach().to(dtype) if is_watched else _rounded(x, dtype)
    memory = None if _keeps_outputs(modes) else _memory_of(result)
    target = result if memory is None else memory
    apply: Any = _AddProduct.apply
    added = apply(target, x, rounded, down, up, layer.scaling[name], dtype, memory is not None)
    return added.view(result.shape)


def _covered(layer: Any) -> str | None:
    """The name of the one adapter that is active, or None where PEFT has to compute."""
    active = layer.active_adapters
    if len(active) != 1 or active[0] not in layer.lora_A or layer.disable_adapters or layer.merged:
        return None
    name: str = active[0]
    return None if name in layer.lora_variant or layer.lora_bias[name] else name


def _keeps_outputs(modes: list[Any]) -> bool:
    return any(type(mode).__name__ in _KEEP_OUTPUTS for mode in modes)


def _is_frozen(base: Any) -> bool:
    """Whether nothing of a base trains, so that it and its adapter can be one step of the graph."""
    return not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)


def _frozen_dtype(base: Any, x: torch.Tensor) -> torch.dtype:
    """`_compute_dtype`, before there is a result."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    own: torch.dtype | None = getattr(base, "compute_dtype", None)
    return base.weight.dtype if own is None else own


def _compute_dtype(base: Any, x: torch.Tensor, result: torch.Tensor) -> torch.dtype:
    """The format in which the base multiplies; a 4-bit module has its own and gives back that of its input."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    own = getattr(base, "compute_dtype", None)
    return result.dtype if own is None else own


def _memory_of(result: torch.Tensor) -> torch.Tensor | None:
    """The tensor that the base has just made, where nothing else has a use for it; None where one cannot know.

    With a bias, what a linear module gives is a view of a sum that it made as a matrix.
    """
    if not result._is_view():
        return result
    whole = result._base
    if whole is None or whole.numel() != result.numel() or not result.is_contiguous():
        return None
    made_by = "" if whole.grad_fn is None else whole.grad_fn.name()
    return whole if made_by == "AddmmBackward0" or not torch.is_grad_enabled() else None


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


class _AddProduct(torch.autograd.Function):
    """`result` + scale * x A^T B^T."""

    @staticmethod
    def forward(
        ctx: Any,
        result: torch.Tensor,
        x: torch.Tensor,
        rounded: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
        dtype: torch.dtype,
        in_place: bool,
    ) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):  # every format is chosen here
            inner = _rows(rounded) @ down.to(dtype).t()
            added = _add_product(result, inner, up.to(dtype), scale, in_place)
        if in_place:
            ctx.mark_dirty(result)
        _, needs_x, _, needs_down, needs_up, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            rounded if needs_down else None, inner if needs_up else None, down if needs_x else None, up
        )
        ctx.scale, ctx.dtype, ctx.shape, ctx.input_dtype = scale, dtype, x.shape, x.dtype
        return added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rounded, inner, down, up = ctx.saved_tensors
        needs_result, needs_x, _, needs_down, needs_up, *_ = ctx.needs_input_grad
        grad_x = grad_down = grad_up = None
        with torch.autocast(grad.device.type, enabled=False):
            rows = _rows(grad).to(ctx.dtype)
            if needs_up:
                grad_up = (rows.t() @ inner).to(up.dtype).mul_(ctx.scale)
            if needs_x or needs_down:
                grad_inner = (rows @ up.to(ctx.dtype)).mul_(ctx.scale)
                if needs_down:
                    grad_down = (grad_inner.t() @ _rows(rounded)).float()
                if needs_x:
                    grad_x = (grad_inner @ down.to(ctx.dtype)).view(ctx.shape).to(ctx.input_dtype)
        return grad if needs_result else None, grad_x, None, grad_down, grad_up, None, None, None


class _FrozenAndProduct(torch.autograd.Function):
    """A frozen base and its adapter in one step: the gradient of the input is summed where it is made.

    As two steps autograd would hold both gradients of the input and add them, which at a wide input is the largest
    temporary of a block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        rounded: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        base: Any,
        scale: float,
        dtype: torch.dtype,
        is_kept: bool,
    ) -> torch.Tensor:
        """What both give, in any shape with the same rows: autograd forbids much with a view that is made in here."""
        result = base(x)
        memory = None if is_kept else _memory_of(result)
        with torch.autocast(x.device.type, enabled=False):
            inner = _rows(rounded) @ down.to(dtype).t()
            if memory is not None:
                _add_product(memory, inner, up.to(dtype), scale, in_place=True)
            else:
                memory = _add_product(result, inner, up.to(dtype), scale, in_place=False).clone()
        _, _, needs_down, needs_up, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rounded if needs_down else None, inner if needs_up else None, down, up)
        ctx.base, ctx.scale, ctx.dtype, ctx.shape, ctx.input_dtype = base, scale, dtype, x.shape, x.dtype
        return memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rounded, inner, down, up = ctx.saved_tensors
        needs_x, _, needs_down, needs_up, *_ = ctx.needs_input_grad
        grad_x = grad_down = grad_up = None
        with torch.autocast(grad.device.type, enabled=False):
            rows = _rows(grad).to(ctx.dtype)
            if needs_up:
                grad_up = (rows.t() @ inner).to(up.dtype).mul_(ctx.scale)
            grad_inner = (rows @ up.to(ctx.dtype)).mul_(ctx.scale)
            if needs_down:
                grad_down = (grad_inner.t() @ _rows(rounded)).to(down.dtype)
            if needs_x:
                grad_x = (rows @ _matrix_of(ctx.base, ctx.dtype)).addmm_(grad_inner, down.to(ctx.dtype))
                grad_x = grad_x.view(ctx.shape).to(ctx.input_dtype)
        return grad_x, None, grad_down, grad_up, None, None, None, None


def _matrix_of(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a base as (out, in)."""
    if is_nf4(base):
        return dequantized(base.weight, dtype)
    weight: torch.Tensor = base.weight.to(dtype)
    return weight if isinstance(base, torch.nn.Linear) else weight.t()  # Conv1D keeps it the other way round


def _add_product(
    result: torch.Tensor, inner: torch.Tensor, up: torch.Tensor, scale: float, in_place: bool
) -> torch.Tensor:
    rows = _rows(result)
    if result.dtype != inner.dtype:
        product = (inner @ up.t()).view(result.shape)
        return result.add_(product, alpha=scale) if in_place else result.add(product, alpha=scale)
    if in_place and rows.data_ptr() == result.data_ptr():
        rows.addmm_(inner, up.t(), alpha=scale)
        return result
    added = torch.addmm(rows, inner, up.t(), alpha=scale).view(result.shape)
    return result.copy_(added) if in_place else added


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
