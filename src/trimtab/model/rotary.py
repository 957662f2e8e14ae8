"""Rotary position embeddings of one model with a fused kernel instead of ten operations per block.

Attention modules call a function of their file, `apply_rotary_pos_emb`. Here a module gets a copy of its forward that
sees another function under that name, so other models of the same classes do not change. Only functions with the code
of Llama's are replaced. liger-kernel's function is not used because it overwrites queries and keys, which code that
keeps products for backward (`gradient_checkpointing: ops`) would not notice.
"""

from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.model.forward_code import code_of

_NAME = "apply_rotary_pos_emb"
_HELPER = "rotate_half"  # functions that the rotary function calls


class Rotate(Hashable, Protocol):
    """Rotate heads, or rotate their gradients back; see `rotary_kernel.rotate`."""

    def __call__(
        self, x_BHLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor, dtype: torch.dtype, *, is_backward: bool
    ) -> Tensor:
        """Return the result in a dtype."""


def use_fused_rotary(model: torch.nn.Module, rotate: Rotate) -> int:
    """Make the attention of a model rotate queries and keys with a kernel.

    Args:
        model: The model.
        rotate: The kernel, or its replacement in a trace.

    Returns:
        The number of modules that use it.
    """
    apply, num_changed = _fused(rotate), 0
    for module in model.modules():
        forward = type(module).forward
        if "forward" not in module.__dict__ and _calls_llama_rotary(forward):
            module.forward = MethodType(_with_other_rotary(forward, apply), module)
            num_changed += 1
    return num_changed


def rotate_with_triton(
    x_BHLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor, dtype: torch.dtype, *, is_backward: bool
) -> Tensor:
    """Call the kernel, which is imported at the first call."""
    from trimtab.model.rotary_kernel import rotate

    return rotate(x_BHLD, cos_BLD, sin_BLD, dtype, is_backward=is_backward)


def rotate_in_trace(
    x_BHLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor, dtype: torch.dtype, *, is_backward: bool
) -> Tensor:
    """Allocate and move the same data as the kernel."""
    num_rows, num_heads, num_tokens, width = x_BHLD.shape
    result_BLHD = x_BHLD.new_empty((num_rows, num_tokens, num_heads, width), dtype=dtype)
    return result_BLHD.transpose(1, 2).copy_(x_BHLD)


class _Rotation(torch.autograd.Function):
    """Rotation that saves only cosines and sines, which all blocks share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, rotate: Rotate) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rotate, ctx.dtype = rotate, x.dtype
        return rotate(x, cos, sin, torch.promote_types(x.dtype, cos.dtype), is_backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return ctx.rotate(grad, cos, sin, ctx.dtype, is_backward=True), None, None, None


@cache
def _fused(rotate: Rotate) -> Callable[..., tuple[Tensor, Tensor]]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        is_usual = unsqueeze_dim == 1 and q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
        if not is_usual or q.shape[-1] != cos.shape[-1] or q.shape[-1] % 2 or cos.requires_grad:
            plain: tuple[Tensor, Tensor] = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
            return plain
        rotated: Any = _Rotation.apply
        return rotated(q, cos, sin, rotate), rotated(k, cos, sin, rotate)

    return apply


@cache
def _with_other_rotary(forward: FunctionType, apply: Callable[..., Any]) -> FunctionType:
    """A copy of a forward that calls another rotary function; one copy for all modules of a class."""
    seen = forward.__globals__ | {_NAME: apply}
    copied = FunctionType(forward.__code__, seen, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__, copied.__annotations__ = forward.__kwdefaults__, forward.__annotations__
    copied.__wrapped__ = forward  # type: ignore[attr-defined]  # for inspect.signature
    return copied


@cache
def _calls_llama_rotary(forward: Any) -> bool:
    """Whether a forward calls a function with the same code as Llama's."""
    from transformers.models.llama import modeling_llama

    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return False
    known = forward.__globals__
    return all(code_of(known.get(name)) == code_of(getattr(modeling_llama, name)) for name in (_NAME, _HELPER))
