"""Compute the token loss in the output layer of a model, from hidden states, instead of returning logits.

The forward of the output layer (head) is replaced for one call of the model, so autocast, DDP and hooks see an ordinary
forward with a small output. Operations that a model applies to its logits after the head (softcapping, scaling, bias)
are recorded once on a short row and applied to each chunk; models that do more than arithmetic there are refused.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.data.packing import ROW_STARTS
from trimtab.errors import LossError, RecipeError
from trimtab.hardware.extras import require_extra
from trimtab.model.forward import IGNORED, NUM_LABELLED, Batch, bare_model, logits_of, run_model
from trimtab.model.linear_cross_entropy import Job, Kernel, chunked_cross_entropy, liger_cross_entropy
from trimtab.model.router_loss import router_loss

_CURE = "memory.loss: plain"
_SHORT_LENGTH = 32  # positions of the row with which operations are recorded


class HeadLoss:
    """Run a model and return its summed token loss instead of logits.

    Args:
        how: "chunked" or "liger".
        label_smoothing: As in `torch.nn.CrossEntropyLoss`.
        counts_hits: Whether to count labels that are the most likely token.

    Raises:
        RecipeError: liger-kernel or a GPU for it is missing.
    """

    def __init__(self, how: str, label_smoothing: float = 0.0, *, counts_hits: bool = False) -> None:
        if how == "liger":
            require_liger()
        self._how = how
        self._job = Job(label_smoothing, counts_hits=counts_hits)

    def __call__(
        self, model: torch.nn.Module, batch: Batch, labels_BL: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the loss summed over the labels, the number of hits if counted, and the router loss if any.

        Args:
            model: The model or its DDP wrapper.
            batch: Inputs of the model; its "labels" are only used to make the inputs of a decoder.
            labels_BL: The token to predict at each position, or -100.

        Raises:
            LossError: The model does not compute its logits in a way that this loss supports.
        """
        bare = bare_model(model)
        head = _head_of(bare)
        steps = _steps_after_head(bare, head, batch)
        at_most: Any = batch.get(NUM_LABELLED)
        job = replace(self._job, after=steps.on(bare), softcap=steps.softcap(), at_most=at_most)
        kernel: Kernel = chunked_cross_entropy
        if self._how == "liger":
            kernel = liger_cross_entropy
            if steps.recorded and job.softcap is None:
                raise LossError(
                    f"{type(bare).__name__} applies {steps} to its logits, which liger's loss does not support",
                    "memory.loss: chunked",
                )

        def compute(hidden: Tensor) -> Tensor:
            labels = _labels_for(hidden, head, labels_BL)
            return kernel(hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, labels, job)

        recorder = _Recorder(bare, (*labels_BL.shape, len(head.weight)))
        with _head_replaced(head, compute, recorder):
            outputs = run_model(model, batch)
        if recorder.steps() != steps:
            raise LossError(
                f"{type(bare).__name__} applies {recorder.steps()} to its logits, but applied {steps} before", _CURE
            )
        sums = _unsealed(outputs, bare)
        return sums[0], sums[1].detach().long() if self._job.counts_hits else None, router_loss(model, outputs)


def check_chunked_loss(model: torch.nn.Module, batch: Batch, how: str = "chunked") -> str | None:
    """Check that `HeadLoss` supports a model, by comparing it with the plain loss on a short row.

    Args:
        model: A model or its DDP wrapper; its training mode and gradients are not changed.
        batch: A batch of the task, on the device of the model.
        how: "chunked" or "liger".

    Returns:
        None if it is supported, else the reason why not.
    """
    bare = bare_model(model)
    try:
        head = _head_of(bare)
        row = _short_row(batch)
        if row["labels"].dim() != 2:
            return f"labels of shape {list(row['labels'].shape)} are not one label per position"
        labels = torch.arange(row["labels"].numel(), device=head.weight.device) % len(head.weight)
        labels = labels.view_as(row["labels"])
        labels[:, 1:2] = IGNORED
        with _eval_mode(bare), torch.no_grad():
            total, _, _ = HeadLoss(how)(bare, row, labels)
            logits, dtype = _plain_logits(bare, head, row)
    except (LossError, RecipeError) as error:
        return error.problem
    if logits is None or logits.shape[:2] != labels.shape:
        return f"{type(bare).__name__} does not return logits for each position"
    wanted = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    if not torch.allclose(total, wanted, rtol=1e-5 if dtype is torch.float32 else 2e-3):
        means = [float(value) / labels.numel() for value in (total, wanted)]
        return "the loss computed in the head is {:.6f}, from logits {:.6f}".format(*means)
    return None


