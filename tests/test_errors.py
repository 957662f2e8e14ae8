"""Errors as a notebook shows them: one message without a traceback, in Python's words."""

import subprocess
import sys

import pytest

import trimtab
from trimtab.errors import UserError, in_python


@pytest.mark.parametrize(
    ("message", "translated"),
    [
        ("to continue: --set train.epochs=…", 'to continue: Recipe(train={"epochs": …})'),
        ("write --set adapter=lora", 'write Recipe(adapter="lora")'),
        ("trimtab resume runs/a; or --fresh", 'trimtab.resume("runs/a"); or fresh=True'),
        ("trimtab resume runs/a --set train.epochs=4", "trimtab.resume(\"runs/a\", sets=['train.epochs=4'])"),
        ("trimtab resume runs/a --from step-3", "!trimtab resume runs/a --from step-3"),
        ("--memory 24GiB, or omit it", 'memory="24GiB", or omit it'),
        ("leave out --length 512", "leave out length=512"),
        ("trimtab train r.yaml --out x --fresh; or --resume", "!trimtab train r.yaml --out x --fresh; or resume=True"),
        ("pip install 'trimtab[onnx]'", "!pip install 'trimtab[onnx]'"),
        ("set train.lr to a number", "set train.lr to a number"),
    ],
)
def test_cures_in_a_notebook(message, translated):
    assert in_python(message) == translated


def test_the_exceptions_are_public():
    assert issubclass(trimtab.errors.DataError, UserError)
    tree = trimtab.errors.__doc__
    assert trimtab.errors.__all__
    assert all(name in tree and issubclass(getattr(trimtab.errors, name), Exception) for name in trimtab.errors.__all__)


@pytest.mark.slow
def test_a_cell_with_a_mistake(own_folder):
    """In a real IPython, which shows 40 lines for other exceptions."""
    cell = "from trimtab.errors import RecipeError\nraise RecipeError('run exists', 'pass --fresh')"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "IPython",
            "--no-banner",
            "--colors=NoColor",
            "--HistoryManager.enabled=False",
            "-c",
            cell,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout + done.stderr).strip() == "RecipeError: run exists\n  cure: pass fresh=True"
