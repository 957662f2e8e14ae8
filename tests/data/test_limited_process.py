"""Calls in a process with limited memory and time."""

import os
from pathlib import Path

import pytest

from trimtab.data import limited_process
from trimtab.data.limited_process import LimitedProcess, LimitExceeded


def work(what):
    if what == "memory":
        return "x" * 2**40
    if what == "loop":
        while True:
            pass
    if what == "one call that no thread can interrupt":
        return len("".join(map(str, range(10**12))))
    if what == "fail":
        raise LookupError("not here")
    return what, os.getpid()


def test_results_and_errors_come_back_and_the_process_ends(tmp_path):
    with LimitedProcess(work) as call:
        answer, pid = call("x")
        assert (answer, call("y")) == ("x", ("y", pid))
        assert pid != os.getpid()
        with pytest.raises(RuntimeError, match="LookupError: not here"):
            call("fail")
        with pytest.raises(LimitExceeded, match="1 GiB of memory"):
            call("memory")
        assert call("y") == ("y", pid)
        with (tmp_path / "kept").open("w") as file:
            file.write("this process still owns its files")
    assert not Path(f"/proc/{pid}").exists()
    assert (tmp_path / "kept").read_text() == "this process still owns its files"


@pytest.mark.parametrize("what", ["loop", "one call that no thread can interrupt"])
def test_an_endless_call_is_ended(monkeypatch, what):
    monkeypatch.setattr(limited_process, "_CPU_S", 0.05)
    with LimitedProcess(work) as call:
        _, pid = call("x")
        with pytest.raises(LimitExceeded, match="0 s"):
            call(what)
        assert not Path(f"/proc/{pid}").exists()
        assert call("z")[0] == "z"  # in a new one
