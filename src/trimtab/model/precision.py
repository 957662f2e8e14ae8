"""The number formats in which a model computes and keeps its weights; what it returns is always fp32.

`fp16` and `bf16` mean mixed: the forward runs under autocast, and weights that train are kept in fp32, whatever they
were loaded in, so that small updates are not rounded away and fp16 gradients can be unscaled. `bf16-pure` keeps nothing
in fp32; small updates survive if the optimizer rounds stochastically. `tf32` is fp32 with coarser matrix products.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.log import say

_DTYPES = {"no": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}
_OWN_FORWARD = "_trimtab_forward"


class Precision:
    """The number format in which a model computes; "no" does nothing at all.

    Args:
        name: "no", "tf32", "fp16", "bf16" or "bf16-pure". "tf32" is a setting of the whole process.
        device: Where the model computes.
    """

    def __init__(self, name: str | None, device: torch.device) -> None:
        self.name = "no" if name is None else str(name)
        if self.name not in _DTYPES:
            words = ", ".join(f'"{word}"' for word in _DTYPES)
            raise RecipeError(f"mixed_precision={name!r} is not known", f"use one of {words}")
        self.compute_dtype = _DTYPES[self.name]
        self.is_pure = self.name == "bf16-pure"
        self._device = device
        if self.name == "tf32":
            _use_tf32(device)

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether small gradients would vanish in the format of the computation."""
        return self.compute_dtype is torch.float16

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """A context in which matrix products run in the format of this precision."""
        if self.compute_dtype is None or self.is_pure:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.compute_dtype, enabled=enabled)

    def attach(self, model: torch.nn.Module) -> None:
        """Make the forward of `model` run in this precision by itself, and its weights what that needs."""
        if self.compute_dtype is None or _OWN_FORWARD in model.__dict__:
            return
        if self.is_pure:
            _convert([p for p in model.parameters() if p.is_floating_point()], self.compute_dtype)
        else:
            keep_fp32([p for p in model.parameters() if p.requires_grad], said_of=type(model).__name__)
        precision = self

        def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            with precision.autocast():
                output = self.__dict__[_OWN_FORWARD](*args, **kwargs)
            return as_fp32(output)

        # Bound methods follow their object through copy.deepcopy; a closure over the model would not.
        model.__dict__[_OWN_FORWARD] = model.forward
        model.forward = MethodType(_signature_of(model.forward, forward), model)

    def detach(self, model: torch.nn.Module) -> None:
        """Give `model` its own forward back."""
        own = model.__dict__.pop(_OWN_FORWARD, None)
        if own is None:
            return
        del model.__dict__["forward"]
        if own != model.forward:
            model.forward = own


def _signature_of(wrapped: Any, function: Any) -> Any:
    """Let tools that read a forward's parameters (trainers, tokenizers) see those of the model."""
    function.__wrapped__ = getattr(wrapped, "__func__", wrapped)
    function.__doc__ = wrapped.__doc__
    return function


def keep_fp32(parameters: list[torch.nn.Parameter], said_of: str = "") -> None:
    """Turn half-precision parameters, and the gradients they may have, into fp32 in place."""
    half = [p for p in parameters if p.dtype in (torch.float16, torch.bfloat16)]
    _convert(half, torch.float32)
    if half and said_of:
        say(f"{said_of}: {len(half)} trainable tensors were in half precision and are kept in fp32 (mixed precision)")


def _convert(parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> None:
    for parameter in parameters:
        gradient = parameter.grad
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)
        if gradient is not None:
            parameter.grad = gradient.to(dtype)


def _use_tf32(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        raise RecipeError(
            "tf32 is a format of NVIDIA GPUs from compute capability 8.0 on, which this device is not",
            "train.precision: fp32, or auto",
        )
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def as_fp32(output: Any) -> Any:
    """`output` with every half-precision tensor in it as fp32; containers keep their type."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(as_fp32, output))
    if isinstance(output, list | tuple):
        return type(output)(map(as_fp32, output))
    if isinstance(output, Mapping):
        converted = {key: as_fp32(value) for key, value in output.items()}
        # transformers' outputs are dataclasses and mappings at once, built by field
        return type(output)(**converted) if dataclasses.is_dataclass(output) else type(output)(converted)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output) if field.init}
        return dataclasses.replace(output, **as_fp32(fields))
    return output
