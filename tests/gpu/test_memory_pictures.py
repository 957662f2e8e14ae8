"""Memory pictures on a GPU: what the allocator recorded adds up, is named, and is drawn when memory runs out."""

import gc
import pickle

import pytest
import torch
from torch.cuda import _memory_viz

from tiny_runs import reviews, write_jsonl
from trimtab import Recipe, fit
from trimtab.commands.measured_step import measure_step
from trimtab.commands.memory import draw_memory, write_page, write_snapshot
from trimtab.errors import DoesNotFit
from trimtab.report.anatomy import MemoryWatch
from trimtab.report.failed_step import memory_now

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("own_folder"),
]
CUDA = torch.device("cuda", 0)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
VARIANTS = {
    "plain": {},
    "recomputed": {"memory": {"micro_batch": 4, "gradient_checkpointing": "all", "loss": "plain"}},
    "chunked": {"memory": {"micro_batch": 4, "loss": "chunked"}},
    "lora": {"adapter": "lora", "memory": {"micro_batch": 4}},
    "bf16-pure": {"train": {"batch_size": 8, "precision": "bf16-pure", "compile": "off"}},
}


def recipe_of(folder, **sections):
    rows = [{"text": " ".join(row["text"] for row in reviews(40, first=40 * number))} for number in range(32)]
    usual = {
        "model": {"config": CONFIG, "tokenizer": "train"},
        "task": "causal-lm",
        "data": {"train": str(write_jsonl(folder / "rows.jsonl", rows)), "text": "text", "eval_share": 0},
        "train": {"batch_size": 8, "max_steps": 4, "compile": "off"},
        "memory": {"micro_batch": 4},
        "checkpoint": {"every": None, "best": False},
        "track": "none",
    }
    return Recipe.model_validate(usual | sections)


@pytest.fixture(autouse=True)
def fresh():
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    torch.cuda.memory._record_memory_history(None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_measured_step_adds_up(tmp_path, variant):
    """To the counter of the allocator, with no part below zero at any moment."""
    torch.cuda.reset_peak_memory_stats(CUDA)
    found = measure_step(recipe_of(tmp_path, **VARIANTS[variant]), "cuda:0")
    peak = found.record.peak()
    highest = torch.cuda.max_memory_allocated(CUDA)  # of loading and of the first steps, too
    assert 0.9 * highest <= peak.num_bytes <= 1.01 * highest
    for moment in found.record.moments():
        assert min(moment.parts.values()) >= 0
    stages = [name for name, _, _ in found.record.stage_spans()]
    assert stages == ["forward", "backward", "forward", "backward", "optimizer"]
    nameless = sum(one.num_bytes for one in found.record.allocations if not one.name)
    assert nameless < 0.5 * sum(one.num_bytes for one in found.record.allocations)
    assert "total_allocated" in _memory_viz.segsum(found.snapshot)


@pytest.mark.parametrize("autocast", [False, True])
def test_no_part_of_an_anatomy_is_negative(autocast):
    """Started inside of a forward, as `trimtab compare` does: there most stored anatomies had negative temporaries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**CONFIG, use_cache=False)).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.ones(4, 512, dtype=torch.int64, device=CUDA)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=tokens).logits
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    watch = MemoryWatch(model, optimizer, CUDA)
    handle = model.register_forward_pre_hook(lambda *_: None if watch.is_recording else watch.start())
    torch.cuda.reset_peak_memory_stats(CUDA)
    step()
    handle.remove()
    anatomy = watch.stop()
    parts = anatomy.parts()
    assert min(size for size in parts.values() if size is not None) >= 0, parts
    assert anatomy.allocated == pytest.approx(torch.cuda.max_memory_allocated(CUDA), rel=0.01)
    assert anatomy.logits_and_loss >= 3 * (4 * 512 * CONFIG["vocab_size"] * 4)


def test_both_pictures_are_on_one_page(tmp_path):
    picture = draw_memory(recipe_of(tmp_path), device="cuda:0")
    predicted, measured = picture.records
    assert (predicted.source, measured.source) == ("predicted", "measured")
    assert measured.peak().num_bytes == pytest.approx(predicted.peak().num_bytes, rel=0.05)
    write_page(picture.page, tmp_path / "memory.html")
    write_snapshot(picture.snapshot, tmp_path / "step.pickle")
    text = (tmp_path / "memory.html").read_text()
    assert "Measured on cuda:0" in text
    assert "model.layers.*.mlp" in text
    snapshot = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert _memory_viz.trace(snapshot)
    assert any(entry.get("frames") for entry in snapshot["device_traces"][0]), "with stacks"


def test_memory_now_is_what_is_allocated():
    model = torch.nn.Linear(1024, 1024, device=CUDA)
    optimizer = torch.optim.SGD(model.parameters())
    other = torch.empty(2**22, dtype=torch.uint8, device=CUDA)
    record = memory_now(model, optimizer, CUDA)
    peak = record.peak()
    assert peak.num_bytes == torch.cuda.memory_allocated(CUDA)
    assert peak.parts["weights"] == 1024 * 1024 * 4 + 4096
    assert peak.parts["activations"] >= other.nbytes


def test_a_run_that_runs_out_of_memory_draws_it(tmp_path):
    """With a limit that the model and its state fit into, but no micro-batch with its gradients."""
    recipe = recipe_of(tmp_path, out=str(tmp_path / "run"))
    needed = measure_step(recipe, "cuda:0").record
    lasting = sum(one.num_bytes for one in needed.allocations if one.born < 0)
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(CUDA)
    torch.cuda.set_per_process_memory_fraction((lasting + 64 * 2**20) / total, CUDA)
    with pytest.raises(DoesNotFit) as failure:
        fit(recipe, progress="quiet", device="cuda:0")
    path = tmp_path / "run" / "out-of-memory.html"
    assert str(path) in str(failure.value)
    page = path.read_text()
    assert page.index("Measured on cuda:0") < page.index("Predicted on cuda:0")
