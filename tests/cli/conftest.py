"""Shared by the tests of the command line."""

from collections import namedtuple

import pytest

Done = namedtuple("Done", ["code", "out", "err"])


@pytest.fixture
def trimtab(own_folder, trimtab_command):
    """Run a command in this process, through the same `main` as the installed script, in an empty folder."""
    return lambda *arguments: Done(*trimtab_command(*arguments))
