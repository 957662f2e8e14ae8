"""What memory is at its peak on a GPU: the parts add up to what the allocator counts."""

import pytest
import torch

from trimtab.report.anatomy import MemoryWatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda", 0)
VOCAB = 8000


def small_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(CUDA)


def train_step(model, optimizer, autocast=False):
    tokens = torch.ones(4, 512, dtype=torch.int64, device=CUDA)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=tokens).logits
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_parts_add_up_to_the_peak(autocast, recomputes):
    model = small_llama()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        train_step(model, optimizer, autocast)
    watch = MemoryWatch(model, optimizer, CUDA)
    torch.cuda.reset_peak_memory_stats()
    watch.start()
    train_step(model, optimizer, autocast)
    anatomy = watch.stop()
    assert anatomy.allocated == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.01)
    assert anatomy.weights == num_bytes([*model.parameters(), *model.buffers()])
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert anatomy.optimizer_state == num_bytes(state)
    assert anatomy.logits_and_loss >= 2 * (4 * 512 * VOCAB * 4)
    assert anatomy.activations > 0
    assert anatomy.temporaries >= 0
    reserved = anatomy.allocated + anatomy.allocator_slack
    assert reserved == pytest.approx(torch.cuda.memory_reserved(), rel=0.01)
    assert anatomy.outside > 50 * 2**20  # a context at least
    assert anatomy.host_state == 0


def test_gradients_are_exact_where_they_are_all_there():
    """In the second of two micro-batches; and watching does not change the peak."""
    model = small_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.ones(1, 16, dtype=torch.int64, device=CUDA)
    watch = MemoryWatch(model, optimizer, CUDA)
    peaks = []
    for watches in (False, False, True):
        torch.cuda.reset_peak_memory_stats()
        if watches:
            watch.start()
        for _ in range(2):
            model(input_ids=tokens).logits.square().mean().backward()
        anatomy = watch.stop() if watches else None
        peaks.append(torch.cuda.max_memory_allocated())
        optimizer.zero_grad()
    assert anatomy.gradients == num_bytes(model.parameters())
    assert peaks[2] == peaks[1]


def test_paged_state_is_on_the_host():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    model = small_llama()
    optimizer = bitsandbytes.optim.PagedAdamW8bit(model.parameters())
    train_step(model, optimizer)
    watch = MemoryWatch(model, optimizer, CUDA)
    watch.start()
    train_step(model, optimizer)
    anatomy = watch.stop()
    num_large = sum(p.numel() for p in model.parameters() if p.numel() >= 1e5)  # smaller ones are not paged
    assert 2 * num_large <= anatomy.host_state <= 2.2 * num_large
    assert anatomy.optimizer_state < 0.35 * num_large


def test_steps_are_timed_without_waiting_for_them():
    from trimtab.commands.measure import StepClock

    clock, matrix = StepClock(CUDA), torch.randn(4096, 4096, device=CUDA)
    for _ in range(4):
        clock.tick()
        for _ in range(20):
            matrix = (matrix @ matrix).tanh()
    seconds = clock.seconds()
    assert len(seconds) == 3
    assert all(1e-4 < s < 5 for s in seconds[1:])
