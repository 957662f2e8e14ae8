"""A small disk of its own for a test: full is then really full."""

import contextlib
import shutil
import subprocess

import pytest


@contextlib.contextmanager
def mounted(place, size):
    """A disk at `place`, made for the test, where this user may mount one; the test is skipped where not.

    Args:
        place: A folder that does not exist.
        size: As mount writes it, such as 1m.
    """
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only a user who may mount has a small disk; file-size limits are tested anyway")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
