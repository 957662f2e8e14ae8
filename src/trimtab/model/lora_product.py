"""The forward of a LoRA module: in the compute dtype of the base module, with few tensors saved for backward.

PEFT computes in the dtype of the adapter's weights, so fp32 master weights cause an fp32 copy of every input. Here the
master weights are cast to the compute dtype of the base in each forward, and the product is added in place to the
output of the base. The tensors saved for backward are the input in that dtype (one tensor, shared by the projections of
a block) and the small inner product.

Shapes: x (tokens, in), down = A (rank, in), up = B (out, rank), inner = x A^T (tokens, rank).
"""

import threading
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import TensorWeakRef

from trimtab.model.fp8 import Fp8Linear
from trimtab.model.nf4 import dequantized, is_nf4

_PEFT_FORWARD = "_trimtab_peft_forward"
_last_input = threading.local()
# torch's selective checkpointing caches outputs of the base and fails if they are changed in place.
_CACHING_MODES = {"_CachingTorchDispatchMode", "_CachedTorchDispatchMode"}


def bind_product(layer: Any) -> bool:
    """Replace the forward of one of PEFT's LoRA modules with the forward of this module.

    It still calls PEFT's forward in unsupported cases: merged, disabled or several adapters, variants such as DoRA, an
    adapter with a bias, a trainable base.

    Args:
        layer: A LoRA module of PEFT.

    Returns:
        Whether the forward was replaced, which happens once, and only for adapters on linear modules.
    """
    from transformers.pytorch_utils import Conv1D

    if not isinstance(layer.get_base_layer(), torch.nn.Linear | Conv1D) or _PEFT_FORWARD in layer.__dict__:
        return False
    # Bound methods follow their object through copy.deepcopy; a closure over the module would not.
    layer.__dict__[_PEFT_FORWARD] = layer.forward
    layer.forward = MethodType(_forward, layer)
    return True


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    name = _supported_adapter(layer)
    if name is None or args or kwargs or not x.is_floating_point() or not x.numel():
        return layer.__dict__[_PEFT_FORWARD](x, *args, **kwargs)
    base, dropout = layer.base_layer, layer.lora_dropout[name]
    dropped = dropout(x) if layer.training and isinstance(dropout, torch.nn.Dropout) else None
    seen = x if dropped is None else dropped
    if torch.compiler.is_compiling():
        return _traceable_sum(layer, name, x, seen)
    dtype, modes = _compute_dtype(base, x), _get_current_dispatch_mode_stack()
    # Dispatch modes (selective checkpointing, a tracer) must see the same operations in every call, so nothing is
    # cached.
    rounded = seen.detach().to(dtype) if modes else _rounded(seen, dtype)
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    keeps_outputs = any(type(mode).__name__ in _CACHING_MODES for mode in modes)
    product = _Product(base, layer.scaling[name], dtype, keeps_outputs)
    after_inner: Any = _Inner.apply(seen, rounded, down, up, product)  # type: ignore[no-untyped-call]
    rows: Any = _BaseAndAdapter.apply(x, dropped, down, up, after_inner, product)  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], -1)


def _supported_adapter(layer: Any) -> str | None:
    """The name of the single active adapter, or None if PEFT's forward is needed."""
    active = layer.active_adapters
    if len(active) != 1 or active[0] not in layer.lora_A or layer.disable_adapters or layer.merged:
        return None
    name: str = active[0]
    is_plain = name not in layer.lora_variant and not layer.lora_bias[name]
    return name if is_plain and _is_frozen(layer.base_layer) else None


