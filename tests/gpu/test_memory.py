"""Levers that only an accelerator has: fused kernels, embeddings read from host memory, formats of its products."""

import sys

import pytest
import torch

from tiny_models import config_of, tokenizer
from trimtab.model.load import load_model
from trimtab.model.precision import Precision
from trimtab.techniques.host_embeddings import keep_embeddings_on_host
from trimtab.techniques.kernels import choose_kernels, use_liger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda:0")


def llama(**config):
    torch.manual_seed(0)
    return load_model({**config_of("llama"), "tie_word_embeddings": False, **config}, "causal-lm", {}, tokenizer())


def gradients_of(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_embeddings_are_read_from_host_memory():
    model = llama(hidden_size=512, vocab_size=50_000).requires_grad_(False)
    ids = torch.randint(0, 50_000, (2, 64), device=CUDA)
    expected = model.get_input_embeddings()(ids.cpu()).cuda()
    table = model.get_input_embeddings()
    before = torch.cuda.memory_allocated()
    spared = keep_embeddings_on_host(model, CUDA)
    model.to(CUDA)
    rest = sum(p.numel() * p.element_size() for p in model.parameters() if p is not table.weight)
    assert spared == 50_000 * 512 * 4
    assert torch.cuda.memory_allocated() - before < rest + spared / 2
    assert table.weight.device == CUDA
    assert torch.equal(table(ids), expected)
    model.lm_head.requires_grad_(True)
    _, found = gradients_of(model, ids)
    model.get_input_embeddings().weight.data = table.weight.data.clone()  # into the device's own memory
    _, again = gradients_of(model, ids)
    assert torch.equal(found["lm_head.weight"], again["lm_head.weight"])


def test_liger_kernels_compute_the_same_and_change_one_model_only():
    pytest.importorskip("liger_kernel")
    model, ids = llama().to(CUDA), torch.randint(0, 300, (2, 32), device=CUDA)
    home = sys.modules[type(model).__module__]
    classes = {name: value for name, value in vars(home).items() if isinstance(value, type)}
    loss, expected = gradients_of(model, ids)
    assert choose_kernels("auto", model, CUDA, torch.bfloat16) == "liger"
    assert choose_kernels("auto", model, CUDA, None) == "plain"
    use_liger(model)
    assert "Liger" in type(model.model.norm).__name__ or "Liger" in model.model.norm.forward.__qualname__
    assert {name: value for name, value in vars(home).items() if isinstance(value, type)} == classes
    found_loss, found = gradients_of(model, ids)
    assert torch.allclose(found_loss, loss, rtol=1e-5)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5), name


def test_tf32_is_coarser_than_fp32():
    a, b = torch.randn(512, 512, device=CUDA), torch.randn(512, 512, device=CUDA)
    exact = a.double() @ b.double()
    before = torch.backends.cuda.matmul.fp32_precision
    fine = (a @ b - exact).norm() / exact.norm()
    try:
        Precision("tf32", CUDA)
        coarse = (a @ b - exact).norm() / exact.norm()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert fine < 1e-6
    assert 1e-5 < coarse < 1e-3
