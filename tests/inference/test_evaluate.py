"""Evaluating a model: metrics against scikit-learn, intervals, worst rows, two models on the same rows."""

import json
import logging
import math

import numpy
import pytest
import torch
from sklearn import metrics as reference

from tiny_models import KINDS, config_of, tokenizer
from tiny_runs import reviews
from trimtab.data.metrics import log_odds
from trimtab.errors import DataError, ModelError
from trimtab.inference.bootstrap import interval_of, mcnemar, resampled_metrics
from trimtab.inference.evaluate import evaluate, same_rows
from trimtab.inference.held_out import quality_of, read_held_out
from trimtab.inference.load import LoadedModel
from trimtab.inference.row_scores import RowScores
from trimtab.model.load import load_model
from trimtab.training.work_progress import work_shown_as

pytestmark = pytest.mark.usefixtures("own_folder")
WORDS = ["the", "film", "was", "a", "very", "long", "story", "about", "this", "cast"]


def loaded_of(task, name="bert", seed=0, **head):
    torch.manual_seed(seed)
    tok = tokenizer()
    kinds = {"masked-lm": "masked-lm", "regress": "sequence-classification"}
    spread = {"initializer_factor": 2.0} if name == "t5" else {"initializer_range": 0.5}
    model = load_model(config_of(name) | spread, kinds.get(task, KINDS[name]), head, tok)
    if task == "chat":
        tok.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    return LoadedModel(model.eval(), tok, task)


def classifier(*names, seed=0, problem_type="single_label_classification"):
    head = {"num_labels": len(names), "id2label": dict(enumerate(names)), "problem_type": problem_type}
    return loaded_of("classify", seed=seed, **head, label2id={name: index for index, name in enumerate(names)})


def rows_of(*names, num_rows=60):
    random = numpy.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(num_rows)]
    return [{"text": text, "label": str(random.choice(names))} for text in texts]


@pytest.mark.parametrize("names", [("bad", "good"), ("a", "b", "c", "d")])
def test_labels_against_scikit_learn(names):
    loaded = classifier(*names)
    rows = rows_of(*names[: max(2, len(names) - 1)])  # no row has the last of four labels
    found = evaluate(loaded, read_held_out(loaded, rows))
    true = [row["label"] for row in rows]
    predicted = loaded_predictions(found)
    assert set(predicted) == set(names)
    options = {"labels": list(names), "zero_division": 0}
    columns = reference.precision_recall_fscore_support(true, predicted, **options)
    for scores, name, *wanted in zip(found.by_label, names, *columns, strict=True):
        assert (scores.label, scores.support) == (name, wanted[3])
        assert (scores.precision, scores.recall, scores.f1) == pytest.approx(wanted[:3])
    assert found.confusion == tuple(map(tuple, reference.confusion_matrix(true, predicted, labels=list(names))))
    assert found.metrics["accuracy"] == reference.accuracy_score(true, predicted)
    assert found.metrics["mcc"] == pytest.approx(reference.matthews_corrcoef(true, predicted))
    assert found.are_correct == [one == other for one, other in zip(true, predicted, strict=True)]
    probabilities = found.scores.outputs_NK.softmax(-1).numpy()
    if len(names) == 2:
        area = reference.roc_auc_score([name == "good" for name in true], probabilities[:, 1])
    else:
        area = numpy.mean([reference.roc_auc_score([n == c for n in true], probabilities[:, i])
                           for i, c in enumerate(names[:3])])  # fmt: skip
    assert found.metrics["auc"] == pytest.approx(area)
    losses = -numpy.log(probabilities[range(len(rows)), [names.index(name) for name in true]])
    assert found.losses == pytest.approx(losses.tolist())


def loaded_predictions(found):
    return [found.labels[index] for index in found.scores.outputs_NK.argmax(-1).tolist()]


def test_several_labels_against_scikit_learn():
    names = ("sad", "long", "new")
    loaded = classifier(*names, problem_type="multi_label_classification")
    rows = [
        {"text": row["text"], "sad": i % 2, "long": i % 3 == 0, "new": i % 5 == 1} for i, row in enumerate(reviews(40))
    ]
    found = evaluate(loaded, read_held_out(loaded, rows))
    true = numpy.array([[int(row[name]) for name in names] for row in rows])
    predicted = (found.scores.outputs_NK > 0).int().numpy()
    columns = reference.precision_recall_fscore_support(true, predicted, zero_division=0)
    for scores, *wanted in zip(found.by_label, *columns, strict=True):
        assert (scores.precision, scores.recall, scores.f1, scores.support) == pytest.approx(tuple(wanted))
    assert found.confusion == ()
    assert found.metrics["accuracy"] == reference.accuracy_score(true, predicted)
    assert found.metrics["auc"] == pytest.approx(reference.roc_auc_score(true, found.scores.outputs_NK.numpy()))


