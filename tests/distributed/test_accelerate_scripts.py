"""Accelerate's own test scripts with `trimtab.accelerate` in its place: what passes, and the few differences."""

import json

import accelerate_scripts
import pytest
from launching import run_alone, run_together

pytest.importorskip("accelerate")

# What each of these ends with, on how many processes; docs/accelerate.md says why.
DIFFERENCES = {
    # There is no state of the process to be reset: an engine that exists works on.
    "script.test_reinstantiated_state": ((1, 2), "DID NOT RAISE AttributeError"),
    # Each process names a temporary folder of its own; here the first process alone writes.
    "data.test_stateful_dataloader_save_state": ((2,), "put the folder where every process can read it"),
}
LEAST = {1: 54, 2: 71}  # functions that pass


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_function_passes_or_is_a_known_difference(num_processes, fork_server, tmp_path):
    if num_processes == 1:
        run_alone(fork_server, accelerate_scripts, tmp_path)
    else:
        run_together(fork_server, accelerate_scripts, tmp_path, num_processes)
    different = {name: words for name, (where, words) in DIFFERENCES.items() if num_processes in where}
    for rank in range(num_processes):
        outcomes = json.loads((tmp_path / f"outcomes-{rank}.json").read_text())
        failed = {name: said for name, said in outcomes.items() if said}
        assert failed.keys() == different.keys(), failed
        assert len(outcomes) - len(failed) >= LEAST[num_processes]
    first = json.loads((tmp_path / "outcomes-0.json").read_text())
    for name, words in different.items():
        assert words in first[name]
