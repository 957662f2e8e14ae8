"""Shared by the tests of the command line."""

import sys
from collections import namedtuple

import pytest

from trimtab.cli.main import main

Done = namedtuple("Done", ["code", "out", "err"])


@pytest.fixture
def trimtab(own_folder, monkeypatch, capsys):
    """Run a command in this process, through the same `main` as the installed script, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "240")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Done(ending.value.code or 0, out, err)

    return run
