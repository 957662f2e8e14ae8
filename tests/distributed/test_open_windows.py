"""A state saved inside an accumulation window gives the same gradients on any number of processes."""

import open_windows
import pytest
import torch
from launching import run_alone, run_together


@pytest.fixture(scope="module")
def results(fork_server, tmp_path_factory):
    """Gradients at the end of the window, by (number of processes, rank)."""
    folder = tmp_path_factory.mktemp("windows")
    run_alone(fork_server, open_windows, folder)
    for num_processes in (2, 3, 2):  # the second time with the states of three
        run_together(fork_server, open_windows, folder, num_processes)
    run_alone(fork_server, open_windows, folder)
    return {(count, rank): torch.load(folder / f"{count}-{rank}.pt") for count in (1, 2, 3) for rank in range(count)}


# several processes refuse to save inside a window of `accumulate`
SAVED = [
    (case, num_saving)
    for case, (_, _, accumulates) in open_windows.CASES.items()
    for num_saving in ((1,) if accumulates else (1, 2, 3))
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "num_saving"), SAVED)
@pytest.mark.parametrize("num_loading", [1, 2, 3])
@pytest.mark.parametrize("engine", ["fresh", "used"])
def test_the_gradients_are_those_of_the_undisturbed_window(results, case, num_saving, num_loading, engine):
    expected = results[1, 0][case, "whole"]
    # what each process computes in half precision is rounded on its own
    eps = torch.finfo(torch.float16 if "fp16" in case else torch.float32).eps
    for rank in range(num_loading):
        found = results[num_loading, rank][case, f"{case}-by-{num_saving}", engine]
        for name, gradient in expected.items():
            bound = 16 * eps * float(gradient.abs().max())
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=bound)