@dataclass(frozen=True)
class _Step:
    """One operation on the logits; arguments can be `_LOGITS` or a `_Buffer` of the model as placeholders."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Buffer:
    name: str


_LOGITS = "the logits"


@dataclass(frozen=True)
class _Steps:
    """The operations that a model applies to its logits."""

    recorded: tuple[_Step, ...] = ()

    def __str__(self) -> str:
        return ", ".join(step.name for step in self.recorded) or "nothing"

    def on(self, model: torch.nn.Module) -> Callable[[Tensor], Tensor] | None:
        """The operations as a function, with the current buffers of the model; None if there are none."""
        return partial(self._replay, dict(model.named_buffers())) if self.recorded else None

    def _replay(self, buffers: Mapping[str, Tensor], logits: Tensor) -> Tensor:
        for step in self.recorded:
            args = [_resolve(arg, logits, buffers) for arg in step.args]
            logits = step.function(*args, **{name: _resolve(arg, logits, buffers) for name, arg in step.kwargs})
        return logits

    def softcap(self) -> float | None:
        """The bound c if the operations are c * tanh(logits / c), else None."""
        if [step.name for step in self.recorded] != ["div", "tanh", "mul"]:
            return None
        div, _, mul = (step.args for step in self.recorded)
        bound = div[1]
        is_softcap = div == (_LOGITS, bound) and mul in ((_LOGITS, bound), (bound, _LOGITS))
        return float(bound) if is_softcap and isinstance(bound, int | float) else None


def _resolve(arg: Any, logits: Tensor, buffers: Mapping[str, Tensor]) -> Any:
    if isinstance(arg, _Buffer):
        return buffers[arg.name]
    return logits if isinstance(arg, str) and arg == _LOGITS else arg


class _Recorder:
    """Records the operations on the output of a head during one call."""

    _ARITHMETIC = frozenset(("mul", "div", "true_divide", "add", "sub", "neg", "tanh", "clamp"))
    _CONVERSIONS = frozenset(("float", "to", "contiguous"))

    def __init__(self, model: torch.nn.Module, shape: tuple[int, ...]) -> None:
        self.shape = torch.Size(shape)  # shape that the logits would have
        self.model = model
        self._steps: list[_Step] = []

    def supports(self, name: str) -> bool:
        """Whether an operation can be recorded and applied later."""
        return name.removesuffix("_") in self._ARITHMETIC or name in self._CONVERSIONS

    def add(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record an operation."""
        if name.endswith("_"):  # replayed out of place: autograd needs the chunk's values
            name = name.removesuffix("_")
            function = getattr(torch.Tensor, name)
        named = tuple((key, self._placeholder(name, value)) for key, value in kwargs.items())
        self._steps.append(_Step(name, function, tuple(self._placeholder(name, value) for value in args), named))

    def steps(self) -> _Steps:
        """The recorded operations without conversions at the end, which the loss does anyway."""
        steps = list(self._steps)
        while steps and steps[-1].name in ("float", "contiguous"):
            steps.pop()
        return _Steps(tuple(steps))

    def _placeholder(self, name: str, value: Any) -> Any:
        if isinstance(value, _Sealed):
            return _LOGITS
        if not isinstance(value, Tensor):
            return value
        for known, buffer in self.model.named_buffers():
            if buffer is value:
                return _Buffer(known)
        raise LossError(
            f"{type(self.model).__name__} applies {name!r} to its logits with a tensor that is not one of its buffers",
            _CURE,
        )


class _Sealed(torch.Tensor):
    """Loss sums that pass through a model like logits: arithmetic on them is recorded but does not change them."""

    _recorder: _Recorder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sealed = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, _Sealed))
        recorder = sealed._recorder
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name in ("shape", "size"):
            return recorder.shape if len(args) < 2 else recorder.shape[args[1]]
        if name in ("dim", "ndim"):
            return len(recorder.shape)
        if name == "_base":  # never changed in place, so nothing depends on whether it is a view
            return None
        if recorder.supports(name):
            recorder.add(name, func, args, kwargs)
            return sealed
        if name not in _HARMLESS:
            raise LossError(f"{type(recorder.model).__name__} applies {name!r} to its logits", _CURE)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return _seal(result, recorder) if isinstance(result, Tensor) else result


