"""The loss without logits: equal to the plain loss with all gradients, without a tensor of the size of all logits."""

import copy
import gc
import threading
from weakref import ref

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rounding import assert_as_exact, assert_same_up_to_rounding
from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.data.metrics import Metrics
from trimtab.engine.engine import Engine
from trimtab.errors import LossError, MissingDependency, RecipeError
from trimtab.model import linear_cross_entropy
from trimtab.model.chunked_loss import check_chunked_loss
from trimtab.model.linear_cross_entropy import Job, chunk_rows, chunked_cross_entropy, logits_bytes
from trimtab.model.load import load_model
from trimtab.model.precision import Precision
from trimtab.techniques.chunked_loss import build_task_loss as build_loss
from trimtab.training.evaluate import Evaluator

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_GATED = {**_SMALL, "num_key_value_heads": 1, "max_position_embeddings": 64}
AFTER_THE_HEAD = {
    "gemma2": {"model_type": "gemma2", "final_logit_softcapping": 0.5, "head_dim": 16, **_GATED},
    "cohere": {"model_type": "cohere", "logit_scale": 0.3, **_GATED},
    "granite": {"model_type": "granite", "logits_scaling": 0.2, **_GATED},
}
MORE_HEADS = {
    "roberta": config_of("roberta"),
    "modernbert": {"model_type": "modernbert", "max_position_embeddings": 64, **_SMALL},
    "distilbert": {"model_type": "distilbert", "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48},
}
MODELS = [
    *((name, "causal-lm", True) for name in ("gpt2", "llama")),
    *((name, "seq2seq-lm", False) for name in ("t5", "marian", "bart", "encoder-decoder")),
    ("bert", "masked-lm", False),
    *((name, "causal-lm", True) for name in AFTER_THE_HEAD),
    *((name, "masked-lm", False) for name in MORE_HEADS),
]


def a_model(name, kind="causal-lm"):
    torch.manual_seed(3)
    config = {**AFTER_THE_HEAD, **MORE_HEADS}.get(name) or config_of(name)
    model = load_model(copy.deepcopy(config), kind, {}, tokenizer()).eval()  # no dropout
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("final_logits_bias"):
            buffer.normal_()
    return model


def token_batch():
    batch = batch_of(TEXTS)
    labels = batch["input_ids"].clone()
    labels[(batch["attention_mask"] == 0) | (torch.rand(labels.shape) < 0.4)] = -100
    return {**batch, "labels": labels}


def both_ways(model, batch, **settings):
    """(step, gradients) of the plain and of the chunked loss."""
    found = []
    for how in ("plain", "chunked"):
        model.zero_grad(set_to_none=True)
        step = build_loss("token-cross-entropy", how=how, **settings)(model, batch)
        step.value.backward()
        found.append((step, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    return found


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of seven tokens of a vocabulary of 300."""
    monkeypatch.setattr(linear_cross_entropy, "_MIN_CHUNK_TOKENS", 7)
    monkeypatch.setattr(linear_cross_entropy, "_CHUNK_BYTES", 1024)


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation made, and the shape it had."""

    def __init__(self):
        super().__init__()
        self.num_elements, self.shape = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or storage_of(leaf) in known:  # a view of what was there
                continue
            if leaf.numel() > self.num_elements:
                self.num_elements, self.shape = leaf.numel(), list(leaf.shape)
        return result


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("name", "kind", "shifts"), MODELS)
def test_equals_the_plain_loss(small_chunks, name, kind, shifts, smoothing):
    model, batch = a_model(name, kind), token_batch()
    assert check_chunked_loss(model, batch) is None
    (plain, wanted), (chunked, found) = both_ways(model, batch, shifts_labels=shifts, label_smoothing=smoothing)
    assert_same_up_to_rounding(chunked.value, plain.value, num_roundings=16)
    assert int(plain.weight) == int(chunked.weight) > 7
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-5, msg=parameter)
    assert not chunked.logits.numel()


def test_operations_after_the_head_change_the_loss():
    """Without it the models above would not show that it is done."""
    for name, key, value in (("gemma2", "final_logit_softcapping", None), ("granite", "logits_scaling", 1.0)):
        model, batch = a_model(name), token_batch()
        before = build_loss("token-cross-entropy")(model, batch).value
        setattr(model.config, key, value)
        after = build_loss("token-cross-entropy")(model, batch).value
        assert abs(float(before.detach()) - float(after.detach())) > 1e-4


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("bound", [None, 2.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("at_most", [None, 45, 50, 1000])
def test_the_kernel_alone(small_chunks, smoothing, bound, has_bias, at_most):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(50, 16) * 2, torch.randn(300, 16), torch.randn(300) if has_bias else None
    labels = torch.randint(0, 300, (50,))
    labels[::6] = -100
    assert int((labels != -100).sum()) <= 45
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]

    def after(logits):
        return torch.tanh(logits / bound) * bound

    def plain(inputs):
        logits = functional.linear(*inputs)
        logits = logits if bound is None else after(logits)
        loss = functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
        return logits, loss, torch.autograd.grad(loss * 3, inputs)

    logits, wanted, plain_gradients = plain(inputs)
    exact_gradients = plain([tensor.detach().double().requires_grad_() for tensor in inputs])[2]
    job = Job(smoothing, None if bound is None else after, counts_hits=True, at_most=at_most)
    total, hits = chunked_cross_entropy(hidden, weight, bias, labels, job)
    assert_same_up_to_rounding(total, wanted, num_roundings=16)
    assert int(hits) == int((logits.argmax(-1) == labels).sum())
    gradients = torch.autograd.grad(total * 3, inputs)
    for ours, theirs, exact in zip(gradients, plain_gradients, exact_gradients, strict=True):
        assert_as_exact(ours, theirs, exact)


@pytest.mark.parametrize("trains", ["all", "blocks", "head"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_only_of_trainable_parameters(small_chunks, name, trains):
    """A frozen head, as under an adapter; a trained one on frozen blocks; gpt2's is its embedding as well."""
    model, batch = a_model(name), token_batch()
    head = model.get_output_embeddings().weight
    for parameter in model.parameters():
        parameter.requires_grad_(trains == "all" or (parameter is head) == (trains == "head"))
    assert (head is model.get_input_embeddings().weight) == (name == "gpt2")
    (_, wanted), (_, found) = both_ways(model, batch, shifts_labels=True)
    assert found.keys() == wanted.keys() != set()
    assert (head.grad is not None) == (trains != "blocks")
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-5)


def test_no_tensor_of_all_logits_is_ever_made(monkeypatch):
    """Neither in forward nor in backward, nor with a trainable head; the plain loss shows that the check works."""
    monkeypatch.setattr(linear_cross_entropy, "_MIN_CHUNK_TOKENS", 16)
    monkeypatch.setattr(linear_cross_entropy, "_CHUNK_BYTES", 16 * 4 * 5000)
    vocab, rows, length = 5000, 4, 60
    model = load_model({**config_of("llama"), "vocab_size": vocab}, "causal-lm", {}, None)
    ids = torch.randint(0, vocab, (rows, length))
    batch = {"input_ids": ids, "labels": ids}
    weight = model.lm_head.weight.numel()
    assert rows * length * vocab > 4 * max(weight, 16 * vocab)
    for autocast in (None, "bf16"):
        if autocast:
            Precision(autocast, torch.device("cpu")).attach(model)
        found = {}
        for how in ("plain", "chunked"):
            loss = build_loss("token-cross-entropy", shifts_labels=True, how=how)
            loss(model, batch)  # what is done once
            model.zero_grad()
            kept = {}
            with (
                torch.autograd.graph.saved_tensors_hooks(
                    lambda t, kept=kept: kept.setdefault(t.data_ptr(), t.numel()) and t, lambda t: t
                ),
                Largest() as largest,
            ):
                step = loss(model, batch)
                step.value.backward()
            found[how] = largest, max(kept.values())
        assert found["plain"][0].num_elements >= 236 * vocab
        assert found["plain"][1] >= 236 * vocab
        assert found["chunked"][0].num_elements == weight, found["chunked"][0].shape
        assert found["chunked"][1] <= weight


def test_evaluation_keeps_no_gradients(small_chunks):
    model, batch = a_model("llama"), token_batch()
    loss = build_loss("token-cross-entropy", shifts_labels=True, how="chunked")
    loss(model, batch)
    weight = model.lm_head.weight.shape
    with torch.no_grad(), Largest() as largest:
        step = loss(model, batch)
    assert not step.value.requires_grad
    assert largest.num_elements < weight.numel()  # no gradient of the head was made
    assert step.hits is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "gemma2"])
def test_half_precision_is_about_as_exact_as_plain(small_chunks, name, dtype):
    """Against fp32: gradients of the head, and those below it, have about the error of those of the plain loss."""
    kind = "seq2seq-lm" if name == "bart" else "causal-lm"
    model, batch = a_model(name, kind), token_batch()
    (_, exact), _ = both_ways(model, batch)
    word = "bf16" if dtype is torch.bfloat16 else "fp16"
    Precision(word, torch.device("cpu")).attach(model)
    assert check_chunked_loss(model, batch) is None
    (plain, by_plain), (chunked, by_chunks) = both_ways(model, batch)
    assert chunked.value.dtype is torch.float32
    assert abs(float(plain.value.detach() - chunked.value.detach())) < 1e-3
    head = next(name for name, p in model.named_parameters() if p is model.get_output_embeddings().weight)
    assert all(gradient.dtype is torch.float32 for gradient in by_chunks.values())
    for parameters in ([head], exact):
        ours, theirs = (
            sum(float((found[name] - exact[name]).square().sum()) for name in parameters) ** 0.5
            for found in (by_chunks, by_plain)
        )
        # the gradient of the hidden states is rounded twice: when computed, and when multiplied by that of the loss
        assert 0 < ours <= 1.3 * theirs, parameters


def test_weights_kept_in_bf16():
    model, batch = a_model("llama").to(torch.bfloat16), token_batch()
    assert check_chunked_loss(model, batch) is None
    (plain, wanted), (chunked, found) = both_ways(model, batch, shifts_labels=True)
    assert abs(float(plain.value.detach() - chunked.value.detach())) < 2e-3
    for parameter, gradient in wanted.items():
        assert found[parameter].dtype is torch.bfloat16
        assert float((found[parameter] - gradient).norm()) <= 0.03 * float(gradient.norm())


def test_fp16_neither_overflows_nor_underflows(small_chunks):
    """A gradient of the weight above 65,504, and a loss scale that comes only in the backward pass."""
    labels = torch.zeros(2000, dtype=torch.long)
    hidden = torch.full((2000, 8), 60.0, requires_grad=True)
    weight = torch.zeros(50, 8, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        total = chunked_cross_entropy(hidden, weight, None, labels, Job())[0]
    total.backward()
    torch.testing.assert_close(weight.grad[0], torch.full((8,), -2000 * 60 * 0.98), rtol=1e-3, atol=0)
    vocab = 60_000  # each token has a probability of 1.7e-5, less than fp16 can tell exactly
    hidden, weight = torch.zeros(4, 8, requires_grad=True), torch.zeros(vocab, 8, requires_grad=True)
    weight.data[:, 0] = 1.0
    hidden.data[:, 1] = 1.0
    for scale in (1.0, 65536.0):
        weight.grad = hidden.grad = None
        with torch.autocast("cpu", torch.float16):
            total = chunked_cross_entropy(hidden, weight, None, torch.zeros(4, dtype=torch.long), Job())[0]
        (total / 4 * scale).backward()
        torch.testing.assert_close(weight.grad[5, 1] / scale, torch.tensor(1 / vocab), rtol=2e-3, atol=0)


def test_a_factor_is_not_rounded_to_half_precision():
    """bf16 has 8 bits: a mean over 3 tokens would make every gradient wrong by the same 0.1%."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 256).bfloat16().requires_grad_()
    weight, labels = torch.randn(100, 256).bfloat16(), torch.randint(0, 100, (64,))
    total = chunked_cross_entropy(hidden, weight, None, labels, Job())[0]
    (whole,) = torch.autograd.grad(total, hidden)
    (third,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, None, labels, Job())[0] / 3, hidden)
    assert abs(float(third.double().norm() * 3 / whole.double().norm()) - 1) < 3e-4


def test_a_batch_without_labels_has_weight_0():
    """And every parameter still has a gradient, for which other processes may wait."""
    model, batch = a_model("llama"), token_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    (_, wanted), (step, found) = both_ways(model, batch, shifts_labels=True)
    assert float(step.value.detach()) == 0
    assert int(step.weight) == 0
    assert found.keys() == wanted.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in found.values())


def test_gradient_checkpointing_of_blocks(small_chunks):
    model, batch = a_model("llama"), token_batch()
    (_, wanted), _ = both_ways(model, batch, shifts_labels=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    _, (_, found) = both_ways(model, batch, shifts_labels=True)
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-5)


def test_nothing_is_read_from_the_device():
    """On the meta device a read would raise; with a bound on the number of labels only so many are computed."""
    model = Odd(lambda model, hidden: model.head(hidden)).to("meta")
    ids = torch.zeros(2, 30, dtype=torch.long, device="meta")
    loss = build_loss("token-cross-entropy", shifts_labels=True, how="chunked", counts_hits=True)
    batch = {"input_ids": ids, "labels": ids}
    loss(model, batch)
    for at_most, num_rows in ((None, 60), (40, 40)):
        with Largest() as largest:
            step = loss(model, batch if at_most is None else batch | {"num_labelled": at_most})
            step.value.backward()
        assert largest.num_elements == num_rows * 300
    assert step.hits.is_meta


def test_random_numbers_are_those_of_the_plain_loss():
    """Trying the model on a short row draws none, and leaves each module in its mode: dropout masks are the same."""
    batch, values = token_batch(), []
    for how in ("plain", "chunked"):
        model = load_model({**config_of("gpt2"), "resid_pdrop": 0.4}, "causal-lm", {}, tokenizer())
        model.load_state_dict(a_model("gpt2").state_dict())
        model.train()
        model.transformer.h[0].eval()
        torch.manual_seed(5)
        values.append(build_loss("token-cross-entropy", shifts_labels=True, how=how)(model, batch).value)
        assert model.training
        assert not model.transformer.h[0].mlp.training
    assert_same_up_to_rounding(*values, num_roundings=16)


def test_evaluation_without_logits(small_chunks):
    """Loss, perplexity and token accuracy as from logits; what needs logits says so."""
    model, batches = a_model("llama"), [token_batch(), token_batch()]
    with torch.no_grad():  # some tokens are predicted correctly then
        model.lm_head.weight.copy_(model.get_input_embeddings().weight * 30)
    engine = Engine(cpu=True)

    def evaluate(how, names, own=None, counts_hits=True):
        loss = build_loss("token-cross-entropy", shifts_labels=False, how=how, counts_hits=counts_hits)
        return Evaluator(engine, batches, loss, lambda: Metrics("token-cross-entropy", names), own).run(model)

    names = ["loss", "perplexity", "token_accuracy"]
    plain, chunked = evaluate("plain", names), evaluate("chunked", names)
    assert chunked == pytest.approx(plain, rel=2e-5)  # of perplexity the exponent is rounded
    assert 0 < chunked["token_accuracy"] < 1
    assert evaluate("chunked", ["loss"], counts_hits=False) == pytest.approx({"loss": plain["loss"]}, rel=2e-6)
    with pytest.raises(LossError, match="token_accuracy can be computed without logits"):
        evaluate("chunked", names, counts_hits=False)
    own = {"spread": lambda logits, batch: logits.std(dim=(1, 2))}
    assert evaluate("plain", ["loss"], own)["spread"] > 0
    with pytest.raises(LossError, match="spread need the logits"):
        evaluate("chunked", ["loss"], own)


class Odd(torch.nn.Module):
    """A model with a custom operation on its logits."""

    def __init__(self, odd):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.odd = odd

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None):
        return {"logits": self.odd(self, self.table(input_ids))}


ODD = {
    "applies 'relu' to its logits": lambda m, h: m.head(h).relu(),
    "applies '__getitem__' to its logits": lambda m, h: m.head(h)[:, :5],
    "with a tensor that is not one of its buffers": lambda m, h: m.head(h) * m.scale,
    "uses its output layer more than once": lambda m, h: m.head(h) + m.head(h * 2),
    "are not those of its output layer": lambda m, h: functional.linear(h, m.head.weight),
    "hidden states of shape [1, 4, 8] do not match labels of shape [1, 5]": lambda m, h: m.head(h[:, 1:]),
}


@pytest.mark.parametrize("reason", list(ODD))
def test_unsupported_operations_on_logits_are_refused(reason):
    model, batch = Odd(ODD[reason]), {"input_ids": torch.arange(5)[None], "labels": torch.arange(5)[None]}
    assert reason in check_chunked_loss(model, batch)
    assert "forward" not in model.head.__dict__
    with pytest.raises(LossError):
        build_loss("token-cross-entropy", how="chunked")(model, batch)
    assert "forward" not in model.head.__dict__


def test_check_head_finds_a_different_loss():
    """A model that looks at who calls its head."""

    def sly(model, hidden):
        return model.head(hidden if "forward" in model.head.__dict__ else hidden * 3)

    batch = {"input_ids": torch.arange(5)[None], "labels": torch.arange(5)[None]}
    assert "the loss computed in the head is" in check_chunked_loss(Odd(sly), batch)
    assert check_chunked_loss(Odd(lambda model, hidden: model.head(hidden)), batch) is None


def test_shape_and_dtype_of_logits_can_be_read():
    def curious(model, hidden):
        logits = model.head(hidden)
        assert logits.shape == (*hidden.shape[:2], 300)
        assert (logits.dim(), logits.size(-1), logits.device, logits.dtype) == (3, 300, hidden.device, hidden.dtype)
        logits = logits.float().contiguous()
        logits *= 0.25
        return 2 * logits.to(torch.float32)

    model, batch = Odd(curious), {"input_ids": torch.arange(5)[None], "labels": torch.arange(5)[None]}
    assert check_chunked_loss(model, batch) is None
    (plain, wanted), (chunked, found) = both_ways(model, batch)
    torch.testing.assert_close(plain.value, chunked.value)
    torch.testing.assert_close(found["head.weight"], wanted["head.weight"])


def test_heads_that_are_not_plain_linear_modules_are_refused():
    batch = token_batch()
    classifier = load_model(config_of("bert"), "sequence-classification", {"num_labels": 3}, tokenizer())
    assert "has no output layer" in check_chunked_loss(classifier, batch)
    assert "has no output layer" in check_chunked_loss(torch.nn.Linear(2, 2), batch)
    model = a_model("llama")
    model.lm_head.forward = lambda hidden: functional.linear(hidden, model.lm_head.weight)
    assert "with a custom forward" in check_chunked_loss(model, batch)

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.weight = base, base.weight

        def forward(self, hidden):
            return self.base_layer(hidden)

    model = a_model("llama")
    model.lm_head = Adapted(model.lm_head)
    assert "Adapted with a custom forward" in check_chunked_loss(model, batch)
    with pytest.raises(LossError, match="Adapted with a custom forward"):
        build_loss("token-cross-entropy", how="chunked")(model, batch)


def test_a_head_of_four_bits_is_refused():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = a_model("llama")
    model.lm_head = bitsandbytes.nn.Linear4bit(32, len(model.lm_head.weight), bias=False).to("cpu")
    assert "Linear4bit with a custom forward" in check_chunked_loss(model, token_batch())


def test_logits_to_keep_is_an_error_as_with_the_plain_loss():
    model, batch = a_model("llama"), token_batch() | {"logits_to_keep": 2}
    for how in ("plain", "chunked"):
        with pytest.raises(LossError, match="do not match labels"):
            build_loss("token-cross-entropy", how=how)(model, batch)
    assert model(**batch_of(["a cat"])).logits.shape[-1] == len(model.lm_head.weight)


def test_a_model_that_changes_its_operations_is_an_error():
    model, batch = a_model("gemma2"), token_batch()
    loss = build_loss("token-cross-entropy", how="chunked")
    loss(model, batch)
    model.config.final_logit_softcapping = None
    with pytest.raises(LossError, match="applies nothing to its logits, but applied div, tanh, mul before"):
        loss(model, batch)


def test_current_buffers_are_used():
    """Moving a model gives it new buffers; one noted at the first call would be stale."""
    model, batch = a_model("bart", "seq2seq-lm"), token_batch()
    (before, _), _ = both_ways(model, batch)
    model.final_logits_bias = model.final_logits_bias * 3
    (plain, _), (chunked, _) = both_ways(model, batch)
    assert abs(float(plain.value.detach() - before.value.detach())) > 1e-3
    assert_same_up_to_rounding(chunked.value, plain.value, num_roundings=16)


def test_other_threads_still_get_logits():
    seen = []

    def slow(model, hidden):
        if threading.current_thread() is threading.main_thread() and model.training:
            other = threading.Thread(target=lambda: seen.append(model.head(hidden.detach())))
            other.start()
            other.join()
        return model.head(hidden)

    model, batch = Odd(slow), {"input_ids": torch.arange(5)[None], "labels": torch.arange(5)[None]}
    build_loss("token-cross-entropy", how="chunked")(model, batch)
    assert [type(logits) for logits in seen] == [torch.Tensor]
    assert seen[0].shape == (1, 5, 300)


def test_backward_runs_once_and_frees_gradients():
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    total = chunked_cross_entropy(hidden, weight, None, torch.arange(5), Job())[0]
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can run only once"):
        total.backward()
    model, batch = a_model("llama"), token_batch()
    build_loss("token-cross-entropy", how="chunked")(model, batch).value.backward()
    watched = ref(model)
    del model
    gc.collect()
    assert watched() is None  # what was noted about it does not keep it


def test_settings():
    with pytest.raises(RecipeError, match="'fast' is not valid"):
        build_loss("token-cross-entropy", how="fast")
    with pytest.raises(RecipeError, match="does not support a cross-entropy loss"):
        build_loss("cross-entropy", how="chunked")
    if not torch.cuda.is_available():
        with pytest.raises((RecipeError, MissingDependency), match="liger"):
            build_loss("token-cross-entropy", how="liger")


def test_sizes():
    assert logits_bytes(8, 1024, 32_000) == 8 * 1024 * 32_000 * 4
    for num_tokens, vocab in ((8192, 32_000), (8192, 128_256), (513, 32_000), (10, 128_256), (0, 50), (1, 5)):
        rows = chunk_rows(num_tokens, vocab)
        assert rows * vocab * 4 <= max(64 * 2**20, 256 * 4 * vocab)
        assert rows <= max(1, num_tokens)
    assert chunk_rows(1050, 32_000) == 350  # three alike, and not two full ones and a rest
