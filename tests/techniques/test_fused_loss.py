"""The fused loss in plans: where it is possible, that `auto` does not choose it yet, and what a trace sees of it."""

import pytest
import torch

from trimtab import predict_step_memory
from trimtab.errors import RecipeError
from trimtab.model import linear_cross_entropy
from trimtab.model.linear_cross_entropy import chunk_rows
from trimtab.recipe.schema import Recipe
from trimtab.techniques import chunked_loss
from trimtab.techniques.base import Accelerator, Case
from trimtab.techniques.chunked_loss import ChunkedLoss

VOCAB, ROWS, LENGTH = 50_000, 4, 512
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
}
HOPPER = Accelerator("cuda", (9, 0), is_here=False)


class Model:
    """A model with an output layer."""

    def get_output_embeddings(self):
        return torch.nn.Linear(1, VOCAB, device="meta")


def values(loss, accelerator=HOPPER, **more):
    recipe = Recipe(model="nowhere", data={"train": "nowhere"}, task="causal-lm", memory={"loss": loss})
    case = Case(Model(), accelerator, "bf16", recipe, loss_kind="token-cross-entropy", num_rows=ROWS, **more)
    return ChunkedLoss().values(case)


def test_where_it_is_possible(monkeypatch):
    assert values("fused") == ("fused",)
    for accelerator, why in (
        (Accelerator("cpu"), "need an NVIDIA GPU; this device is cpu"),
        (Accelerator("cuda", (7, 5), is_here=False), "of compute capability 8.0 or higher"),
    ):
        with pytest.raises(RecipeError, match=why):
            values("fused", accelerator)
    monkeypatch.setattr(chunked_loss, "has_package", lambda name: False)
    with pytest.raises(RecipeError, match="need Triton"):
        values("fused", Accelerator("cuda", (9, 0)))


def test_auto():
    assert values("auto", num_targets=4096) == ("fused", "chunked")
    assert values("auto", num_targets=4096, find_head_problem=lambda how: "an odd head") == ("fused",)
    assert values("auto", Accelerator("cpu"), num_targets=4096) == ("plain", "chunked")
    assert values("auto", num_targets=4) == ("plain",)
    assert ChunkedLoss().loads_kernels("fused")


def test_tasks_without_tokens_are_refused():
    with pytest.raises(RecipeError, match="task classify has few logits"):
        Recipe(model="nowhere", data={"train": "nowhere"}, task="classify", memory={"loss": "fused"})


# ---------------------------------------------------------------------- predictions


def predicted(loss, precision="bf16", **more):
    return predict_step_memory(
        LLAMA, "causal-lm", micro_batch=ROWS, length=LENGTH, gpu="h100", precision=precision, loss=loss, **more
    )


def test_only_the_logits_are_as_large_as_the_logits():
    """The plain loss has logits, their log-softmax and the gradients of both in fp32: 16 bytes for each, and not 2."""
    logits = ROWS * LENGTH * VOCAB
    plain, fused = (predicted(loss).allocated for loss in ("plain", "fused"))
    assert plain - fused == pytest.approx(14 * logits, rel=0.02)


def test_the_trace_counts_what_the_kernels_read_and_write():
    trace = predicted("fused", "bf16-pure").trace
    size = 2 * ROWS * LENGTH * VOCAB
    moved = {op.name: (op.stage, op.moved) for op in trace.ops if op.name.startswith("cross_entropy")}
    assert moved["cross_entropy"] == ("forward", pytest.approx(size, rel=0.01))
    assert moved["cross_entropy_backward"] == ("backward", pytest.approx(2 * size, rel=0.01))
    wide = [birth.op for birth in trace.births.values() if birth.size >= size]
    assert wide == ["aten.mm"], "the output of the head"


def test_larger_chunks_with_kernels_take_no_more_memory(monkeypatch):
    with_kernels = predicted("chunked").allocated
    smaller, larger = (chunk_rows(ROWS * LENGTH, VOCAB, bytes_per_logit) for bytes_per_logit in (8, 2))
    assert larger > 3 * smaller
    monkeypatch.setattr(linear_cross_entropy, "kernels_of_chunks", lambda dtype, device: None)
    assert with_kernels <= 1.01 * predicted("chunked").allocated
