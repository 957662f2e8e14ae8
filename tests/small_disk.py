"""A small file system for a test, which can really be filled."""

import contextlib
import shutil
import subprocess

import pytest


@contextlib.contextmanager
def mounted(place, size):
    """Mount a small disk at `place`; skip the test if this user may not mount.

    Args:
        place: A folder that does not exist yet.
        size: In the syntax of mount, such as 1m.
    """
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk; file-size limits are tested anyway")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
