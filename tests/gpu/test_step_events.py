"""Events of one optimizer step of `fit`: host-device syncs, kernels launched by the host, filler of packed batches."""

import random
import warnings

import pytest
import torch

from gpu_events import counts_of, new_profiler, num_graphs, num_kernels
from tiny_models import config_of
from trimtab import Recipe, fit
from trimtab.data.packing import ROW_STARTS

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
        self._profiler, self._seen, self.counts = new_profiler(), [], {}

    def on_step(self, state):
        following = state.step + 1
        if state.step == 1:
            state.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        if following == PROFILED:
            self._profiler.start()
        elif state.step == PROFILED:
            torch.cuda.synchronize()
            self._profiler.stop()
            self.counts = counts_of(self._profiler)
        torch.cuda.set_sync_debug_mode("warn" if following in WATCHED else "default")

    def on_end(self, state):
        torch.cuda.set_sync_debug_mode("default")

    def _before_forward(self, model, args, kwargs):
        if ROW_STARTS in kwargs:
            self._seen.append(kwargs[ROW_STARTS])

    @property
    def num_filler_tokens(self):
        """Of all steps but the first."""
        assert len(self._seen) == NUM_STEPS - 1
        return sum(int(starts[-1] - starts[-2]) for starts in self._seen)


def run(folder, name, compiled, precision):
    """The events of a run, the places of its host-device syncs, and its tokens without filler."""
    events = Events()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(recipe_of(folder, name, compiled, precision), callbacks=[events], progress="quiet")
    assert result.fit.step == NUM_STEPS
    assert result.plan.padding == "none"
    syncs = [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]
    return events, syncs, result.fit.num_tokens


@pytest.mark.parametrize(
    ("compiled", "precision", "num_syncs"),
    [("off", "bf16", 0), ("off", "fp16", 1), ("blocks", "bf16", 0), ("graphs", "bf16", 0), ("graphs", "fp16", 1)],
)
@pytest.mark.parametrize("name", CASES)
def test_syncs_of_a_step(tmp_path, name, compiled, precision, num_syncs):
    """With fp16 the host reads whether gradients overflowed."""
    _, syncs, _ = run(tmp_path, name, compiled, precision)
    assert len(syncs) == num_syncs * len(WATCHED), sorted(set(syncs))


@pytest.mark.parametrize("name", CASES)
def test_launches_of_a_step(tmp_path, name):
    found = {kind: run(tmp_path / kind, name, kind, "bf16")[0].counts for kind in ("off", "blocks", "graphs")}
    kernels = {kind: num_kernels(counts) for kind, counts in found.items()}
    assert kernels["off"] > kernels["blocks"] > kernels["graphs"] > 0, kernels
    # a graph leaves clipping, the optimizer and copies of inputs, which are few kernels for many tensors
    assert kernels["graphs"] < 120, kernels
    assert [num_graphs(counts) for counts in found.values()] == [0, 0, 1], "one micro-batch"


@pytest.mark.parametrize("name", CASES)
def test_filler_of_packed_batches(tmp_path, name):
    """Compiled code is made for few sizes, so batches are rounded up; otherwise there is no filler at all."""
    compiled, _, num_tokens = run(tmp_path / "blocks", name, "blocks", "bf16")
    plain, _, _ = run(tmp_path / "off", name, "off", "bf16")
    assert plain.num_filler_tokens == 0
    assert 0 < compiled.num_filler_tokens <= MOST_FILLER * num_tokens
