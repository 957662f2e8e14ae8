"""The best model of a run: when it is written, and what a resumed run knows about it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trimtab.engine.engine import Engine
from trimtab.log import say
from trimtab.training.callbacks import call_callbacks
from trimtab.training.run_state import RunState
from trimtab.training.run_writer import RunWriter
from trimtab.training.stopping import Best


class BestModel:
    """Write the best model, and call the `on_save` method of callbacks."""

    def __init__(self, engine: Engine, best: Best, writer: RunWriter, callbacks: list[object]) -> None:
        self._engine, self._best, self._writer, self._callbacks = engine, best, writer, callbacks
        self.is_kept = False  # a model was written, or is waiting for disk space
        self._was_lost = False  # whether no evaluation has followed

    @property
    def kept_step(self) -> int | None:
        """The step of the best model that was written; None if no model was written."""
        return self._best.step if self.is_kept else None

    def update(self, state: RunState) -> bool:
        """Compare the metrics of an evaluation with the best so far; return whether they are better."""
        self._was_lost = False
        return self._best.update(state.metrics, state.step)

    def write(self, state: RunState) -> None:
        """Write the model as the best one so far."""
        self.is_kept = True
        self._write(state, lambda: self._writer.write_best_model(state.step, state.metrics))

    def rewrite(self, state: RunState) -> None:
        """Write the best model again, from the state of its step, which was just loaded."""
        self._writer.write_best_model(state.step, state.metrics)

    def write_pending(self, state: RunState) -> None:
        """Try again to write a model for which the disk had no space."""
        self._write(state, self._writer.write_pending)

    def _write(self, state: RunState, write: Callable[[], str | None]) -> None:
        with self._engine.busy("writing the best model"):
            folder = write()
        if folder is not None:
            call_callbacks(self._callbacks, "on_save", state, folder)

    def explain_last(self) -> None:
        """Report why the last model replaces the best one."""
        never = f"{self._best.metric} was never finite"
        why = "no evaluation followed the loss of the best model" if self._was_lost else never
        say(f"{why}: the last model is kept as the best one")

    def forget(self) -> None:
        """Discard the best metric, because its model is lost: the next evaluated model becomes the best."""
        self._best.value = self._best.step = None
        self.is_kept, self._was_lost = False, True
        self._writer.forget_best()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Keep the best metric while an older state is loaded: a model written since then still exists."""
        best, is_kept = self._best.state_dict(), self.is_kept
        yield
        self._best.load_state_dict(best)
        self.is_kept = is_kept
