"""Fused kernels for the operations between the matrix products of a block; they store less and read memory less often.

`liger`: norms and gated activations of decoders from liger-kernel, and rotary embeddings by trimtab's kernel
(`trimtab.model.rotary`). liger-kernel also patches the classes of the model's family for models that are built later;
that is reverted here. `fused`: dropout, residual sums, norms, GELU and projections of BERT's blocks by trimtab's
kernels (`trimtab.model.fused_encoder`). Only the modules of one model are changed.
"""

import sys
from types import MethodType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trimtab.errors import RecipeError
from trimtab.hardware.extras import has_package, require_extra
from trimtab.model.fused_encoder import has_encoder_blocks, use_fused_encoder
from trimtab.model.rotary import rotate_in_trace, rotate_with_triton, use_fused_rotary
from trimtab.techniques.base import Accelerator, Case, Phase, Site, StepSpec, Technique
from trimtab.techniques.compilation import captures_steps, compiles_blocks, conflict, may_compile


class FusedKernels(Technique):
    """Compute norms, activations and rotary embeddings with fused kernels."""

    key = "kernels"
    setting = "memory.kernels"
    off = "plain"
    phase = Phase.KERNELS
    is_decided_first = True

    def values(self, case: Case) -> tuple[str, ...]:
        """Return the result of `choose_kernels`; for a device outside this machine, packages need not be installed."""
        asked = str(self.asked(case.recipe))
        if case.recipe is None:
            return ("plain",)
        if asked == "fused":
            _require_encoder(case.model, case.accelerator)
        if asked == "auto" and _can_fuse_encoder(case):
            return _values_of_encoder(case)
        if asked == "fused" or (asked != "auto" and not case.accelerator.is_here):
            return (asked,)
        if asked == "auto" and case.recipe.train.compile not in ("auto", "off"):
            return ("plain",)  # compiled blocks are fused by the compiler; other values were not tested in CUDA graphs
        device = torch.device(case.accelerator.type)
        chosen = choose_kernels(asked, case.model, device, case.compute_dtype)
        return (chosen, "plain") if asked == "auto" and chosen != "plain" and may_compile(case) else (chosen,)

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """Refuse compiled blocks: a compiler fuses norms and activations itself, and fails on liger's functions."""
        value, compiled = spec[self.key], spec["compile"]
        if (value == "liger" and compiled != "off") or (value == "fused" and compiles_blocks(compiled)):
            return conflict(f"{self.setting}: {value}", compiled, "which also fuses kernels")
        # calling the kernel from Python costs more than the launches that it saves
        if value == "fused" and compiled == "off" and self.is_open(case.recipe):
            return f"{self.setting}: auto uses fused kernels of encoders in captured steps only"
        return None

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Use the fused kernels; in a trace, use modules that allocate the same memory."""
        if value == "fused":
            _require_encoder(model, site.accelerator)  # a stored plan may come from another machine
            use_fused_encoder(model)
        elif site.is_traced:
            _use_traced_liger(model, site.accelerator.num_multiprocessors)
            use_fused_rotary(model, rotate_in_trace)
        else:
            _require_liger(model, site.device)
            use_liger(model)
            use_fused_rotary(model, rotate_with_triton)

    def loads_kernels(self, value: str) -> bool:
        """Return True for fused kernels: they are Triton's."""
        return value != self.off


def _can_fuse_encoder(case: Case) -> bool:
    """Whether `auto` may choose the kernels for encoders."""
    return case.compute_dtype is not None and _encoder_problem(case.model, case.accelerator) is None


def _values_of_encoder(case: Case) -> tuple[str, ...]:
    assert case.recipe is not None
    compiled = case.recipe.train.compile
    if captures_steps(compiled) and not compiles_blocks(compiled):
        return ("fused",)
    return ("plain", "fused") if may_compile(case) else ("plain",)


def _require_encoder(model: torch.nn.Module, accelerator: Accelerator) -> None:
    problem = _encoder_problem(model, accelerator)
    if problem is not None:
        raise RecipeError(f"memory.kernels: fused {problem}", "memory.kernels: auto")


