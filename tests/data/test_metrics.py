"""Metrics from sums equal those of scikit-learn over all rows at once, and nothing is read while they are added."""

import math
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.data.metrics import METRIC_NAMES, Metrics, higher_is_better
from trimtab.errors import RecipeError

sklearn_metrics = pytest.importorskip("sklearn.metrics")

CLASS_METRICS = ["accuracy", "f1", "precision", "recall", "auc", "mcc"]


def computed(metrics, logits, labels, num_batches=5):
    """All rows in batches of unequal size."""
    for part in torch.arange(len(labels)).tensor_split(num_batches):
        metrics.update(logits[part], {"labels": labels[part]}, torch.tensor(0.0), len(part))
    return metrics.compute()


def averages(labels, predicted, average):
    """Precision, recall and F1 of scikit-learn."""
    names = {"f1": "f1_score", "precision": "precision_score", "recall": "recall_score"}
    return {
        name: getattr(sklearn_metrics, function)(labels, predicted, average=average, zero_division=0)
        for name, function in names.items()
    }


def sklearn_values(logits, labels):
    labels, predicted = labels.numpy(), logits.argmax(-1).numpy()
    scores = logits.double().softmax(-1).numpy()
    auc = {"y_score": scores[:, 1]} if logits.shape[1] == 2 else {"y_score": scores, "multi_class": "ovr"}
    return averages(labels, predicted, "binary" if logits.shape[1] == 2 else "macro") | {
        "accuracy": sklearn_metrics.accuracy_score(labels, predicted),
        "mcc": sklearn_metrics.matthews_corrcoef(labels, predicted),
        "auc": sklearn_metrics.roc_auc_score(labels, **auc),
    }


