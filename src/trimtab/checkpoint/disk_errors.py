"""What to do about a file or folder that the system refuses to write."""

import errno

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def is_no_room(error: OSError) -> bool:
    """Whether a disk is full, or a quota or the largest size of a file is reached."""
    return error.errno in _NO_ROOM


def refused_path(error: OSError) -> str | None:
    """The file that could not be written or read; None where the system does not say.

    An error of a copy names both files, and a disk that is full is that of the second.
    """
    path = error.filename2 if is_no_room(error) and error.filename2 is not None else error.filename
    return None if path is None else str(path)


def cure_of(error: OSError, other: str = "choose another folder", less: str = "") -> str:
    """The cure for an error of the system, by its kind.

    Args:
        error: What the system said.
        other: The way out if this place cannot be used, such as "choose another --out".
        less: The way out if the disk stays full, where that is another one.
    """
    if is_no_room(error):
        return f"make room on that disk, or {less or other}"
    if error.errno in _NOT_ALLOWED:
        return f"make the folder writable for this user, or {other}"
    return f"see that the disk is there and healthy, or {other}"
