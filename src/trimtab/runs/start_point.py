"""The point from which a run starts: a new folder, or a checkpoint of a run that is resumed."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StartPoint:
    """The folder of a run, and the checkpoint that it resumes from."""

    path: Path
    checkpoint: Path | None = None
    replaces_run: bool = False  # the folder contains a run, which is removed once the new one is known to start
    is_resumed: bool = False  # the folder already contains a run
    is_longer: bool = False  # the recipe changes the length of the run, or the patience of early stopping
    precision: str | None = None  # in which a resumed run started
    is_branch: bool = False  # resumed from a checkpoint that the user named, with a recipe that changes the results
