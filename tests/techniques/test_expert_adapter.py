"""Adapters on experts, from training to a merged model, through a recipe."""

import json

import pytest
import torch

from rounding import assert_same_up_to_rounding
from tiny_runs import reviews, write_csv
from trimtab import Recipe, fit, load
from trimtab.commands.merge import merge
from trimtab.errors import RecipeError
from trimtab.inference.evaluate import evaluate
from trimtab.inference.held_out import read_held_out
from trimtab.model.adapters import adapter_of

TEXTS = ["the film was good", "a very long and dull story"]
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


class Look:
    def on_step(self, state):
        self.model = state.model


@pytest.fixture
def train(own_folder, tiny):
    rows, held_out = own_folder / "rows.csv", own_folder / "held_out.csv"
    write_csv(rows, reviews(24))
    write_csv(held_out, reviews(8, first=1000))

    def run(adapter, **sections):
        look = Look()
        recipe = Recipe(
            model=tiny.folder("llama", **MIXTRAL),
            task="causal-lm",
            data={"train": str(rows), "eval": str(held_out), "text": "text"},
            adapter=adapter,
            train={"max_steps": 3, "batch_size": 8, "lr": 1e-2},
            out=str(own_folder / "run"),
            **sections,
        )
        look.result = fit(recipe, callbacks=[look], progress="quiet", device="cpu")
        return look

    return run


def logits(model, tokenizer):
    with torch.no_grad():
        return model.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits


@pytest.mark.parametrize(("kind", "onto"), [("lora", "original"), ("qlora", "dequantized")])
def test_from_training_to_a_merged_model(train, own_folder, kind, onto):
    look = train({"kind": kind, "rank": 2, "experts": True})
    adapter = adapter_of(look.model)
    assert len([name for name in adapter.targets if "experts" in name]) == 2
    assert all(tensor.abs().max() > 0 for tensor in adapter.tensors().values()), "B starts as zero"
    assert "experts" in json.loads((own_folder / "run/plan.json").read_text())["adapter"]
    loaded = load(look.result.best, device="cpu")
    expected = logits(look.model, loaded.tokenizer)
    assert_same_up_to_rounding(logits(loaded.model, loaded.tokenizer), expected, num_roundings=256)
    found = evaluate(loaded, read_held_out(loaded, reviews(8, first=1000)))
    assert found.metrics["loss"] == pytest.approx(look.result.fit.metrics["loss"], rel=1e-4)
    merged = merge(own_folder / "run", own_folder / "merged", onto=onto, num_rows=4, device="cpu")
    assert merged.closeness.agreement == 1
    again = load(own_folder / "merged", device="cpu")
    assert adapter_of(again.model) is None
    assert_same_up_to_rounding(logits(again.model, again.tokenizer), expected, num_roundings=256)


def test_refused_in_a_recipe(train):
    with pytest.raises(RecipeError, match="adapter.dropout: found 0.1; adapters on fused experts do not support it"):
        train({"kind": "lora", "experts": True, "dropout": 0.1})
    with pytest.raises(RecipeError, match="adapter.experts: found true; no effect on ia3"):
        train({"kind": "ia3", "experts": True})
