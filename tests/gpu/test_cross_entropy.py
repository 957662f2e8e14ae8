"""The fused cross-entropy kernels on a GPU: equal to torch's loss, in place, without fp32 copies, in CUDA graphs."""

import warnings

import pytest
import torch
from torch.nn import functional

from trimtab.model import linear_cross_entropy
from trimtab.model.linear_cross_entropy import Job, chunked_cross_entropy
from trimtab.model.precision import Precision
from trimtab.model.token_cross_entropy import fused_cross_entropy, kernels_for
from trimtab.techniques.chunked_loss import build_task_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _triton():
    pytest.importorskip("triton", reason="needs Triton")
    if kernels_for(torch.device("cuda")) is None:
        pytest.skip("the kernels do not run on this device")


def head_and_labels(num_tokens, vocab, dtype, width=64):
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, width, device="cuda") / 4).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,), device="cuda")
    labels[::3] = -100
    return hidden, weight, labels


def relative(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 300, 32_000, 50_257, 128_256, 262_144])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_kernels_equal_torch(dtype, vocab, smoothing):
    """Losses to fp32 rounding; the gradient of each logit to one rounding of its dtype."""
    kernels = kernels_for(torch.device("cuda"))
    torch.manual_seed(0)
    logits = (torch.randn(37, vocab, device="cuda") * 4).to(dtype)
    labels = torch.randint(0, vocab, (37,), device="cuda")
    labels[::5] = -100
    factors = torch.rand(37, device="cuda")
    exact = logits.double().requires_grad_()
    wanted = functional.cross_entropy(exact, labels, label_smoothing=smoothing, reduction="none")
    wanted.backward(factors.double())
    wanted = wanted.detach()
    losses, norms = kernels.token_losses(logits, labels, smoothing)
    eps = torch.finfo(torch.float32).eps
    assert float((losses - wanted).abs().max()) <= 16 * eps * float(wanted.max())
    kernels.write_gradient(logits, labels, norms, smoothing, factors, logits)
    bound = (torch.finfo(dtype).eps + 64 * eps) * exact.grad.abs() + 16 * eps
    if dtype is torch.float16:
        bound += 2**-24  # the smallest number
    assert bool(((logits.double() - exact.grad).abs() <= bound).all())
    assert not logits[::5].any()


def test_rows_beyond_two_billion_logits():
    """Offsets of rows have 64 bits."""
    num_tokens, vocab = 20_000, 128_256
    if torch.cuda.mem_get_info()[0] < 3 * 2 * num_tokens * vocab:
        pytest.skip("needs 15 GB")
    logits = torch.zeros(num_tokens, vocab, device="cuda", dtype=torch.bfloat16)
    labels = torch.full((num_tokens,), 5, device="cuda")
    kernels = kernels_for(logits.device)
    losses, norms = kernels.token_losses(logits, labels, 0.0)
    torch.testing.assert_close(losses, torch.full_like(losses, vocab).log())
    kernels.write_gradient(logits, labels, norms, 0.0, 1.0, logits)
    assert torch.equal(logits[0], logits[-1])
    assert float(logits[-1, 5]) == -1.0
    assert float(logits[-1, 6]) == pytest.approx(1 / vocab, rel=2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_of_a_head(dtype, smoothing):
    hidden, weight, labels = head_and_labels(300, 32_000, dtype)
    total = functional.cross_entropy((hidden @ weight.t()).float(), labels, label_smoothing=smoothing, reduction="sum")
    wanted = torch.autograd.grad(total / 200, (hidden, weight))
    losses = fused_cross_entropy(hidden @ weight.t(), labels, smoothing)
    assert float(losses.detach().sum()) == pytest.approx(float(total.detach()), rel=1e-5)
    found = torch.autograd.grad(losses.sum() / 200, (hidden, weight))
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative(ours, theirs) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_nothing_to_learn(num_tokens):
    hidden, weight, _ = head_and_labels(num_tokens, 300, torch.bfloat16)
    labels = torch.full((num_tokens,), -100, device="cuda")
    losses = fused_cross_entropy(hidden @ weight.t(), labels)
    losses.sum().backward()
    assert not losses.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [None, 5.0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_chunks(monkeypatch, dtype, bound, has_bias):
    """Several chunks, with and without softcapping and a bias, against chunks without kernels."""
    hidden, weight, labels = head_and_labels(3000, 32_000, dtype)
    bias = torch.randn(32_000, device="cuda", dtype=dtype, requires_grad=True) if has_bias else None
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    after = None if bound is None else lambda logits: torch.tanh(logits / bound) * bound
    found = []
    for uses_kernels in (True, False):
        if not uses_kernels:
            monkeypatch.setattr(linear_cross_entropy, "kernels_of_chunks", lambda dtype, device: None)
        total, hits = chunked_cross_entropy(hidden, weight, bias, labels, Job(0.1, after, counts_hits=True))
        found.append((total.detach(), hits, torch.autograd.grad(total / 2000, inputs)))
    (total, hits, gradients), (wanted, wanted_hits, wanted_gradients) = found
    assert float(total) == pytest.approx(float(wanted), rel=1e-5)
    assert int(hits) == int(wanted_hits)
    for ours, theirs in zip(gradients, wanted_gradients, strict=True):
        assert ours.dtype is theirs.dtype
        # sums over 3,000 tokens in another order
        assert relative(ours, theirs) <= 16 * torch.finfo(dtype).eps


def peak_of(compute):
    compute()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compute()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_no_copy_of_the_logits():
    """Only the logits are as large as they are: in the loss, in its gradient, and in the products of the head."""
    num_tokens, vocab = 2048, 50_000
    hidden, weight, labels = head_and_labels(num_tokens, vocab, torch.bfloat16)

    def step():
        hidden.grad = weight.grad = None
        fused_cross_entropy(hidden @ weight.t(), labels).sum().backward()

    logits = 2 * num_tokens * vocab
    assert peak_of(step) < 1.1 * logits


def a_model():
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 512, "vocab_size": 32_000, "pad_token_id": 0, "head_dim": 64}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).cuda()


