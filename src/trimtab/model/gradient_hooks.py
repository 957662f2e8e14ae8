"""Post-accumulate-grad hooks. If memory runs out in a hook, backward completes before the error is raised.

An exception in a hook stops torch's backward immediately. Operations that were ready to run stay in a queue, and with
them all activations of the operations before them: on a CPU until the next backward of the thread, on an accelerator
until its thread has dropped them, which may be after backward has raised. The next attempt, with a smaller micro-batch,
would start without that memory. So an out-of-memory error of a hook is stored, further gradients of this backward are
freed, and the error is raised when nothing is left to compute.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import ismethod
from typing import Any
from weakref import ref

import torch

from trimtab.hardware.memory import is_out_of_memory

_failed: set[int] = set()  # numbers of backwards in which memory ran out in a hook
_listeners: list[Callable[[], None]] = []


def register_gradient_hook(parameter: torch.Tensor, hook: Callable[..., None], **arguments: Any) -> None:
    """Call a function with a parameter whenever its gradient is complete, also if it is unfrozen later.

    A bound method's object is referenced weakly. Otherwise, if it refers to the parameter, neither would ever be freed:
    the garbage collector does not see that torch's reference to the hook belongs to the parameter.

    Args:
        parameter: The parameter.
        hook: Called with it.
        arguments: Passed to the hook as well.
    """
    call = partial(_call_method, ref(hook.__self__), hook.__func__) if ismethod(hook) else hook
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses hooks of frozen parameters
    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        partial(_call, partial(call, **arguments))
    )
    parameter.requires_grad_(requires_grad)


def _call_method(find: "ref[Any]", method: Callable[..., None], parameter: torch.Tensor, **arguments: Any) -> None:
    owner = find()
    if owner is not None:
        method(owner, parameter, **arguments)


@contextmanager
def call_when_hooks_run_out(listener: Callable[[], None]) -> Iterator[None]:
    """Inside the context, call a function if memory runs out in a hook, while the activations are still in memory."""
    _listeners.append(listener)  # not a context variable: hooks run in a thread of the device
    try:
        yield
    finally:
        _listeners.remove(listener)


def _call(hook: Callable[[torch.Tensor], None], parameter: torch.Tensor) -> None:
    backward = torch._C._current_graph_task_id()
    if backward in _failed:
        parameter.grad = None
        return
    try:
        hook(parameter)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        for listener in _listeners:
            listener()
        _failed.add(backward)
        parameter.grad = None
        traceback.clear_frames(error.__traceback__)  # their variables, such as the gradient
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # twice: the second runs after all callbacks that other hooks queue, which release what they hold
        queue(partial(queue, partial(_raise, backward, [error])))


def _raise(backward: int, kept: list[Exception]) -> None:
    _failed.discard(backward)
    raise kept.pop()  # no variable of this frame may refer to the error, because its traceback refers to the frame
