"""Confines what planning changes to the thread that plans.

To trace a step as a GPU would run it, some functions of torch and of trimtab need stand-ins. They are looked up by
name in their modules, so the names have to lead to something else during a plan. They lead to a function that acts on
the planning thread alone; all other threads get the original.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_planning = threading.RLock()


@contextlib.contextmanager
def one_plan_at_a_time() -> Iterator[None]:
    """Inside, other threads that want to plan wait.

    Building a model without weights changes settings of the process for moments, such as transformers' verbosity, and
    puts them back: two plans at once would put back each other's values.
    """
    with _planning:
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of an object, class or module has another value, for every thread."""
    is_own = name in vars(owner)
    before = vars(owner).get(name)  # not getattr: of a class it would bind static and class methods
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def stand_ins_on_this_thread(stand_ins: Iterable[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, calls from this thread reach the stand-ins; calls from other threads reach what was there before.

    Args:
        stand_ins: A module or class, the name of a function in it, and what this thread calls in its place.
    """
    with one_plan_at_a_time(), contextlib.ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            dispatcher = _dispatcher(getattr(owner, name), stand_in)
            stack.enter_context(replaced(owner, name, dispatcher))
        yield


def _dispatcher(original: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    planning_thread, this_thread = threading.get_ident(), threading.get_ident

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if this_thread() == planning_thread else original)(*args, **kwargs)

    return dispatch