def a_batch():
    ids = torch.randint(0, 32_000, (4, 512), generator=torch.Generator().manual_seed(1)).cuda()
    labels = ids.clone()
    labels[:, :100] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16", "bf16-pure"])
def test_a_model_trains_as_plainly(precision):
    model, batch = a_model(), a_batch()
    Precision(precision, torch.device("cuda")).attach(model)
    found = {}
    for how in ("plain", "fused"):
        model.zero_grad(set_to_none=True)
        step = build_task_loss("token-cross-entropy", shifts_labels=True, how=how)(model, batch)
        (step.value * 1024.0).backward()
        found[how] = step.value.detach(), {name: p.grad for name, p in model.named_parameters()}
    (plain, wanted), (fused, gradients) = found.values()
    assert float(fused) == pytest.approx(float(plain), rel=1e-5)
    for name, gradient in wanted.items():
        assert relative(gradients[name], gradient) <= (1e-5 if precision == "no" else 1e-2), name


def test_memory_of_a_model_and_its_evaluation():
    """bf16 logits once: the plain loss holds at least 9 bytes more for each."""
    model, batch = a_model(), a_batch()
    Precision("bf16-pure", torch.device("cuda")).attach(model)
    peaks = {}
    for how in ("plain", "fused"):
        loss = build_task_loss("token-cross-entropy", shifts_labels=True, how=how)

        def step(loss=loss):
            model.zero_grad(set_to_none=True)
            loss(model, batch).value.backward()

        peaks[how] = peak_of(step)
    num_logits = batch["labels"].numel() * 32_000
    assert peaks["plain"] - peaks["fused"] > 9 * num_logits
    with torch.no_grad():
        plain, fused = (
            build_task_loss("token-cross-entropy", shifts_labels=True, how=how)(model, batch)
            for how in ("plain", "fused")
        )
    assert torch.equal(fused.logits, plain.logits)


@pytest.mark.parametrize("how", ["fused", "chunked"])
def test_captured_in_a_graph(how):
    hidden, weight, labels = head_and_labels(1500, 32_000, torch.bfloat16)
    other = head_and_labels(1500, 32_000, torch.bfloat16)[0].detach().flip(0)

    def step():
        if how == "fused":
            total = fused_cross_entropy(hidden @ weight.t(), labels, 0.1).sum()
        else:
            total = chunked_cross_entropy(hidden, weight, None, labels, Job(0.1))[0]
        total.backward()
        return total.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    hidden.grad.zero_(), weight.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = step()
    for values in (hidden.detach().clone(), other):
        with torch.no_grad():
            hidden.copy_(values)
            hidden.grad.zero_(), weight.grad.zero_()
        graph.replay()
        replayed = [total.clone(), hidden.grad.clone(), weight.grad.clone()]
        hidden.grad.zero_(), weight.grad.zero_()
        wanted = step()
        for found, expected in zip(replayed, (wanted, hidden.grad, weight.grad), strict=True):
            assert relative(found, expected) <= torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("how", ["fused", "chunked"])
def test_no_host_device_sync(how):
    hidden, weight, labels = head_and_labels(1500, 32_000, torch.bfloat16)

    def step():
        if how == "fused":
            fused_cross_entropy(hidden @ weight.t(), labels).sum().backward()
        else:
            chunked_cross_entropy(hidden, weight, None, labels, Job())[0].backward()

    step()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    assert not [warning for warning in caught if "synchroniz" in str(warning.message)]
