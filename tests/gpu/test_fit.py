"""Our loop on an accelerator: it learns in every precision, and a step never waits for the device."""

import random
import warnings

import pytest
import torch

from tiny_models import config_of
from trimtab import Recipe, fit, load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def reviews(num_rows=256):
    draw = random.Random(0)
    words = {"good": ["great", "lovely", "fine"], "bad": ["awful", "dull", "poor"]}
    rows = []
    for index in range(num_rows):
        label = ("good", "bad")[index % 2]
        filler = [draw.choice(["the", "film", "was", "a", "story"]) for _ in range(draw.randint(2, 20))]
        filler.insert(draw.randrange(len(filler)), draw.choice(words[label]))
        rows.append({"text": " ".join(filler), "label": label})
    return rows


def recipe(tmp_path, precision, memory=None, **train):
    settings = {"epochs": 4, "batch_size": 16, "lr": 3e-3, "precision": precision, "log_every": 1000, **train}
    return Recipe(
        model={"config": {**config_of("bert"), "vocab_size": 300}, "tokenizer": "train"},
        data={"train": reviews(), "eval": reviews(64)},
        train=settings,
        memory=memory or {},
        out=str(tmp_path / precision),
    )


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", "off")


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "fp16"])
def test_it_learns_in_every_precision(tmp_path, precision):
    result = fit(recipe(tmp_path, precision), progress="quiet")
    assert result.plan.device.startswith("cuda")
    assert result.plan.precision == ("bf16" if precision == "auto" else precision)
    assert result.fit.best_metric >= 0.9
    assert result.fit.peak_memory_bytes > 0
    assert load(result.best).device.type == "cuda"


class WatchSyncs:
    """Turns torch's watch on from the third step on; evaluation, which reads its metrics, is left out."""

    def on_step(self, state):
        watch = 3 <= state.step < state.num_steps - 1
        torch.cuda.set_sync_debug_mode("warn" if watch else "default")

    def on_end(self, state):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("precision", "reads_a_step"), [("fp32", 0), ("bf16", 0), ("fp16", 1)])
@pytest.mark.parametrize("micro_batch", ["auto", 4])
def test_a_step_reads_nothing_from_the_device(tmp_path, precision, reads_a_step, micro_batch):
    wanted = recipe(tmp_path, precision, memory={"micro_batch": micro_batch}, epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(wanted, callbacks=[WatchSyncs()], progress="quiet")
    syncs = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    # transformers looks into an attention mask to see whether anything is padded, in a plain loop too
    syncs = [w for w in syncs if "masking_utils" not in w.filename]
    assert result.fit.step == 16
    # steps 4 … 15 are watched
    assert len(syncs) == 12 * reads_a_step, sorted({f"{w.filename}:{w.lineno}" for w in syncs})
