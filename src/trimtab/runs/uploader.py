"""The interface through which a run folder starts and ends the upload of its metrics."""

from typing import Protocol


class Uploader(Protocol):
    """Uploads a run to a tracking server while it trains."""

    def start(self) -> None:
        """Start uploading. Called once the journal exists; must not block."""

    def finish(self) -> None:
        """Upload what is left. Called after the final state was written to `run.json`."""


class NoUploader:
    """The uploader of a run that is not tracked."""

    def start(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""