TASKS = {
    "classify": ("bert", {}, lambda: reviews(40)),
    "regress": ("bert", {"num_labels": 1}, lambda: [row | {"label": 0.1 * i} for i, row in enumerate(reviews(40))]),
    "causal-lm": ("gpt2", {}, lambda: [{"text": row["text"]} for row in reviews(40)]),
    "masked-lm": ("bert", {}, lambda: [{"text": row["text"]} for row in reviews(40)]),
    "chat": ("llama", {}, lambda: [{"prompt": row["text"], "answer": row["label"]} for row in reviews(40)]),
    "seq2seq": ("t5", {}, lambda: [{"source": row["text"], "target": row["label"]} for row in reviews(40)]),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_agrees_with_its_metrics_in_training(task, monkeypatch):
    name, head, rows = TASKS[task]
    loaded = classifier("bad", "good") if task == "classify" else loaded_of(task, name, **head)
    loaded.model.double()  # batches of other sizes round differently
    held_out = read_held_out(loaded, rows())
    found = evaluate(loaded, held_out, batch_size=7)
    assert found.metrics == pytest.approx(quality_of(loaded, held_out), rel=1e-5)
    assert set(found.intervals) == set(found.metrics)
    for name, (low, high) in found.intervals.items():
        assert low <= found.metrics[name] <= high
        assert low < high or found.metrics[name] == 0  # such as token accuracy of random weights
    assert len(found.losses) == found.num_rows == len(held_out)
    assert [row.loss for row in found.worst] == sorted(found.losses, reverse=True)[:10]
    assert all(row.text and row.location for row in found.worst)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["num_rows"] == found.num_rows
    # batches that are smaller because of a large vocabulary change nothing
    monkeypatch.setattr("trimtab.inference.held_out._MAX_LOGITS", 1)
    again = evaluate(loaded, held_out)
    assert again.metrics == pytest.approx(found.metrics, rel=1e-5)


def test_a_long_evaluation_reports_its_progress(monkeypatch, caplog):
    monkeypatch.setattr("trimtab.training.work_progress._SECONDS_BEFORE_LINES", 0.0)
    loaded = classifier("bad", "good")
    with caplog.at_level(logging.INFO, "trimtab"), work_shown_as("plain"):
        evaluate(loaded, read_held_out(loaded, reviews(20)), batch_size=8)
    found = [line.rpartition(",")[0] for line in caplog.messages if line.startswith("predict")]
    assert found == [f"predicting rows, the longest first: {num} of 20" for num in (8, 16)]


def test_worst_rows_name_text_and_labels():
    loaded = classifier("bad", "good")
    rows = reviews(30)
    found = evaluate(loaded, read_held_out(loaded, rows), num_worst=3)
    assert len(found.worst) == 3
    for row in found.worst:
        index = int(row.location.split()[-1]) - 1
        assert row.text == rows[index]["text"]
        assert row.label == rows[index]["label"]
        assert row.predicted == loaded_predictions(found)[index]
        assert row.loss == found.losses[index]


def test_intervals_are_those_of_resampled_rows():
    """Against a plain loop with scikit-learn over the same draws."""
    random = numpy.random.default_rng(1)
    outputs, labels = torch.tensor(random.normal(size=(80, 3))), torch.tensor(random.integers(3, size=80))
    targets = torch.nn.functional.one_hot(labels, 3).double()
    loss = torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
    hits = (outputs.argmax(-1) == labels).double()
    scores = RowScores("cross-entropy", loss, torch.ones(80).double(), hits, outputs, targets)
    found = resampled_metrics(scores, 30, seed=5)
    odds = log_odds(outputs, one_label=True)
    drawn = torch.randint(80, (30, 80), generator=torch.Generator().manual_seed(5))
    for index, rows in enumerate(drawn):
        true, predicted = labels[rows].numpy(), outputs.argmax(-1)[rows].numpy()
        wanted = {
            "loss": loss[rows].mean().item(),
            "accuracy": reference.accuracy_score(true, predicted),
            "f1": reference.f1_score(true, predicted, average="macro"),
            "precision": reference.precision_score(true, predicted, average="macro", zero_division=0),
            "mcc": reference.matthews_corrcoef(true, predicted),
            "auc": numpy.mean([reference.roc_auc_score(true == k, odds[rows, k]) for k in range(3)]),
        }
        assert {name: found[name][index].item() for name in wanted} == pytest.approx(wanted)
    low, high = interval_of(found["accuracy"])
    assert (low, high) == pytest.approx(tuple(numpy.quantile(found["accuracy"].numpy(), [0.025, 0.975])))


def test_equal_scores_count_half():
    random = numpy.random.default_rng(2)
    outputs = torch.tensor(random.integers(-2, 3, size=(50, 2))).double()  # nine different scores
    labels = torch.tensor(random.integers(2, size=50))
    targets, ones = torch.nn.functional.one_hot(labels, 2).double(), torch.ones(50).double()
    weights = torch.tensor(random.integers(0, 4, size=(5, 50))).double()
    found = RowScores("cross-entropy", ones, ones, ones, outputs, targets).metrics(weights)["auc"]
    odds = (outputs[:, 1] - outputs[:, 0]).numpy()
    wanted = [reference.roc_auc_score(labels, odds, sample_weight=each) for each in weights.numpy()]
    assert found.tolist() == pytest.approx(wanted)


def test_an_interval_covers_the_true_value_as_often_as_it_says():
    random = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(200):
        hits = (torch.rand(100, generator=random) < 0.7).double()
        outputs = torch.stack([1 - hits, hits], 1)
        targets = torch.tensor([[0.0, 1.0]]).double().expand(100, 2)
        scores = RowScores("cross-entropy", 1 - hits, torch.ones(100).double(), hits, outputs, targets)
        low, high = interval_of(resampled_metrics(scores, 200, seed)["accuracy"])
        covered += low <= 0.7 <= high
    assert 180 <= covered <= 200  # 190 expected, with a standard deviation of 3


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (3, 3), (1, 9), (0, 12), (40, 61), (600, 700)])
def test_mcnemar_is_exact(only_first, only_second):
    first = torch.tensor([1.0] * only_first + [0.0] * only_second + [1.0, 0.0])
    second = torch.tensor([0.0] * only_first + [1.0] * only_second + [1.0, 0.0])
    num = only_first + only_second
    exact = 2 * sum(math.comb(num, k) for k in range(min(only_first, only_second) + 1)) / 2**num
    assert mcnemar(first, second) == pytest.approx(min(1.0, exact), rel=1e-9)


