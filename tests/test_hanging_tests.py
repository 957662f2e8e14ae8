"""A test that hangs is reported with its name and stacks, and the tests after it run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# The first holds the interpreter's lock, so that nothing in Python can end it; the second states its limit.
HANGING = """
import ctypes, subprocess, sys, threading, time
import pytest

def test_native_code_keeps_the_lock():
    ctypes.PyDLL(None).sleep(600)

@pytest.mark.slow(timeout=1)
def test_a_slow_one_waits():
    threading.Event().wait()

def test_a_process_does_not_end():
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])

@pytest.mark.slow
def test_a_slow_one_has_time():
    time.sleep(4)
"""


@pytest.mark.slow(timeout=600)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_is_reported_and_the_others_run(tmp_path, num_workers):
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    options = [
        "-c",
        str(HERE.parent / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        "-p",
        "time_limits",
        "-p",
        "no:hypothesispytest",
        "-v",
    ]
    options += ["-n", str(num_workers), "-m", "", "-o", "faulthandler_timeout=3", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Timeout (0:00:03)!" in done.stderr, said
    assert "in test_native_code_keeps_the_lock" in done.stderr, said
    if num_workers:
        assert "crashed while running 'test_hanging.py::test_native_code_keeps_the_lock'" in said
        assert "crashed while running 'test_hanging.py::test_a_slow_one_waits'" in said
        assert "in test_a_slow_one_waits" in done.stderr, said
        assert "2 failed, 3 passed" in said
