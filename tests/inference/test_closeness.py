"""How near two models are: numbers that can be worked out by hand, in every task, and nothing left changed."""

import copy
import math

import pytest
import torch

from tiny_models import CONFIGS, TEXTS, batch_of, config_of, tokenizer
from trimtab.inference.comparison import ModelComparison, OutputDivergence, computed_in_fp32
from trimtab.model.forward import logits_of, run_model
from trimtab.model.load import load_model

KINDS = {"bert": "masked-lm", "roberta": "masked-lm", "gpt2": "causal-lm", "llama": "causal-lm"}
CPU = torch.device("cpu")


class FakeTask:
    """Rows that are their own batches."""

    def __init__(self, loss_kind, shifts_labels=False):
        self.loss_kind, self.shifts_labels = loss_kind, shifts_labels

    def collate(self, examples, epoch=0):
        batch = {}
        for name, fill in (("input_ids", 0), ("labels", -100)):
            rows = [example[name] for example in examples]
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, True, fill) if rows[0].dim() else torch.stack(rows)
        return batch


class Table(torch.nn.Module):
    """Answers each token with its row of a table; with `per_row`, a row of tokens with that of its first."""

    def __init__(self, table, per_row=False):
        super().__init__()
        self.table = torch.nn.Parameter(torch.as_tensor(table, dtype=torch.float32))
        self.per_row = per_row

    def forward(self, input_ids):
        return (self.table[input_ids[:, 0] if self.per_row else input_ids],)


def closeness(task, examples, one, other, per_row=False):
    first, second = Table(one, per_row), Table(other, per_row)
    questions = ModelComparison(task, examples, first.table.shape[1], CPU)
    questions.record_reference(first)
    return questions.compare(second)


def rows(*tokens, labels=None):
    pairs = zip(tokens, labels or tokens, strict=True)
    return [{"input_ids": torch.tensor(row), "labels": torch.tensor(label)} for row, label in pairs]


def logs(*probabilities):
    return [[math.log(p) + 3.0 for p in row] for row in probabilities]  # a constant changes no distribution


def test_tokens():
    """Two tokens: one is answered the same, one with (0.5, 0.5) against (0.9, 0.1) and another first choice."""
    one, other = logs((0.7, 0.3), (0.4, 0.6)), logs((0.7, 0.3), (0.9, 0.1))
    differs = 0.4 * math.log(0.4 / 0.9) + 0.6 * math.log(0.6 / 0.1)
    found = closeness(FakeTask("token-cross-entropy"), rows([0, 1], [0, 0, 0]), one, other)
    assert found.kl_mean == pytest.approx(differs / 5, rel=1e-5)
    assert found.kl_max == pytest.approx(differs, rel=1e-5)
    assert found.agreement == pytest.approx(4 / 5)
    assert (found.num_answers, found.num_rows) == (5, 2)
    # of a causal model the last token answers for nobody
    shifted = closeness(FakeTask("token-cross-entropy", shifts_labels=True), rows([0, 1], [0, 0, 0]), one, other)
    assert (shifted.kl_mean, shifted.num_answers) == (0.0, 3)
    hidden = rows([0, 1], labels=[[-100, 1]])
    assert closeness(FakeTask("token-cross-entropy"), hidden, one, other).kl_mean == pytest.approx(differs, rel=1e-5)


def test_classes_and_labels():
    one, other = logs((0.7, 0.3), (0.4, 0.6)), logs((0.7, 0.3), (0.9, 0.1))
    differs = 0.4 * math.log(0.4 / 0.9) + 0.6 * math.log(0.6 / 0.1)
    found = closeness(FakeTask("cross-entropy"), rows([0], [1], labels=[0, 1]), one, other, per_row=True)
    assert found == OutputDivergence(pytest.approx(differs / 2), pytest.approx(differs), 0.5, 2, 2)
    # two labels of a row: the first with probability 0.8 and 0.5, the second the same in both
    one, other = [[math.log(0.8 / 0.2), -1.0]], [[math.log(0.4 / 0.6), -1.0]]
    differs = 0.8 * math.log(0.8 / 0.4) + 0.2 * math.log(0.2 / 0.6)
    found = closeness(FakeTask("binary-cross-entropy"), rows([0], labels=[0]), one, other, per_row=True)
    assert found == OutputDivergence(pytest.approx(differs), pytest.approx(differs), 0.0, 1, 1)


