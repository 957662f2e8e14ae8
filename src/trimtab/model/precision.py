"""Precision of a model: the dtypes of its computation and weights. Outputs are fp32 unless a loss needs another dtype.

`fp16` and `bf16` are mixed precision: the forward runs under autocast, and trainable parameters are fp32 whatever dtype
they were loaded in, so small updates are not lost and fp16 gradients can be unscaled. `bf16-pure` has only bf16
weights; small updates are not lost if the optimizer rounds stochastically. `tf32` is fp32 with tf32 matrix products.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model.half_experts import cast_experts, restore_experts
from trimtab.model.half_weights import is_rounded

_DTYPES = {"no": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}
_OWN_FORWARD = "_trimtab_forward"
_keeps_half: ContextVar[bool] = ContextVar("keeps_half", default=False)


class Precision:
    """The precision of a model; "no" changes nothing.

    Args:
        name: "no", "tf32", "fp16", "bf16" or "bf16-pure". "tf32" applies to the whole process.
        device: Device of the model.
        keeps_bf16: Whether "bf16" leaves bf16 weights as they are, as Accelerate does; else they become fp32.
    """

    def __init__(self, name: str | None, device: torch.device, keeps_bf16: bool = False) -> None:
        self.name = "no" if name is None else str(name)
        if self.name not in _DTYPES:
            names = ", ".join(f'"{known}"' for known in _DTYPES)
            raise RecipeError(f"mixed_precision={name!r} is not valid", f"use one of {names}")
        self.compute_dtype = _DTYPES[self.name]
        self.is_pure = self.name == "bf16-pure"
        self._device = device
        self._keeps_bf16 = keeps_bf16 and self.compute_dtype is torch.bfloat16
        if self.name == "tf32":
            _use_tf32(device)

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether small gradients would underflow in the compute dtype."""
        return self.compute_dtype is torch.float16

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The autocast context of this precision."""
        if self.compute_dtype is None or self.is_pure:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.compute_dtype, enabled=enabled)

    def attach(self, model: torch.nn.Module) -> None:
        """Wrap the forward of `model` in autocast with fp32 outputs, and convert its weights."""
        if self.compute_dtype is None or _OWN_FORWARD in model.__dict__:
            return
        if self.is_pure:
            _convert([p for p in model.parameters() if p.is_floating_point()], self.compute_dtype)
        else:
            trained = [p for p in model.parameters() if p.requires_grad and not is_rounded(p)]
            if self._keeps_bf16 and any(p.dtype is torch.bfloat16 for p in trained):
                say(f"{type(model).__name__}: bf16 weights stay bf16, as in Accelerate; small updates are rounded away")
                trained = [p for p in trained if p.dtype is not torch.bfloat16]
            convert_to_fp32(trained, model_name=type(model).__name__)
            cast_experts(model)
        precision = self

        def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            with precision.autocast():
                output = self.__dict__[_OWN_FORWARD](*args, **kwargs)
            return output if _keeps_half.get() else as_fp32(output)

        # Bound methods follow their object through copy.deepcopy; a closure over the model would not.
        model.__dict__[_OWN_FORWARD] = model.forward
        model.forward = MethodType(_signature_of(model.forward, forward), model)

    def detach(self, model: torch.nn.Module) -> None:
        """Restore the original forward of `model`."""
        own = model.__dict__.pop(_OWN_FORWARD, None)
        if own is None:
            return
        restore_experts(model)
        del model.__dict__["forward"]
        if own != model.forward:
            model.forward = own


@contextmanager
def half_precision_outputs() -> Iterator[None]:
    """Make models return outputs in the dtype that they were computed in, for code that needs no fp32 copies."""
    before = _keeps_half.set(True)
    try:
        yield
    finally:
        _keeps_half.reset(before)


def _signature_of(wrapped: Any, function: Any) -> Any:
    """Make `inspect.signature` of a wrapper return the parameters of the wrapped forward."""
    function.__wrapped__ = getattr(wrapped, "__func__", wrapped)
    function.__doc__ = wrapped.__doc__
    return function


def convert_to_fp32(parameters: list[torch.nn.Parameter], model_name: str = "") -> None:
    """Convert half-precision parameters and their gradients to fp32 in place.

    Args:
        parameters: Parameters to convert.
        model_name: Name of the model for a log message; empty for no message.
    """
    half = [p for p in parameters if p.dtype in (torch.float16, torch.bfloat16)]
    _convert(half, torch.float32)
    if half and model_name:
        say(f"{model_name}: {len(half)} trainable tensors in half precision were converted to fp32 (mixed precision)")


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
            f"tf32 needs an NVIDIA GPU with compute capability 8.0 or higher, but the device is {device}",
            "train.precision: fp32, or auto",
        )
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def as_fp32(output: Any) -> Any:
    """Convert every half-precision tensor in `output` to fp32; containers keep their type."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(as_fp32, output))
    if isinstance(output, list | tuple):
        return type(output)(map(as_fp32, output))
    if isinstance(output, Mapping):
        converted = {key: as_fp32(value) for key, value in output.items()}
        # transformers' outputs are both dataclasses and mappings, and are built from keyword arguments
        return type(output)(**converted) if dataclasses.is_dataclass(output) else type(output)(converted)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output) if field.init}
        return dataclasses.replace(output, **as_fp32(fields))
    return output
