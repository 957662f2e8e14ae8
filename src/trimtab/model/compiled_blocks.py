"""Compile the repeated blocks of a model with torch.compile: one graph per size, shared by all blocks of a stack.

Only the blocks are compiled, not the model: a block is compiled once and used N times, where a whole model would take N
times as long. A size is what torch specializes a graph on: the shapes and numbers among the inputs of a block. Blocks
are compiled in training only; evaluation computes what it computes without this module.

The forward of a block is replaced on the instance, so names in state dicts do not change. A block whose compilation
fails, and every size beyond `MOST_SIZES`, computes as before.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch

from trimtab.errors import summarize_error
from trimtab.log import log_info_once, say
from trimtab.model.blocks import blocks_of

MOST_SIZES = 16  # shapes of inputs; each takes seconds to compile, and its code stays in memory
_KINDS_PER_SIZE = 4  # of blocks and inputs: the first block of a stack may have others
_PLAIN_FORWARD = "_trimtab_uncompiled_block"
_STATE = "_trimtab_compiled_blocks"

Size = tuple[Any, ...]


class CompiledBlocks:
    """The compiled blocks of one model: which sizes are compiled, and whether a compilation failed.

    Args:
        backend: The compiler, as `torch.compile` takes it.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self.failure: str | None = None  # the reason why every block computes uncompiled
        self.sizes: dict[str, str] = {}  # the shape of the first input, by size
        self.adds_sizes = True  # whether a size that is met for the first time is compiled
        self.is_resumed = False
        self._backend = backend
        self._functions: dict[Size, Callable[..., Any]] = {}
        self._refused: set[Size] = set()  # sizes beyond the limit

    def run(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a block's own forward, computed by the graph of its size."""
        if self.failure is not None:
            return own(*args, **kwargs)
        size = (type(getattr(own, "__self__", None)), *_sizes_in(args), *_sizes_in(kwargs.values()))
        function = self._functions.get(size)
        if function is not None:
            return self._attempt(function, own, args, kwargs)
        # the compiler waits for the device, which a capture in a CUDA graph forbids
        if size in self._refused or _is_capturing() or not self._accept(size):
            return own(*args, **kwargs)
        self._functions[size] = function = _compiled(self._backend)
        with _compiling():
            return self._attempt(function, own, args, kwargs)

    def _accept(self, size: Size) -> bool:
        """Whether a size that has no graph yet gets one."""
        kind, *inputs = size
        name = f"{kind.__name__} {' '.join(map(str, inputs))}"
        shape = next((str(found[0]) for found in inputs if isinstance(found, tuple) and found), "")
        if name in self.sizes:
            return True
        if not self.adds_sizes:
            return False
        num_shapes, num_sizes = len({*self.sizes.values(), shape}), len(self.sizes) + 1
        if num_shapes > MOST_SIZES or num_sizes > MOST_SIZES * _KINDS_PER_SIZE:
            log_info_once(f"inputs of blocks have more than {MOST_SIZES} shapes: the others are not compiled")
            self._refused.add(size)
            return False
        self.sizes[name] = shape
        return True

    def _attempt(
        self, function: Callable[..., Any], own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return function(own, args, kwargs)
        except TorchDynamoException as error:  # of the compiler, so nothing was computed yet
            self.failure = summarize_error(getattr(error, "inner_exception", error))
        result = own(*args, **kwargs)  # raises the error again if it is not the compiler's
        say(f"blocks could not be compiled, and the run continues without it: {self.failure}")
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that are compiled, and the failure: a resumed run computes the same way."""
        return {"sizes": dict(self.sizes), "failure": self.failure}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sizes, self.failure = dict(state["sizes"]), self.failure or state["failure"]
        self.is_resumed = True


def compile_blocks(model: torch.nn.Module, backend: str | Callable[..., Any] = "inductor") -> CompiledBlocks | None:
    """Let the blocks of a model compute through graphs that are compiled when a size is met for the first time; once.

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
        return self.__dict__[_STATE].run(own, args, kwargs)

    # Bound methods follow their object through copy.deepcopy; a closure over the block would not.
    own = block.forward
    forward.__wrapped__ = getattr(own, "__func__", own)  # type: ignore[attr-defined]  # for inspect.signature
    block.__dict__[_PLAIN_FORWARD] = own
    block.forward = MethodType(forward, block)


def _is_observed() -> bool:
    """Whether a compiler or a dispatch mode (a trace, selective checkpointing) has to see single operations."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _call(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return own(*args, **kwargs)


def _compiled(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """A compiled `_call`.

    torch keeps compiled graphs with the code object of a function and compares the guards of one after the other. With
    a code object of its own, a size needs one comparison, and sizes do not count towards torch's recompile limit.
    """
    function = FunctionType(_call.__code__.replace(), globals(), "compiled_block")
    options = _inductor_options() if backend == "inductor" else None
    return torch.compile(function, backend=backend, dynamic=False, options=options)


def _inductor_options() -> dict[str, Any]:
    """Options without which timings would choose kernels, and a resumed run could round differently."""
    from torch._inductor import config

    options = {"triton.autotune_pointwise": False, "deterministic": True}
    known = config.get_config_copy()  # torch.compile refuses names that its version does not have
    return {name: value for name, value in options.items() if name in known}


@contextmanager
def _compiling() -> Iterator[None]:
    """The settings of torch while a size is compiled.

    Parts of a block after a graph break belong to code that all sizes share: the recompile limit must allow them. The
    backward is compiled with the forward, so that a failure is met before anything was computed. torch warns about
    tensors that its compiler itself reads.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    lowers_backward = {"force_non_lazy_backward_lowering": True}
    known = {name: value for name, value in lowers_backward.items() if hasattr(functorch_config, name)}
    with (
        dynamo_config.patch(recompile_limit=_KINDS_PER_SIZE * MOST_SIZES),
        functorch_config.patch(known),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _sizes_in(values: Any) -> tuple[Any, ...]:
    return tuple(_size_of(value) for value in values)


def _size_of(value: Any) -> Any:
    """What a graph is specialized on: the shape of a tensor and whether it needs a gradient, a number itself."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.requires_grad
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return _sizes_in(value)
    return type(value).__name__
