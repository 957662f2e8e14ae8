"""Adapters on a GPU: loaded as they were trained, merged with the weights on the host or on the device."""

import pytest
import torch

from tiny_adapters import adapted, export_run, nf4
from tiny_models import batch_of
from tiny_runs import reviews, write_csv
from trimtab.commands.merge import merge
from trimtab.inference.load import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WIDE = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture
def data(own_folder):
    return write_csv(own_folder / "reviews.csv", [{"text": row["text"]} for row in reviews(60)])


def run_of(tiny, data, **form):
    model, tok = adapted(tiny.folder("llama", **WIDE), "causal-lm", **form)
    export_run("run", model, tok, data, "causal-lm")
    return model.eval(), tok


def test_a_base_of_4_bits_is_one_again(tiny, data):
    pytest.importorskip("bitsandbytes")
    model, tok = run_of(tiny, data, **nf4(torch.bfloat16) | {"device": "cuda"})
    loaded = load("run", device="cuda").model
    batch = {name: value.cuda() for name, value in batch_of(["the film was good"], tok).items()}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("has_room", [True, False])
def test_weights_on_the_host_or_on_the_device(tiny, data, monkeypatch, has_room):
    """Where a model does not fit, each of its modules comes to the device in its turn: the same numbers."""
    monkeypatch.setattr("trimtab.inference.comparison._has_room", lambda model, device: has_room)
    run_of(tiny, data)
    near = merge("run", "bf16", dtype="bf16", device="cuda", num_rows=8).closeness
    on_host = merge("run", "again", dtype="bf16", device="cpu", num_rows=8).closeness
    assert near.kl_mean == pytest.approx(on_host.kl_mean, rel=0.2)
    assert 0 < near.kl_mean < 1e-3


def test_onto_the_values_of_4_bits(tiny, data):
    pytest.importorskip("bitsandbytes")
    run_of(tiny, data, **nf4(torch.bfloat16) | {"device": "cuda"})
    merged = merge("run", "merged", onto="dequantized", dtype="fp32", device="cuda", num_rows=8)
    assert merged.closeness.kl_mean < 1e-8
    assert merge("run", "original", device="cuda", num_rows=8, force=True).closeness.kl_mean > 1e-6