def test_numbers():
    """In units of their spread: predictions 1 and 3 have a standard deviation of 1."""
    task = FakeTask("mse")
    near = closeness(task, rows([0], [1], labels=[0, 0]), [[1.0], [3.0]], [[1.05], [3.0]], per_row=True)
    assert near == OutputDivergence(
        pytest.approx(0.05**2 / 4, rel=1e-4), pytest.approx(0.05**2 / 2, rel=1e-4), 1.0, 2, 2
    )
    far = closeness(task, rows([0], [1], labels=[0, 0]), [[1.0], [3.0]], [[2.0], [3.0]], per_row=True)
    assert far == OutputDivergence(pytest.approx(0.25), pytest.approx(0.5), 0.5, 2, 2)
    scaled = closeness(task, rows([0], [1], labels=[0, 0]), [[100.0], [300.0]], [[200.0], [300.0]], per_row=True)
    assert scaled.kl_mean == pytest.approx(0.25)


def test_a_broken_model_is_never_near():
    found = closeness(FakeTask("token-cross-entropy"), rows([0]), [[0.0, 1.0]], [[math.nan, 1.0]])
    assert math.isnan(found.kl_mean)
    found = closeness(FakeTask("token-cross-entropy"), rows([0]), [[0.0, -math.inf]], [[0.0, -math.inf]])
    assert found.kl_mean == 0.0
    found = closeness(FakeTask("token-cross-entropy"), rows([0]), [[0.0, 0.0]], [[0.0, -math.inf]])
    assert found.kl_mean == math.inf


def test_long_rows_are_asked_at_even_distances(monkeypatch):
    """No more is kept than there is room for; a short row is asked everywhere."""
    monkeypatch.setattr("trimtab.inference.comparison._KEPT_BYTES", 2 * 3 * 4 * 5)  # five answers of three in each row
    one = torch.zeros(40, 3)
    other = one.clone()
    other[[0, 8, 16, 24, 32], 0] = 1.0  # every eighth token is answered otherwise
    found = closeness(FakeTask("token-cross-entropy"), rows(list(range(40)), [1, 2]), one, other)
    assert found.num_answers == 5 + 2
    assert found.agreement == 1.0  # the first of three equal ones is still the first
    different = (torch.tensor([1.0, 0, 0]).log_softmax(0) - math.log(1 / 3)).mean().neg().item()
    assert found.kl_mean == pytest.approx(different * 5 / 7, rel=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_halves_compute_in_fp32(name):
    """As the same weights in fp32 would, and afterwards every weight is the tensor that it was."""
    kind = KINDS.get(name, "seq2seq-lm")
    model = load_model(config_of(name), kind, {}, tokenizer()).to(torch.bfloat16)
    wide = copy.deepcopy(model).float()
    before = {key: (p.dtype, p.data_ptr()) for key, p in model.named_parameters()}
    batch = batch_of(TEXTS)
    batch["labels"] = batch["input_ids"].clone()
    with torch.no_grad(), computed_in_fp32(model, CPU):
        found = logits_of(run_model(model, batch))
    with torch.no_grad():
        expected = logits_of(run_model(wide, batch))
    assert found.dtype is torch.float32
    # T5 rounds what goes into the second layer of its feed-forward to the dtype of that layer's weight
    tolerance = 0.02 if name == "t5" else 0.0
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)
    assert {key: (p.dtype, p.data_ptr()) for key, p in model.named_parameters()} == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_an_error_leaves_the_weights_as_they_were():
    model = load_model(config_of("gpt2"), "causal-lm", {}, tokenizer()).to(torch.bfloat16)
    with pytest.raises(IndexError), computed_in_fp32(model, CPU):
        model(input_ids=torch.tensor([[10_000]]))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
