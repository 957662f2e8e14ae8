"""Evaluation and streams on a GPU give what they give on the host."""

import pytest
import torch

from tiny_models import TEXTS, config_of, tokenizer
from tiny_runs import reviews
from trimtab.inference.evaluate import evaluate
from trimtab.inference.held_out import read_held_out
from trimtab.inference.load import LoadedModel
from trimtab.model.load import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("own_folder"),
]
LABELS = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.mark.parametrize(
    ("name", "kind", "task", "head"),
    [("bert", "sequence-classification", "classify", LABELS), ("gpt2", "causal-lm", "causal-lm", {})],
)
def test_metrics_are_those_of_the_host(name, kind, task, head):
    model = load_model(config_of(name), kind, head, tokenizer()).float()
    rows = reviews(40) if task == "classify" else [{"text": row["text"]} for row in reviews(40)]
    found = []
    for device in ("cpu", "cuda"):
        loaded = LoadedModel(model.to(device), tokenizer(), task)
        found.append(evaluate(loaded, read_held_out(loaded, rows)))
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-3)  # matrix products may use TF32
    assert found[1].metrics["loss"] == pytest.approx(found[0].metrics["loss"], rel=1e-3)


def test_a_sampled_stream_leaves_the_generators_alone():
    model = load_model(config_of("gpt2"), "causal-lm", {}, tokenizer()).to("cuda")
    loaded = LoadedModel(model, tokenizer(), "causal-lm")
    options = {"temperature": 1.5, "top_p": 0.9, "seed": 1}
    text = loaded.generate(TEXTS[0], 12, **options)
    before = torch.cuda.get_rng_state()
    assert "".join(loaded.generate(TEXTS[0], 12, stream=True, **options)) == text
    assert torch.equal(torch.cuda.get_rng_state(), before)
