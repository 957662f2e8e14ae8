"""Replace functions for the planning thread only.

To trace a step as a GPU would run it, some functions of torch and of trimtab are replaced in their modules during a
plan. The replacement dispatches by thread: the planning thread gets the stand-in, all other threads get the original.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_planning = threading.RLock()


@contextlib.contextmanager
def one_plan_at_a_time() -> Iterator[None]:
    """Hold the lock that allows one thread to plan at a time.

    Building a model without weights temporarily changes global settings, such as transformers' verbosity. Two
    concurrent plans would restore each other's values.
    """
    with _planning:
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object, class or module for all threads."""
    is_own = name in vars(owner)
    before = vars(owner).get(name)  # not getattr, which would bind static and class methods of a class
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
    """Replace functions for this thread; other threads still call the originals.

    Args:
        stand_ins: (module or class, name of a function in it, replacement).
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