def test_two_models_on_the_same_rows():
    one, other = classifier("bad", "good"), classifier("good", "bad", seed=1)
    held_out = read_held_out(one, rows_of("bad", "good"))
    first = evaluate(one, held_out)
    second = evaluate(other, same_rows(held_out, other))
    found = first.compare_with(second)
    accuracy = found["accuracy"]
    assert accuracy.test == "McNemar"
    assert (accuracy.first, accuracy.second) == (first.metrics["accuracy"], second.metrics["accuracy"])
    assert accuracy.p_value == mcnemar(torch.tensor(first.are_correct), torch.tensor(second.are_correct))
    assert found["loss"].test == "bootstrap"
    assert found["loss"].low <= second.metrics["loss"] - first.metrics["loss"] <= found["loss"].high
    # F1 is that of label 1, which is another one in the second model
    swapped = reference.f1_score(
        [row["label"] for row in rows_of("bad", "good")], loaded_predictions(second), pos_label="good"
    )
    assert found["f1"].second == pytest.approx(swapped)
    itself = first.compare_with(first)
    assert {difference.p_value for difference in itself.values()} == {1.0}


def test_models_that_cannot_be_compared():
    one = classifier("bad", "good")
    held_out = read_held_out(one, reviews(12))
    first = evaluate(one, held_out)
    with pytest.raises(DataError, match="different rows"):
        first.compare_with(evaluate(one, read_held_out(one, reviews(10))))
    three = classifier("bad", "good", "new")
    with pytest.raises(ModelError, match="predict different things"):
        first.compare_with(evaluate(three, same_rows(held_out, three)))
    decoder = loaded_of("causal-lm", "gpt2")
    with pytest.raises(ModelError, match="the tasks of the models differ"):
        same_rows(held_out, decoder)
    texts = [{"text": row["text"]} for row in reviews(12)]
    of_decoder = evaluate(decoder, read_held_out(decoder, texts))
    shorter = LoadedModel(decoder.model, decoder.tokenizer, "causal-lm", {"max_length": 4})
    with pytest.raises((ModelError, DataError), match="different tokens|different rows"):
        of_decoder.compare_with(evaluate(shorter, read_held_out(shorter, texts)))
