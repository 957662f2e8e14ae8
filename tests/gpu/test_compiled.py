"""Compiled blocks on a GPU: gradients up to rounding, one graph per size, with kernels, adapters and recomputation."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from gpu_events import events_of, num_kernels
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.attention_kernels import use_attention
from trimtab.model.compiled_blocks import compile_blocks
from trimtab.techniques.recomputation import checkpoint_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EPS = torch.finfo(torch.bfloat16).eps
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _fresh_counters():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def a_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, num_key_value_heads=2, use_cache=False, **sizes)
    return LlamaForCausalLM(config).to(DEVICE).train()


def a_bert(dropout=0.0):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = BertConfig(vocab_size=512, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes)
    return BertForMaskedLM(config).to(DEVICE).train()


MODELS = {"bert": a_bert, "llama": a_llama}


def gradient(model, length=128, dtype=torch.bfloat16):
    ids = torch.randint(0, 512, (4, length), generator=torch.Generator().manual_seed(length)).to(DEVICE)
    model.zero_grad()
    with torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same_gradient(plain, compiled, length=128):
    """The error of bf16 is what the plain model itself has against fp32; the compiled one may not have twice that."""
    exact = gradient(plain, length, dtype=None)
    errors = [(gradient(model, length) - exact).norm() / exact.norm() for model in (plain, compiled)]
    assert errors[1] <= 2 * errors[0] + EPS, errors


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_and_blocks_share_a_graph(name):
    plain = MODELS[name]()
    compiled = copy.deepcopy(plain)
    blocks = compile_blocks(compiled)
    for length in (128, 192, 128):
        assert_same_gradient(plain, compiled, length)
    assert counters["stats"]["unique_graphs"] == 1
    assert blocks.failure is None
    assert not counters["graph_break"]


@pytest.mark.parametrize("which", ["all", {"every": 2}])
def test_recomputed(which):
    plain = a_bert()
    compiled = copy.deepcopy(plain)
    compile_blocks(compiled)
    checkpoint_layers(compiled, which)
    assert_same_gradient(plain, compiled)


def test_recomputed_dropout_draws_the_same_numbers():
    compiled = a_bert(dropout=0.3)
    compile_blocks(compiled)
    recomputed = copy.deepcopy(compiled)
    checkpoint_layers(recomputed, "all")
    found = []
    for model in (compiled, recomputed):
        gradient(model)
        torch.manual_seed(3)
        found.append(gradient(model))
    # the attention kernels add in any order; a wrong mask is wrong by far more
    assert (found[0] - found[1]).norm() <= 4 * EPS * found[0].norm()


def test_adapters():
    plain = a_llama()
    adapter = add_adapter(plain, LoraSpec(rank=8))
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor.normal_(std=0.05)
    compiled = copy.deepcopy(plain)
    blocks = compile_blocks(compiled)
    assert_same_gradient(plain, compiled)
    assert blocks.failure is None
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "math"])
def test_attention_kernels(backend):
    plain = a_llama()
    use_attention(plain, backend, repeats_heads=backend in ("efficient", "math"))
    compiled = copy.deepcopy(plain)
    blocks = compile_blocks(compiled)
    assert_same_gradient(plain, compiled)
    assert blocks.failure is None
    assert not counters["graph_break"]
    gradient(compiled)
    names = " ".join(events_of(lambda: gradient(compiled))).lower()
    marks = {"cudnn": ("cudnn",), "flash": ("flash",), "efficient": ("fmha", "efficient"), "math": ("softmax",)}
    assert any(mark in names for mark in marks[backend]), names


def test_fewer_kernels_are_launched():
    plain = a_llama()
    compiled = copy.deepcopy(plain)
    compile_blocks(compiled)
    counts = []
    for model in (plain, compiled):
        for _ in range(2):
            gradient(model)
        counts.append(num_kernels(events_of(lambda model=model: gradient(model))))
    assert counts[1] < counts[0], counts


@pytest.mark.slow
def test_a_run_resumes_with_the_same_bits(tiny, own_folder):
    import os
    import signal
    from pathlib import Path

    from safetensors.torch import load_file

    from tiny_runs import write_csv
    from trimtab import Recipe, fit
    from trimtab.errors import Stopped

    words = {"good": "the film was good", "bad": "the cast was bad"}
    write_csv(own_folder / "rows.csv", [{"text": words[label], "label": label} for label in ("good", "bad") * 24])

    def recipe(out):
        train = {"compile": "blocks", "deterministic": True, "max_steps": 8, "batch_size": 8, "log_every": 1}
        model = tiny.folder("bert", num_hidden_layers=2)
        return Recipe(model=model, data={"train": "rows.csv", "eval_share": 0.25}, train=train, out=out)

    class Stops:
        def on_step(self, state):
            if state.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    fit(recipe("whole"), progress="quiet")
    with pytest.raises(Stopped):
        fit(recipe("stopped"), callbacks=[Stops()], progress="quiet")
    fit(recipe("stopped"), progress="quiet", resume=True)
    ours, theirs = (load_file(Path(run) / "best" / "model.safetensors") for run in ("stopped", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
