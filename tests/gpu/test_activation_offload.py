"""Activation offload on a GPU: the bits of the plain step, less memory, and pages that are used again."""

import pytest
import torch

from gpu.test_gradient_checkpointing import a_bert, a_llama, loss_of, step
from trimtab.model.blocks import blocks_of
from trimtab.model.offloaded_blocks import offload_blocks
from trimtab.techniques.recomputation import checkpoint_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:cuDNN Attention defaults"),  # once in a process
]

RECOMPUTED = ["none", "all", {"every": 2}]


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("which", RECOMPUTED, ids=str)
@pytest.mark.parametrize("make", [a_llama, a_bert])
def test_the_step_is_the_plain_one(make, which):
    model = make()
    plain = step(model, torch.bfloat16)
    checkpoint_layers(model, which)
    found = offload_blocks(model, [block for _, block in blocks_of(model)], pins=True, min_bytes=1024)
    for _ in range(3):  # pages are reused from the second step on, while copies of the first may still run
        loss, gradient, generator = step(model, torch.bfloat16)
        assert torch.equal(loss, plain[0])
        assert torch.equal(gradient, plain[1])
        assert torch.equal(generator, plain[2])
    assert found.pages.num_free == found.pages.num_pages > 0
    assert found.pages.take().is_pinned()


@pytest.mark.parametrize("which", ["none", "all"])
def test_less_is_kept_on_the_device(which):
    model = a_llama()
    checkpoint_layers(model, which)
    loss_of(model, torch.bfloat16).backward()

    def kept():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = loss_of(model, torch.bfloat16)
        size = torch.cuda.memory_allocated() - before
        del loss
        return size

    plain = kept()
    offload_blocks(model, [block for _, block in blocks_of(model)], pins=True, min_bytes=1024)
    assert kept() < 0.7 * plain
