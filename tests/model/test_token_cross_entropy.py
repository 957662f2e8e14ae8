"""The fused token loss: equal to the plain one; its gradient replaces the logits where nothing else needs them."""

import copy

import pytest
import torch
from torch.nn import functional

from rounding import assert_same_up_to_rounding
from tiny_models import TEXTS, batch_of, config_of, tokenizer
from torch_kernels import TorchKernels
from trimtab.data.metrics import Metrics
from trimtab.engine.engine import Engine
from trimtab.errors import LossError
from trimtab.model import linear_cross_entropy, token_cross_entropy
from trimtab.model.linear_cross_entropy import Job, chunk_rows, chunked_cross_entropy
from trimtab.model.load import load_model
from trimtab.model.precision import Precision
from trimtab.model.token_cross_entropy import fused_cross_entropy, may_overwrite
from trimtab.techniques.chunked_loss import build_task_loss
from trimtab.training.evaluate import Evaluator

_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
_SMALL |= {"num_key_value_heads": 1, "max_position_embeddings": 64}
MORE = {
    "gemma2": {"model_type": "gemma2", "final_logit_softcapping": 0.5, "head_dim": 16, **_SMALL},
    "cohere": {"model_type": "cohere", "logit_scale": 0.3, **_SMALL},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 2, "output_router_logits": True, **_SMALL},
}
MODELS = [
    *((name, "causal-lm", True) for name in ("llama", "gpt2", *MORE)),
    *((name, "seq2seq-lm", False) for name in ("t5", "bart")),
    ("bert", "masked-lm", False),
]


@pytest.fixture
def torch_kernels(monkeypatch):
    """The kernels, on every device."""
    kernels = TorchKernels()
    monkeypatch.setattr(token_cross_entropy, "kernels_for", lambda device: kernels)
    return kernels


def a_model(name, kind="causal-lm"):
    torch.manual_seed(3)
    return load_model(copy.deepcopy(MORE.get(name) or config_of(name)), kind, {}, tokenizer()).eval()


def token_batch():
    batch = batch_of(TEXTS)
    torch.manual_seed(4)
    labels = batch["input_ids"].clone()
    labels[(batch["attention_mask"] == 0) | (torch.rand(labels.shape) < 0.4)] = -100
    return {**batch, "labels": labels}


def step_of(model, batch, how, **settings):
    model.zero_grad(set_to_none=True)
    step = build_task_loss("token-cross-entropy", how=how, **settings)(model, batch)
    step.value.backward()
    return step, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("name", "kind", "shifts"), MODELS)
def test_equals_the_plain_loss(torch_kernels, name, kind, shifts, smoothing):
    model, batch = a_model(name, kind), token_batch()
    settings = {"shifts_labels": shifts, "label_smoothing": smoothing}
    plain, wanted = step_of(model, batch, "plain", **settings)
    fused, found = step_of(model, batch, "fused", **settings)
    assert_same_up_to_rounding(fused.value, plain.value, num_roundings=16)
    assert int(fused.weight) == int(plain.weight) > 7
    assert (fused.item_mean is None) == (plain.item_mean is None)
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-5, msg=parameter)
    assert torch_kernels.overwritten == [True]
    assert not fused.logits.numel(), "the logits are overwritten, so no one may get them"


@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_half_precision_rounds_as_the_plain_loss_without_fp32_logits(torch_kernels, word):
    model, batch = a_model("llama"), token_batch()
    Precision(word, torch.device("cpu")).attach(model)
    (plain, wanted), (fused, found) = (step_of(model, batch, how, shifts_labels=True) for how in ("plain", "fused"))
    assert_same_up_to_rounding(fused.value, plain.value, num_roundings=16)
    for name, gradient in wanted.items():  # one rounding of a gradient by a logit, once more in each product
        assert float((found[name] - gradient).norm()) <= 0.02 * float(gradient.norm()), name
    assert torch_kernels.dtypes == [torch.bfloat16 if word == "bf16" else torch.float16]
    with torch.no_grad():
        step = build_task_loss("token-cross-entropy", how="fused")(model, batch)
    assert step.logits.dtype is model(input_ids=batch["input_ids"]).logits.dtype is torch.float32


def test_a_batch_without_labels_has_weight_0_and_all_gradients(torch_kernels):
    model, batch = a_model("llama"), token_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    step, found = step_of(model, batch, "fused", shifts_labels=True)
    assert float(step.value.detach()) == 0
    assert int(step.weight) == 0
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in found.values())


def test_evaluation_gets_the_logits_and_they_are_not_changed(torch_kernels):
    model, batch = a_model("llama"), token_batch()
    with torch.no_grad():
        plain = build_task_loss("token-cross-entropy", shifts_labels=True)(model, batch)
        fused = build_task_loss("token-cross-entropy", shifts_labels=True, how="fused")(model, batch)
    assert torch.equal(fused.logits, plain.logits)
    engine, found = Engine(cpu=True), []
    for how in ("plain", "fused"):
        loss = build_task_loss("token-cross-entropy", shifts_labels=True, how=how)
        own = {"mean_logit": lambda logits, batch: logits.mean(dim=(1, 2))}
        metrics = lambda: Metrics("token-cross-entropy", shifts_labels=True)  # noqa: E731
        found.append(Evaluator(engine, [batch, batch], loss, metrics, own).run(model))
    assert found[1] == pytest.approx(found[0], rel=1e-5)  # a perplexity has the error of the loss, times its size
    assert "mean_logit" in found[1]
    assert not torch_kernels.overwritten


