"""A tracking store, or a run's folder, on a disk that is full: said once for each outage, and with the right folder."""

import errno
import shutil

import pytest

from small_disk import mounted
from trimtab.checkpoint.disk_errors import refused_path
from trimtab.tracking.mlflow.server import Trouble, trouble_of
from trimtab.tracking.upload import process as ship_process
from trimtab.tracking.upload.attachment import About, Tracking
from trimtab.tracking.upload.process import Patience, ship


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(ship_process, "time", clock)
    return clock


def test_failures_that_come_and_go_are_said_once(clock):
    """A disk that is full to the brim takes a small line now and then."""
    said = []
    patience = Patience(said.append, "it waits", "it is back")
    full = [Trouble("away", "full")]
    for _ in range(50):
        patience.note(full)
        clock.now += 1
        patience.note([])
        clock.now += 1
    assert said == ["tracking: full; it waits", "tracking: it is back"]


def test_a_second_outage_that_lasts_is_said(clock):
    said = []
    patience = Patience(said.append, "it waits", "it is back")
    for _ in range(2):
        for _ in range(8):
            patience.note([Trouble("away", "full", over="there is room")])
            clock.now += 60
        patience.note([])
    assert said == ["tracking: full; it waits", "tracking: there is room"] * 2


class FullAtTheEnd:
    """A shipment whose numbers are all sent, and whose last words find no room a few times."""

    is_attached = True
    num_failures = 20

    def __init__(self, *arguments, **options):
        pass

    def ship_numbers(self):
        return False

    def ship_files(self, *, is_over, with_model):
        return []

    def close(self):
        type(self).num_failures -= 1
        if self.num_failures >= 0:
            raise RuntimeError("(sqlite3.OperationalError) database or disk is full [SQL: INSERT INTO tags …]")

    def progress(self):
        return ()


def test_what_fails_after_the_numbers_is_not_back_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(ship_process, "Shipment", FullAtTheEnd)
    monkeypatch.setattr(ship_process, "open_tracking", lambda *arguments: None)

    class Ears:
        is_orphan, is_over = False, True

        def wait(self, seconds):
            pass

    messages = []
    mouth = type("Mouth", (), {"__call__": lambda self, **one: messages.append(one)})()
    mouth.say = lambda text: messages.append({"say": text})
    (tmp_path / "run").mkdir()
    ship(tmp_path / "run", "sqlite:///store.db", About(), Ears(), mouth)
    assert [one["say"] for one in messages if "say" in one] == [
        "tracking: the disk of sqlite:///store.db is full; training goes on, its numbers wait in the run's folder",
        "tracking: sqlite:///store.db is back",
    ]
    assert messages[-1] == {"done": True}


def test_a_full_folder_of_the_run_is_named_and_not_the_server(tmp_path):
    with mounted(tmp_path / "disk", "64k") as disk:
        tracking = Tracking(disk, About())
        tracking.write()
        (disk / "filler").write_bytes(bytes(_free(disk)))
        tracking.about.name = "x" * 10_000
        with pytest.raises(OSError, match="No space left") as raised:
            tracking.write()
    trouble = trouble_of(raised.value, "http://server")
    assert str(trouble) == f"No space left on device: {disk}/tracking.json"
    assert trouble.over == f"{disk}/tracking.json can be written again"


def _free(disk):
    return shutil.disk_usage(disk).free


def test_the_folder_that_is_full_is_named_and_not_what_was_copied_there(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(bytes(200_000))
    with mounted(tmp_path / "disk", "64k") as disk:
        with pytest.raises(OSError, match="No space left") as raised:
            shutil.copyfile(source, disk / "copy")
        assert refused_path(raised.value) == str(disk / "copy")
    assert refused_path(OSError(errno.EACCES, "Permission denied", "one", None, "two")) == "one"
    assert refused_path(OSError(errno.ENOSPC, "No space left on device")) is None
