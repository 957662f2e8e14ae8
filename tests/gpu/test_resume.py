"""Killed and resumed on a GPU, with deterministic kernels: the same bits in bf16 and fp16, by real kills."""

import pytest
import torch

from tiny_runs import reviews, write_csv
from trimtab import Recipe
from trimtab.proof import prove_resume

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def test_weights_that_are_counted_on_the_device(own_folder, tiny):
    """Tokens with loss are counted there, and the reference weight of a window is a number there."""
    (own_folder / "texts.txt").write_text("\n".join(row["text"] for row in reviews(300)))
    recipe = Recipe(
        model=tiny.folder("gpt2"),
        task="causal-lm",
        data={"train": "texts.txt", "max_length": 16},
        train={"precision": "bf16", "lr": 1e-3, "batch_size": 8},
        memory={"micro_batch": 3},
    )
    assert prove_resume(recipe, "cuda").difference == ""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_killed_run_ends_with_the_same_bits(own_folder, tiny, precision):
    data = write_csv(own_folder / "reviews.csv", reviews(200))
    train = {"precision": precision, "lr": 1e-3, "batch_size": 8}
    recipe = Recipe(model=tiny.folder("bert"), data={"train": str(data)}, train=train, memory={"micro_batch": 3})
    proof = prove_resume(recipe, "cuda")
    assert proof.difference == ""
    assert proof.num_tensors > 60
    assert proof.num_lines > 8
