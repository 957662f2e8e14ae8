"""The cure of an error of the operating system follows from its kind."""

import errno
import shutil

import pytest
from safetensors import SafetensorError

from trimtab.checkpoint.disk_errors import as_os_error, cure_for_os_error


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free space on that disk, or write less"),
        (errno.EDQUOT, "free space on that disk, or write less"),
        (errno.EACCES, "make the folder writable for this user, or choose another --out"),
        (errno.EROFS, "make the folder writable for this user, or choose another --out"),
        (errno.ENOTDIR, "part of this path is a file: choose another --out"),
        (errno.EIO, "check that the disk is mounted and healthy, or choose another --out"),
    ],
)
def test_the_cure_follows_from_the_error(number, cure):
    assert cure_for_os_error(OSError(number, "no"), "choose another --out", less="write less") == cure


def test_a_missing_folder_is_created_with_the_command_in_the_cure(tmp_path):
    folder = tmp_path / "no" / "such"
    with pytest.raises(FileNotFoundError) as caught:
        (folder / "report.html").write_text("")
    assert cure_for_os_error(caught.value, "choose another --out") == f"mkdir -p {folder}, or choose another --out"


def test_commands_in_a_cure_are_quoted():
    error = FileNotFoundError(errno.ENOENT, "no", "my runs/it's/report.html")
    assert cure_for_os_error(error, "not") == """mkdir -p 'my runs/it'"'"'s', or not"""


def test_errors_of_other_libraries_about_the_disk_are_recognized():
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert as_os_error(full).errno == errno.ENOSPC
    assert as_os_error(Exception("Permission denied (os error 13)")).errno == errno.EACCES
    copied = shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])
    assert as_os_error(copied).errno == errno.ENOSPC
    own = FileNotFoundError(errno.ENOENT, "no", "x")
    assert as_os_error(own) is own


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the worker said [Errno 28] No space left on device"),
        Exception("server: [Errno 111] Connection refused"),
        SafetensorError("Error while deserializing header: invalid JSON"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_stay_what_they_are(error):
    assert as_os_error(error) is None
