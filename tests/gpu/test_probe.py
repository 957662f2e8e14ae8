"""Trial steps on a real GPU: a model that cannot be traced stays within its budget, with the bits of a written plan."""

import itertools
import json

import pytest
import torch
from transformers import BertModel

from tiny_runs import Watch, reviews, same_bits
from trimtab import Recipe, fit
from trimtab.errors import DoesNotFit
from trimtab.hardware.memory import non_allocator_memory
from trimtab.recipe.yaml_text import read_value

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
MIB = 2**20
ROWS = [{"text": " ".join([row["text"]] * 8), "label": row["label"]} for row in reviews(96)]
WIDE = {"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 8, "max_position_embeddings": 128}


@pytest.fixture(autouse=True)
def _no_cap_after():
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.fixture
def train(tiny, tmp_path, own_folder, monkeypatch):
    forward, numbers = BertModel.forward, itertools.count()

    def reads(self, input_ids=None, **kwargs):
        assert input_ids.data_ptr()  # tensors without data have no address
        return forward(self, input_ids=input_ids, **kwargs)

    reads.__wrapped__ = forward
    monkeypatch.setattr(BertModel, "forward", reads)

    def train(callbacks=(), **memory):
        recipe = Recipe(
            model=tiny.folder("bert", **WIDE),
            data={"train": ROWS, "eval": ROWS[:16]},
            train={"batch_size": 32, "max_steps": 2, "precision": "fp32", "deterministic": True},
            memory=memory,
            out=str(tmp_path / f"run-{next(numbers)}"),
        )
        torch.cuda.reset_peak_memory_stats()
        return fit(recipe, callbacks=callbacks, progress="quiet", device="cuda")

    return train


def used_bytes():
    return torch.cuda.max_memory_reserved() + non_allocator_memory(torch.device("cuda"))


def test_budgets_between_the_smallest_and_the_whole_step(train):
    whole = train(budget="auto").plan
    assert (whole.origin, whole.micro_batch_size) == ("measured", 32)
    totals = [step["total_bytes"] for step in whole.measured_steps]
    for share in (0.3, 0.7):
        budget = int(totals[0] + share * (totals[-1] - totals[0]))
        measured, written = Watch(), Watch()
        result = train([measured], budget=f"{budget}B")
        assert used_bytes() <= budget
        assert result.plan.micro_batch_size < 32
        assert result.fit.peak_memory_bytes == pytest.approx(result.plan.measured_peak_bytes, rel=0.02)
        recomputed = read_value(result.plan.gradient_checkpointing)
        train([written], micro_batch=result.plan.micro_batch_size, gradient_checkpointing=recomputed)
        assert all(same_bits(*pair) for pair in zip(measured.weights, written.weights, strict=True))


def test_below_one_row_techniques_follow_and_then_it_does_not_fit(train):
    smallest = train(budget="auto", micro_batch=1).plan.measured_steps[0]["total_bytes"]
    plan = train(budget=f"{smallest - 8 * MIB}B").plan
    assert any(step["fits"] is False for step in plan.measured_steps)
    stored = json.loads(json.dumps(plan.as_dict()))
    assert stored["gradient_checkpointing"] != "none" or stored["update"] != "device"
    with pytest.raises(DoesNotFit, match=r"does not fit: needs .*, measured, .* over the budget"):
        train(budget="1100MiB", update="device", offload_activations="none", tile_tokens="none")