# Operations that wrappers and hooks apply to an output without reading its values.
_HARMLESS = frozenset(
    (
        *("dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "grad", "is_cuda", "is_sparse"),
        *("_version", "is_floating_point", "is_complex", "element_size", "data_ptr", "untyped_storage", "stride"),
        *("__hash__", "register_hook", "retain_grad", "view_as", "clone", "detach", "alias", "__repr__", "__format__"),
    )
)


def _seal(tensor: Tensor, recorder: _Recorder) -> _Sealed:
    sealed = tensor.as_subclass(_Sealed)
    sealed._recorder = recorder
    return sealed


def _unsealed(outputs: Any, model: torch.nn.Module) -> Tensor:
    """The loss sums in the outputs of a model."""
    found = logits_of(outputs)
    if not isinstance(found, _Sealed):
        raise LossError(f"the logits of {type(model).__name__} are not those of its output layer", _CURE)
    with torch._C.DisableTorchFunctionSubclass():
        return found.as_subclass(torch.Tensor)


@contextmanager
def _head_replaced(head: torch.nn.Linear, compute: Callable[[Tensor], Tensor], recorder: _Recorder) -> Iterator[None]:
    """Make the forward of `head` return the sums of `compute`; other threads still get logits."""
    owner, own, num_calls = threading.get_ident(), head.forward, 0

    def forward(hidden: Tensor) -> Tensor:
        nonlocal num_calls
        if threading.get_ident() != owner:
            return own(hidden)
        num_calls += 1
        if num_calls > 1:
            raise LossError(f"{type(recorder.model).__name__} uses its output layer more than once in a call", _CURE)
        return _seal(compute(hidden), recorder)

    head.__dict__["forward"] = forward  # hides the method of the class
    try:
        yield
    finally:
        del head.__dict__["forward"]


def _head_of(model: Any) -> torch.nn.Linear:
    """The output layer of a model.

    Raises:
        LossError: There is none, or it is not a plain `torch.nn.Linear`.
    """
    getter = getattr(model, "get_output_embeddings", None)
    head: Any = getter() if getter is not None else None
    name = type(model).__name__
    if head is None:
        raise LossError(f"{name} has no output layer: its get_output_embeddings returns none", _CURE)
    is_plain = type(head).forward is torch.nn.Linear.forward and "forward" not in head.__dict__
    if not is_plain or not isinstance(head, torch.nn.Linear):
        raise LossError(
            f"the output layer of {name} is a {type(head).__module__}.{type(head).__name__} with a custom forward",
            _CURE,
        )
    return head


def _labels_for(hidden: Tensor, head: torch.nn.Linear, labels_BL: Tensor) -> Tensor:
    """The labels, flattened. Checked inside the model's forward, where the weights of a sharded model are gathered."""
    if type(head.weight) not in (Tensor, torch.nn.Parameter) or not head.weight.is_floating_point():
        kind = f"{type(head.weight).__name__} of {head.weight.dtype}"
        raise LossError(f"the weight of the output layer is a {kind}", _CURE)
    if hidden.shape[:-1] != labels_BL.shape:
        raise LossError(
            f"hidden states of shape {list(hidden.shape)} do not match labels of shape {list(labels_BL.shape)}",
            "the shapes must be (rows, positions, width) and (rows, positions): check the task and the inputs",
        )
    return labels_BL.reshape(-1).to(hidden.device)


_steps_by_model: WeakKeyDictionary[torch.nn.Module, _Steps] = WeakKeyDictionary()


def _steps_after_head(model: torch.nn.Module, head: torch.nn.Linear, batch: Batch) -> _Steps:
    """The operations that a model applies to its logits, recorded once on a short row without computing logits."""
    if model not in _steps_by_model:
        row = _short_row(batch)
        recorder = _Recorder(model, (*row["labels"].shape, len(head.weight)))
        nothing = torch.zeros(2, device=head.weight.device)
        with _eval_mode(model), torch.no_grad(), _head_replaced(head, lambda hidden: nothing, recorder):
            outputs = run_model(model, row)
        _unsealed(outputs, model)
        _steps_by_model[model] = recorder.steps()
    return _steps_by_model[model]


def _short_row(batch: Batch) -> dict[str, Tensor]:
    """The start of the row with the least padding if every input is a matrix of tokens, else the batch as given.

    The start of a packed batch becomes one row: operations after the head do not depend on attention.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and name != ROW_STARTS}
    labels = tensors["labels"]
    if labels.dim() != 2 or any(value.dim() != 2 or len(value) != len(labels) for value in tensors.values()):
        return tensors
    row = 0
    if "attention_mask" in tensors and not labels.is_meta:
        row = int(tensors["attention_mask"].sum(dim=1).argmax())
    short = {name: value[row : row + 1, :_SHORT_LENGTH] for name, value in tensors.items()}
    # decoder inputs are made from the labels and must be valid tokens
    return short | {"labels": short["labels"].where(short["labels"] != IGNORED, 0)}


def _plain_logits(model: Any, head: torch.nn.Linear, row: Batch) -> tuple[Tensor | None, torch.dtype | None]:
    """The logits of a row, and the dtype of the output of the head."""
    seen: list[torch.dtype] = []
    handle = head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    try:
        return logits_of(run_model(model, row)), seen[0] if seen else None
    finally:
        handle.remove()


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put all modules into eval mode, where dropout draws no random numbers, and restore their modes on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def require_liger() -> None:
    """Raise an error if liger-kernel or a GPU for it is missing."""
    require_extra("liger_kernel", "memory.loss: liger")
    if not torch.cuda.is_available():
        raise RecipeError("memory.loss: liger needs an NVIDIA GPU, but none was found", "memory.loss: chunked, or auto")