# ---------------------------------------------------------------------- in place


def head_and_labels():
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    labels = torch.randint(0, 30, (20,))
    labels[::4] = -100
    return hidden, weight, labels


AFTER = {
    "nothing": (lambda logits: logits, True),
    "a view": (lambda logits: logits.view(4, 5, 30).flatten(0, 1), True),
    "a scale": (lambda logits: logits * 0.5, True),
    "in place": (lambda logits: logits.mul_(2).add_(1.0), True),
    "a softcap": (lambda logits: torch.tanh(logits / 3) * 3, True),
    "another dtype": (lambda logits: logits.bfloat16(), True),
    "tanh, which needs its result": (torch.tanh, False),
    "a view of it": (lambda logits: torch.tanh(logits).view(4, 5, 30).flatten(0, 1), False),
    "every second column": (lambda logits: torch.cat([logits, logits], 1)[:, ::2], True),  # copied
    "a part": (lambda logits: torch.cat([logits, logits], 1)[:, :30], False),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_is_overwritten(torch_kernels, name):
    after, is_overwritten = AFTER[name]
    hidden, weight, labels = head_and_labels()
    wanted = functional.cross_entropy(after(hidden @ weight.t()).float(), labels, reduction="none")
    wanted = torch.autograd.grad((wanted * torch.arange(20)).sum(), (hidden, weight))
    losses = fused_cross_entropy(after(hidden @ weight.t()), labels)
    assert losses.dtype is torch.float32
    found = torch.autograd.grad((losses * torch.arange(20)).sum(), (hidden, weight))
    assert torch_kernels.overwritten == [is_overwritten]
    for ours, theirs in zip(found, wanted, strict=True):
        bound = 1e-2 if name == "another dtype" else 1e-5
        assert float((ours - theirs).norm()) <= bound * float(theirs.norm())


def test_a_leaf_is_not_overwritten(torch_kernels):
    logits = torch.randn(5, 7, requires_grad=True)
    before = logits.detach().clone()
    assert not may_overwrite(logits)
    assert not may_overwrite(logits.view(7, 5))
    losses = fused_cross_entropy(logits, torch.arange(5))
    losses.sum().backward(retain_graph=True)
    losses.sum().backward()
    assert torch.equal(logits.detach(), before)
    assert torch_kernels.overwritten == [False, False]


def test_another_backward_that_needs_the_logits_is_an_error(torch_kernels):
    """And not a wrong gradient: a z-loss of the model would be computed from gradients."""
    hidden, weight, labels = head_and_labels()
    logits = hidden @ weight.t()
    other = logits.square().sum()
    total = fused_cross_entropy(logits, labels).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (total + other).backward()


def test_backward_runs_once(torch_kernels):
    hidden, weight, labels = head_and_labels()
    total = fused_cross_entropy(hidden @ weight.t(), labels).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can run only once"):
        total.backward()


def test_no_tokens(torch_kernels):
    logits = (torch.zeros(0, 8, requires_grad=True) @ torch.randn(8, 9)).requires_grad_()
    losses = fused_cross_entropy(logits, torch.zeros(0, dtype=torch.long))
    assert losses.shape == (0,)
    losses.sum().backward()


def test_other_devices_are_refused():
    with pytest.raises(LossError, match="does not support logits in torch.float32 on cpu"):
        fused_cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    assert token_cross_entropy.kernels_for(torch.device("cpu")) is None


# ---------------------------------------------------------------------- in chunks


@pytest.fixture
def kernels_in_chunks(torch_kernels, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "_MIN_CHUNK_TOKENS", 7)
    monkeypatch.setattr(linear_cross_entropy, "_CHUNK_BYTES", 1024)
    return torch_kernels


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("bound", [None, 2.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_with_kernels(kernels_in_chunks, smoothing, bound, has_bias, dtype):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(50, 16) * 2, torch.randn(300, 16), torch.randn(300) if has_bias else None
    labels = torch.randint(0, 300, (50,))
    labels[::6] = -100
    inputs = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias) if t is not None]

    def after(logits):
        return torch.tanh(logits / bound) * bound

    logits = functional.linear(*inputs)
    logits = logits if bound is None else after(logits)
    wanted = functional.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="sum")
    wanted_gradients = torch.autograd.grad(wanted * 3, inputs)
    job = Job(smoothing, None if bound is None else after, counts_hits=True, at_most=50)
    total, hits = chunked_cross_entropy(*inputs[:2], inputs[2] if has_bias else None, labels, job)
    assert_same_up_to_rounding(total, wanted, num_roundings=16)
    assert int(hits) == int((logits.argmax(-1) == labels).sum())
    size = 7 if bound is not None else 14 if dtype is torch.float32 else 28  # fewer bytes per logit, more tokens
    assert len(kernels_in_chunks.dtypes) == -(-50 // size)
    assert set(kernels_in_chunks.overwritten) == {bound is None}
    for ours, theirs in zip(torch.autograd.grad(total * 3, inputs), wanted_gradients, strict=True):
        assert float((ours - theirs).norm()) <= 16 * torch.finfo(dtype).eps * float(theirs.norm())


def test_sizes_of_chunks():
    assert chunk_rows(8192, 128_256) == 256
    assert chunk_rows(8192, 128_256, 2) == 1024
    assert chunk_rows(8192, 128_256, 4) == 512
