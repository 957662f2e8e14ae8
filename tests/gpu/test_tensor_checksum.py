"""Checksums of tensors on an accelerator: those of the host, and without a large temporary."""

import pytest
import torch

from trimtab.checkpoint.tensor_checksum import checksums_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_the_device_does_not_count(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(0, 256, (size,), generator=generator).to(dtype) for size in (1, 7, 2**16, 5_000_001)]
    tensors.append(tensors[-1][:5_000_000].view(1000, 5000).t())
    on_device = [tensor.cuda() for tensor in tensors]
    assert checksums_of(on_device) == checksums_of(tensors)
    assert checksums_of([on_device[0], tensors[1], on_device[2]]) == checksums_of(tensors[:3])


def test_one_element_of_many_counts_and_little_memory_is_taken():
    tensor = torch.zeros(2**28, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, held = checksums_of([tensor]), torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_allocated() - held < 32 * 2**20
    tensor[123_456_789] = 1
    assert checksums_of([tensor]) != before
