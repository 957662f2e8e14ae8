"""Fused kernels of norms and gated activations in a prediction."""

from trimtab import predict_step_memory

ROWS, LENGTH, WIDTH, INNER, NUM_BLOCKS = 2, 64, 128, 512, 3
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}


def test_what_the_kernels_read_and_write_is_counted():
    """A gated activation reads two tensors and writes one; its backward reads three and writes two."""
    step = predict_step_memory(LLAMA, "causal-lm", ROWS, LENGTH, gpu="h100", precision="bf16-pure", kernels="liger")
    wide = 2 * ROWS * LENGTH * INNER
    moved = {"forward": 0, "backward": 0}
    for op in step.trace.ops:
        if not op.flops and op.moved in (2 * wide, 3 * wide):
            moved[op.stage] += op.moved
    assert moved == {"forward": 3 * wide * NUM_BLOCKS, "backward": 5 * wide * NUM_BLOCKS}
