"""Progress of work without steps: bars in a terminal, a few lines in a log, nothing where it was asked for."""

import os
import pty
import re
import subprocess
import sys

import pytest

from trimtab.log import muted
from trimtab.training import work_progress as module
from trimtab.training.work_progress import tracked, work_shown_as, working


class FakeScreen:
    def __init__(self):
        self.frames, self.is_open, self.num_opened = [], False, 0

    def open(self, frame):
        self.is_open, self.num_opened = True, self.num_opened + 1
        self.frames.append(frame)

    def show(self, frame):
        self.frames.append(frame)

    def close(self, last_frame):
        self.is_open = False


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def screen(monkeypatch):
    fake = FakeScreen()
    monkeypatch.setattr(module, "build_screen", lambda transient: fake)
    monkeypatch.setattr(module._Board, "_frame", lambda board: [(w.name, w.num_done, w.total) for w in board._works])
    return fake


def test_items_come_in_order_and_work_inside_is_shown_below(screen, clock):
    seen = []
    with work_shown_as("bar"):
        for form in tracked(["int8", "nf4"], "forms"):
            with working("rows", 10) as rows:
                for _ in range(2):
                    clock[0] += 1
                    rows.advance(5)
            seen.append(form)
    assert seen == ["int8", "nf4"]
    assert screen.frames[0] == [("forms", 0, 2), ("rows", 5, 10)]
    assert screen.frames[-1] == [("forms", 1, 2), ("rows", 10, 10)]
    assert (screen.is_open, screen.num_opened) == (False, 1)


def test_short_work_is_not_shown_and_frames_are_rare(screen, clock):
    with work_shown_as("bar"):
        list(tracked(range(100), "short"))
        assert screen.num_opened == 0
        for _ in tracked(range(1000), "ten seconds"):
            clock[0] += 0.01
    assert 20 <= len(screen.frames) <= 50


def test_an_error_or_an_early_end_closes_the_bar(screen, clock):
    def work():
        for number in tracked(range(9), "work"):
            clock[0] += 1
            if number == 3:
                raise ValueError("bad row")

    with work_shown_as("bar"):
        with pytest.raises(ValueError, match="bad row"):
            work()
        assert not screen.is_open
        for number in tracked(range(9), "work"):
            clock[0] += 1
            if number == 3:
                break
    assert screen.num_opened == 2
    assert not screen.is_open
    assert module._board._works == []


def test_a_log_gets_at_most_three_lines(clock, caplog):
    with caplog.at_level("INFO", logger="trimtab"), work_shown_as("plain"):
        for _ in tracked(range(1000), "layers"):
            clock[0] += 1
    assert [record.getMessage() for record in caplog.records] == [
        "layers: 250 of 1,000, 12 min left",
        "layers: 500 of 1,000, 8 min left",
        "layers: 750 of 1,000, 4 min left",
    ]
    caplog.clear()
    with caplog.at_level("INFO", logger="trimtab"), work_shown_as("plain"):
        for _ in tracked(range(9), "nine seconds"):
            clock[0] += 1
    assert not caplog.records


@pytest.mark.parametrize("mode", ["json", "quiet", "muted"])
def test_nothing_is_shown_where_it_was_asked_for(screen, clock, caplog, capsys, mode):
    suppressed = muted() if mode == "muted" else work_shown_as(mode)
    with caplog.at_level("INFO", logger="trimtab"), work_shown_as("bar"), suppressed:
        for _ in tracked(range(100), "layers"):
            clock[0] += 10
    assert not screen.frames
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


def test_a_real_terminal_is_left_as_it_was():
    code = (
        "import sys\n"
        "from trimtab.log import say\n"
        "from trimtab.training import work_progress as module\n"
        "module._SECONDS_BEFORE_BARS = module.SECONDS_BETWEEN_FRAMES = module._SECONDS_BEFORE_LINES = 0\n"
        "for number in module.tracked(range(3), 'a [red] name'):\n"
        "    say(f'line {number}')\n"
        "print('the end')\n"
        "assert sys.stdout is sys.__stdout__"
    )
    main, child_end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=child_end,
        stderr=child_end,
        stdin=child_end,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"},
    ) as child:
        os.close(child_end)
        output = b""
        try:
            while chunk := os.read(main, 65536):
                output += chunk
        except OSError:  # Linux gives an error where the child has ended
            pass
        os.close(main)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", output.decode())
    assert child.returncode == 0, shown
    assert "a [red] name" in shown
    assert all(f"{number}/3" in shown for number in (1, 2, 3))
    assert "3, " not in shown  # no lines of a log
    assert all(f"trimtab: line {number}" in shown for number in range(3))
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is hidden, and shown again
    assert shown.rstrip().endswith("the end")
