"""A folder that appears whole or not at all: written beside its place, synced to disk, renamed into it."""

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trimtab.checkpoint.process_identity import ran_at
from trimtab.errors import CheckpointError

_BESIDE = re.compile(r"\.(?P<name>.+)\.(?P<state>writing|outdated|removing)-(?P<pid>\d+)")


@contextmanager
def whole_folder(folder: str | os.PathLike[str], *, marker: str | None, what: str) -> Iterator[Path]:
    """A place to write into; at the end it takes the place of `folder`, and on an error nothing has changed.

    Args:
        folder: Where it should be in the end. An older one of ours is replaced.
        marker: The file that tells a folder of ours; one with other files and without it is left alone. None replaces
            whatever folder is there.
        what: What is written, for messages.
    """
    target = Path(folder).resolve()  # behind a link, so that the link stays one
    put_back(target)
    _refuse_foreign(target, marker, what)
    beside = _beside(target, "writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        _sync(beside)
        _swap_in(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Remove a folder so that a kill in the middle leaves no half of it under its name."""
    aside = _beside(folder, "removing")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def put_back(target: Path) -> bool:
    """Give a folder its name again if a writer was killed after it had moved the old one away and before the new came.

    Returns:
        Whether there was one.
    """
    if target.exists() or not target.parent.is_dir():
        return False
    for outdated in sorted(target.parent.glob(f".{_escaped(target.name)}.outdated-*")):
        with suppress(OSError):
            if not _is_being_used(outdated):
                outdated.rename(target)
                return True
    return False


def clear_leftovers(parent: Path) -> list[Path]:
    """Remove what killed writers left beside their places; what a living one of this machine writes is left alone.

    Returns:
        What was removed.
    """
    removed = []
    for path in sorted(parent.glob(".*-*")):
        match = _BESIDE.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):  # gone by itself, or not ours to remove
            if _is_being_used(path) or (match["state"] == "outdated" and put_back(parent / match["name"])):
                continue
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _is_being_used(beside: Path) -> bool:
    """Whether the process that made it still runs: one that began later has only got the same number."""
    match = _BESIDE.fullmatch(beside.name)
    return match is not None and ran_at(int(match["pid"]), beside.stat().st_ctime)  # a rename changes that time only


def sync_path(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems have no such thing for folders, and need none
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
            raise
    finally:
        os.close(descriptor)


def _beside(target: Path, state: str) -> Path:
    return target.with_name(f".{target.name}.{state}-{os.getpid()}")


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _refuse_foreign(target: Path, marker: str | None, what: str) -> None:
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file, so no {what} can be written there", "name a folder")
    if marker is not None and target.exists() and not (target / marker).exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} holds other files, which a {what} would replace", "name a folder of its own")


def _sync(folder: Path) -> None:
    """Bring everything in a folder to the disk, so that a rename never shows files that a power cut would empty."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def _swap_in(beside: Path, target: Path) -> None:
    outdated = _beside(target, "outdated")
    if not target.exists():
        beside.rename(target)
    elif _exchange(beside, target):
        outdated = beside
    else:
        shutil.rmtree(outdated, ignore_errors=True)
        target.rename(outdated)
        try:
            beside.rename(target)
        except BaseException:
            outdated.rename(target)
            raise
    sync_path(target.parent)  # the names reach the disk before anything older leaves it
    with suppress(OSError):  # the folder around may be new as well; not everyone may read the one above that
        sync_path(target.parent.parent)
    # also what writers before this one left when they were killed
    for left in [outdated, *target.parent.glob(f".{_escaped(target.name)}.outdated-*")]:
        shutil.rmtree(left, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders trade names in one step, where the system and the file system can: there is never none."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    working_folder, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    return bool(renameat2(working_folder, os.fsencode(one), working_folder, os.fsencode(other), exchange) == 0)