def _traceable_sum(layer: Any, name: str, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The same sum in plain operations: torch.compile decides itself what is saved for backward."""
    result: torch.Tensor = layer.base_layer(x)
    dtype = _compute_dtype(layer.base_layer, x)
    with torch.autocast(x.device.type, enabled=False):
        inner = _rows(seen).to(dtype) @ layer.lora_A[name].weight.to(dtype).t()
        product = inner @ layer.lora_B[name].weight.to(dtype).t()
        total: torch.Tensor = result + layer.scaling[name] * product.view(result.shape)
    return total


def _is_frozen(base: Any) -> bool:
    """Whether a base module has no trainable parameters, so it and its adapter can be one autograd function."""
    return not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)


def _compute_dtype(base: Any, x: torch.Tensor) -> torch.dtype:
    """The dtype in which the base module computes; a quantized module has its own compute dtype."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    own: torch.dtype | None = getattr(base, "compute_dtype", None)
    return base.weight.dtype if own is None else own


def _memory_of(result: torch.Tensor) -> torch.Tensor | None:
    """The tensor behind the output of the base, to add to in place; with a bias, the output is a view of a matrix."""
    if not result._is_view():
        return result
    whole = result._base
    is_whole = whole is not None and whole.numel() == result.numel() and result.is_contiguous()
    return whole if is_whole else None


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The detached input in the compute dtype; modules with the same input share the converted tensor.

    It is held by a weak reference, so it is shared only while autograd keeps it for the first of the modules.
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


class _Inner(torch.autograd.Function):
    """Compute x A^T, and save what the backward of `_BaseAndAdapter`, which follows, needs.

    Gradient checkpointing stops recomputing a block when all saved tensors exist. Because they are saved here, before
    the product of the base, the last product of a block is not recomputed: an eighth of the step of a Llama.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rounded: torch.Tensor, down: torch.Tensor, up: torch.Tensor, product: "_Product"
    ) -> torch.Tensor:
        """Return an empty tensor that makes `_BaseAndAdapter` depend on this function."""
        with torch.autocast(x.device.type, enabled=False):  # all dtypes are explicit
            product.inner = _rows(rounded) @ down.to(product.dtype).t()
        _, _, needs_down, needs_up, _ = ctx.needs_input_grad
        ctx.save_for_backward(rounded if needs_down else None, product.inner if needs_up else None, down, up)
        product.saved = ctx
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        return None, None, None, None, None


@dataclass
class _Product:
    """The values that one call of a module passes from `_Inner` to `_BaseAndAdapter`."""

    base: Any
    scale: float
    dtype: torch.dtype
    keeps_outputs: bool
    inner: torch.Tensor | None = None
    saved: Any = None  # the context of `_Inner`

    def take_inner(self) -> torch.Tensor:
        """Return the inner product; afterwards only autograd keeps it, if at all."""
        inner, self.inner = self.inner, None
        assert inner is not None
        return inner


class _BaseAndAdapter(torch.autograd.Function):
    """A frozen base and its adapter in one autograd function: base(x) + scale * x A^T B^T.

    As two functions, autograd would add two gradients of the input, which for wide inputs is the largest temporary of a
    block. With dropout the adapter has a different input, and there are two gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        after_inner: torch.Tensor,
        product: _Product,
    ) -> torch.Tensor:
        """Return the sum, possibly flattened to a matrix: autograd restricts views that a function returns."""
        result = product.base(x)
        memory = None if product.keeps_outputs else _memory_of(result)
        with torch.autocast(x.device.type, enabled=False):
            if memory is None:
                memory = result.clone()
            _add_product(memory, product.take_inner(), up.to(product.dtype), product.scale)
        ctx.product, ctx.shape, ctx.input_dtype = product, x.shape, x.dtype
        return memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        product: _Product = ctx.product
        rounded, inner, down, up = product.saved.saved_tensors
        needs_x, needs_dropped, needs_down, needs_up, *_ = ctx.needs_input_grad
        grad_x = grad_dropped = grad_down = grad_up = None
        with torch.autocast(grad.device.type, enabled=False):
            rows = _rows(grad).to(product.dtype)
            grad_inner = (rows @ up.to(product.dtype)).mul_(product.scale)
            if needs_up:
                grad_up = (rows.t() @ inner).to(up.dtype).mul_(product.scale)
            if needs_down:
                grad_down = (grad_inner.t() @ _rows(rounded)).to(down.dtype)
            if needs_dropped:
                grad_dropped = (grad_inner @ down.to(product.dtype)).view(ctx.shape).to(ctx.input_dtype)
            if needs_x:
                grad_x = _input_gradient(product.base, rows, product.dtype)
                if not needs_dropped:
                    grad_x.addmm_(grad_inner, down.to(product.dtype))
                grad_x = grad_x.view(ctx.shape).to(ctx.input_dtype)
        return grad_x, grad_dropped, grad_down, grad_up, None, None


def _input_gradient(base: Any, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of the input of a base module, from the gradient of its output."""
    if isinstance(base, Fp8Linear):
        return base.input_gradient(rows, dtype)
    return rows @ _matrix_of(base, dtype)


def _matrix_of(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a base module as (out, in)."""
    if is_nf4(base):
        return dequantized(base.weight, dtype)
    weight: torch.Tensor = base.weight.to(dtype)
    return weight if isinstance(base, torch.nn.Linear) else weight.t()  # Conv1D stores (in, out)


def _add_product(result: torch.Tensor, inner: torch.Tensor, up: torch.Tensor, scale: float) -> None:
    """Add scale * inner up^T in place; in one kernel if the dtypes are the same."""
    rows = result.view(-1, result.shape[-1])
    if rows.dtype == inner.dtype:
        rows.addmm_(inner, up.t(), alpha=scale)
    else:
        rows.add_(inner @ up.t(), alpha=scale)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