@pytest.mark.parametrize("num_labels", [2, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_one_label_as_in_sklearn(num_labels, seed):
    torch.manual_seed(seed)
    labels = torch.cat([torch.arange(num_labels), torch.randint(num_labels, (501,)) * torch.randint(2, (501,))])
    logits = torch.randn(len(labels), num_labels) * 3
    logits[torch.arange(len(labels)), labels] += seed  # from a guess to a good model
    found = computed(Metrics("cross-entropy", CLASS_METRICS, num_labels=num_labels), logits, labels)
    del found["loss"]
    assert found == pytest.approx(sklearn_values(logits, labels), abs=1e-12)


def test_labels_without_rows_or_predictions_do_not_count():
    labels = torch.tensor([0, 0, 3, 3, 3])
    logits = torch.nn.functional.one_hot(torch.tensor([0, 3, 3, 0, 5]), 9).float()
    found = computed(Metrics("cross-entropy", ["f1", "precision", "recall"], num_labels=9), logits, labels, 2)
    assert found == pytest.approx({"loss": 0.0} | averages(labels, logits.argmax(-1), "macro"))


@pytest.mark.parametrize("predicted", [0, 1])
def test_a_model_that_always_says_the_same(predicted):
    labels = torch.tensor([0, 1, 1, 0, 1])
    logits = torch.zeros(5, 2)
    logits[:, predicted] = 1
    found = computed(Metrics("cross-entropy", CLASS_METRICS, num_labels=2), logits, labels, 1)
    assert found["mcc"] == 0
    assert found["auc"] == 0.5
    assert found["f1"] == pytest.approx(0.75 if predicted else 0)


@pytest.mark.parametrize("seed", range(3))
def test_several_labels_as_in_sklearn(seed):
    torch.manual_seed(seed)
    labels = (torch.rand(300, 6) < 0.3).float()
    labels[:, 5] = 0  # one that no row has
    logits = torch.randn(300, 6) * 2 + (labels - 0.5) * seed
    names = ["accuracy", "f1", "precision", "recall", "auc"]
    found = computed(Metrics("binary-cross-entropy", names, num_labels=6), logits, labels)
    predicted, true = (logits > 0).int().numpy(), labels.int().numpy()
    assert found == pytest.approx(
        averages(true, predicted, "macro")
        | {
            "loss": 0.0,
            "accuracy": sklearn_metrics.accuracy_score(true, predicted),
            "auc": sklearn_metrics.roc_auc_score(true[:, :5], logits[:, :5].numpy(), average="macro"),
        },
        abs=1e-12,
    )


def test_auc_is_not_defined_for_one_class():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = computed(Metrics("cross-entropy", ["auc"], num_labels=2), torch.randn(4, 2), torch.zeros(4).long(), 1)
    assert math.isnan(found["auc"])


@pytest.mark.parametrize("num_numbers", [1, 3])
def test_numbers_as_in_sklearn(num_numbers):
    labels = torch.randn(200, num_numbers) * 4 + 10
    logits = labels * 0.5 + torch.randn(200, num_numbers)
    given = labels[:, 0] if num_numbers == 1 else labels
    found = computed(Metrics("mse", num_labels=num_numbers), logits, given)
    assert found["mse"] == pytest.approx(sklearn_metrics.mean_squared_error(labels, logits), rel=1e-6)
    assert found["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(labels, logits), rel=1e-6)
    pearsons = [torch.corrcoef(torch.stack([labels[:, i], logits[:, i]]).double())[0, 1] for i in range(num_numbers)]
    assert found["pearson"] == pytest.approx(float(sum(pearsons) / num_numbers), abs=1e-9)


def test_pearson_of_a_constant_is_not_defined():
    found = computed(Metrics("mse", num_labels=1), torch.ones(4, 1), torch.randn(4), 2)
    assert math.isnan(found["pearson"])
    assert math.isfinite(found["mse"])


@pytest.mark.parametrize("shifts", [True, False])
def test_tokens(shifts):
    logits = torch.randn(6, 9, 11)
    labels = torch.randint(11, (6, 9))
    labels[torch.rand(6, 9) < 0.4] = -100
    metrics = Metrics("token-cross-entropy", ["perplexity", "token_accuracy"], shifts_labels=shifts)
    answers, wanted = (logits[:, :-1], labels[:, 1:]) if shifts else (logits, labels)
    for rows in (slice(0, 4), slice(4, 6)):
        loss_sum = torch.nn.functional.cross_entropy(
            answers[rows].flatten(0, 1), wanted[rows].flatten(), reduction="sum"
        )
        metrics.update(logits[rows], {"labels": labels[rows]}, loss_sum, (wanted[rows] != -100).sum())
    counted = wanted != -100
    loss = torch.nn.functional.cross_entropy(answers[counted], wanted[counted])
    accuracy = sklearn_metrics.accuracy_score(wanted[counted], answers.argmax(-1)[counted])
    found = metrics.compute()
    assert found == pytest.approx(
        {"loss": float(loss), "perplexity": math.exp(loss), "token_accuracy": accuracy}, rel=1e-6
    )


def test_loss_is_weighted_by_what_it_stands_for():
    metrics = Metrics("token-cross-entropy", ["loss"])
    logits, batch = torch.zeros(1, 1, 1), {"labels": torch.zeros(1, 1)}
    metrics.update(logits, batch, torch.tensor(30.0), 10)
    metrics.update(logits, batch, torch.tensor(2.0), torch.tensor(6))
    assert metrics.compute() == {"loss": 2.0}


def test_many_small_losses_do_not_drown():
    """Sums are kept in float64: float32 would add none of these ones to so large a sum."""
    metrics = Metrics("token-cross-entropy", ["loss"])
    logits, batch = torch.zeros(1, 1, 1), {"labels": torch.zeros(1, 1)}
    metrics.update(logits, batch, torch.tensor(2.0**26), 2**26)
    for _ in range(100):
        metrics.update(logits, batch, torch.tensor(1.0), 0)
    assert metrics.compute()["loss"] == 1 + 100 / 2**26


def test_losses_that_grow_without_bound():
    for loss, perplexity in ((2000.0, math.inf), (math.nan, math.nan)):
        metrics = Metrics("token-cross-entropy")
        metrics.update(torch.zeros(1, 1, 1), {"labels": torch.zeros(1, 1)}, torch.tensor(loss), 1)
        assert metrics.compute() == pytest.approx({"loss": loss, "perplexity": perplexity}, nan_ok=True)


@pytest.mark.parametrize("kind", ["cross-entropy", "binary-cross-entropy", "mse", "token-cross-entropy"])
def test_nothing_seen(kind):
    assert all(math.isnan(value) or value == 0 for value in Metrics(kind, num_labels=3).compute().values())


def test_sums_of_processes_add_up():
    torch.manual_seed(3)
    labels, logits = torch.randint(4, (90,)), torch.randn(90, 4)
    whole = Metrics("cross-entropy", CLASS_METRICS, num_labels=4)
    parts = [Metrics("cross-entropy", CLASS_METRICS, num_labels=4) for _ in range(2)]
    expected = computed(whole, logits, labels)
    computed(parts[0], logits[:31], labels[:31])
    computed(parts[1], logits[31:], labels[31:])
    scores = []
    parts[1].combine(torch.clone, lambda mine: scores.append(mine) or mine)
    others = iter(parts[1].sums)
    parts[0].combine(lambda mine: mine + next(others), lambda mine: torch.cat([mine, *scores]))
    assert parts[0].compute() == expected


class NoHostReads(TorchDispatchMode):
    """Every read of a value by the host, and every operation whose size depends on values, is an error."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "equal"), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("metrics", "logits", "labels"),
    [
        (Metrics("cross-entropy", CLASS_METRICS, num_labels=2), torch.randn(5, 2), torch.randint(2, (5,))),
        (Metrics("cross-entropy", CLASS_METRICS, num_labels=4), torch.randn(5, 4), torch.randint(4, (5,))),
        (Metrics("binary-cross-entropy", CLASS_METRICS[:-1], num_labels=3), torch.randn(5, 3), torch.ones(5, 3)),
        (Metrics("mse", num_labels=1), torch.randn(5, 1), torch.randn(5)),
        (
            Metrics("token-cross-entropy", ["token_accuracy"], shifts_labels=True),
            torch.randn(2, 3, 5),
            torch.randint(5, (2, 3)),
        ),
    ],
)
def test_an_update_reads_nothing_from_the_device(metrics, logits, labels):
    with NoHostReads():
        metrics.update(logits.requires_grad_(), {"labels": labels}, torch.tensor(1.0), torch.tensor(5))
    assert not any(sums.requires_grad for sums in metrics.sums)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoHostReads():
        torch.tensor(1.0).item()


def test_names_and_directions():
    assert Metrics("cross-entropy", num_labels=2).names == ["loss", "accuracy", "f1"]
    assert Metrics("cross-entropy", ["mcc", "loss", "mcc"], num_labels=2).names == ["loss", "mcc"]
    names = {name for kind in METRIC_NAMES.values() for name in kind}
    assert {name for name in names if not higher_is_better(name)} == {"loss", "mse", "mae", "perplexity"}


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("cross-entropy", "acuracy", "did you mean 'accuracy'"),
        ("cross-entropy", "acc", "did you mean 'accuracy'"),
        ("binary-cross-entropy", "mcc", "for this task"),
        ("token-cross-entropy", "accuracy", "did you mean 'token_accuracy'"),
        ("mse", "f1", "use one of loss, mse, mae, pearson"),
    ],
)
def test_metrics_that_do_not_exist(kind, name, hint):
    with pytest.raises(RecipeError) as caught:
        Metrics(kind, [name], num_labels=2)
    assert f"there is no metric {name!r}" in caught.value.problem
    assert hint in str(caught.value)
    with pytest.raises(RecipeError, match="there is no metric 'speed'"):
        higher_is_better("speed")
