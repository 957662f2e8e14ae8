"""Atomic replacement of a folder or file: write to a temporary one next to it, sync that to disk, then rename it.

A temporary folder or file is named `.NAME.STATE-PID`. The state is `writing` (not complete yet), `outdated` (the folder
that was replaced) or `removing`; the process id shows whether its writer is still running.
"""

import ctypes
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from trimtab.addresses import path_problem
from trimtab.checkpoint.disk_errors import as_os_error
from trimtab.checkpoint.process_identity import was_running_at
from trimtab.errors import CheckpointError

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<state>writing|outdated|removing)-(?P<pid>\d+)")


@contextmanager
def atomic_folder(folder: str | os.PathLike[str], *, marker: str | None, what: str) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` on exit; on an error `folder` is left unchanged.

    Args:
        folder: The final path.
        marker: The file that identifies a folder written by trimtab. A non-empty folder without it is never replaced.
            None replaces any folder.
        what: The kind of content, for error messages.
    """
    refuse_impossible(Path(folder))
    target = Path(folder).resolve()  # write through a symbolic link, do not replace the link
    restore_interrupted(target)
    refuse_foreign(target, marker, what)
    clear_leftovers(target.parent, target.name)
    temporary = _temporary(target, "writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        # Sync before the rename: a power cut must never show the new name with empty files.
        for path in [*temporary.rglob("*"), temporary]:
            sync_path(path)
        _replace(target, temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        cause = as_os_error(error)
        if cause is None:
            raise
        _raise_naming_target(cause, target, temporary)


def write_file(target: Path, contents: bytes) -> None:
    """Write a file atomically: if this fails, an older file stays.

    Raises:
        OSError: It cannot be written; the error names the target.
    """
    refuse_impossible(target)
    target = target.resolve()  # write through a symbolic link, do not replace the link
    if target.exists() and not target.is_file():  # a pipe or a device
        target.write_bytes(contents)
        return
    clear_leftovers(target.parent, target.name)
    temporary = _temporary(target, "writing")
    try:
        temporary.write_bytes(contents)
        sync_path(temporary)
        temporary.replace(target)
    except OSError as error:
        _raise_naming_target(error, target, temporary)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _raise_naming_target(error: OSError, target: Path, temporary: Path) -> NoReturn:
    """Raise an error with the path that the user knows: a full disk names none, others name a temporary one."""
    named = None if error.filename is None else Path(str(error.filename)).absolute()
    if error.errno is not None and (named is None or temporary.absolute() in (named, *named.parents)):
        raise OSError(error.errno, error.strerror, str(target))
    raise error


@contextmanager
def folder_beside(target: Path, use: str) -> Iterator[Path]:
    """Yield a new folder next to a target and remove it on exit, with leftovers of killed processes.

    Args:
        target: The folder that will be written in the end.
        use: A word for its name.
    """
    name = f"{target.name}.{use}"
    clear_leftovers(target.parent, name)
    temporary = _temporary(target.with_name(name), "writing")
    try:
        temporary.mkdir(0o700, parents=True)
        yield temporary
    except OSError as error:
        _raise_naming_target(error, target, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def temporary_folder(use: str) -> Iterator[Path]:
    """Yield a new folder among the system's temporary files and remove it on exit, with leftovers of killed processes.

    Args:
        use: A word for its name.
    """
    with folder_beside(Path(tempfile.gettempdir(), "trimtab"), use) as folder:
        yield folder


def remove_folder(folder: Path) -> None:
    """Remove a folder; if the process is killed during this, nothing partial is left under its name."""
    temporary = _temporary(folder, "removing")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.rename(temporary)
    shutil.rmtree(temporary)


def restore_interrupted(target: Path) -> bool:
    """Restore a folder whose writer was killed after it renamed the old folder and before it renamed the new one.

    Returns:
        Whether a folder was restored.
    """
    if target.exists() or not target.parent.is_dir():
        return False
    for outdated in _outdated(target):
        with suppress(OSError):
            if not _is_in_use(outdated):
                outdated.rename(target)
                return True
    return False


def clear_leftovers(parent: Path, name: str | None = None) -> list[Path]:
    """Remove the temporary folders of killed processes in `parent`; those of running local processes are kept.

    Args:
        parent: The folder that contains them.
        name: Only those of the folder, or file, with this name; None for those of all folders.

    Returns:
        The folders that were removed.
    """
    removed = []
    for path in sorted(parent.glob(".*-*")):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or path.is_symlink() or not (path.is_dir() or name is not None):
            continue
        if name is not None and _final_name(path.name) != name:
            continue
        with suppress(OSError):  # removed by another process in the meantime, or no permission
            if _is_in_use(path) or (match["state"] == "outdated" and restore_interrupted(parent / match["name"])):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(path)
    return removed


def sync_path(path: Path) -> None:
    """Call fsync on a file, or on a folder to make its directory entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems do not support fsync on folders, and do not need it
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
            raise
    finally:
        os.close(descriptor)


def _final_name(name: str) -> str:
    """Return the name of the folder that a temporary one becomes, which may be a temporary one in turn."""
    while match := _TEMPORARY.fullmatch(name):
        name = match["name"]
    return name


def _temporary(target: Path, state: str) -> Path:
    return target.with_name(f".{target.name}.{state}-{os.getpid()}")


def _outdated(target: Path) -> list[Path]:
    escaped = re.sub(r"([*?\[])", r"[\1]", target.name)
    return sorted(target.parent.glob(f".{escaped}.outdated-*"))


def _is_in_use(temporary: Path) -> bool:
    """Whether the process that created a temporary folder still runs; a later process can have the same id."""
    match = _TEMPORARY.fullmatch(temporary.name)
    # a rename sets ctime and no other time
    return match is not None and was_running_at(int(match["pid"]), temporary.stat().st_ctime)


def refuse_foreign(target: Path, marker: str | None, what: str) -> None:
    """Refuse a target that `atomic_folder` would refuse: for commands that work for long before they write.

    Raises:
        CheckpointError: The target is a file, or a folder with other files.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file, so no {what} can be written there", "choose a folder")
    if marker is not None and target.exists() and not (target / marker).exists() and any(target.iterdir()):
        raise CheckpointError(
            f"{target} contains other files, which the {what} would replace", "choose a new or empty folder"
        )


def refuse_impossible(target: Path) -> None:
    """Refuse what is not a path, such as an address: a folder of that name would contain its password.

    Raises:
        CheckpointError: It cannot be a path of this machine.
    """
    if problem := path_problem(str(target)):
        raise CheckpointError(f"{target} {problem}", "choose a folder or file of this machine")


def refuse_unwritable(target: Path, *, is_replaced: bool = True) -> None:
    """Refuse a folder that this user cannot create: for commands that work for long before they write.

    Args:
        target: The folder.
        is_replaced: Whether a folder that exists is replaced; otherwise files are written to it.

    Raises:
        CheckpointError: The nearest folder that exists is read-only.
    """
    refuse_impossible(target)
    whole = target.absolute()
    nearest = next(folder for folder in (*([] if is_replaced else [whole]), *whole.parents) if folder.is_dir())
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise CheckpointError(
            f"{target} cannot be written: {nearest} is not writable", "make it writable, or choose another folder"
        )


def _replace(target: Path, temporary: Path) -> None:
    outdated = _temporary(target, "outdated")
    if not target.exists():
        temporary.rename(target)
    elif _exchange(temporary, target):
        outdated = temporary
    else:
        shutil.rmtree(outdated, ignore_errors=True)
        target.rename(outdated)
        try:
            temporary.rename(target)
        except BaseException:
            outdated.rename(target)
            raise
    sync_path(target.parent)  # make the new name durable before the old folder is removed
    with suppress(OSError):  # the parent can be new as well; its own parent need not be readable
        sync_path(target.parent.parent)
    # also remove the leftovers of killed writers
    for path in [outdated, *_outdated(target)]:
        shutil.rmtree(path, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders atomically, if the operating system and the file system support it."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_fdcwd, rename_exchange = -100, 2  # constants of Linux
    return bool(renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0)
