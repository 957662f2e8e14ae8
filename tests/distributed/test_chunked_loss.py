"""The loss in place of logits through DDP: the head's gradient, here also the embedding's, is exchanged once."""

import chunked_loops
import torch
from launching import run_together


def test_gradients_are_those_of_the_whole_batch(fork_server, tmp_path):
    run_together(fork_server, chunked_loops, tmp_path, 2)
    alone = chunked_loops.gradients(chunked_loops.a_model(), chunked_loops.rows(), "plain")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert len(found[0]) == 6
    for (way, how), gradient in found[0].items():
        torch.testing.assert_close(gradient, alone, atol=1e-6, rtol=1e-5, msg=f"{way} {how}")
        assert torch.equal(gradient, found[1][way, how]), (way, how)
