"""tracking.json: which servers know a run, and how far."""

import json
import subprocess
import sys

import pytest

from trimtab.errors import CheckpointError
from trimtab.runs.tracking_file import RunDescription, Tracking, is_tracked, sent_bytes, upload_lock

HOLDER = """
import pathlib, sys, time
from trimtab.runs.tracking_file import shipping
with shipping(pathlib.Path(sys.argv[1]), 0.0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_it_comes_back_as_it_was(tmp_path):
    assert Tracking.read(tmp_path) is None
    assert not is_tracked(tmp_path)
    tracking = Tracking(tmp_path, RunDescription(name="001", experiment="imdb", tags={"a": "b"}))
    at = tracking.at("http://me:secret@a")
    at.run_id, at.sent, at.acked, at.artifacts = "r", 20, 10, {"x": "y"}
    tracking.at("http://b").sent = 30
    tracking.write()
    assert "secret" not in (tmp_path / "tracking.json").read_text()
    again = Tracking.read(tmp_path)
    assert again == tracking
    assert again.at("http://me:secret@a").acked == 10
    assert [one.uri for one in again.servers] == ["http://b", "http://a"]  # the one used last is the last
    assert sent_bytes(tmp_path) == 30
    assert is_tracked(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tracking.json"]


def test_a_file_of_an_older_version_that_has_a_user_name(tmp_path):
    """It is the same server, so that the history is not sent a second time."""
    tracking = Tracking(tmp_path, RunDescription(name="001"))
    tracking.at("http://a").sent = 30
    tracking.write()
    file = tmp_path / "tracking.json"
    file.write_text(file.read_text().replace("http://a", "http://me@a"))
    assert Tracking.read(tmp_path).at("http://me:secret@a").sent == 30


def test_keys_of_another_version_are_passed_over(tmp_path):
    Tracking(tmp_path, RunDescription(name="001")).write()
    said = json.loads((tmp_path / "tracking.json").read_text())
    said["about"]["colour"] = "red"
    (tmp_path / "tracking.json").write_text(json.dumps(said))
    assert Tracking.read(tmp_path).about.name == "001"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"about": 3, "servers": []}', '{"about": {}, "servers": [3]}'])
def test_what_cannot_be_read_is_begun_anew(tmp_path, text, caplog):
    (tmp_path / "tracking.json").write_text(text)
    with caplog.at_level("INFO", logger="trimtab"):
        assert Tracking.read(tmp_path) is None
    assert "uploaded again" in caplog.text
    assert sent_bytes(tmp_path) == 0


def test_two_runs_are_told_apart():
    assert RunDescription().run != RunDescription().run


def test_one_process_uploads_at_a_time_and_a_dead_one_holds_nothing(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="another process is uploading"), upload_lock(tmp_path, 0.1):
            pytest.fail("both hold it")
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with upload_lock(tmp_path, 100.0):
        pass
