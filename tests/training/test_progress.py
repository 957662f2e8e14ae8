"""What a run shows: the text, the displays, and that none of them can disturb the run."""

import builtins
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from trimtab.errors import RecipeError
from trimtab.training import progress_bar as module
from trimtab.training import screen as screen_module
from trimtab.training.progress import build_progress
from trimtab.training.progress_bar import BarProgress
from trimtab.training.progress_lines import JsonProgress, PlainProgress, QuietProgress
from trimtab.training.progress_text import StepLine, step_text

LINE = StepLine(
    step=40,
    epoch=0.42,
    loss=0.531,
    lr=4.2e-5,
    grad_norm=1.3,
    tokens_per_s=5210.2,
    memory_bytes=1_288_490_189,
    memory_share=None,
    num_skipped=0,
    seconds_left=118.0,
)


def show_all(progress):
    progress.start(300, start_step=20)
    progress.note("[CLS] is no markup")
    progress.step(LINE)
    progress.eval_progress(1)
    progress.eval_progress(2)
    progress.evaluation({"accuracy": 0.9123, "loss": 0.31}, 40, improved=True)
    progress.evaluation({"accuracy": math.nan}, 60, improved=False)
    progress.finish("finished after 300 steps")


def test_the_one_format():
    numbers = "epoch 0.42 · loss 0.531 · lr 4.2e-05 · grad norm 1.3 · 5,210 tokens/s · 1.2 GiB · skipped 0"
    assert step_text(LINE, 300) == f"step 40/300 · {numbers} · 2 min left"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": math.nan}, "loss nan ·"),
        ({"loss": math.inf}, "loss inf ·"),
        ({"loss": -math.inf}, "loss -inf ·"),
        ({"loss": 0.00012345}, "loss 1.23e-04 ·"),
        ({"loss": 0.0}, "loss 0.000 ·"),
        ({"loss": 11.98765}, "loss 11.988 ·"),
        ({"lr": 0.0}, "lr 0 ·"),
        ({"lr": 1e-3}, "lr 1.0e-03 ·"),
        ({"grad_norm": 0.0312}, "norm 0.031 ·"),
        ({"grad_norm": 1234.5}, "grad norm 1,234 ·"),
        ({"grad_norm": math.inf}, "norm inf ·"),
        ({"num_skipped": 3}, "skipped 3 ·"),
        ({"memory_share": 0.154}, "1.2 GiB (15%) ·"),
        ({"seconds_left": 3.4}, "· 3 s left"),
        ({"seconds_left": 5430.0}, "· 1 h 30 min left"),
    ],
)
def test_numbers_in_words(change, words):
    assert words in step_text(replace(LINE, **change), 300)


def test_a_norm_that_is_not_known_is_omitted():
    assert "norm" not in step_text(replace(LINE, grad_norm=None), 300)


def test_plain(capsys):
    show_all(build_progress("plain"))
    assert capsys.readouterr().out.splitlines() == [
        "[CLS] is no markup",
        step_text(LINE, 300),
        "evaluation at step 40 · accuracy 0.912 · loss 0.310 · best so far",
        "evaluation at step 60 · accuracy nan",
        "finished after 300 steps",
    ]


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_json(capsys):
    progress = build_progress("json")
    show_all(progress)
    progress.step(replace(LINE, loss=math.nan, grad_norm=math.inf))
    objects = [json.loads(line, parse_constant=refuse_constant) for line in capsys.readouterr().out.splitlines()]
    assert [o["event"] for o in objects] == ["start", "note", "step", "evaluation", "evaluation", "finish", "step"]
    assert objects[0] == {"event": "start", "description": "train", "num_steps": 300, "start_step": 20}
    assert objects[2]["loss"] == 0.531
    assert objects[2]["num_steps"] == 300
    assert objects[3]["metrics"] == {"accuracy": 0.9123, "loss": 0.31}
    assert [o["improved"] for o in objects[3:5]] == [True, False]
    assert objects[4]["metrics"] == {"accuracy": "nan"}
    assert (objects[-1]["loss"], objects[-1]["grad_norm"]) == ("nan", "inf")


