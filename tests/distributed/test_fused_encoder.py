"""Fused operations of encoders in two processes: gradients of weights that only a fused operation reads are shared."""

import fused_encoder_loops
import pytest
import torch
from launching import run_both_ways

from rounding import assert_same_up_to_rounding

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(fork_server, tmp_path_factory):
    """The weights of each process, by (number of processes, rank)."""
    return run_both_ways(fork_server, fused_encoder_loops, tmp_path_factory.mktemp("fused"))


def test_two_processes_train_as_one_and_as_plain_operations(results):
    plain = results[1, 0]["plain"]
    for found in results.values():
        assert_same_up_to_rounding(found["fused"], plain, num_roundings=64)


@pytest.mark.parametrize("setting", fused_encoder_loops.SETTINGS)
def test_processes_agree_and_have_trained(results, setting):
    untrained = torch.cat([p.detach().flatten() for p in fused_encoder_loops.a_model().parameters()])
    found = results[2, 0][setting]
    assert torch.equal(found, results[2, 1][setting])
    assert (found - untrained).abs().max() > 1e-2
