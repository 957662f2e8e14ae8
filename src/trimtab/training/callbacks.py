"""What a user's own code can hang on: four moments of a run."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Protocol

from trimtab.errors import RecipeError

MOMENTS = ("on_step", "on_eval", "on_save", "on_end")
_CURE = "give an object with any of on_step(state), on_eval(state, metrics), on_save(state, folder), on_end(state)"


class Callback(Protocol):
    """Any of these may be left out of an object given as a callback; `state` is the trainer's `RunState`."""

    def on_step(self, state: object) -> None:
        """After every optimizer step."""

    def on_eval(self, state: object, metrics: dict[str, float]) -> None:
        """After every evaluation."""

    def on_save(self, state: object, folder: str) -> None:
        """After the best model was written."""

    def on_end(self, state: object) -> None:
        """When the run is over, however it ended."""


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse what would never be called: classes, bare functions, misspelt methods.

    Raises:
        RecipeError: With the method that was probably meant.
    """
    for number, callback in enumerate(callbacks):
        name = getattr(callback, "__name__", None) or f"a {type(callback).__name__}"
        if isinstance(callback, type):
            raise RecipeError(f"callbacks[{number}] is the class {name}", f"give an object of it: {name}()")
        names = [method for method in dir(callback) if method.startswith("on_")]
        methods = [method for method in names if callable(getattr(callback, method, None))]
        for method in methods:
            if method not in MOMENTS:
                near = get_close_matches(method, MOMENTS, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}? " if near else ""
                cure = f"{hint}There are {', '.join(MOMENTS)}; start the name of a helper method with an underscore"
                raise RecipeError(f"callbacks[{number}], {name}: {method} would never be called", cure)
        if not set(methods) & set(MOMENTS):
            raise RecipeError(f"callbacks[{number}], {name}, has no method that would be called", _CURE)


def call_all(callbacks: list[object], moment: str, *arguments: object) -> None:
    """Call `moment` on every callback that has it."""
    for callback in callbacks:
        method = getattr(callback, moment, None)
        if method is not None:
            method(*arguments)
