"""Samples at the end of a run on a GPU: the trained model's memory is free by then, and the budget still holds."""

import json

import pytest
import torch

from tiny_runs import reviews
from trimtab import Recipe, fit
from trimtab.build import samples
from trimtab.hardware.memory import memory_in_use, non_allocator_memory
from trimtab.units import parse_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("no_cache", "no_cap"),
    pytest.mark.samples,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
GPU = torch.device("cuda", 0)
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
}
ROWS = [{"text": " ".join(row["text"] for row in reviews(6, 6 * index))} for index in range(40)]


def trained(tiny, tmp_path, budget, **settings):
    recipe = {
        "model": tiny.folder("llama", **SHAPE),
        "task": "causal-lm",
        "data": {"train": ROWS},
        "train": {"max_steps": 2, "batch_size": 4, "precision": "bf16"},
        "memory": {"budget": budget},
        "out": str(tmp_path / "run"),
    }
    result = fit(Recipe(**recipe | settings), progress="quiet")
    return result, json.loads((result.folder / "report.json").read_text()).get("samples")


@pytest.mark.parametrize(("adapter", "budget"), [("none", "5GiB"), ("lora", "3GiB"), ("qlora", "3GiB")])
@pytest.mark.parametrize("compiled", ["off", "capture"])
def test_the_budget_holds_until_the_end(tiny, tmp_path, monkeypatch, adapter, budget, compiled):
    if adapter == "qlora":
        pytest.importorskip("bitsandbytes")
        if compiled == "capture":
            pytest.skip("not for a 4-bit base")
    seen = {}
    generate = samples.generate_samples

    def watched(*arguments):
        torch._C._cuda_clearCublasWorkspaces()  # they are not of the model
        seen["at the start"] = memory_in_use(GPU)
        torch.cuda.reset_peak_memory_stats()
        found = generate(*arguments)
        seen["peak"] = torch.cuda.max_memory_allocated()
        seen["all"] = torch.cuda.max_memory_reserved() + non_allocator_memory(GPU)
        return found

    torch._C._cuda_clearCublasWorkspaces()
    before = memory_in_use(GPU)
    monkeypatch.setattr(samples, "generate_samples", watched)
    train = {"max_steps": 2, "batch_size": 4, "precision": "bf16", "compile": compiled}
    result, found = trained(tiny, tmp_path, budget, adapter=adapter, train=train)
    weights = result.plan.num_parameters
    assert len(found["rows"]) == 3
    assert all(isinstance(row["before"], str) for row in found["rows"])
    assert seen["at the start"] - before < weights // 100  # nothing is left of the trained model
    assert seen["peak"] > weights // 2
    assert seen["all"] <= parse_bytes(budget)