def _encoder_problem(model: torch.nn.Module | None, accelerator: Accelerator) -> str | None:
    """The reason why the kernels for encoders are not possible; None if they are."""
    if not accelerator.is_cuda:
        return f"needs an NVIDIA GPU; this device is {accelerator.type}"
    if accelerator.is_here and not has_package("triton"):
        return "needs Triton, which is not installed"
    if model is None or not has_encoder_blocks(model):
        return f"is for encoders with the blocks of BERT; {type(model).__name__} has none"
    return None


def choose_kernels(wanted: str, model: torch.nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> str:
    """Resolve `auto`: liger if it is installed, supports the model, and the model computes in half precision.

    Args:
        wanted: "auto", "plain" or "liger".
        model: A transformers model.
        device: Its device.
        compute_dtype: Its compute dtype; None is fp32, for which `auto` is "plain".

    Raises:
        RecipeError: "liger" was requested and is not possible.
    """
    if wanted != "auto":
        if wanted == "liger":
            _require_liger(model, device)
        return wanted
    usable = device.type == "cuda" and compute_dtype is not None and has_package("liger_kernel")
    return "liger" if usable and _family(model) in _families() else "plain"


def use_liger(model: torch.nn.Module) -> None:
    """Use the fused kernels for norms and gated activations of a model; its loss and its classes do not change."""
    import inspect

    apply = _families()[_family(model)]
    home = sys.modules[type(model).__module__]
    before = dict(vars(home))
    wanted = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    apply(model=model, **{name: value for name, value in wanted.items() if name in inspect.signature(apply).parameters})
    for name, value in vars(home).copy().items():
        if name in before and before[name] is not value:
            setattr(home, name, before[name])


def _family(model: torch.nn.Module) -> str:
    config: Any = model.config
    return str(config.model_type)


def _families() -> dict[str, Any]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return dict(MODEL_TYPE_TO_APPLY_LIGER_FN)


def _require_liger(model: torch.nn.Module, device: torch.device) -> None:
    require_extra("liger_kernel", "memory.kernels: liger")
    if device.type != "cuda":
        raise RecipeError(
            f"memory.kernels: liger needs an NVIDIA GPU; this device is {device.type}", "memory.kernels: auto"
        )
    if _family(model) not in _families():
        raise RecipeError(
            f"memory.kernels: liger does not support {_family(model)} models", "memory.kernels: plain, or auto"
        )


# ---------------------------------------------------------------------- in a trace Each kernel is one operation that
# reads and writes the same data as the kernel, so that its time is predicted.


class _RmsNorm(torch.autograd.Function):
    """Stores its input and one number per row; its backward overwrites the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, num_multiprocessors: int) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        result = rows * 1.0
        ctx.save_for_backward(rows, weight, torch.empty(rows.shape[0], dtype=torch.float32, device="meta"))
        ctx.num_multiprocessors = num_multiprocessors
        return result.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()
        grad.data.mul_(rows.view_as(grad))
        partial = torch.empty((ctx.num_multiprocessors, weight.shape[0]), dtype=torch.float32, device="meta")
        return grad, partial.sum(dim=0).to(weight.dtype), None


class _SiluMul(torch.autograd.Function):
    """Keeps its two inputs, which its backward overwrites."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        gate.data.mul_(grad)
        up.data.neg_()
        return gate.detach(), up.detach()


def _use_traced_liger(model: torch.nn.Module, num_multiprocessors: int) -> None:
    """Replace norms and gated activations by functions that allocate like liger-kernel's."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        apply: Any = _RmsNorm.apply
        return apply(x, self.weight, num_multiprocessors)  # type: ignore[no-any-return]

    def gated(self: Any, x: torch.Tensor) -> torch.Tensor:
        apply: Any = _SiluMul.apply
        return self.down_proj(apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]

    known = 0
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            known += 1
            module.forward = MethodType(norm, module)
        elif kind.endswith("MLP") and all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            known += 1
            module.forward = MethodType(gated, module)
    if not known:
        raise RecipeError(
            f"memory.kernels: liger has no kernel for {type(model).__name__}", "memory.kernels: plain, or auto"
        )
