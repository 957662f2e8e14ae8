"""One of several ranks runs out of memory: all repeat the step with a smaller micro-batch size."""

import json

import pytest
import runs_out_of_memory
from launching import run_together

from tiny_runs import NO_DROPOUT, reviews, write_csv


@pytest.mark.parametrize(
    ("num_processes", "is_quick"),
    [(3, True), *(pytest.param(number, False, marks=pytest.mark.slow) for number in (2, 3))],
)
def test_wherever_it_runs_out_all_processes_take_the_step_back(num_processes, is_quick, fork_server, tiny, tmp_path):
    if is_quick:
        (tmp_path / "quick").touch()
    write_csv(tmp_path / "reviews.csv", reviews(40))
    (tmp_path / "models.json").write_text(json.dumps({"bert": str(tiny.folder("bert", **NO_DROPOUT["bert"]))}))
    run_together(fork_server, runs_out_of_memory, tmp_path, num_processes)
