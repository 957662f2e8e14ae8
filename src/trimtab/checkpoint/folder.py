"""A folder that appears whole or not at all: written beside its place, synced to disk, renamed into it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.errors import CheckpointError


@contextmanager
def whole_folder(folder: str | os.PathLike[str], *, marker: str, what: str) -> Iterator[Path]:
    """A place to write into; at the end it takes the place of `folder`, and on an error nothing has changed.

    Args:
        folder: Where it should be in the end. An older one of ours is replaced.
        marker: The file that tells a folder of ours; one with other files and without it is left alone.
        what: What is written, for messages.
    """
    target = Path(folder).resolve()  # behind a link, so that the link stays one
    _refuse_foreign(target, marker, what)
    beside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        _sync(beside)
        _swap_in(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _refuse_foreign(target: Path, marker: str, what: str) -> None:
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file, so no {what} can be written there", "name a folder")
    if target.exists() and not (target / marker).exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} holds other files, which a {what} would replace", "name a folder of its own")


def _sync(folder: Path) -> None:
    """Bring everything in a folder to the disk, so that a rename never shows files that a power cut would empty."""
    for path in [*(path for path in folder.rglob("*") if path.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap_in(beside: Path, target: Path) -> None:
    if target.exists():
        outdated = target.with_name(f".{target.name}.outdated-{os.getpid()}")
        shutil.rmtree(outdated, ignore_errors=True)
        target.rename(outdated)
        try:
            beside.rename(target)
        except BaseException:
            outdated.rename(target)
            raise
    else:
        beside.rename(target)
    # also what writers before this one left when they were killed
    for left in target.parent.glob(f".{target.name}.outdated-*"):
        shutil.rmtree(left, ignore_errors=True)