def test_quiet_speaks_only_of_errors(capsys):
    show_all(build_progress("quiet"))
    assert capsys.readouterr() == ("", "")
    build_progress("quiet").finish("stopped by an error at step 3", failed=True)
    assert capsys.readouterr() == ("", "stopped by an error at step 3\n")


@pytest.mark.parametrize(
    ("mode", "is_terminal", "term", "encoding", "kind"),
    [
        ("auto", True, "xterm", "utf-8", BarProgress),
        ("auto", True, "dumb", "utf-8", PlainProgress),
        ("auto", True, "xterm", "latin-1", PlainProgress),
        ("auto", False, "xterm", "utf-8", PlainProgress),
        ("bar", False, "xterm", "utf-8", BarProgress),
        ("plain", True, "xterm", "utf-8", PlainProgress),
        ("json", True, "xterm", "utf-8", JsonProgress),
        ("quiet", True, "xterm", "utf-8", QuietProgress),
    ],
)
def test_choice(mode, is_terminal, term, encoding, kind, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(output, "isatty", lambda: is_terminal, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        patch.setenv("TERM", term)
        assert type(build_progress(mode)) is kind


def test_unknown_mode():
    with pytest.raises(RecipeError, match="did you mean plain"):
        build_progress("plane")


def test_no_standard_output_at_all(monkeypatch):
    """As under pythonw, or in a service."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        show_all(build_progress("auto"))
        show_all(build_progress("json"))


def test_an_output_without_the_characters(monkeypatch):
    raw = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        show_all(build_progress("auto"))
        assert b"step 40/300 ? epoch 0.42 ? loss 0.531" in raw.getvalue()


def fresh_python(code, **arguments):
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=buffered, **arguments)


PREAMBLE = """
import sys, time
from dataclasses import replace
from trimtab.training.progress import build_progress
from trimtab.training.progress_text import StepLine
line = StepLine(1, 0.1, 0.5, 1e-5, 1.0, 100.0, 2**30, None, 0, 60.0)
"""


@pytest.mark.parametrize("mode", ["plain", "json", "bar"])
def test_a_reader_that_goes_away_does_not_end_the_run(mode):
    code = PREAMBLE + (
        f"p = build_progress({mode!r}); p.start(1000)\n"
        "sys.stdin.read()\n"
        "for i in range(2000): p.step(line); p.note('x' * 100)\n"
        "p.finish('done'); sys.stderr.write('trained to the end')"
    )
    child = fresh_python(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.close()
    _, errors = child.communicate(timeout=300)
    assert errors == "trained to the end"
    assert child.returncode == 0


def test_rich_and_torch_are_not_loaded_for_lines():
    code = PREAMBLE + (
        "p = build_progress('auto'); p.start(2); p.step(line); p.finish('')\n"
        "sys.stderr.write(' '.join({'rich', 'torch'} & set(sys.modules)))"
    )
    child = fresh_python(code, stdout=subprocess.DEVNULL)
    assert child.communicate(timeout=300)[1] == ""
    assert child.returncode == 0


class FakeScreen:
    def __init__(self):
        self.frames, self.lines, self.is_open = 0, [], False

    def open(self, frame):
        self.is_open = True

    def show(self, frame):
        self.frames += 1

    def line(self, text, style):
        self.lines.append(text)

    def close(self, last_frame):
        self.is_open = False


@pytest.fixture
def screen(monkeypatch):
    fake = FakeScreen()
    monkeypatch.setattr(screen_module, "_TerminalScreen", lambda transient: fake)
    return fake


def test_a_bar_is_drawn_at_most_ten_times_a_second(screen, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    bar = BarProgress()
    bar.start(10_000)
    for number in range(10_000):  # ten seconds
        now[0] += 0.001
        (bar.step(LINE) if number % 3 else bar.eval_progress(number))
    assert 20 <= screen.frames <= 100
    bar.finish("")
    assert not screen.is_open


def test_a_step_between_two_frames_composes_nothing(screen, monkeypatch):
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)
    bar = BarProgress()
    bar.start(9)
    with monkeypatch.context() as between:
        between.setattr(BarProgress, "_frame", lambda bar: pytest.fail("a frame was composed before it was due"))
        bar.step(LINE)
        bar.eval_progress(1)
    bar.finish("")


def test_a_bar_may_be_finished_twice_and_started_again(screen, capsys):
    bar = BarProgress()
    bar.finish("never began", failed=True)
    for _ in range(2):
        bar.start(3)
        assert screen.is_open
        bar.finish("done")
        bar.finish("done")
        assert not screen.is_open
    bar.note("after the end")
    assert capsys.readouterr().out.splitlines() == ["never began", *["done"] * 4, "after the end"]
    assert screen.lines == []


def in_terminal(code):
    """What a child writes to a terminal, frame codes and all; Linux gives an error where the child has ended."""
    main, child_end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=child_end,
        stderr=child_end,
        stdin=child_end,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"},
    ) as child:
        os.close(child_end)
        output = b""
        try:
            while chunk := os.read(main, 65536):
                output += chunk
        except OSError:
            pass
        os.close(main)
    return child.returncode, re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).replace("\r\n", "\n")


def test_a_real_terminal():
    code = PREAMBLE + (
        "from trimtab.log import logger, say\n"
        "say('before')\n"
        "p = build_progress('auto'); p.start(300)\n"
        "p._next_frame = 0; p.step(replace(line, step=40, loss=float('nan')))\n"
        "p.note('a [red] :smile: note'); say('a line of the log')\n"
        "p.step(replace(line, step=299)); p.evaluation({'f1': 0.5}, 299, True)\n"
        "p.finish('the summary'); say('after')\n"
        "assert logger.handlers[0].stream is sys.stderr is sys.__stderr__"
    )
    returncode, shown = in_terminal(code)
    assert returncode == 0
    assert "loss nan" in shown
    # rich erases the frame (2K), writes the line, and draws the frame anew below it
    for line in (
        "a [red] :smile: note",
        "trimtab: a line of the log",
        "evaluation at step 299 · f1 0.500 · best so far",
    ):
        assert re.search(r"\x1b\[2K" + re.escape(line) + r" *\ntrain ━", shown), line
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor was hidden once and is back
    last_frame, end = shown.split("\x1b[?25h")
    assert "299/300 1 min left" in last_frame[-400:]
    assert end == "the summary\ntrimtab: after\n"


def test_a_run_that_dies_gives_the_cursor_back():
    code = PREAMBLE + "p = build_progress('auto'); p.start(300); p.step(line); 1 / 0"
    returncode, shown = in_terminal(code)
    assert returncode == 1
    assert "ZeroDivisionError" in shown
    assert shown.rstrip().endswith("\x1b[?25h")


class FakeHandle:
    def __init__(self):
        self.updates = []

    def update(self, frame):
        self.updates.append(frame)


class FakeDisplay:
    def __init__(self):
        self.handle = FakeHandle()
        self.shown = []

    def display(self, frame, display_id):
        self.shown.append(frame)
        return self.handle if display_id else None


def test_a_notebook(monkeypatch, capsys):
    """One output that is updated in place; its frames know how to show themselves in a notebook."""
    shell = type("ZMQInteractiveShell", (), {})()
    fake = FakeDisplay()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", object())
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    bar = build_progress("auto")
    assert isinstance(bar, BarProgress)
    show_all(bar)
    assert len(fake.shown) == 1
    html = fake.handle.updates[-1]._repr_mimebundle_([], [])["text/html"]
    assert "40/300" in html
    assert "loss 0.531" in html
    assert "evaluation at step 40 · accuracy 0.912 · loss 0.310 · best so far" in capsys.readouterr().out
