"""Killed and resumed on a GPU, with deterministic kernels: the same bits in bf16 and fp16, by real kills."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiny_runs import reviews, write_csv
from trimtab import Recipe, fit
from trimtab.commands.verify_resume import prove_resume
from trimtab.errors import LossNotFinite

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


@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
def test_a_loss_that_is_not_finite(own_folder, tiny, policy):
    """Looked at one step late, and still the right step is named, and no poisoned state is saved."""

    class Poison:
        """The loss of the seventh step is NaN, once; the step itself is counted by the loop."""

        step, is_used = 0, False

        def on_step(self, state):
            self.step = state.step

        def __call__(self, outputs, batch):
            loss = torch.nn.functional.cross_entropy(outputs.logits.float(), batch["labels"])
            if self.step != 6 or self.is_used or not outputs.logits.requires_grad:
                return loss
            self.is_used = True
            return loss * float("nan")

    poison = Poison()
    data = write_csv(own_folder / "reviews.csv", reviews(120))
    train = {"precision": "bf16", "batch_size": 8, "epochs": 1, "on_nan": policy}
    recipe = Recipe(
        model=tiny.folder("bert"), data={"train": str(data)}, train=train, checkpoint={"every": "3 steps"}, out="run"
    )
    if policy == "stop":
        with pytest.raises(LossNotFinite, match="of step 7 are not finite"):
            fit(recipe, loss=poison, callbacks=[poison], progress="quiet", device="cuda")
    else:
        fit(recipe, loss=poison, callbacks=[poison], progress="quiet", device="cuda")
    assert Path("run/bad-rows-step-7.jsonl").exists()
    for path in Path("run/checkpoints").glob("*/model.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(path).values()), path
