"""A budget on a real GPU: the process stays within, smaller micro-batches follow, and the look ahead was right."""

import random

import pytest
import torch

from tiny_models import config_of
from tiny_runs import lines_of
from trimtab import Recipe, fit
from trimtab.errors import DoesNotFit
from trimtab.hardware.memory import cap_memory, expected_non_allocator_memory, non_allocator_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("no_cache", "no_cap"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
WORDS = ["the", "film", "was", "a", "story", "about", "this", "cast", "very", "long"]
MIB = 2**20


def rows_of(num_rows=96, longest=120):
    """Some of them as long as any; the others of all lengths."""
    draw = random.Random(0)
    lengths = [longest if index % 12 == 0 else draw.randint(10, longest) for index in range(num_rows)]
    return [
        {"text": " ".join(draw.choices(WORDS, k=length)), "label": ("good", "bad")[index % 2]}
        for index, length in enumerate(lengths)
    ]


def run(tmp_path, name, budget=None, **memory):
    """A BERT whose activations are far larger than its weights."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {**config_of("bert"), **shape, **dropout, "vocab_size": 300, "max_position_embeddings": 256}
    recipe = Recipe(
        model={"config": config, "tokenizer": "train"},
        data={"train": rows_of(), "eval": rows_of(32), "max_length": 200},
        train={"epochs": 1, "batch_size": 32, "precision": "fp32", "lr": 1e-3, "optimizer": "sgd"},
        memory={"budget": budget, **memory},
        checkpoint={"every": None},
        evaluate={"batch_size": 32},
        out=str(tmp_path / name),
    )
    return fit(recipe, progress="quiet")


def test_the_look_ahead_measures_what_the_run_needs(tmp_path):
    """On an accelerator there is one without a budget, too."""
    result = run(tmp_path, "free")
    last = lines_of(result.folder)[-1]
    assert last["preflight_peak_bytes"] == pytest.approx(last["peak_memory_bytes"], rel=0.02)
    assert result.fit.micro_batch_size == 32


def test_a_budget_leads_to_smaller_micro_batches(tmp_path):
    """About half of what the whole batch needs: the run is cut, ends, stays within, and learns the same."""
    free = run(tmp_path, "free")
    torch.cuda.empty_cache()
    needed = free.fit.peak_memory_bytes
    outside = expected_non_allocator_memory(with_kernels=False)
    budget = outside + int(needed * 0.55) + 64 * MIB
    held = run(tmp_path, "held", budget, gradient_checkpointing="none")
    assert held.fit.micro_batch_size in (8, 16)
    assert held.fit.step == free.fit.step == 3
    last = lines_of(held.folder)[-1]
    assert last["peak_reserved_bytes"] <= budget - outside
    assert last["preflight_peak_bytes"] == pytest.approx(last["peak_memory_bytes"], rel=0.02)
    losses = [[line["loss"] for line in lines_of(done.folder) if "loss" in line] for done in (free, held)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_memory_that_runs_out_in_the_middle_of_a_run(tmp_path):
    """The look ahead was fine; then something else takes most of what was left, and the step is taken back."""

    class Takes:
        held = None

        def on_step(self, state):
            if state.step == 1:
                torch.cuda.empty_cache()
                device = torch.device("cuda", torch.cuda.current_device())
                left = int(torch.cuda.memory_allocated() + (peak - torch.cuda.memory_allocated()) * 0.6) + 32 * MIB
                cap_memory(device, left + outside, outside)

    free = run(tmp_path, "free")
    peak = free.fit.peak_memory_bytes
    outside = non_allocator_memory(torch.device("cuda", torch.cuda.current_device()))
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = {**config_of("bert"), **shape, "vocab_size": 300, "max_position_embeddings": 256}
    recipe = Recipe(
        model={"config": config, "tokenizer": "train"},
        data={"train": rows_of(), "eval_share": 0, "max_length": 200},
        train={"epochs": 1, "batch_size": 32, "precision": "fp32", "lr": 1e-3},
        checkpoint={"every": None},
        out=str(tmp_path / "taken"),
    )
    result = fit(recipe, callbacks=[Takes()], progress="quiet")
    assert result.fit.step == 3
    assert result.fit.micro_batch_size < 32
    notes = [line["note"] for line in lines_of(result.folder) if "note" in line]
    assert notes
    assert all("at step" in note for note in notes)


def test_a_budget_that_holds_nothing(tmp_path):
    outside = non_allocator_memory(torch.device("cuda", torch.cuda.current_device()))
    with pytest.raises(DoesNotFit):
        run(tmp_path, "none", outside + 24 * MIB)
