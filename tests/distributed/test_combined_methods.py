"""Engine methods combined with each other and with other libraries, on two processes."""

import json

import combined_methods
import pytest
from launching import run_together


@pytest.fixture(scope="module")
def problems(fork_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    run_together(fork_server, combined_methods, folder, 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("check", [check.__name__ for check in combined_methods.CHECKS])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes(problems, check, rank):
    assert not problems[rank][check], problems[rank][check]
