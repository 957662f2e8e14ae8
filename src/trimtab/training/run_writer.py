"""The interface through which the loop writes to a run's folder."""

from typing import Any, Protocol

from trimtab.errors import CheckpointError
from trimtab.runs.journal import JournalMark


class RunWriter(Protocol):
    """Write the best model and the metrics of a run."""

    @property
    def problem(self) -> CheckpointError | None:
        """Why the best model is not on the disk yet; None if it is."""

    def write_best_model(self, step: int, metrics: dict[str, float]) -> str | None:
        """Write the model as the best one so far and return its folder; None if the disk has no space for it yet."""

    def write_pending(self) -> str | None:
        """Try again to write a model for which there was no space; return its folder, or None if none was written."""

    def record(self, values: dict[str, Any], step: int) -> None:
        """Append values of a step to the journal."""

    def journal_mark(self) -> JournalMark:
        """Return the size and the checksum of the journal."""

    def write_bad_rows(self, step: int, rows: list[int]) -> str:
        """Write the rows of a step to a file for inspection, and return the file."""

    def forget_best(self) -> None:
        """Record that there is no longer a best model."""
