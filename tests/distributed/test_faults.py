"""One process is gone, asleep, or does something else: the others stop soon, and say which one and what it last did.

The processes are started as a cluster does it, without torchrun, which would end the others by itself.
"""

import signal
import subprocess
import sys
import time

import faulty_loop
import pytest
from launching import environment, free_port

from tiny_runs import reviews, write_csv


def start(what, folder, num_processes=2):
    """All processes; they write what they say into files."""
    port = str(free_port())
    started = []
    for rank in range(num_processes):
        place = {"RANK": str(rank), "WORLD_SIZE": str(num_processes), "LOCAL_RANK": str(rank)}
        place |= {"LOCAL_WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with (folder / f"said-{rank}").open("w") as said:
            command = [sys.executable, faulty_loop.__file__, what, str(folder)]
            started.append(subprocess.Popen(command, env=environment() | place, stdout=said, stderr=said))
    return started


def outcome(started, folder, timeout):
    """For each process its exit code and what it said."""
    try:
        codes = [process.wait(timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(code, (folder / f"said-{rank}").read_text()) for rank, code in enumerate(codes)]


def test_a_killed_process_is_named(tmp_path):
    (code, said), (killed, _) = outcome(start("killed", tmp_path), tmp_path, 60)
    assert killed == -signal.SIGKILL
    assert code == 1
    assert "PeerError: rank 1" in said
    assert "it last did: batch 6 of epoch 0" in said


def test_a_failed_process_is_named_with_its_reason(tmp_path):
    (code, said), (_, other) = outcome(start("failing", tmp_path), tmp_path, 60)
    assert "ValueError: a bad row" in other
    assert code == 1
    assert "rank 1 failed: ValueError: a bad row" in said


def test_saving_on_one_process_is_an_error(tmp_path):
    (code, said), (other_code, other) = outcome(start("saves_alone", tmp_path), tmp_path, 60)
    assert code == 1
    assert "save_state" in said
    assert "rank 1" in said
    assert "backward" in said
    assert not (tmp_path / "state").exists()
    assert other_code == 1
    assert "rank 0" in other


@pytest.mark.slow
def test_a_sleeping_process_is_named(tmp_path):
    started = start("asleep", tmp_path)
    began = time.monotonic()
    try:
        assert started[0].wait(60) == 1
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = (tmp_path / "said-0").read_text()
    assert "rank 1" in said
    assert "faulty_loop.py" in said
    assert time.monotonic() - began < 30 + 15  # of which the start of two processes


@pytest.fixture
def data(tiny, tmp_path):
    write_csv(tmp_path / "reviews.csv", reviews(30))
    write_csv(tmp_path / "others.csv", reviews(30, first=7))
    (tmp_path / "model").write_text(tiny.folder("bert"))
    for rank in range(2):
        (tmp_path / f"at-{rank}").mkdir()
    return tmp_path


def test_a_process_with_another_recipe_or_other_data_is_named(data):
    for what, message in (("other_recipe", "rank 1 has train.lr 0.002, others 0.001"), ("other_data", "rank 1 has")):
        for code, said in outcome(start(what, data), data, 90):
            assert code == 2, said
            assert f"the processes differ in {what.removeprefix('other_')}" in said
            assert message in said
        assert not (data / "run").exists(), "nothing is begun"
