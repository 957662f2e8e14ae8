"""The state of the loop in a checkpoint: everything that a resumed run needs in addition to the engine's state."""

from typing import Any

from trimtab.errors import CheckpointError
from trimtab.runs.journal import JournalMark
from trimtab.training.best_model import BestModel
from trimtab.training.data_position import DataPosition
from trimtab.training.run_state import RunState
from trimtab.training.run_writer import RunWriter
from trimtab.training.stopping import EarlyStopping


class LoopState:
    """Save and restore the state of the loop; registered with the engine.

    Args:
        run: The progress of the run, which is restored in place.
        position: The position in the training data.
        best_model: The best model.
        writer: Knows the size and the checksum of the journal.
        parts: Objects with a state, by their key in the checkpoint; None if a part has no state.
    """

    def __init__(
        self, run: RunState, position: DataPosition, best_model: BestModel, writer: RunWriter, parts: dict[str, Any]
    ) -> None:
        self._run, self._position, self._best_model = run, position, best_model
        self._writer, self._parts = writer, parts
        self._ended: str | None = None  # why the run whose state was loaded had ended
        self.journal_mark = JournalMark(0)  # the journal when the loaded state was saved

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop."""
        run = self._run
        return {
            "step": run.step,
            "steps_per_epoch": run.steps_per_epoch,
            "rows": self._position.data_fingerprint(),
            "num_passed_over": self._position.num_passed_over,
            "metrics": dict(run.metrics),
            "has_kept": self._best_model.is_kept,
            # why the run ended with this state; an interrupted run has not ended
            "ended": run.stop_reason if run.should_stop and run.interruption is None else None,
            "journal": list(self._writer.journal_mark()),
            **{name: None if part is None else part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: The training data is different.
        """
        run = self._run
        if state["steps_per_epoch"] != run.steps_per_epoch:
            raise CheckpointError(
                f"an epoch has {state['steps_per_epoch']} steps in the checkpoint and {run.steps_per_epoch} here: "
                "the data or the batch size differ",
                "resume with the data and the batch size of the run",
            )
        if state["rows"] != self._position.data_fingerprint():
            raise CheckpointError(
                "the training rows differ from those of the checkpoint",
                "resume with the same data, or start a new run from the model",
            )
        for name, part in self._parts.items():
            if part is not None and state.get(name) is not None:  # checkpoints of older versions have no "memory"
                part.load_state_dict(state[name])
        run.step, run.metrics = state["step"], dict(state["metrics"])
        self._position.num_passed_over, self._best_model.is_kept = state["num_passed_over"], state["has_kept"]
        journal = state["journal"]  # checkpoints of older versions have only the size
        self.journal_mark = JournalMark(*journal) if isinstance(journal, list) else JournalMark(journal)
        self._ended = state["ended"]

    def end_as_saved(self) -> None:
        """End the run if the loaded state is the last one of a finished run."""
        if self._ended is not None:
            self._run.should_stop, self._run.stop_reason = True, self._ended

    def reset_patience(self) -> None:
        """Count evaluations without improvement from zero, for a finished run that is trained longer."""
        early_stopping: EarlyStopping | None = self._parts["early_stopping"]
        if self._ended is not None and early_stopping is not None:
            early_stopping.num_without_improvement = 0
