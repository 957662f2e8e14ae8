"""Gradient checkpointing in several processes: each ends with the bits that it would have had without it."""

import pytest
import recomputed_loops
import torch
from launching import run_both_ways

from rounding import assert_same_up_to_rounding

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(fork_server, tmp_path_factory):
    """What each process found, by (number of processes, rank)."""
    return run_both_ways(fork_server, recomputed_loops, tmp_path_factory.mktemp("recomputed"))


@pytest.mark.parametrize("setting", recomputed_loops.SETTINGS)
def test_the_same_bits_as_without(results, setting):
    for found in results.values():
        plain = found[setting]["none"]
        assert len(found[setting]) == len(recomputed_loops.KINDS)
        for which, other in found[setting].items():
            assert other["losses"] == plain["losses"], which
            assert torch.equal(other["weights"], plain["weights"]), which


def test_processes_agree_and_have_trained(results):
    untrained = torch.cat([p.detach().flatten() for p in recomputed_loops.a_model(0.0).parameters()])
    for setting in recomputed_loops.SETTINGS:
        for which, found in results[2, 0][setting].items():
            assert torch.equal(found["weights"], results[2, 1][setting][which]["weights"])
            assert (found["weights"] - untrained).abs().max() > 1e-2


def test_without_dropout_two_processes_are_as_one(results):
    alone, together = (results[count, 0]["plain"] for count in (1, 2))
    for which in alone:
        assert_same_up_to_rounding(together[which]["weights"], alone[which]["weights"], num_roundings=16)
