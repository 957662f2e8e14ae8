"""The loss of a student: equal to formulas written by hand, over the same items as the loss of the labels."""

import copy

import pytest
import torch
from torch.nn import functional

from library_versions import skip_before
from rounding import assert_same_up_to_rounding
from tiny_models import KINDS, config_of, tokenizer
from tiny_runs import NO_DROPOUT
from trimtab.errors import LossError, RecipeError
from trimtab.model.distillation import (
    DistillationLoss,
    DistillTerms,
    LayerTerm,
    divergence,
    soft_targets,
)
from trimtab.model.load import load_model
from trimtab.model.losses import build_loss

T, ALPHA = 2.0, 0.7
HEAD = {"num_labels": 3}


def build(name, seed, num_layers=2, **changes):
    torch.manual_seed(seed)
    no_dropout = NO_DROPOUT["bert"] if name in ("bert", "roberta") else NO_DROPOUT.get(name, {})
    config = config_of(name) | no_dropout | changes
    for key in ("num_hidden_layers", "n_layer"):
        if key in config:
            config[key] = num_layers
    return load_model(config, KINDS[name], HEAD if name == "bert" else {}, tokenizer()).train()


def frozen(model):
    return model.eval().requires_grad_(False)


def rows(num_rows=6, length=9, *, with_tokens=True):
    """Rows of different lengths, padded at the end; some tokens have no label."""
    torch.manual_seed(5)
    ids = torch.randint(5, 200, (num_rows, length))
    mask = (torch.arange(length) < torch.randint(4, length + 1, (num_rows, 1))).long()
    mask[0] = 1
    labels = torch.where((mask == 1) & (torch.rand(ids.shape) < 0.7), ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels if with_tokens else ids[:, 0] % 3}


