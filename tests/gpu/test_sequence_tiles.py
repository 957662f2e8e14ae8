"""Sequence tiles on a GPU: gradients of the untiled step up to rounding, and a lower peak."""

import pytest
import torch

from gpu.test_gradient_checkpointing import a_llama, loss_of, step
from trimtab.model.blocks import blocks_of
from trimtab.model.offloaded_blocks import offload_blocks
from trimtab.model.token_tiles import tile_modules
from trimtab.techniques.recomputation import checkpoint_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("which", ["none", "all"])
def test_the_step_is_the_untiled_one(which, dtype):
    model = a_llama()
    loss, gradient, _ = step(model, dtype)
    checkpoint_layers(model, which)
    tile_modules(model, 100)
    offload_blocks(model, [block for _, block in blocks_of(model)], pins=True, min_bytes=1024)
    found = step(model, dtype)
    assert torch.allclose(found[0], loss, rtol=1e-5 if dtype is None else 5e-3)
    assert (found[1] - gradient).norm() < (1e-4 if dtype is None else 2e-2) * gradient.norm()


def test_the_peak_is_lower():
    model = a_llama(intermediate_size=8192).requires_grad_(False)  # gradients of weights would be most of the memory
    model.get_input_embeddings().weight.requires_grad_(True)
    checkpoint_layers(model, "all")
    loss_of(model, torch.bfloat16).backward()

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(model, torch.bfloat16).backward()
        return torch.cuda.max_memory_allocated() - before

    plain = peak()
    tile_modules(model, 64)
    assert peak() < 0.7 * plain
