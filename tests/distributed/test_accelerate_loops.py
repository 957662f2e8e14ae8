"""Scripts written for Accelerate end with the same bits when only their import line changes, on one process and two."""

import accelerate_loops
import pytest
import torch
from launching import run_alone, run_together

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(fork_server, tmp_path_factory):
    """What each loop ended with, by number of processes, library and rank."""
    found = {}
    for num_processes in (1, 2):
        for library in ("accelerate", "trimtab.accelerate"):
            folder = tmp_path_factory.mktemp("loops") / library
            folder.mkdir()
            if num_processes == 1:
                run_alone(fork_server, accelerate_loops, folder)
            else:
                run_together(fork_server, accelerate_loops, folder, num_processes)
            found[num_processes, library] = [
                {loop.__name__: torch.load(folder / f"{loop.__name__}-{rank}.pt") for loop in accelerate_loops.LOOPS}
                for rank in range(num_processes)
            ]
    return found


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("loop", [loop.__name__ for loop in accelerate_loops.LOOPS])
def test_the_end_is_that_of_accelerate_to_the_bit(outcomes, loop, num_processes):
    for rank in range(num_processes):
        theirs = outcomes[num_processes, "accelerate"][rank][loop]
        ours = outcomes[num_processes, "trimtab.accelerate"][rank][loop]
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, dict):
                assert ours[name].keys() == value.keys()
                assert all(torch.equal(ours[name][key], value[key]) for key in value), name
            else:
                assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("loop", ["classifies", "classifies_in_windows", "models_language", "models_masked_words"])
def test_schedules_of_both_kinds_of_scripts_reach_their_end(outcomes, loop, num_processes):
    for rank in range(num_processes):
        lrs = outcomes[num_processes, "trimtab.accelerate"][rank][loop]["lrs"]
        assert lrs[-1] == 0.0
        assert max(lrs) > 0.0
