"""A small disk that can be filled, and a check for threads that are left running."""

import os
import threading

import pytest

from small_disk import mounted


@pytest.fixture(autouse=True)
def _no_thread_left():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        assert not thread.name.startswith("trimtab"), f"{thread.name} was left running"


@pytest.fixture
def small_disk(tmp_path):
    """A separate disk of one MiB, if this user may mount one."""
    with mounted(tmp_path / "disk", "1m") as place:
        yield place


@pytest.fixture
def leave_free(small_disk):
    """Fills the small disk until so many pages are free."""

    def fill(num_pages):
        filler = small_disk / "filler"
        filler.unlink(missing_ok=True)
        stat = os.statvfs(small_disk)
        filler.write_bytes(bytes((stat.f_bavail - num_pages) * stat.f_frsize))

    return fill
