"""What a user's own code can hang on: four moments of a run."""

from typing import Protocol


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


def call_all(callbacks: list[object], moment: str, *arguments: object) -> None:
    """Call `moment` on every callback that has it."""
    for callback in callbacks:
        method = getattr(callback, moment, None)
        if method is not None:
            method(*arguments)
