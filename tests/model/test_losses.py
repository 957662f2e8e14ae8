"""Losses: equal to those of transformers, exact means and weights, in fp32, without a host-device sync."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from rounding import assert_same_up_to_rounding
from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import LossError, RecipeError
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model
from trimtab.model.losses import build_loss, loss_from_function

TOKEN_MODELS = [
    ("gpt2", "causal-lm", True),
    ("llama", "causal-lm", True),
    ("t5", "seq2seq-lm", False),
    ("marian", "seq2seq-lm", False),
    ("bart", "seq2seq-lm", False),
    ("encoder-decoder", "seq2seq-lm", False),
    ("bert", "masked-lm", False),
]


class Fixed(torch.nn.Module):
    """Gives the logits that it was made with."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, **inputs):
        assert "labels" not in inputs
        return {"logits": self.logits}


def token_batch(share_ignored=0.4):
    batch = batch_of(TEXTS)
    labels = batch["input_ids"].clone()
    labels[batch["attention_mask"] == 0] = -100
    labels[torch.rand(labels.shape) < share_ignored] = -100
    return {**batch, "labels": labels}


@pytest.mark.parametrize(("name", "kind", "shifts"), TOKEN_MODELS)
def test_equals_the_loss_of_transformers_for_language_models(name, kind, shifts):
    model = load_model(config_of(name), kind, {}, tokenizer())
    # With labels in gaps an encoder-decoder hides those positions from itself, as it never does when it writes.
    batch = token_batch(share_ignored=0 if name == "encoder-decoder" else 0.4)
    before = {key: value.clone() for key, value in batch.items()}
    step = build_loss("token-cross-entropy", shifts_labels=shifts)(model, batch)
    with quiet_transformers():
        theirs = model(**batch)
    assert_same_up_to_rounding(step.value, theirs.loss, num_roundings=16)
    labelled = batch["labels"] != -100
    torch.testing.assert_close(step.logits[labelled], theirs.logits[labelled].detach())
    labels = batch["labels"][:, 1:] if shifts else batch["labels"]
    assert int(step.weight) == sum(label != -100 for label in labels.flatten().tolist())
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[key], before[key]) for key in batch)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize(
    ("kind", "head", "labels"),
    [
        ("cross-entropy", {"num_labels": 3}, torch.tensor([0, 1, 2, 2, 1])),
        ("mse", {"num_labels": 1, "problem_type": "regression"}, torch.tensor([0.5, -1.0, 2.0, 0.0, 3.5])),
        ("mse", {"num_labels": 2, "problem_type": "regression"}, torch.arange(10.0).reshape(5, 2)),
        (
            "binary-cross-entropy",
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1]]).float(),
        ),
    ],
)
def test_equals_the_loss_of_transformers_for_classifiers(name, kind, head, labels):
    model = load_model(config_of(name), "sequence-classification", head, tokenizer())
    batch = {**batch_of(TEXTS), "labels": labels}
    step = build_loss(kind)(model, batch)
    assert_same_up_to_rounding(step.value, model(**batch).loss, num_roundings=16)
    assert step.weight == 5
    assert not step.logits.requires_grad
    step.value.backward()
    assert all(p.grad is not None for p in model.score.parameters()) if name == "gpt2" else True


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_are_those_of_torch(smoothing):
    logits, labels, weights = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 0, 1]), [0.5, 2.0, 3.25]
    loss = build_loss("cross-entropy", label_smoothing=smoothing, class_weights=weights)
    step = loss(Fixed(logits), {"labels": labels})
    wanted = functional.cross_entropy(logits, labels, torch.tensor(weights), label_smoothing=smoothing)
    torch.testing.assert_close(step.value, wanted)
    assert float(step.weight) == 3 * 0.5 + 2 * 2.0 + 3.25
    for kind in ("binary-cross-entropy", "mse", "token-cross-entropy"):
        with pytest.raises(RecipeError, match="class_weights have no effect"):
            build_loss(kind, class_weights=weights)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_label_smoothing_is_that_of_torch(smoothing):
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    step = build_loss("cross-entropy", label_smoothing=smoothing)(Fixed(logits), {"labels": labels})
    torch.testing.assert_close(step.value, functional.cross_entropy(logits, labels, label_smoothing=smoothing))
    logits, labels = torch.randn(2, 4, 7), torch.tensor([[1, -100, 3, 6], [-100, 2, -100, 0]])
    step = build_loss("token-cross-entropy", label_smoothing=smoothing)(Fixed(logits), {"labels": labels})
    wanted = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(step.value, wanted)
    step = build_loss("token-cross-entropy", label_smoothing=smoothing, shifts_labels=True)(
        Fixed(logits), {"labels": labels}
    )
    wanted = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(step.value, wanted)
    assert int(step.weight) == 4


def test_micro_batches_combine_exactly():
    """Whichever way rows are cut into micro-batches, the weighted mean is that of the whole."""
    model = load_model(config_of("gpt2"), "causal-lm", {}, tokenizer())
    batch, loss = token_batch(), build_loss("token-cross-entropy", shifts_labels=True)
    whole = loss(model, batch)
    for cuts in ([1, 4], [2, 2, 1], [1] * 5):
        parts = [
            dict(zip(batch, part, strict=True)) for part in zip(*(v.split(cuts) for v in batch.values()), strict=True)
        ]
        steps = [loss(model, part) for part in parts]
        total = sum(int(step.weight) for step in steps)
        assert total == int(whole.weight)
        mean = sum(step.value * step.weight for step in steps) / total
        assert_same_up_to_rounding(mean, whole.value, num_roundings=16)


