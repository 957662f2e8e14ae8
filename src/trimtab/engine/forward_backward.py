"""`Engine.forward_backward`: forward, loss and backward of a micro-batch in one call, which CUDA graphs can replay.

Without `Engine(cuda_graphs=True)` the call is `engine.backward(loss, weight)`. With it, every model has its own graphs
(`trimtab.model.captured_step`): one for each combination of batch size, loss function, model mode (train or eval) and
surrounding autocast context.
"""

import dis
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from trimtab.engine.accumulation import Weight
from trimtab.engine.gradients import checked_loss
from trimtab.engine.prepared_parts import PreparedParts, unwrap
from trimtab.errors import DataError, LossError, PrepareError
from trimtab.log import log_info_once
from trimtab.model.captured_step import MOST_GRAPHS, CapturedMicroBatches, compute_plainly
from trimtab.model.compiled_blocks import compiled_blocks_of
from trimtab.model.execution_state import ExecutionState

LossFunction = Callable[[Any, Any], Any]  # (model, batch) -> mean loss, or (mean loss, weight)

_MANY_SIZES = 64  # after this many micro-batches without a graph, a message reports it
_PLAIN = (bool, int, float, str, bytes, type(None), Enum, torch.dtype, torch.device)


@dataclass(frozen=True)
class MeanLoss:
    """The loss of a micro-batch: the mean, and the number of rows or tokens in it if the loss function returns one."""

    value: torch.Tensor
    weight: Weight | None

    def reported(self) -> torch.Tensor:
        """The mean, detached."""
        return self.value.detach()


