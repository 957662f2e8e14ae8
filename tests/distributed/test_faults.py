"""One rank is lost, asleep, or in another call: the other ranks stop soon and name it with its last progress.

The processes are started as a cluster does it, without torchrun, which would end the other ranks itself.
"""

import signal

import pytest
from launching import start_together

from tiny_runs import reviews, write_csv


@pytest.fixture
def start(fork_server, tmp_path):
    """Starts the ranks of a fault, and kills them at the end."""
    started = []

    def start(what):
        started[:] = start_together(fork_server, "faulty_loop:main", 2, what=what, folder=str(tmp_path))
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def outcome(started):
    """Exit code and output of each rank."""
    codes = [process.wait() for process in started]
    return [(code, process.said) for code, process in zip(codes, started, strict=True)]


def test_a_killed_process_is_named(start):
    (code, said), (killed, _) = outcome(start("killed"))
    assert killed == -signal.SIGKILL
    assert code == 1
    assert "PeerError: rank 1" in said
    assert "last progress: batch 6 of epoch 0" in said


@pytest.mark.slow
def test_a_failed_process_is_named_with_its_reason(start):
    (code, said), (_, other) = outcome(start("failing"))
    assert "ValueError: a bad row" in other
    assert code == 1
    assert "rank 1 failed: ValueError: a bad row" in said


@pytest.mark.slow
def test_saving_on_one_process_is_an_error(start, tmp_path):
    (code, said), (other_code, other) = outcome(start("saves_alone"))
    assert code == 1
    assert "save_state" in said
    assert "rank 1" in said
    assert "backward" in said
    assert not (tmp_path / "state").exists()
    assert other_code == 1
    assert "rank 0" in other


@pytest.mark.slow
def test_a_sleeping_process_is_named(start):
    started = start("asleep")
    assert started[0].wait() == 1
    said = started[0].said
    assert "rank 1" in said
    assert "faulty_loop.py" in said


@pytest.fixture
def data(tiny, tmp_path):
    write_csv(tmp_path / "reviews.csv", reviews(30))
    write_csv(tmp_path / "others.csv", reviews(30, first=7))
    (tmp_path / "model").write_text(tiny.folder("bert"))
    for rank in range(2):
        (tmp_path / f"at-{rank}").mkdir()
    return tmp_path


@pytest.mark.slow
def test_a_process_with_another_recipe_or_other_data_is_named(start, data):
    for what, message in (
        ("other_recipe", "rank 1 has train.lr 0.002, the others have 0.001"),
        ("other_data", "rank 1 has"),
    ):
        for code, said in outcome(start(what)):
            assert code == 2, said
            assert f"the processes differ in {what.removeprefix('other_')}" in said
            assert message in said
        assert not (data / "run").exists(), "nothing is begun"
