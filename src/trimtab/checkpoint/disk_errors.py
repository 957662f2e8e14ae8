"""Causes and cures of the errors that the operating system raises for files and folders."""

import errno
import os
import re
import shutil
from pathlib import Path

from trimtab.errors import as_argument

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NUMBER = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")  # in messages of Rust's standard library and of Python


def is_disk_full(error: OSError) -> bool:
    """Whether the disk is full, or a quota or the maximum file size is reached."""
    return error.errno in _NO_SPACE


def is_not_allowed(error: OSError) -> bool:
    """Whether this user may not read or write the file, or the disk is mounted read-only."""
    return error.errno in _NOT_ALLOWED


def as_os_error(error: BaseException) -> OSError | None:
    """Return the error of the operating system that an exception reports; None if it reports none.

    safetensors and tokenizers, which are written in Rust, and `shutil.copytree` raise exceptions of their own, with the
    number in the text: of those, a full disk and missing permissions are recognized.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error
    is_of_rust = type(error) is Exception or type(error).__name__ == "SafetensorError"
    found = _NUMBER.search(str(error)) if is_of_rust or isinstance(error, shutil.Error) else None
    number = 0 if found is None else int(found[1] or found[2])
    return OSError(number, os.strerror(number)) if number in (*_NO_SPACE, *_NOT_ALLOWED) else None


def failed_path(error: OSError) -> str | None:
    """Return the file that could not be read or written; None if the error names none.

    The error of a copy names both files; if the disk is full, it is the disk of the second.
    """
    path = error.filename2 if is_disk_full(error) and error.filename2 is not None else error.filename
    return None if path is None else str(path)


def cure_for_os_error(error: OSError, other: str = "choose another folder", less: str = "") -> str:
    """Return the cure for an error, by its kind.

    Args:
        error: The error of the operating system.
        other: The alternative if this path cannot be used, such as "choose another --out".
        less: The alternative if the disk stays full; `other` by default.
    """
    if is_disk_full(error):
        return f"free space on that disk, or {less or other}"
    if error.errno in _NOT_ALLOWED:
        return f"make the folder writable for this user, or {other}"
    if error.errno == errno.ENOTDIR:
        return f"part of this path is a file: {other}"
    if error.errno == errno.ENOENT and error.filename is not None:
        return f"mkdir -p {as_argument(Path(str(error.filename)).parent)}, or {other}"
    return f"check that the disk is mounted and healthy, or {other}"
