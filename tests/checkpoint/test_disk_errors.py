"""What is said of a disk that is full: the right folder, and what to do."""

import errno

import pytest

from small_disk import mounted
from trimtab.checkpoint.disk_errors import cure_of
from trimtab.checkpoint.mirror import Mirror


def test_a_full_mirror_is_named_and_not_the_run(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").write_bytes(bytes(200_000))
    with mounted(tmp_path / "disk", "64k") as disk:
        mirror = Mirror(run, disk / "mirror", files=("metrics.jsonl",))
        problem = mirror.sync()
    assert problem == f"No space left on device ({disk / 'mirror' / '.metrics.jsonl.mirrored'})"


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free space on that disk, or write less"),
        (errno.EDQUOT, "free space on that disk, or write less"),
        (errno.EACCES, "make the folder writable for this user, or choose another --out"),
        (errno.EROFS, "make the folder writable for this user, or choose another --out"),
        (errno.EIO, "check that the disk is mounted and healthy, or choose another --out"),
    ],
)
def test_the_cure_follows_from_the_error(number, cure):
    assert cure_of(OSError(number, "no"), "choose another --out", less="write less") == cure