def test_a_batch_without_labels_has_weight_0():
    model = Fixed(torch.randn(2, 3, 5))
    step = build_loss("token-cross-entropy")(model, {"labels": torch.full((2, 3), -100)})
    step.value.backward()
    assert float(step.value.detach()) == 0
    assert int(step.weight) == 0
    assert not model.logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_fp32(dtype):
    logits, labels = (torch.randn(8, 50_000) * 4).to(dtype), torch.arange(8)
    step = build_loss("cross-entropy")(Fixed(logits), {"labels": labels})
    assert step.value.dtype is torch.float32
    wanted = functional.cross_entropy(logits.double(), labels)
    assert_same_up_to_rounding(step.value, wanted, num_roundings=16)


@pytest.mark.parametrize("kind", ["cross-entropy", "token-cross-entropy", "binary-cross-entropy", "mse"])
def test_nothing_is_read_from_the_device(kind):
    """Tensors on the meta device have no values: a read would raise."""
    shape = (2, 3, 5) if kind == "token-cross-entropy" else (2, 5)
    whole = kind.startswith(("cross", "token"))
    labels = torch.zeros(shape[:-1] if whole else shape, dtype=torch.long if whole else torch.float, device="meta")
    step = build_loss(kind)(Fixed(torch.randn(shape, device="meta")), {"labels": labels})
    assert step.value.device.type == "meta"
    assert isinstance(step.weight, int) or step.weight.device.type == "meta"


def test_no_key_value_cache_is_made_and_the_config_is_unchanged():
    for name, kind in [("llama", "causal-lm"), ("t5", "seq2seq-lm")]:
        model = load_model(config_of(name), kind, {}, tokenizer())
        seen = []
        model.register_forward_hook(lambda module, inputs, outputs, seen=seen: seen.append(outputs.past_key_values))
        build_loss("token-cross-entropy")(model, token_batch())
        assert seen == [None]
        assert model.config.use_cache


def test_no_key_value_cache_is_made_where_the_text_config_asks_for_one():
    text = SimpleNamespace(use_cache=True)
    model = TextInside(SimpleNamespace(get_text_config=lambda: text))
    build_loss("token-cross-entropy")(model, token_batch())
    assert model.used_cache is False


class TextInside(torch.nn.Module):
    """A model of text and images: its own config does not say whether it uses a cache."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, input_ids, attention_mask=None, use_cache=None, **others):
        self.used_cache = use_cache
        return {"logits": torch.nn.functional.one_hot(input_ids, 300).float()}


def test_shapes_that_torch_would_broadcast_are_refused():
    with pytest.raises(LossError, match=r"\[4, 2\] do not match labels of shape \[4\]"):
        build_loss("mse")(Fixed(torch.randn(4, 2)), {"labels": torch.randn(4)})
    with pytest.raises(LossError, match=r"do not match labels of shape \[4, 1\]"):
        build_loss("binary-cross-entropy")(Fixed(torch.randn(4, 2)), {"labels": torch.ones(4, 1)})
    with pytest.raises(LossError, match="do not match"):
        build_loss("token-cross-entropy")(Fixed(torch.randn(2, 3, 5)), {"labels": torch.ones(2, 4).long()})
    with pytest.raises(LossError, match="do not match"):
        build_loss("cross-entropy")(Fixed(torch.randn(2, 3)), {"labels": torch.ones(2, 3)})
    with pytest.raises(LossError, match="no labels, only input_ids"):
        build_loss("cross-entropy")(Fixed(torch.randn(2, 3)), {"input_ids": torch.ones(2, 3)})


def test_settings_without_effect_are_refused():
    with pytest.raises(RecipeError, match="kind of loss: 'hinge'"):
        build_loss("hinge")
    with pytest.raises(RecipeError, match="label_smoothing 1.5"):
        build_loss("cross-entropy", label_smoothing=1.5)
    with pytest.raises(RecipeError, match="no effect on a mse loss"):
        build_loss("mse", label_smoothing=0.1)


def test_own_loss():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    batch = {"labels": labels}

    def focal(outputs, batch):
        log_p = outputs["logits"].log_softmax(-1).gather(1, batch["labels"][:, None]).squeeze(1)
        return -((1 - log_p.exp()) ** 2 * log_p).mean()

    step = loss_from_function(focal)(Fixed(logits), batch)
    assert step.weight == 4
    assert step.value.requires_grad
    torch.testing.assert_close(step.logits, logits)
    weighted = loss_from_function(lambda outputs, batch: (outputs["logits"].mean(), 7))(Fixed(logits), batch)
    assert weighted.weight == 7
    for wrong in (lambda o, b: 0.5, lambda o, b: o["logits"].mean(1)):
        with pytest.raises(LossError, match="your loss function returned"):
            loss_from_function(wrong)(Fixed(logits), batch)
    with pytest.raises(RecipeError, match="loss='focal' is not a function"):
        loss_from_function("focal")