def loss_of(kind, teacher, terms, *, shifts=False):
    return DistillationLoss(kind, shifts_labels=shifts, label_smoothing=0.0, terms=terms, teacher=teacher)


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def by_hand(student, teacher, batch, *, shifts):
    """A loop as one writes it: labels and Kullback-Leibler divergence over the labelled items."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    ours, labels = student(**inputs).logits, batch["labels"]
    with torch.no_grad():
        theirs = teacher(**inputs).logits
    if labels.dim() == 2:
        if shifts:
            ours, theirs, labels = ours[:, :-1], theirs[:, :-1], labels[:, 1:]
        ours, theirs, labels = (each[labels != -100] for each in (ours, theirs, labels))
    hard = functional.cross_entropy(ours, labels)
    soft = functional.kl_div(
        functional.log_softmax(ours / T, -1), functional.softmax(theirs / T, -1), reduction="batchmean"
    )
    return (1 - ALPHA) * hard + ALPHA * T**2 * soft


@pytest.mark.parametrize(
    ("name", "kind", "shifts"),
    [
        ("bert", "cross-entropy", False),
        ("roberta", "token-cross-entropy", False),
        ("llama", "token-cross-entropy", True),
    ],
)
def test_loss_and_gradients_are_those_of_a_loop_by_hand(name, kind, shifts):
    student, teacher = build(name, 1, 1), frozen(build(name, 2))
    twin, batch = copy.deepcopy(student), rows(with_tokens=name != "bert")
    step = loss_of(kind, teacher, DistillTerms(T, ALPHA), shifts=shifts)(student, batch)
    expected = by_hand(twin, teacher, batch, shifts=shifts)
    assert_same_up_to_rounding(step.value, expected, 50)
    step.value.backward()
    expected.backward()
    assert_same_up_to_rounding(gradients(student), gradients(twin), 200)
    assert all(parameter.grad is None for parameter in teacher.parameters())


EVERY_TERM = DistillTerms(T, ALPHA, LayerTerm(0.5), LayerTerm(2.0), None)


@pytest.mark.parametrize("name", ["bert", "roberta", "llama", "t5"])
@pytest.mark.parametrize("terms", [DistillTerms(T, ALPHA), DistillTerms(T, ALPHA, top_k=5), EVERY_TERM])
def test_micro_batches_combine_to_the_whole_batch(name, terms):
    if name == "t5" and terms is EVERY_TERM:
        skip_before("5.22", "returns no attentions of T5")
    student, teacher = build(name, 1), frozen(build(name, 2))
    for model in (student, teacher):
        model.set_attn_implementation("eager")
    student.eval()  # T5 has dropout
    kind = "cross-entropy" if name == "bert" else "token-cross-entropy"
    loss, batch = loss_of(kind, teacher, terms, shifts=name == "llama"), rows(with_tokens=name != "bert")
    whole = loss(student, batch)
    whole.value.backward()
    expected = gradients(student)
    student.zero_grad(set_to_none=True)
    pieces = [{key: value[at] for key, value in batch.items()} for at in (slice(0, 1), slice(1, 4), slice(4, 6))]
    steps = [loss(student, piece) for piece in pieces]
    total = sum(int(step.weight) for step in steps)
    assert total == int(whole.weight)
    for step in steps:
        (step.value * step.weight / total).backward()
    assert_same_up_to_rounding(gradients(student), expected, 400)
    assert_same_up_to_rounding(sum(step.loss_sum() for step in steps), whole.loss_sum(), 100)


def test_padding_changes_nothing():
    student, teacher = build("bert", 1), frozen(build("bert", 2))
    for model in (student, teacher):
        model.set_attn_implementation("eager")
    loss, batch = loss_of("cross-entropy", teacher, EVERY_TERM), rows(with_tokens=False)
    padded = {key: functional.pad(value, (0, 5)) if value.dim() == 2 else value for key, value in batch.items()}
    assert_same_up_to_rounding(loss(student, padded).value, loss(student, batch).value, 100)


def test_a_student_that_equals_its_teacher_has_no_distance():
    student = build("llama", 1)
    teacher = frozen(copy.deepcopy(student))
    for model in (student, teacher):
        model.set_attn_implementation("eager")
    batch = rows()
    terms = DistillTerms(T, 1.0, LayerTerm(1.0), LayerTerm(1.0))
    assert loss_of("token-cross-entropy", teacher, terms, shifts=True)(student, batch).value.abs() < 1e-6
    without = DistillTerms(T, 0.0, LayerTerm(1.0))
    labels = build_loss("token-cross-entropy", shifts_labels=True)(student, batch).value
    assert_same_up_to_rounding(
        loss_of("token-cross-entropy", teacher, without, shifts=True)(student, batch).value, labels, 50
    )


def test_hidden_states_by_hand():
    student, teacher = build("bert", 1, 1), frozen(build("bert", 2, 2))
    batch = rows(with_tokens=False)
    terms = DistillTerms(T, 0.0, LayerTerm(3.0, {0: 1}))
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "output_hidden_states": True}
    ours, theirs = student(**inputs).hidden_states[1], teacher(**inputs).hidden_states[2]
    per_row = []
    for row, mask in enumerate(batch["attention_mask"].bool()):
        one, other = ours[row][mask], theirs[row][mask]
        per_row.append(((one - other).norm(dim=-1) / other.norm(dim=-1)).square().mean())
    hard = functional.cross_entropy(student(**inputs).logits, batch["labels"])
    found = loss_of("cross-entropy", teacher, terms)(student, batch).value
    assert_same_up_to_rounding(found, hard + 3.0 * torch.stack(per_row).mean(), 100)


def test_top_k_is_exact_about_the_rest():
    torch.manual_seed(0)
    ours, theirs = torch.randn(4, 50), 3 * torch.randn(4, 50)
    terms = DistillTerms(T, top_k=7)
    found = divergence("token-cross-entropy", ours, soft_targets("token-cross-entropy", theirs, terms), T)
    p, q = (each.div(T).softmax(-1).double() for each in (theirs, ours))
    best = p.topk(7, -1).indices
    groups = [
        torch.cat([each.gather(-1, best), 1 - each.gather(-1, best).sum(-1, keepdim=True)], -1) for each in (p, q)
    ]
    expected = (groups[0] * (groups[0] / groups[1]).log()).sum(-1)
    assert_same_up_to_rounding(found, expected, 100)
    every = soft_targets("token-cross-entropy", theirs, DistillTerms(T, top_k=50))
    whole = soft_targets("token-cross-entropy", theirs, DistillTerms(T))
    assert every.keys() == whole.keys()
    assert torch.equal(every["teacher_log_probs"], whole["teacher_log_probs"])


def test_several_labels_per_row_by_hand():
    torch.manual_seed(0)
    ours, theirs = torch.randn(3, 4), torch.randn(3, 4)
    found = divergence("binary-cross-entropy", ours, soft_targets("binary-cross-entropy", theirs, DistillTerms(T)), T)
    p, q = ((each / T).sigmoid() for each in (theirs, ours))
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean(-1)
    assert_same_up_to_rounding(found, expected, 50)


def test_layers_are_evenly_spaced_or_as_mapped():
    assert LayerTerm(1.0).pairs(3, 6) == [(0, 1), (1, 3), (2, 5)]
    assert LayerTerm(1.0).pairs(2, 2) == [(0, 0), (1, 1)]
    assert LayerTerm(1.0, {0: 4}).pairs(3, 6) == [(0, 4)]
    with pytest.raises(RecipeError, match="the teacher has 4 layers"):
        LayerTerm(1.0, {0: 4}).pairs(3, 4)


def test_what_cannot_be_compared_is_refused():
    student, teacher = build("bert", 1), frozen(build("bert", 2, hidden_size=16))
    with pytest.raises(LossError, match="hidden size"):
        loss_of("cross-entropy", teacher, DistillTerms(T, ALPHA, LayerTerm(1.0)))(student, rows(with_tokens=False))
    with pytest.raises(RecipeError, match="no classes"):
        loss_of("mse", teacher, DistillTerms())
    with pytest.raises(LossError, match="labels"):
        divergence(
            "cross-entropy", torch.zeros(2, 3), soft_targets("cross-entropy", torch.zeros(3, 3), DistillTerms()), T
        )
