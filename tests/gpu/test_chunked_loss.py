"""The loss in place of logits on an accelerator: that of the plain way in each format, less memory, no waiting."""

import warnings
from importlib.util import find_spec

import pytest
import torch

from trimtab.model.chunked_loss import check_chunked_loss
from trimtab.model.losses import build_loss
from trimtab.model.precision import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
VOCAB, ROWS, LENGTH = 32_000, 4, 512
WAYS = ["chunked", pytest.param("liger", marks=pytest.mark.skipif(not find_spec("liger_kernel"), reason="no liger"))]


def a_model(family="llama", **settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 512, "vocab_size": VOCAB, "pad_token_id": 0, "head_dim": 64}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **settings)).cuda()


def a_batch():
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()
    labels = ids.clone()
    labels[:, : LENGTH // 2] = -100
    return {"input_ids": ids, "labels": labels}


def step_of(model, batch, how, **settings):
    model.zero_grad(set_to_none=True)
    step = build_loss("token-cross-entropy", shifts_labels=True, how=how, counts_hits=True, **settings)(model, batch)
    (step.value * 1024.0).backward()
    return step, {name: p.grad / 1024.0 for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16", "bf16-pure"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gemma2", {"final_logit_softcapping": 5.0})],
)
def test_equals_the_plain_way(how, precision, family, settings):
    model, batch = a_model(family, **settings), a_batch()
    Precision(precision, torch.device("cuda")).attach(model)
    assert check_chunked_loss(model, batch, how) is None
    for smoothing in (0.0, 0.1):
        plain, wanted = step_of(model, batch, "plain", label_smoothing=smoothing)
        found, gradients = step_of(model, batch, how, label_smoothing=smoothing)
        bound = 1e-5 if precision == "no" else 2e-2
        assert float(found.value.detach()) == pytest.approx(float(plain.value.detach()), rel=bound / 10)
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert gradients[name].dtype == gradient.dtype
            assert float((gradients[name] - gradient).norm()) <= bound * float(gradient.norm()) + 1e-7, name
        right = plain.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
        assert abs(int(found.hits) - int(right.sum())) <= (0 if precision == "no" else 2)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("trains", ["head", "blocks"])
def test_gradients_only_of_what_trains(how, trains):
    model, batch = a_model(), a_batch()
    for parameter in model.parameters():
        parameter.requires_grad_((parameter is model.lm_head.weight) == (trains == "head"))
    _, wanted = step_of(model, batch, "plain")
    _, found = step_of(model, batch, how)
    assert found.keys() == wanted.keys() != set()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("trains_head", [False, True])
def test_needs_less_memory(how, trains_head):
    """A bound that no tensor of all logits would fit under, beside the head's own gradient."""
    model, batch = a_model(), a_batch()
    model.lm_head.weight.requires_grad_(trains_head)
    Precision("bf16", torch.device("cuda")).attach(model)
    peaks = {}
    for way in ("plain", how):
        step_of(model, batch, way)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step_of(model, batch, way)
        peaks[way] = torch.cuda.max_memory_allocated() - before
    print({way: f"{peak / 2**20:.0f} MiB" for way, peak in peaks.items()})
    assert peaks["plain"] > 3 * ROWS * LENGTH * VOCAB * 2
    assert peaks[how] < 0.6 * peaks["plain"]


def test_labelled_positions_are_gathered_where_their_number_is_known():
    model, batch = a_model(), a_batch()
    _, wanted = step_of(model, batch, "chunked")
    known = batch | {"num_labelled": ROWS * LENGTH // 2}
    _, found = step_of(model, known, "chunked")
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-3)


def test_the_host_waits_no_more_than_plainly():
    """The model itself may wait, in making its mask."""
    model, batch = a_model(), a_batch()
    known = batch | {"num_labelled": ROWS * LENGTH // 2}
    assert num_waits(model, known, "chunked") <= num_waits(model, batch, "plain")


def num_waits(model, batch, how):
    loss = build_loss("token-cross-entropy", shifts_labels=True, how=how, counts_hits=how != "plain")
    loss(model, batch).value.backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss(model, batch).value.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)
