"""Events of one optimizer step of `fit`: host-device syncs, kernels launched by the host, filler of packed batches."""

import random
import warnings

import pytest
import torch

from gpu_events import counts_of, new_profiler, num_graphs, num_kernels
from tiny_models import config_of
from trimtab import Recipe, fit
from trimtab.data.packing import ROW_STARTS, PackedCollate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORDS = ["the", "film", "was", "a", "story", "about", "this", "cast", "very", "long"]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
CASES = {"bert": ("classify", "none"), "llama": ("chat", {"kind": "lora", "rank": 8})}
WATCHED, PROFILED, NUM_STEPS = range(6, 10), 11, 12
MOST_FILLER = 0.03


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", "off")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rows_of(task):
    """Rows of all lengths; those of a chat are not concatenated and cut."""
    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=draw.randint(8, 100))) for _ in range(16 * NUM_STEPS))
    if task == "chat":
        return [{"prompt": "the story", "answer": text} for text in texts]
    return [{"text": text, "label": ("good", "bad")[number % 2]} for number, text in enumerate(texts)]


def recipe_of(folder, name, compiled, precision):
    task, adapter = CASES[name]
    config = {**config_of(name), **SHAPE, "vocab_size": 300, "max_position_embeddings": 128}
    return Recipe(
        model={"config": config, "tokenizer": "train"},
        task=task,
        data={"train": rows_of(task), "eval_share": 0, "max_length": 96},
        # batches of mixed lengths have similar totals, so few sizes are compiled
        train={
            "max_steps": NUM_STEPS,
            "batch_size": 16,
            "precision": precision,
            "compile": compiled,
            "group_by_length": False,
            "log_every": 1000,
        },
        memory={"padding": "none", "micro_batch": 16, "kernels": "plain", "gradient_checkpointing": "none"},
        adapter=adapter,
        checkpoint={"every": None},
        track="none",
        out=str(folder / "run"),
    )


class Events:
    """A callback that watches some steps for syncs and profiles another one, without a sync of its own."""

    def __init__(self):
        self._profiler, self.counts = new_profiler(), {}

    def on_step(self, state):
        following = state.step + 1
        if following == PROFILED:
            self._profiler.start()
        elif state.step == PROFILED:
            torch.cuda.synchronize()
            self._profiler.stop()
            self.counts = counts_of(self._profiler)
        torch.cuda.set_sync_debug_mode("warn" if following in WATCHED else "default")

    def on_end(self, state):
        torch.cuda.set_sync_debug_mode("default")


def run(folder, name, compiled, precision):
    """The events of a run, and the places of its host-device syncs."""
    events = Events()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(recipe_of(folder, name, compiled, precision), callbacks=[events], progress="quiet")
    assert result.fit.step == NUM_STEPS
    assert result.plan.padding == "none"
    syncs = [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]
    return events, syncs


@pytest.mark.parametrize(
    ("compiled", "precision", "num_syncs"),
    [
        *(("off", "bf16", 0), ("off", "fp16", 1), ("blocks", "bf16", 0), ("capture", "bf16", 0)),
        *(("graphs", "bf16", 0), ("graphs", "fp16", 1)),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_syncs_of_a_step(tmp_path, name, compiled, precision, num_syncs):
    """With fp16 the host reads whether gradients overflowed."""
    _, syncs = run(tmp_path, name, compiled, precision)
    assert len(syncs) == num_syncs * len(WATCHED), sorted(set(syncs))


@pytest.mark.parametrize("name", CASES)
def test_launches_of_a_step(tmp_path, name):
    kinds = ("off", "blocks", "graphs", "capture")
    found = {kind: run(tmp_path / kind, name, kind, "bf16")[0].counts for kind in kinds}
    kernels = {kind: num_kernels(counts) for kind, counts in found.items()}
    assert kernels["off"] > kernels["blocks"] > kernels["graphs"] > 0, kernels
    assert kernels["capture"] == kernels["graphs"], "of what is not captured"
    # a graph leaves clipping, the optimizer and copies of inputs, which are few kernels for many tensors
    assert kernels["graphs"] < 120, kernels
    assert [num_graphs(counts) for counts in found.values()] == [0, 0, 1, 1], "one micro-batch"


@pytest.mark.parametrize(
    ("compiled", "is_rounded"), [("off", False), ("blocks", False), ("capture", True), ("graphs", True)]
)
@pytest.mark.parametrize("name", CASES)
def test_filler_of_packed_batches(tmp_path, monkeypatch, name, compiled, is_rounded):
    """Graphs are captured for few sizes, so batches are rounded up; otherwise there is no filler at all."""
    seen, collate = [], PackedCollate.__call__

    def watched(self, *args, **kwargs):
        batch = collate(self, *args, **kwargs)
        seen.append(batch[ROW_STARTS])
        return batch

    monkeypatch.setattr(PackedCollate, "__call__", watched)
    run(tmp_path, name, compiled, "bf16")
    num_filler = sum(int(starts[-1] - starts[-2]) for starts in seen)
    assert (num_filler > 0) == is_rounded
    assert num_filler <= MOST_FILLER * sum(int(starts[-2]) for starts in seen)
