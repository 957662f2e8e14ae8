"""Compile the repeated blocks of a model with torch.compile: one graph for all blocks of a stack and all sizes.

Only the blocks are compiled, not the model: a block is compiled once and used N times, whereas a whole model would take
N times as long. Sizes are symbols in the graph, so that micro-batches of other sizes do not need another graph. Blocks
are compiled in training only; evaluation is not affected by this module.

The forward of a block is replaced on the instance, so names in state dicts do not change. Streamed weights are fetched
around the compiled code, not inside it. A model whose blocks cannot be compiled computes without compilation.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch

from trimtab.errors import summarize_error
from trimtab.log import say
from trimtab.model.blocks import blocks_of
from trimtab.model.streamed_blocks import innermost_forward, set_innermost_forward

_MOST_GRAPHS = 32  # graphs for one kind of inputs, if torch cannot make one graph for all sizes
_PLAIN_FORWARD = "_trimtab_uncompiled_block"
_STATE = "_trimtab_compiled_blocks"

Size = tuple[Any, ...]


class CompiledBlocks:
    """The compiled blocks of one model.

    Args:
        backend: The compiler, as `torch.compile` takes it.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self.failure: str | None = None  # the reason why all blocks are uncompiled
        self._backend = backend
        self._functions: dict[Size, Callable[..., Any]] = {}  # graphs by kind of inputs
        self._known: set[Size] = set()  # sizes that need no further compilation

    def run(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a block's own forward, computed by its graph."""
        if self.failure is not None:
            return own(*args, **kwargs)
        inputs = (type(getattr(own, "__self__", None)), args, tuple(kwargs.values()))
        size = _describe(inputs, _size_of)
        if size in self._known:
            return self._attempt(self._function_of(inputs), own, args, kwargs)
        if _is_capturing():  # the compiler waits for the device, which is forbidden while a CUDA graph is captured
            return own(*args, **kwargs)
        if not self._known:
            say("compiling blocks; this takes up to a minute if they are not cached")
        with _compiling():
            result = self._attempt(self._function_of(inputs), own, args, kwargs)
        self._known.add(size)
        return result

    def _function_of(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        kind = _describe(inputs, _kind_of)
        if kind not in self._functions:
            self._functions[kind] = _compiled(self._backend)
        return self._functions[kind]

    def _attempt(
        self, function: Callable[..., Any], own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return function(own, args, kwargs)
        except (TorchDynamoException, AssertionError) as error:  # an error of the compiler: nothing was computed yet
            failure = summarize_error(getattr(error, "inner_exception", error))
        result = own(*args, **kwargs)  # raises the error again if it is not the compiler's
        self.failure = failure
        say(f"blocks could not be compiled, and the run continues without compilation: {self.failure}")
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the failure: a resumed run computes the same way."""
        return {"failure": self.failure}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.failure = self.failure or state["failure"]


def compile_blocks(model: torch.nn.Module, backend: str | Callable[..., Any] = "inductor") -> CompiledBlocks | None:
    """Make the blocks of a model compute with graphs, which are compiled when a size first occurs; has no effect twice.

    Args:
        model: The model; its parameters and their names do not change.
        backend: The compiler, as `torch.compile` takes it.

    Returns:
        The state of the compiled blocks; None if the model has no repeated blocks.
    """
    blocks = [block for _, block in blocks_of(model)]
    if not blocks or _STATE in model.__dict__:
        return compiled_blocks_of(model)
    compiled = CompiledBlocks(backend)
    for block in blocks:
        _replace_forward(block)
        block.__dict__[_STATE] = compiled
    model.__dict__[_STATE] = compiled
    return compiled


def compiled_blocks_of(model: torch.nn.Module) -> CompiledBlocks | None:
    """The state of a model's compiled blocks; None if they are not compiled."""
    found: CompiledBlocks | None = model.__dict__.get(_STATE)
    return found


def _replace_forward(block: torch.nn.Module) -> None:
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__[_PLAIN_FORWARD]
        if not self.training or not torch.is_grad_enabled() or _is_observed():
            return own(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and not args[0].requires_grad:
            args = (_requiring_gradient(args[0], self), *args[1:])
        return self.__dict__[_STATE].run(own, args, kwargs)

    # Bound methods follow their object through copy.deepcopy; a closure over the block would not.
    own = innermost_forward(block)
    forward.__wrapped__ = getattr(own, "__func__", own)  # type: ignore[attr-defined]  # for inspect.signature
    block.__dict__[_PLAIN_FORWARD] = own
    set_innermost_forward(block, MethodType(forward, block))


class _Requiring(torch.autograd.Function):
    """Return a copy of the input that requires a gradient, which is never read.

    torch's compiler would add a guard for a view, and other inputs would need another graph.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


def _requiring_gradient(x: torch.Tensor, block: torch.nn.Module) -> torch.Tensor:
    """Make the input of the first block (frozen embeddings) require a gradient, like the inputs of the other blocks.

    Then all blocks share one graph. The gradient takes a few matrix products of one block; another graph would take as
    long to compile as the first one.
    """
    if not any(parameter.requires_grad for parameter in block.parameters()):
        return x
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    required: torch.Tensor = _Requiring.apply(x, anchor)  # type: ignore[no-untyped-call]
    return required


def _is_observed() -> bool:
    """Whether a compiler or a dispatch mode (a trace, selective checkpointing) must see single operations."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _call(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return own(*args, **kwargs)


def _compiled(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """A compiled `_call`.

    torch stores compiled graphs with the code object of a function and checks the guards of one after another. With a
    separate code object for each kind of inputs, few guards are checked, and the kinds do not share one recompile
    limit.
    """
    function = FunctionType(_call.__code__.replace(), globals(), "compiled_block")
    options = inductor_options() if backend == "inductor" else None
    return torch.compile(function, backend=backend, dynamic=True, options=options)


def inductor_options() -> dict[str, Any]:
    """Options for reproducible numbers: no kernel is chosen by timing, and dropout draws the same numbers as torch.

    Inductor's own random numbers are no faster (BERT-base on an H200, 1.21 against 1.19 ms for a layer). Sums over rows
    and over columns are fused for all sizes: otherwise inductor would use another graph for small sizes.
    """
    from torch._inductor import config

    options = {
        "triton.autotune_pointwise": False,
        "triton.mix_order_reduction_non_strict_mode": True,
        "deterministic": True,
        "fallback_random": True,
    }
    known = config.get_config_copy()  # torch.compile refuses names that its version does not have
    return {name: value for name, value in options.items() if name in known}


@contextmanager
def _compiling() -> Iterator[None]:
    """The settings of torch during a possible compilation.

    The backward is compiled with the forward, so that a failure occurs before anything was computed. Two sizes that are
    equal by chance get separate symbols. Floats (the scaling of an adapter) are constants: as symbols they would be
    computed on the host, by C++ code whose compilation takes longer than that of all kernels of the block. torch warns
    about tensors that its compiler itself reads.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch.fx.experimental._config as symbol_config

    lowers_backward = {"force_non_lazy_backward_lowering": True}
    known = {name: value for name, value in lowers_backward.items() if hasattr(functorch_config, name)}
    with (
        dynamo_config.patch(recompile_limit=_MOST_GRAPHS, specialize_float=True),
        functorch_config.patch(known),
        symbol_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _describe(value: Any, describe: Callable[[Any], Any]) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_describe(item, describe) for item in value)
    return describe(value)


def _size_of(value: Any) -> Any:
    """The contribution of a value to the key of a graph with constant sizes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value if _is_plain(value) else type(value)


def _kind_of(value: Any) -> Any:
    """The contribution of a value to the key of a graph with symbolic sizes."""
    if isinstance(value, torch.Tensor):
        return value.dim(), value.dtype, value.requires_grad
    return value if _is_plain(value) and type(value) is not int else type(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | type)
