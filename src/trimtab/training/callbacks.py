"""Callbacks: user objects with one or more of four methods, each called at an event of a run.

- `on_step(state)` after every optimizer step; `state` is the trainer's `RunState`
- `on_eval(state, metrics)` after every evaluation
- `on_save(state, folder)` after the best model was written
- `on_end(state)` at the end of the run, also after an error
"""

from collections.abc import Sequence
from difflib import get_close_matches

from trimtab.errors import RecipeError

EVENTS = ("on_step", "on_eval", "on_save", "on_end")
_CURE = "pass an object with any of on_step(state), on_eval(state, metrics), on_save(state, folder), on_end(state)"


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse callbacks that would never be called: classes, bare functions, misspelt methods.

    Raises:
        RecipeError: A callback would never be called. The message suggests the method that was probably meant.
    """
    for number, callback in enumerate(callbacks):
        name = getattr(callback, "__name__", None) or f"a {type(callback).__name__}"
        if isinstance(callback, type):
            raise RecipeError(f"callbacks[{number}] is the class {name}", f"pass an instance: {name}()")
        names = [method for method in dir(callback) if method.startswith("on_")]
        methods = [method for method in names if callable(getattr(callback, method, None))]
        for method in methods:
            if method not in EVENTS:
                near = get_close_matches(method, EVENTS, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}? " if near else ""
                cure = f"{hint}The events are {', '.join(EVENTS)}; begin the names of other methods with an underscore"
                raise RecipeError(f"callbacks[{number}], {name}: {method} would never be called", cure)
        if not set(methods) & set(EVENTS):
            raise RecipeError(f"callbacks[{number}], {name}, has no method that would be called", _CURE)


def call_callbacks(callbacks: list[object], event: str, *arguments: object) -> None:
    """Call the method of an event on every callback that has it."""
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(*arguments)
