"""AUC: that of scikit-learn at any scale of the scores, whichever way rows come in, and near it in bounded memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data.auc import RankedScores
from trimtab.data.metrics import Metrics

sklearn_metrics = pytest.importorskip("sklearn.metrics")


def auc_of(logits, labels, kind="cross-entropy", num_batches=3):
    metrics = Metrics(kind, ["auc"], num_labels=logits.shape[1])
    for part in torch.arange(len(labels)).tensor_split(num_batches):
        metrics.update(logits[part], {"labels": labels[part]}, torch.tensor(0.0), len(part))
    return metrics.compute()["auc"]


def log_odds(logits, label):
    """Of one label against the others, in extended precision: probabilities would be 0 or 1 for large logits."""
    wide = logits.numpy().astype(np.longdouble)
    others = np.delete(wide, label, axis=1)
    highest = others.max(axis=1)
    return (wide[:, label] - highest - np.log(np.exp(others - highest[:, None]).sum(axis=1))).astype(np.float64)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-8, 1e-4, 1.0, 1e4, 1e8]),
    offset=st.sampled_from([0.0, 5.0]),
    num_values=st.sampled_from([1, 3, 1000]),  # from constant scores and many ties to none
    num_rows=st.integers(12, 400),
    share_true=st.sampled_from([0.02, 0.5]),
)
def test_two_labels_at_any_scale(seed, scale, offset, num_values, num_rows, share_true):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(num_rows, generator=generator) < share_true).long()
    labels[:2] = torch.tensor([0, 1])
    steps = torch.randint(num_values, (num_rows,), generator=generator) + labels * (num_values // 4)
    logits = torch.stack([torch.zeros(num_rows), offset + scale * steps], dim=1)
    expected = sklearn_metrics.roc_auc_score(labels.numpy(), logits[:, 1].double().numpy())
    assert auc_of(logits, labels) == pytest.approx(expected, abs=1e-12)
    multi = auc_of(logits[:, 1:].repeat(1, 2), labels[:, None].repeat(1, 2).float(), "binary-cross-entropy")
    assert multi == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0, 1e4, 1e8])
@pytest.mark.parametrize("num_labels", [3, 6])
def test_several_labels_at_any_scale(scale, num_labels):
    torch.manual_seed(num_labels)
    labels = torch.cat([torch.arange(num_labels), torch.randint(num_labels, (300,))])
    logits = torch.randn(len(labels), num_labels)
    logits[torch.arange(len(labels)), labels] += 1
    logits = (logits * scale).float()
    areas = [
        sklearn_metrics.roc_auc_score((labels == label).numpy(), log_odds(logits, label)) for label in range(num_labels)
    ]
    assert auc_of(logits, labels) == pytest.approx(np.mean(areas), abs=1e-6)


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_a_score_that_is_no_number_is_below_all_others(broken):
    labels = torch.tensor([1, 0, 1, 0])
    logits = torch.tensor([[broken], [-1e30], [3.0], [float("inf")]])
    assert auc_of(logits, labels[:, None].float(), "binary-cross-entropy") == 0.25


def scores_of(kind, num_rows, generator):
    normal = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    if kind == "heavy ties":
        return (normal * 2).round()
    if kind == "narrow":
        return 5 + 1e-9 * normal
    return normal.sinh() ** 5 if kind == "wide" else normal


@pytest.mark.parametrize("kind", ["normal", "heavy ties", "narrow", "wide", "sorted"])
@pytest.mark.parametrize("share_true", [0.5, 0.01])
def test_more_scores_than_are_kept(kind, share_true):
    """Memory is bounded, and the area is as near as is promised, also if all low scores come first."""
    generator = torch.Generator().manual_seed(1)
    num_rows, num_groups = 60_000, 1024
    are_positive = torch.rand(num_rows, generator=generator) < share_true
    scores = scores_of(kind, num_rows, generator)
    scores += are_positive * scores.std()
    if kind == "sorted":
        order = scores.argsort()
        scores, are_positive = scores[order], are_positive[order]
    ranks = RankedScores(2, num_groups, num_pending=5000)
    both = torch.stack([scores, -scores], dim=1)
    for part in torch.arange(num_rows).split(500):
        ranks.add(both[part], are_positive[part, None].expand(-1, 2))
        kept = ranks._table
        assert len(kept) <= 2 * (num_groups + 1)
    expected = sklearn_metrics.roc_auc_score(are_positive.numpy(), scores.numpy())
    assert ranks.areas().tolist() == pytest.approx([expected, 1 - expected], abs=1 / num_groups)
    assert ranks.table()[:, 2:].sum() == 2 * num_rows


def test_as_many_as_an_evaluation_usually_has_are_exact():
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(30_000, 1, generator=generator)
    are_positive = torch.rand(30_000, 1, generator=generator) < 0.3
    ranks = RankedScores(1, num_pending=1000)  # taken in by the host thirty times
    for part in torch.arange(len(scores)).split(100):
        ranks.add(scores[part], are_positive[part])
    expected = sklearn_metrics.roc_auc_score(are_positive[:, 0].numpy(), scores[:, 0].numpy())
    assert ranks.areas().tolist() == pytest.approx([expected], abs=1e-12)


def test_tables_of_processes_are_joined():
    """One of which has seen nothing."""
    torch.manual_seed(3)
    scores, are_positive = torch.randn(90, 3).round(decimals=1), torch.rand(90, 3) < 0.5
    whole, *parts = (RankedScores(3) for _ in range(4))
    whole.add(scores, are_positive)
    parts[0].add(scores[:40], are_positive[:40])
    parts[1].add(scores[40:], are_positive[40:])
    tables = torch.cat([part.table() for part in parts])
    for part in parts:
        part.replace(tables)
        assert torch.equal(part.areas(), whole.areas())
