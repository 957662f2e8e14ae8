"""The loop, through `fit`: it learns, it is exact, it evaluates at its intervals, and it keeps the best model."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import tiny_runs
import trimtab
from rounding import assert_same_up_to_rounding
from tiny_runs import NO_DROPOUT, lines_of, reviews, same_bits
from trimtab import Recipe, fit
from trimtab.errors import RecipeError
from trimtab.inference.classify import classify_texts
from trimtab.training.interval import Interval
from trimtab.training.run_state import RunState
from trimtab.units import Every

ROWS = reviews(32)
HELD_OUT = reviews(24, first=1000)
pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def train(tiny, tmp_path):
    """Trains a tiny BERT on the reviews; keywords are sections of the recipe, in the place of the usual ones."""
    numbers = itertools.count()

    def train(callbacks=(), loss=None, metrics=None, **sections):
        usual = {
            "model": tiny.folder("bert", **NO_DROPOUT["bert"]),
            "data": {"train": ROWS, "eval": HELD_OUT},
            "train": {"epochs": 1, "lr": 1e-3},
            "out": str(tmp_path / f"run-{next(numbers)}"),
        }
        return fit(
            Recipe(**usual | sections), callbacks=callbacks, loss=loss, metrics=metrics, progress="quiet", device="cpu"
        )

    return train


class Watch(tiny_runs.Watch):
    """Also stores the learning rate after each step, and when evaluations and saves came."""

    def __init__(self):
        super().__init__()
        self.lrs, self.evaluated, self.saved = [], [], []

    def on_step(self, state):
        super().on_step(state)
        self.lrs.append(state.optimizer.param_groups[0]["lr"])
        self.optimizer, self.model = state.optimizer, state.model

    def on_eval(self, state, metrics):
        self.evaluated.append(state.step)

    def on_save(self, state, folder):
        self.saved.append(state.step)


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def saved_weights(result):
    return load_file(result.best / "model.safetensors")


def rows_of(batch):
    """The rows of a batch as tuples of tokens, without padding."""
    ids, mask = batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    return [tuple(token for token, real in zip(*row, strict=True) if real) for row in zip(ids, mask, strict=True)]


# ---------------------------------------------------------------------- it learns, and always the same


def test_it_learns(train):
    settings = {"epochs": 12, "lr": 3e-3, "log_every": 1}
    result = train(train=settings, evaluate={"at_start": True}, data={"train": reviews(64), "eval": HELD_OUT})
    lines = lines_of(result.folder)
    before = next(line for line in lines if "eval_accuracy" in line)
    assert before["step"] == 0
    assert before["eval_accuracy"] < 0.7
    assert result.fit.metrics["accuracy"] >= 0.9
    assert result.fit.step == 96
    assert result.fit.stop_reason == "finished"
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] > 0.6
    assert len(losses) == 96
    assert losses[-1] < 0.3


def test_the_same_recipe_gives_the_same_bits(train, tiny):
    watches = []
    for seed, earlier in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(earlier)  # what the process drew before must not matter
        watches.append(Watch())
        train([watches[-1]], model=tiny.folder("bert"), seed=seed, data={"train": ROWS})
    first, second, other = (watch.weights[-1] for watch in watches)
    assert same_bits(first, second)
    assert not same_bits(first, other)


def test_evaluation_leaves_the_training_as_it_is(train, tiny):
    """Also its dropout, although a loader draws a random number whenever it begins."""
    watches = [Watch(), Watch()]
    for watch, every in zip(watches, ("1 steps", "100 steps"), strict=True):
        train([watch], model=tiny.folder("bert"), evaluate={"every": every})
    assert [len(watch.evaluated) for watch in watches] == [4, 1]
    assert same_bits(watches[0].weights[-1], watches[1].weights[-1])


CHATS = [{"prompt": row["text"], "answer": " ".join([row["label"]] * (1 + i % 5))} for i, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("task", "name", "rows", "own"),
    [
        ("classify", "bert", ROWS[:30], {"class_weights": {"good": 7, "bad": 0.3}}),
        pytest.param("causal-lm", "gpt2", [{"text": row["text"]} for row in ROWS[:30]], {}, marks=pytest.mark.slow),
        ("chat", "gpt2", CHATS[:30], {}),
    ],
)
def test_micro_batches_change_nothing(train, tiny, task, name, rows, own):
    """Rows of unequal length, unequal numbers of tokens with loss, a short last batch, and clipping that bites."""
    data = {"train": rows, "eval_share": 0} | ({"max_length": 11} if task == "causal-lm" else {})
    settings = {"epochs": 2, "lr": 0.5, "optimizer": "sgd", "schedule": "constant", "max_grad_norm": 0.2, **own}
    weights = {}
    for micro in ("auto", 1, 2, 4):
        watch = Watch()
        model = tiny.folder(name, **NO_DROPOUT[name])
        result = train([watch], model=model, task=task, data=data, train=settings, memory={"micro_batch": micro})
        weights[micro] = watch.weights
        assert result.plan.micro_batch_size == (8 if micro == "auto" else micro)
        assert result.plan.num_train_rows % 8  # a last batch that is not full
        assert result.fit.step == result.plan.num_steps == 2 * result.plan.steps_per_epoch
    assert largest_difference(weights["auto"][0], weights["auto"][-1]) > 1e-2
    for micro in (1, 2, 4):
        for ours, whole in zip(weights[micro], weights["auto"], strict=True):
            assert ours.keys() == whole.keys()
            for name, weight in whole.items():  # each step sums in another order
                assert_same_up_to_rounding(ours[name], weight, 100, size=max(1.0, float(weight.abs().max())))


def test_balanced_class_weights_are_the_weighted_loss_of_torch(train, tiny):
    """One step in micro-batches of unequal total weight, against the gradient of the whole batch."""
    head = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    folder = tiny.folder("bert", kind="sequence-classification", head=head, **NO_DROPOUT["bert"])
    rows = [row for index, row in enumerate(ROWS[:40]) if index % 2 or index % 8 == 0]  # 20 good, 5 bad
    settings = {"lr": 1.0, "optimizer": "sgd", "schedule": "constant", "max_grad_norm": None, "max_steps": 1}
    settings |= {"batch_size": 25, "class_weights": "balanced", "log_every": 1, "precision": "fp32"}
    watch = Watch()
    result = train(
        [watch], model=folder, data={"train": rows, "eval": HELD_OUT}, train=settings, memory={"micro_batch": 4}
    )
    model, tok = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tok([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([int(row["label"] == "good") for row in rows])
    loss = functional.cross_entropy(model(**batch).logits, labels, torch.tensor([25 / (2 * 5), 25 / (2 * 20)]))
    loss.backward()
    (line,) = (line for line in lines_of(result.folder) if "loss" in line)
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in model.named_parameters():
        wanted = weight.detach() if weight.grad is None else weight.detach() - weight.grad
        assert_same_up_to_rounding(watch.weights[0][name], wanted, 100, size=max(1.0, float(wanted.abs().max())))
    plain = train(
        model=folder, data={"train": rows, "eval": HELD_OUT}, train=settings | {"class_weights": None, "lr": 1e-9}
    )
    still = train(model=folder, data={"train": rows, "eval": HELD_OUT}, train=settings | {"lr": 1e-9})
    assert still.fit.metrics["loss"] == pytest.approx(plain.fit.metrics["loss"], rel=1e-5), "evaluation is not weighted"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision(train, precision):
    watch, plain = Watch(), Watch()
    result = train([watch], train={"max_steps": 2, "precision": precision, "log_every": 1})
    train([plain], train={"max_steps": 2})
    assert result.plan.precision == precision
    assert [math.isfinite(line["loss"]) for line in lines_of(result.folder) if "loss" in line] == [True, True]
    assert {value.dtype for value in watch.weights[-1].values() if value.is_floating_point()} == {torch.float32}
    assert 0 < largest_difference(watch.weights[-1], plain.weights[-1]) < 1e-2


# ---------------------------------------------------------------------- when it looks, and when it ends


@pytest.mark.parametrize(
    ("every", "expected"),
    [("5 steps", [5, 10, 12]), ("epoch", [4, 8, 12]), ("2 epochs", [8, 12]), ("4 steps", [4, 8, 12])],
)
def test_evaluation_by_steps_and_epochs(train, every, expected):
    watch = Watch()
    train([watch], train={"epochs": 3}, evaluate={"every": every})
    assert watch.evaluated == expected


def test_evaluation_by_part_of_an_epoch():
    interval = Interval(Every(steps=None, epochs=0.5, seconds=None), steps_per_epoch=5)
    found = []
    for step in range(1, 16):
        if interval.has_passed(step, 0.0):
            found.append(step)
            interval.restart(step, 0.0)
    assert found == [3, 5, 8, 10, 13, 15]
    assert not interval.has_passed(16, 0.0)
    assert interval.has_passed(19, 0.0), "one that was passed over is owed"


class Clock:
    """Replaces the `time` of the meter: it passes only at steps and evaluations."""

    def __init__(self, monkeypatch, per_step, per_evaluation, for_the_save=0.0):
        self.now, self._per_step, self._per_evaluation = 100.0, per_step, per_evaluation
        monkeypatch.setattr("trimtab.training.meter.time", self)
        monkeypatch.setattr("trimtab.training.checkpoints.Checkpoints.seconds_needed", for_the_save)

    def monotonic(self):
        return self.now

    def on_step(self, state):
        self.now += self._per_step

    def on_eval(self, state, metrics):
        self.now += self._per_evaluation


def test_evaluation_by_time(train, monkeypatch):
    """Time spent on evaluations does not count: else a long one would be due again after one step."""
    clock, watch = Clock(monkeypatch, 1.0, 50.0), Watch()
    result = train([clock, watch], train={"epochs": 3}, evaluate={"every": "5s"})
    assert watch.evaluated == [5, 10, 12]
    assert result.fit.train_seconds == 12


def test_max_time_is_time_on_the_clock(train, monkeypatch):
    """Evaluations count: a machine that is taken away does not wait. A run that will be resumed is not evaluated."""
    clock, watch = Clock(monkeypatch, 1.0, 2.0), Watch()
    result = train([clock, watch], train={"epochs": 3, "max_time": "5s"}, evaluate={"every": "2 steps"})
    assert result.fit.stop_reason == "time limit"
    assert result.fit.step == 3  # 2 steps, 2 seconds of evaluation, 1 step
    assert watch.evaluated == [2]
    assert json.loads((result.folder / "run.json").read_text())["state"] == "stopped"
    assert result.best is not None


@pytest.mark.parametrize(
    ("settings", "for_the_save", "ending"),
    [
        ({"epochs": 3, "max_time": "10s"}, 4.0, (6, "time limit")),
        ({"max_steps": 4, "max_time": "4s"}, 0.0, (4, "finished")),  # its last step was in time
    ],
)
def test_max_time_leaves_time_for_the_save(train, monkeypatch, settings, for_the_save, ending):
    result = train([Clock(monkeypatch, 1.0, 0.0, for_the_save)], train=settings)
    assert (result.fit.step, result.fit.stop_reason) == ending


def test_max_steps_and_limits(train):
    watch = Watch()
    assert train([watch], train={"max_steps": 6}).fit.step == 6
    assert watch.evaluated == [4, 6]
    for limit, steps in ((2, 6), (0.5, 6), (100, 12)):
        result = train(train={"epochs": 3}, limits={"train": limit})
        assert result.fit.step == steps
        assert result.plan.steps_per_epoch == steps / 3


class EvaluatedRows:
    """An own metric that remembers the rows it is asked about, evaluation by evaluation."""

    def __init__(self):
        self.rows, self._open = [], []

    def metric(self, logits, batch):
        assert len(logits) == len(batch["labels"])
        self._open += rows_of(batch)
        return torch.ones(len(logits))

    def on_eval(self, state, metrics):
        self.rows.append(self._open)
        self._open = []


@pytest.mark.parametrize(("limit", "num_rows"), [(1, 8), (2, 16), (0.67, 16), (100, 24), (None, 24)])
def test_limited_evaluation(train, limit, num_rows):
    """The same rows each time, and not just the longest ones, which stand first in an evaluation."""
    seen = EvaluatedRows()
    result = train([seen], metrics={"seen": seen.metric}, train={"epochs": 2}, limits={"eval": limit})
    first, second = seen.rows
    named = "24 held-out rows" if num_rows == 24 else f"{num_rows} of 24 held-out rows"
    assert f" training rows, {named};" in " ".join(result.plan.describe())
    card = (result.best / "README.md").read_text()
    assert f"On {'the held-out rows' if num_rows == 24 else named} at step" in card
    assert first == second
    assert len(first) == num_rows
    if num_rows == 8:
        everything = EvaluatedRows()
        train([everything], metrics={"seen": everything.metric})
        assert sum(map(len, first)) < sum(map(len, everything.rows[0][:8]))


@pytest.mark.parametrize("group_by_length", [True, False])
def test_overfit_batches(train, group_by_length):
    """The loss goes down on a few batches, and what is evaluated is what is trained on."""
    seen, trained = EvaluatedRows(), []

    def loss(outputs, batch):
        if torch.is_grad_enabled():
            trained.append(rows_of(batch))
        return torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])

    result = train(
        [seen],
        loss=loss,
        metrics={"seen": seen.metric},
        train={"epochs": 30, "lr": 3e-3, "group_by_length": group_by_length},
        limits={"overfit_batches": 2},
        evaluate={"every": "15 epochs"},
    )
    losses = [line["eval_loss"] for line in lines_of(result.folder) if "eval_loss" in line]
    assert result.fit.step == 60
    assert "On 2 batches of training rows (limits.overfit_batches) at step" in (result.best / "README.md").read_text()
    assert losses[-1] < 0.2
    assert trained[:2] == trained[2:4] == trained[-2:]
    assert len(seen.rows) == 2
    assert sorted(seen.rows[-1]) == sorted(trained[0] + trained[1])


# ---------------------------------------------------------------------- the best model


def test_the_best_model_is_kept(train):
    """The last evaluation is worse, because the head is turned around before it; the model kept is an earlier one."""

    class Breaks(Watch):
        def on_step(self, state):
            if state.step == state.num_steps:
                with torch.no_grad():
                    state.model.classifier.weight.neg_()
                    state.model.classifier.bias.neg_()
            super().on_step(state)

    watch = Breaks()
    data = {"train": reviews(64), "eval": HELD_OUT}
    result = train([watch], data=data, train={"epochs": 7, "lr": 3e-3, "schedule": "constant"})
    by_step = {line["step"]: line["eval_accuracy"] for line in lines_of(result.folder) if "eval_accuracy" in line}
    assert list(by_step) == watch.evaluated
    assert by_step[watch.evaluated[-1]] < max(by_step.values())
    assert result.fit.best_metric == max(by_step.values())
    assert result.fit.best_step == min(step for step, value in by_step.items() if value == result.fit.best_metric)
    assert watch.saved[-1] == result.fit.best_step
    assert same_bits(saved_weights(result), watch.weights[result.fit.best_step - 1])
    assert not same_bits(saved_weights(result), watch.weights[-1])
    loaded = trimtab.load(result.folder, device="cpu")
    predictions = classify_texts(loaded, [row["text"] for row in HELD_OUT])
    right = [p.label == row["label"] for p, row in zip(predictions, HELD_OUT, strict=True)]
    assert sum(right) / len(right) == pytest.approx(result.fit.best_metric)
    facts = json.loads((result.best / "trimtab.json").read_text())
    assert facts["step"] == result.fit.best_step
    assert facts["metrics"]["accuracy"] == result.fit.best_metric


def scripted(values, higher_is_better=None):
    """An own metric with these values, one for each evaluation of a single batch."""
    left = iter(values)

    def metric(logits, batch):
        return torch.full((len(logits),), next(left))

    if higher_is_better is not None:
        metric.higher_is_better = higher_is_better
    return metric


RISING = [0.5, 0.6, 0.605, 0.609, 0.7, 0.7, 0.7, 0.7]


@pytest.mark.parametrize(
    ("values", "rises", "settings", "stops_at", "best_at"),
    [
        (RISING, None, {"patience": 2, "min_delta": 0.01}, 4, 4),
        (RISING, None, {"patience": 3, "min_delta": 0.01}, 8, 5),
        (RISING, None, {"patience": 2}, 7, 5),
        (RISING, None, {"patience": 1}, 6, 5),
        ([-value for value in RISING], False, {"patience": 2, "min_delta": 0.01}, 4, 4),
        ([-value for value in RISING], None, {"patience": 2, "min_delta": 0.01, "mode": "min"}, 4, 4),
        ([0.5, math.nan, math.nan, 0.9], None, {"patience": 2}, 3, 1),
    ],
)
def test_early_stopping(train, values, rises, settings, stops_at, best_at):
    watch = Watch()
    result = train(
        [watch],
        metrics={"script": scripted(values, rises)},
        data={"train": ROWS, "eval": HELD_OUT[:8]},
        train={"max_steps": 20},
        evaluate={"every": "1 steps", "metric": "script"},
        early_stopping=settings,
    )
    assert (result.fit.step, result.fit.stop_reason) == (stops_at, "early stopping")
    assert watch.evaluated == list(range(1, stops_at + 1))
    assert result.fit.best_step == watch.saved[-1] == best_at
    assert same_bits(saved_weights(result), watch.weights[best_at - 1])


def test_early_stopping_by_another_metric(train):
    """The best model by one metric, the end by another that the task does not usually compute."""
    settings = {"metric": "mcc", "mode": "min", "patience": 1}
    result = train(train={"epochs": 12, "lr": 1e-2}, early_stopping=settings)
    assert result.plan.metric == "accuracy"
    values = [line["eval_mcc"] for line in lines_of(result.folder) if "eval_mcc" in line]
    assert result.fit.stop_reason == "early stopping"
    assert values[-1] >= min(values[:-1])
    assert result.fit.metrics.keys() == {"loss", "accuracy", "f1", "mcc"}


def test_without_evaluation_the_last_model_is_kept(train, caplog):
    for sections in (
        {"data": {"train": ROWS, "eval_share": 0}},
        {"checkpoint": {"best": False}},
        {"metrics": {"odd": scripted([math.nan] * 4)}, "evaluate": {"metric": "odd"}, "limits": {"eval": 1}},
    ):
        watch = Watch()
        with caplog.at_level("INFO", "trimtab"):
            result = train([watch], train={"epochs": 3}, **sections)
        assert watch.saved == [12]
        assert same_bits(saved_weights(result), watch.weights[-1])
    assert "odd was never finite: the last model is kept" in caplog.text


# ---------------------------------------------------------------------- the user's own parts


def test_callbacks_in_order(train):
    class Notes:
        def __init__(self):
            self.calls = []

        def on_step(self, state):
            assert state.num_steps == 4
            assert state.epoch == state.step / 4
            assert isinstance(state.model, torch.nn.Module)
            self.calls.append(("step", state.step))

        def on_eval(self, state, metrics):
            assert metrics == state.metrics
            assert metrics.keys() == {"loss", "accuracy", "f1"}
            self.calls.append(("eval", state.step))

        def on_save(self, state, folder):
            assert json.loads((Path(folder) / "trimtab.json").read_text())["step"] == state.step
            self.calls.append(("save", state.step))

        def on_end(self, state):
            self.calls.append(("end", state.step))

    class OnlyTheEnd:
        called = 0

        def on_end(self, state):
            self.called += 1

    notes, other = Notes(), OnlyTheEnd()
    train([notes, other], evaluate={"every": "3 steps", "metric": "loss"})
    steps = [("step", 1), ("step", 2), ("step", 3), ("save", 3), ("eval", 3), ("step", 4), ("save", 4), ("eval", 4)]
    assert notes.calls == [*steps, ("end", 4)]
    assert other.called == 1


@pytest.mark.parametrize("moment", ["on_step", "on_eval"])
def test_a_callback_may_stop_the_run(train, moment):
    class Stops(Watch):
        def on_step(self, state):
            super().on_step(state)
            state.should_stop |= moment == "on_step" and state.step == 3

        def on_eval(self, state, metrics):
            super().on_eval(state, metrics)
            state.should_stop |= moment == "on_eval"

    watch = Stops()
    result = train([watch], evaluate={"every": "2 steps"}, train={"epochs": 5})
    assert result.fit.stop_reason == "callback"
    assert (result.fit.step, watch.evaluated) == ((3, [2, 3]) if moment == "on_step" else (2, [2]))
    assert json.loads((result.folder / "run.json").read_text())["state"] == "finished"


def test_own_loss_and_metric(train):
    """Written again by hand, they give what the built-in ones give, with micro-batches too."""

    def mean(outputs, batch):
        return torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])

    def mean_and_weight(outputs, batch):
        return mean(outputs, batch), len(batch["labels"])

    def hits(logits, batch):
        return logits.argmax(-1) == batch["labels"]

    weights = []
    for loss in (None, mean, mean_and_weight):
        watch = Watch()
        result = train([watch], loss=loss, metrics={"hits": hits}, memory={"micro_batch": 3})
        weights.append(watch.weights[-1])
        assert result.fit.metrics["hits"] == pytest.approx(result.fit.metrics["accuracy"])
    assert same_bits(weights[0], weights[1])
    assert same_bits(weights[0], weights[2])


def test_another_loss_teaches_something_else(train):
    result = train(
        loss=lambda outputs, batch: (outputs.logits - 3).square().mean(),
        metrics={"level": lambda logits, batch: logits.mean(-1)},
        train={"epochs": 10, "lr": 1e-2},
    )
    assert result.fit.metrics["level"] == pytest.approx(3, abs=0.3)
    assert result.fit.metrics["loss"] < 0.2


def test_an_unknown_metric_is_refused(train):
    with pytest.raises(RecipeError, match="no metric 'lenght'"):
        train(metrics={"length": scripted([])}, evaluate={"metric": "lenght"})


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (lambda logits, batch: "high", "str, expected one number per row"),
        (lambda logits, batch: logits.mean(), r"1 value for \d+ rows"),
        (lambda logits, batch: [1, 2, 3], r"3 values for \d+ rows"),
    ],
)
def test_a_metric_without_one_number_per_row_is_refused(train, value, found):
    """A mean of each batch would be averaged wrongly: batches have different sizes."""
    with pytest.raises(RecipeError, match=f"metrics: level returned {found}") as caught:
        train(metrics={"level": value})
    assert caught.value.cure.startswith("return one value per row")


def test_held_out_loss_is_not_smoothed(train):
    """Smoothed by 0.4, the loss of two classes can never be below 0.5, the entropy of (0.8, 0.2)."""
    settings = {"epochs": 12, "lr": 3e-3, "label_smoothing": 0.4, "log_every": 1}
    result = train(train=settings, data={"train": reviews(64), "eval": HELD_OUT})
    assert min(line["loss"] for line in lines_of(result.folder) if "loss" in line) >= 0.5
    assert result.fit.metrics["loss"] < 0.4


def test_evaluations_hide_the_same_tokens(train, tiny):
    """A rate that moves no weight: any change of the held-out loss would come from other masks."""
    data = {"train": [{"text": row["text"]} for row in ROWS]}
    settings = {"epochs": 3, "lr": 1e-30, "optimizer": "sgd", "log_every": 1}
    result = train(task="masked-lm", data=data, train=settings, evaluate={"at_start": True})
    lines = lines_of(result.folder)
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(held_out) == 4
    assert len(set(held_out)) == 1
    trained = [line["loss"] for line in lines if "loss" in line]
    assert len(set(trained)) > len(trained) / 2


# ---------------------------------------------------------------------- frozen parts


def is_head(name):
    return name.startswith("classifier")


def test_a_frozen_base_stays_as_it_is(train, tiny):
    folder = tiny.folder("bert", kind="sequence-classification", head={"num_labels": 2})
    start, watch = load_file(f"{folder}/model.safetensors"), Watch()
    result = train([watch], model=folder, train={"epochs": 2, "lr": 1e-2, "freeze": {"base": "always"}})
    end = watch.weights[-1]
    assert {name for name in start if not torch.equal(start[name], end[name])} == {
        name for name in start if is_head(name)
    }
    assert same_bits(saved_weights(result), watch.weights[result.fit.best_step - 1])
    head = [value for name, value in watch.model.named_parameters() if is_head(name)]
    assert {id(p) for p in watch.optimizer.state} == {id(p) for p in head}
    assert {id(p) for group in watch.optimizer.param_groups for p in group["params"]} == {id(p) for p in head}
    assert result.plan.num_trainable == sum(p.numel() for p in head)


def test_a_new_part_of_the_base_trains_with_the_head(train, tiny):
    """The pooler is not in the file of a masked language model: frozen, it would stay random."""
    folder, watch = tiny.folder("bert"), Watch()
    start = load_file(f"{folder}/model.safetensors")
    train([watch], model=folder, train={"epochs": 2, "lr": 1e-2, "freeze": {"base": "always"}})
    first, last = watch.weights[0], watch.weights[-1]
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert changed == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
    assert all(torch.equal(start[name], last[name]) for name in first.keys() & start.keys())


@pytest.mark.parametrize(("until", "num_frozen"), [("3 steps", 3), ("1 epoch", 4)])
def test_freeze_then_unfreeze(train, tiny, until, num_frozen):
    folder = tiny.folder("bert", kind="sequence-classification", head={"num_labels": 2}, **NO_DROPOUT["bert"])
    start, watch = load_file(f"{folder}/model.safetensors"), Watch()
    settings = {"epochs": 2, "lr": 1e-3, "freeze": {"base": until}, "weight_decay": 0.1, "max_grad_norm": 0}
    train([watch], model=folder, train=settings)
    base = [name for name in start if not is_head(name)]
    for weights in watch.weights[:num_frozen]:
        assert all(torch.equal(weights[name], start[name]) for name in base)
        assert not torch.equal(weights["classifier.weight"], start["classifier.weight"])
    assert watch.lrs == pytest.approx([1e-3 * (1 - step / 8) for step in range(1, 9)])
    # the optimizer begins with the base now: its first step is as long as the rate of that step, whatever came before
    name = "bert.encoder.layer.0.intermediate.dense.bias"
    lr = watch.lrs[num_frozen - 1]
    moved = (watch.weights[num_frozen][name] - start[name]).abs()
    assert float(moved.max()) == pytest.approx(lr, rel=1e-2)
    steps = {n: int(watch.optimizer.state[p]["step"]) for n, p in watch.model.named_parameters()}
    assert {steps[n] for n in base if n in steps} == {8 - num_frozen}
    assert {steps[n] for n in steps if is_head(n)} == {8}


def test_a_wish_to_stop_cannot_be_taken_back():
    state = RunState(num_steps=9, steps_per_epoch=3, model=torch.nn.Linear(1, 1), optimizer=None)
    state.should_stop = True
    state.should_stop = False
    assert state.should_stop
    assert state.is_over
