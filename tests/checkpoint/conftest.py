"""Real faults for tests: a disk that is full, a folder that may not be written, a process that is killed."""

import contextlib
import os
import resource
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from small_disk import mounted


@pytest.fixture(autouse=True)
def _no_thread_left():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        assert not thread.name.startswith("trimtab"), f"{thread.name} was left running"


@pytest.fixture
def file_size_limit():
    """A context in which no file can grow beyond so many bytes: the system itself refuses the write."""

    @contextlib.contextmanager
    def limited(num_bytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


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


@pytest.fixture
def as_somebody():
    """A folder that anyone can reach, and a context in which this process is not root."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)

    @contextlib.contextmanager
    def unprivileged():
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    yield place, unprivileged
    for folder in (place, *(path for path in place.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    shutil.rmtree(place)
