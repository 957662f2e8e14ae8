"""Text from data, models and files cannot control the terminal: no title, no cleared screen, no hidden line."""

import logging
import os
import pty
import re
import sys
from pathlib import Path

import pytest

from trimtab.cli.main import _print_error
from trimtab.cli.output import echo, show, show_table
from trimtab.log import logger, say
from trimtab.training.progress_lines import LineWriter
from trimtab.training.screen import build_screen

HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b[8mhidden\x9b2J\r\b text"
SHOWN = "\\x1b]0;title\\x07\\x1b[2J\\x1b[8mhidden\\x9b2J\\x0d\\x08 text"


@pytest.fixture
def terminal(monkeypatch):
    """A terminal, as a stream, and a function that reads what was written to it."""
    reading, writing = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    stream = os.fdopen(writing, "w")

    def read():
        stream.write("END")
        stream.flush()
        found = ""
        while not found.endswith("END"):
            found += os.read(reading, 65536).decode()
        return found.removesuffix("END")

    yield stream, read
    stream.close()
    os.close(reading)


def bar():
    screen = build_screen()
    screen.open("a frame")
    screen.line(HOSTILE, "")
    screen.close(lambda: "the last frame")


DOORS = {
    "echo": lambda: echo(HOSTILE),
    "error": lambda: _print_error(HOSTILE, fg="red"),
    "table": lambda: show_table((HOSTILE, "b"), [("c", HOSTILE)]),
    "rich": lambda: show(HOSTILE),
    "line": lambda: LineWriter().write(HOSTILE),
    "bar": bar,
    "log": lambda: say(HOSTILE),
}


@pytest.mark.parametrize("door", DOORS)
def test_control_characters_are_escaped(terminal, monkeypatch, door):
    stream, read = terminal
    monkeypatch.setattr(sys, "stdout", stream)  # not in the fixture: pytest sets them before each phase
    monkeypatch.setattr(sys, "stderr", stream)
    if door == "log":
        monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(sys.stderr)])
        logger.setLevel(logging.INFO)
    DOORS[door]()
    written = read()
    is_rich = door in ("table", "rich", "bar")  # which drops some characters by itself
    shown = SHOWN.replace("\\x07", "").replace("\\x0d\\x08", "") if is_rich else SHOWN
    assert shown in re.sub(r"\x1b\[[0-9;]*m|\r?\n", "", written)  # without colours and folded lines
    assert "\x1b]" not in written
    for sequence in ("\x07", "\x08", "\x9b", "\x1b[2J", "\x1b[8m"):
        assert sequence not in written


def test_files_and_pipes_get_the_text_unchanged(capsys):
    echo("a\x07\x08")
    LineWriter().write(HOSTILE)
    assert capsys.readouterr().out == f"a\x07\x08\n{HOSTILE}\n"


def test_there_is_no_other_door():
    """Whatever prints goes through one of these functions."""
    source = Path(sys.modules["trimtab"].__file__).parent
    calls = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"typer\.s?echo\(|typer\.secho\(|click\.s?echo\(|[^.\w]Console\(\)\.print", path.read_text())
    }
    assert calls == {"cli/output.py"}
