"""The same loop on one, two and three processes, and every method of the engine."""

import combined_methods
import engine_methods
import own_loops
import pytest
import torch
import whole_batches
from launching import run_alone, run_by_torchrun, run_together

from rounding import rounding_error

TWO_OR_THREE = [2, pytest.param(3, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def results_of(fork_server, tmp_path_factory):
    """Results of each rank, by the number of processes; they run when they are first asked for."""
    folder, found = tmp_path_factory.mktemp("loops"), {}

    def results(num_processes):
        if num_processes not in found:
            if num_processes == 1:
                run_alone(fork_server, own_loops, folder)
            else:
                run_together(fork_server, own_loops, folder, num_processes)
            found[num_processes] = [torch.load(folder / f"{num_processes}-{rank}.pt") for rank in range(num_processes)]
        return found[num_processes]

    return results


@pytest.mark.parametrize("num_processes", TWO_OR_THREE)
@pytest.mark.parametrize("name", own_loops.LOOPS)
def test_the_loop_does_not_depend_on_the_number_of_processes(results_of, name, num_processes):
    alone = results_of(1)[0][name]
    # fp16 rounds each process's part of a batch on its own; the rest is the order of sums
    roundings = {"overflow": (1, torch.float16), "fp64, 120 steps": (2**13, torch.float64)}
    bound = rounding_error(1.0, *roundings.get(name, (16, torch.float32)))
    untrained = torch.cat([parameter.flatten() for parameter in own_loops.Tagger().parameters()])
    assert (alone["weights"] - untrained).abs().max() > 1e-2
    for together in (found[name] for found in results_of(num_processes)):
        assert (alone["weights"] - together["weights"]).abs().max() <= bound * alone["weights"].abs().max()
        for key in ("losses", "norms"):  # some losses are infinite
            assert together[key] == pytest.approx(alone[key], rel=bound, abs=bound), key
        for key in ("seen", "lr", "num_skipped", "length"):
            assert together[key] == alone[key], key


@pytest.mark.parametrize("num_processes", TWO_OR_THREE)
def test_processes_end_with_the_same_bits(results_of, num_processes):
    for name in own_loops.LOOPS:
        weights = [found[name]["weights"] for found in results_of(num_processes)]
        assert all(torch.equal(one, weights[0]) for one in weights), name


@pytest.mark.parametrize("num_processes", TWO_OR_THREE)
def test_every_row_once_an_epoch(results_of, num_processes):
    for name, found in results_of(num_processes)[-1].items():
        for seen in found["seen"]:
            assert sorted(seen) == list(range(len(seen))), name


@pytest.mark.parametrize("num_processes", TWO_OR_THREE)
def test_overflow_of_one_process_is_skipped_by_all(results_of, num_processes):
    for found in results_of(num_processes):
        assert found["overflow"]["num_skipped"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 3])
def test_every_method(fork_server, tmp_path, num_processes):
    if num_processes == 2:
        run_by_torchrun(engine_methods, tmp_path, num_processes)  # once the real one
    else:
        run_together(fork_server, engine_methods, tmp_path, num_processes)
    assert {path.name for path in tmp_path.glob("done-*")} == {f"done-{rank}" for rank in range(num_processes)}


def test_combined_methods(fork_server, tmp_path):
    run_together(fork_server, combined_methods, tmp_path, 2)


@pytest.mark.slow
def test_whole_batches_resume_on_another_number_of_processes(fork_server, tmp_path):
    """With `split_batches=False`: at the same row, or an error."""
    run_alone(fork_server, whole_batches, tmp_path)
    for num_processes in (2, 3):
        run_together(fork_server, whole_batches, tmp_path, num_processes)
    run_alone(fork_server, whole_batches, tmp_path)  # with the state of two
    assert len(list(tmp_path.glob("by-*"))) == 2
    assert len(list(tmp_path.glob("done-*"))) == 1 + 2 + 3