class ForwardBackward:
    """Compute micro-batches for a user's own loop, with CUDA graphs if requested.

    Args:
        prepared: The prepared parts.
        captures: Whether to capture micro-batches in CUDA graphs.
        compiles: Whether the blocks of prepared models are compiled; a failure to compile is part of the state.
    """

    def __init__(self, prepared: PreparedParts, *, captures: bool, compiles: bool) -> None:
        self._prepared = prepared
        self._captures = captures
        self._captured: dict[torch.nn.Module, _CapturedModel] = {}
        self._known_parts: Any = None
        self._known_parameters: list[torch.nn.Parameter] = []
        self.has_state = captures or compiles

    @property
    def captures(self) -> bool:
        """Whether micro-batches on the device are captured."""
        return self._captures and CapturedMicroBatches().can_capture(self._prepared.device)

    def check(self, parts: Sequence[Any]) -> None:
        """Report during `prepare` if nothing can be captured.

        Raises:
            PrepareError: Several processes train.
        """
        if not self._captures or not any(isinstance(part, torch.nn.Module) for part in parts):
            return
        num_processes = self._prepared.world.num_processes
        if num_processes > 1:
            raise PrepareError(
                f"cuda_graphs=True works with one process only, not with {num_processes}: a graph cannot contain "
                "the exchange of gradients",
                "use Engine(compile_blocks=True) instead",
            )
        if not self.captures:
            log_info_once(
                f"cuda_graphs: nothing is captured on {self._prepared.device}, which is not an NVIDIA GPU; "
                "forward_backward computes the same results without graphs"
            )

    def __call__(self, engine: Any, model: torch.nn.Module, batch: Any, loss: LossFunction | None) -> torch.Tensor:
        """Compute a micro-batch; see `Engine.forward_backward`."""
        function, device = _loss_of_model if loss is None else loss, self._prepared.device
        compute = functools.partial(_mean_loss, function, device)
        found = self._captured_model(model) if self._captures else None
        # the loss is refused if gradients are disabled, which a replay would not notice
        if found is None or not found.is_in_use(device) or not torch.is_grad_enabled():
            return compute_plainly(engine, model, compute, batch)[0]
        _check_batch(batch, device, "batch")
        variant = _identity_of(function), found.modes(), _autocast_context(device)
        captured = found.captured
        captured.use_parameters(self._parameters())
        reported, _ = captured(engine, model, compute, batch, variant)
        _report_limits(captured)
        return reported

    def _captured_model(self, model: torch.nn.Module) -> "_CapturedModel":
        inner = unwrap(model)
        if inner not in self._captured:
            self._captured[inner] = _CapturedModel(inner)
        return self._captured[inner]

    def _parameters(self) -> list[torch.nn.Parameter]:
        """All parameters that may receive a gradient from a loss: those of all models and of all optimizers."""
        prepared = self._prepared
        groups = [group["params"] for optimizer in prepared.optimizers for group in optimizer.param_groups]
        parts = len(prepared.models), tuple(len(group) for group in groups)
        if parts != self._known_parts:
            of_models = [parameter for model in prepared.models for parameter in model.parameters()]
            of_groups = [parameter for group in groups for parameter in group]
            self._known_parts = parts
            self._known_parameters = list(dict.fromkeys([*of_models, *of_groups]))
        return self._known_parameters

    def clear(self) -> None:
        """Drop all graphs."""
        self._captured.clear()
        self._known_parts, self._known_parameters = None, []

    # ------------------------------------------------------------------ state

    def _states(self) -> list[ExecutionState]:
        models = [unwrap(model) for model in self._prepared.models]
        return [
            ExecutionState(compiled_blocks_of(model), self._captured_model(model).captured if self._captures else None)
            for model in models
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return for each model whether compiling or capturing failed: a resumed run computes the same way."""
        return {"models": [state.state_dict() for state in self._states()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; the engine's settings may have changed since."""
        for mine, saved in zip(self._states(), state["models"], strict=False):
            mine.load_state_dict(saved)

    def undo_point(self) -> Callable[[], None]:
        """Return a function that undoes `load_state_dict`."""
        undo = [state.undo_point() for state in self._states()]

        def undo_all() -> None:
            for undo_one in undo:
                undo_one()

        return undo_all


class _CapturedModel:
    """The graphs of one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.captured = CapturedMicroBatches(runs_own_code=True)
        self._modules = list(model.modules())  # walking over the modules of a model takes a millisecond

    def is_in_use(self, device: torch.device) -> bool:
        """Whether micro-batches on a device are captured, and no capture has failed."""
        return self.captured.failure is None and self.captured.can_capture(device)

    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training mode."""
        return tuple([module.training for module in self._modules])


def _loss_of_model(model: Any, batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        raise LossError(
            f"the batch is a {type(batch).__name__}; without a loss function it must be a dict for model(**batch)",
            "engine.forward_backward(model, batch, loss=lambda model, batch: …)",
        )
    outputs = model(**batch)
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def _mean_loss(function: LossFunction, device: torch.device, model: Any, batch: Any) -> MeanLoss:
    """Call a loss function; return its weight as a number if it is on the host."""
    result = function(model, batch)
    if isinstance(result, tuple) and len(result) != 2:
        raise LossError(
            f"the loss function returned a tuple of {len(result)} values",
            "return the mean loss, or (mean loss, weight)",
        )
    value, weight = result if isinstance(result, tuple) else (result, None)
    if isinstance(weight, torch.Tensor) and weight.device.type != device.type and weight.numel() == 1:
        weight = float(weight)  # on the CPU
    return MeanLoss(checked_loss(value), weight)


# ---------------------------------------------------------------------- what a graph depends on


def _check_batch(batch: Any, device: torch.device, path: str) -> None:
    """Refuse values that a graph cannot copy, or that it cannot compare between batches."""
    if isinstance(batch, torch.Tensor):
        if not _is_same_device(batch.device, device):
            raise DataError(
                f"{path} is on {batch.device}, and CUDA graphs read batches from {device}",
                f"prepare the loader, or {path}.to(engine.device)",
            )
        if batch.requires_grad or batch.layout is not torch.strided:
            kind = "a tensor that requires a gradient" if batch.requires_grad else f"a {batch.layout} tensor"
            raise DataError(f"{path} is {kind}, which CUDA graphs do not copy", _WITHOUT_GRAPHS)
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            _check_batch(value, device, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for number, value in enumerate(batch):
            _check_batch(value, device, f"{path}[{number}]")
    elif not isinstance(batch, _PLAIN):
        raise DataError(
            f"{path} is a {type(batch).__module__}.{type(batch).__qualname__}; CUDA graphs take dicts, lists and "
            "tuples of tensors, numbers and strings",
            f"collate it to tensors, or remove it from the batch; {_WITHOUT_GRAPHS}",
        )


def _is_same_device(one: torch.device, other: torch.device) -> bool:
    """Whether both are the same device; a device without an index matches any device of its type."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


_WITHOUT_GRAPHS = "engine.backward(loss) computes such a batch without graphs"


def _autocast_context(device: torch.device) -> Any:
    """The autocast context around a call; the engine's own precision is applied inside the model's forward."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _identity_of(function: LossFunction) -> Any:
    """Return a key that distinguishes loss functions.

    A lambda inside a loop is a new object in every iteration, so functions are compared by their code and the values
    that they read: plain values by value (closed over, global, or attributes of a method's object), other objects by
    identity.
    """
    if isinstance(function, functools.partial):
        values = *function.args, *function.keywords.items()
        return functools.partial, _identity_of(function.func), tuple(_flat(values))
    if isinstance(function, MethodType):
        owner = function.__self__
        return MethodType, _identity_of(function.__func__), _Same(owner), tuple(_flat(_plain_attributes(owner)))
    if isinstance(function, FunctionType):
        closed = [_contents(cell) for cell in function.__closure__ or ()]
        defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()
        known = function.__globals__
        read = [
            (name, known[name]) for name in _globals_of(function.__code__) if isinstance(known.get(name, ...), _PLAIN)
        ]
        values = *closed, *defaults, *read
        return function.__code__, _Same(function.__globals__), tuple(_flat(values))
    return _Same(function), tuple(_flat(_plain_attributes(function)))


@functools.lru_cache(maxsize=256)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The names of global variables that a function reads."""
    found = (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    return tuple(dict.fromkeys(found))


def _plain_attributes(owner: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in getattr(owner, "__dict__", {}).items() if isinstance(value, _PLAIN)]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield (type(value), value) if isinstance(value, _PLAIN) else _Same(value)


class _Same:
    """Equal to another instance if both wrap the same object, which is referenced weakly where Python allows it."""

    __slots__ = ("_get", "_hash")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # dicts and lists cannot be referenced weakly
            self._get = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        mine = self._get()
        return mine is not None and mine is other._get()


def _report_limits(captured: CapturedMicroBatches) -> None:
    if captured.is_full:
        log_info_once(
            f"cuda_graphs: {MOST_GRAPHS} micro-batch sizes are captured, the maximum; other sizes run without a "
            "graph. Pad batches to few sizes, for example with pad_to_multiple_of=64"
        )
    elif captured.num_sizes >= _MANY_SIZES and not captured.num_graphs:
        log_info_once(
            f"cuda_graphs: nothing is captured yet, because the first {_MANY_SIZES} micro-batches differed in size, "
            "in values other than tensors, or in values that the loss function closes over; put changing values into "
            "tensors of the batch, and pad batches to few sizes"
        )
