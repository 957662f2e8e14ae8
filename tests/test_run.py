"""The spine: every task and start through `fit`, what a run leaves behind, and what a failing one leaves."""

import json
import logging
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trimtab
from tiny_runs import CHAT_TEMPLATE, lines_of, reviews, tiny_config, write_csv
from trimtab import Recipe, fit
from trimtab.build.data import run_name
from trimtab.build.data_report import report_data
from trimtab.errors import DataError, ModelError, RecipeError, Stopped, UserError
from trimtab.recipe.load import load_recipe
from trimtab.runs.run_folder import list_runs, read_status

ROWS = reviews(24)
TEXTS = [{"text": row["text"]} for row in ROWS]
MESSAGES = [
    {"messages": [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["label"]}]}
    for row in ROWS
]
# task, model, rows, settings of data
TASKS = {
    "classify": ("classify", "bert", ROWS, {}),
    "classify-several": (
        "classify",
        "bert",
        [{"text": row["text"], "labels": [row["label"], "film"][: 1 + i % 2]} for i, row in enumerate(ROWS)],
        {"label": "labels"},
    ),
    "classify-pairs": (
        "classify",
        "bert",
        [{"premise": row["text"], "hypothesis": "this film", "label": i % 3} for i, row in enumerate(ROWS)],
        {"text": ["premise", "hypothesis"]},
    ),
    "regress": ("regress", "bert", [{"text": row["text"], "score": i / 24} for i, row in enumerate(ROWS)], {}),
    "regress-several": (
        "regress",
        "bert",
        [{"text": row["text"], "funny": i / 24, "sad": 1 - i / 24} for i, row in enumerate(ROWS)],
        {"label": ["funny", "sad"]},
    ),
    "causal-lm": ("causal-lm", "gpt2", TEXTS, {"max_length": 16}),
    "chat": ("chat", "gpt2", MESSAGES, {}),
    "seq2seq": ("seq2seq", "t5", [{"source": row["text"], "target": row["label"]} for row in ROWS], {}),
    "masked-lm": ("masked-lm", "bert", TEXTS, {}),
}
pytestmark = pytest.mark.usefixtures("own_folder")


def quick(recipe, **arguments):
    return fit(recipe, progress="quiet", device="cpu", **arguments)


@pytest.fixture
def bert(tiny):
    return tiny.folder("bert")


@pytest.mark.parametrize("case", TASKS)
def test_every_task(case, tiny):
    """Two steps, a finite loss, metrics, and a model that can be loaded for what it learnt."""
    task, name, rows, data = TASKS[case]
    folder = tiny.folder(name, chat=case == "chat")
    recipe = Recipe(model=folder, task=task, data={"train": rows, **data}, train={"max_steps": 2, "log_every": 1})
    result = quick(recipe)
    losses = [line["loss"] for line in lines_of(result.folder) if "loss" in line]
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert math.isfinite(result.fit.metrics[result.plan.metric])
    loaded = trimtab.load(result.folder, device="cpu")
    assert loaded.task_name == task
    columns = [[value] if isinstance(value, str) else value for value in loaded.facts["columns"].values()]
    assert sorted(sum(columns, [])) == sorted(rows[0])
    assert loaded.facts["max_length"] == result.plan.max_length
    if case == "chat":
        assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    if case == "classify-several":
        assert loaded.model.config.problem_type == "multi_label_classification"
        assert set(loaded.model.config.label2id) == {"bad", "good", "film"}


@pytest.mark.parametrize(
    "case",
    [
        case if case in ("classify", "chat", "masked-lm") else pytest.param(case, marks=pytest.mark.slow)
        for case in TASKS
    ],
)
def test_fast_dev_run_leaves_nothing(case, tiny, own_folder, tmp_path, caplog):
    task, name, rows, data = TASKS[case]
    folder = tiny.folder(name, chat=case == "chat")
    limits = {"fast_dev_run": True}
    with caplog.at_level("INFO", "trimtab"):
        result = quick(Recipe(model=folder, task=task, data={"train": rows, **data}, limits=limits))
    assert result.fit.step == min(3, result.plan.num_steps)
    assert result.fit.metrics
    assert result.best is None
    assert not result.folder.exists()
    assert not list(own_folder.iterdir())
    assert not list((tmp_path / "temporary").iterdir())
    done = "train, evaluate, save, load" + ("" if task == "masked-lm" else ", predict")
    assert f"fast_dev_run: {done} work; nothing was kept" in caplog.text
    assert ("prediction of the saved model" in caplog.text) == (task != "masked-lm")


def test_fast_dev_run_that_fails_leaves_nothing(bert, own_folder, tmp_path):
    def loss(outputs, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quick(Recipe(model=bert, data={"train": ROWS}, limits={"fast_dev_run": 2}), loss=loss)
    assert not list(own_folder.iterdir())
    assert not list((tmp_path / "temporary").iterdir())


# ---------------------------------------------------------------------- from scratch


@pytest.mark.parametrize(("name", "case"), [("bert", "classify"), ("gpt2", "causal-lm"), ("marian", "seq2seq")])
@pytest.mark.parametrize("tokenizer", ["train", pytest.param("folder", marks=pytest.mark.slow)])
def test_from_scratch(name, case, tokenizer, bert):
    task, _, rows, data = TASKS[case]
    model = {"config": tiny_config(name, vocab_size=300), "tokenizer": bert if tokenizer == "folder" else "train"}
    classic = {"optimizer": "adam", "betas": [0.9, 0.98], "eps": 1e-9, "schedule": "noam", "warmup": 4}
    settings = {"max_steps": 2, "lr": 1.0, "label_smoothing": 0.1, "log_every": 1, **classic}
    result = quick(Recipe(model=model, task=task, data={"train": rows, **data}, train=settings))
    lines = [line for line in lines_of(result.folder) if "lr" in line]
    # the rate of the next step: d_model^-0.5 · step · warmup^-1.5
    assert [line["lr"] for line in lines] == pytest.approx([32**-0.5 * step * 4**-1.5 for step in (2, 3)])
    assert all(math.isfinite(line["loss"]) for line in lines)
    loaded = trimtab.load(result.folder, device="cpu")
    assert loaded.task_name == task
    vocabulary = len(loaded.tokenizer)
    assert vocabulary <= 300 if tokenizer == "train" else vocabulary > 300
    assert loaded.model.get_input_embeddings().weight.shape[0] == max(300, vocabulary)


def test_a_tokenizer_learns_from_messages():
    model = {"config": tiny_config("gpt2"), "tokenizer": "train"}
    result = quick(Recipe(model=model, data={"train": MESSAGES}, train={"max_steps": 2}))
    loaded = trimtab.load(result.folder, device="cpu")
    assert loaded.task_name == "chat"
    assert len(loaded.tokenizer.tokenize("film")) == 1


# ---------------------------------------------------------------------- what a run leaves


def test_the_folder_of_a_run(bert, own_folder):
    data = write_csv(own_folder / "reviews.csv", ROWS)
    recipe = Recipe(model=bert, data={"train": str(data)}, train={"epochs": 1, "log_every": 1}, seed=3)
    result = quick(recipe)
    assert result.folder == Path("runs/reviews/001")
    assert repr(result).startswith("Result(step=3, loss=")
    assert repr(result).endswith("folder='runs/reviews/001', best='runs/reviews/001/best')")
    assert {path.name for path in result.folder.iterdir()} == {
        *("recipe.yaml", "plan.json", "metrics.jsonl", "run.json", "best", "checkpoints", "report.html", "report.json")
    }
    text = (result.folder / "recipe.yaml").read_text()
    assert load_recipe(result.folder / "recipe.yaml", {}, ()).recipe == recipe
    assert next(line for line in text.splitlines() if line.startswith("seed: 3")).endswith("# Python")
    assert json.loads((result.folder / "plan.json").read_text()) == result.plan.as_dict()
    assert (result.plan.num_train_rows, result.plan.num_eval_rows) == (22, 2)
    status = json.loads((result.folder / "run.json").read_text())
    assert (status["state"], status["step"], status["num_steps"]) == ("finished", 3, 3)
    assert (status["metric_name"], status["best_metric"]) == ("accuracy", result.fit.best_metric)
    first = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["config"]["seed"] == 3
    lines = lines_of(result.folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 3]
    assert all(line.keys() >= {"loss", "lr", "grad_norm", "tokens_per_s"} for line in lines[:3])
    assert lines[3]["eval_accuracy"] == result.fit.metrics["accuracy"]
    assert lines[4]["peak_memory_bytes"] > 0


def test_the_names_of_runs(bert, own_folder):
    data = {"train": ROWS, "eval_share": 0}
    settings = {"model": bert, "data": data, "train": {"max_steps": 1}}
    assert quick(Recipe(**settings)).folder == Path("runs/run/001")
    assert quick(Recipe(**settings)).folder == Path("runs/run/002")
    assert quick(Recipe(**settings, track={"experiment": "mine"})).folder == Path("runs/mine/001")
    assert quick(Recipe(**settings, name="second", track={"experiment": "mine"})).folder == Path("runs/mine/second")
    assert quick(Recipe(**settings, out="some/where")).folder == Path("some/where")
    with pytest.raises(RecipeError, match="runs/mine/second contains a finished run"):
        quick(Recipe(**settings, name="second", track={"experiment": "mine"}))


def test_transformers_alone_loads_the_best_model(bert):
    """A plain Hugging Face folder, with label names, that says what trimtab says."""
    result = quick(Recipe(model=bert, data={"train": ROWS, "max_length": 20}, train={"max_steps": 3, "lr": 1e-2}))
    model = AutoModelForSequenceClassification.from_pretrained(result.best)
    tokenizer = AutoTokenizer.from_pretrained(result.best)
    assert model.config.id2label == {0: "bad", 1: "good"}
    assert model.config.label2id == {"bad": 0, "good": 1}
    batch = tokenizer(ROWS[0]["text"], return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    ours = trimtab.load(result.folder, device="cpu")
    with torch.no_grad():
        assert torch.equal(ours.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, logits)
    assert ours.max_length == 20


def test_a_run_goes_on_from_another(bert):
    """The head of a run has the labels that are wanted: it is kept, and accuracy starts where it ended."""
    first = quick(Recipe(model=bert, data={"train": ROWS, "eval": ROWS}, train={"epochs": 25, "lr": 3e-3}))
    assert first.fit.best_metric > 0.9
    settings = {"max_steps": 1, "lr": 1e-12}
    recipe = Recipe(
        model=str(first.folder),
        data={"train": ROWS, "eval": ROWS},
        train=settings,
        evaluate={"at_start": True},
    )
    second = quick(recipe)
    start = next(line for line in lines_of(second.folder) if "eval_accuracy" in line)
    assert start["eval_accuracy"] == first.fit.best_metric


def test_look_at_data(bert):
    report = report_data(Recipe(model=bert, data={"train": ROWS, "eval": ROWS[:3]}), num_examples=2)
    assert report.task == "classify"
    assert len(report.examples) == 2
    assert report.examples[0].text == f"<s>{ROWS[0]['text']}</s>"
    assert report.examples[0].label == ROWS[0]["label"]
    assert report.num_shared_eval_rows == 3


# ---------------------------------------------------------------------- what goes wrong


def test_a_folder_in_use_is_refused_and_untouched(own_folder):
    mine = own_folder / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for out in (mine, mine / "thesis.txt"):
        # no such model: the folder is looked at before anything is loaded
        with pytest.raises(RecipeError, match="is not empty|is a file"):
            quick(Recipe(model="no/such-model", data={"train": ROWS}, out=str(out)))
    assert [path.name for path in own_folder.rglob("*")] == ["mine", "thesis.txt"]
    assert (mine / "thesis.txt").read_text() == "years of work"
    with pytest.raises(RecipeError, match="cannot be created: Not a directory"):
        quick(Recipe(model="no/such-model", data={"train": ROWS}, out=str(mine / "thesis.txt" / "run")))


def test_a_quiet_run_prints_nothing(bert, own_folder, monkeypatch, capfd):
    """In an application that has not configured logging."""
    for name in (None, "trimtab"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    fit(Recipe(model=bert, data={"train": ROWS}, limits={"fast_dev_run": 1}), progress="quiet", device="cpu")
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_cannot_be_made_is_found_before_anything_is_loaded(as_somebody):
    place, unprivileged = as_somebody
    place.chmod(0o555)
    for out in (place, place / "new" / "run"):
        with unprivileged(), pytest.raises(RecipeError, match="cannot be created: Permission denied") as failure:
            quick(Recipe(model="no/such-model", data={"train": ROWS}, out=str(out)))
        assert "make the folder writable for this user, or choose another --out" in failure.value.cure


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"evaluate": {"metric": "pearson"}}, RecipeError),
        ({"early_stopping": {"metric": "perplexity"}}, RecipeError),
        ({"train": {"freeze": {"no_such_part": "always"}}}, RecipeError),
        ({"task": "masked-lm", "train": {"schedule": "noam", "warmup": 3}, "model": "nowhere"}, ModelError),
        ({"checkpoint": {"mirror": __file__}}, RecipeError),
        ({"data": {"train": "nowhere.csv"}}, DataError),
        ({"data": {"train": ROWS, "label": "stars"}}, DataError),
    ],
)
def test_a_mistake_found_before_the_first_step_costs_no_folder(bert, own_folder, sections, error):
    """The same name and --out can be used again once it is mended."""
    settings = {"model": bert, "data": {"train": ROWS}, "out": "deep/er/run"} | sections
    with pytest.raises(error) as failure:
        quick(Recipe(**settings))
    assert isinstance(failure.value, UserError)
    assert not list(own_folder.iterdir())


def test_an_empty_folder_may_be_used_and_stays(bert, own_folder):
    (own_folder / "given").mkdir()
    with pytest.raises(RecipeError):
        quick(Recipe(model=bert, data={"train": ROWS}, out="given", evaluate={"metric": "pearson"}))
    assert list(own_folder.rglob("*")) == [own_folder / "given"]
    quick(Recipe(model=bert, data={"train": ROWS}, out="given", train={"max_steps": 1}))
    assert (own_folder / "given" / "best").is_dir()


@pytest.mark.parametrize(("raised", "state"), [(ZeroDivisionError("no"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_a_run_that_breaks_says_so(bert, capsys, raised, state):
    class Breaks:
        ended = 0

        def on_step(self, run):
            if run.step == 2:
                raise raised

        def on_end(self, run):
            self.ended += 1

    callback = Breaks()
    with pytest.raises(type(raised)):
        quick(Recipe(model=bert, data={"train": ROWS}, out="run", train={"log_every": 1}), callbacks=[callback])
    assert callback.ended == 1
    status = json.loads(Path("run/run.json").read_text())
    assert status["state"] == state
    assert status["error"].startswith(type(raised).__name__)
    assert status["step"] == 2
    assert status["pid"] == os.getpid()
    assert capsys.readouterr().err == f"{state}: run\n"
    assert len(lines_of(Path("run"))) == 2


@pytest.mark.parametrize(
    ("source", "name"),
    [("data/*.csv", "data"), ("data/**/*.jsonl", "data"), ("*.csv", "run"), ("a/reviews.csv[:10]", "reviews")],
)
def test_a_run_is_named_after_its_data_and_never_after_a_glob(source, name):
    assert run_name(Recipe(model="x", data={"train": source})) == name


@pytest.mark.parametrize("setting", [{"label_smoothing": 0.1}, {"class_weights": "balanced"}])
def test_settings_of_the_loss_are_refused_with_an_own_loss(bert, setting):
    recipe = Recipe(model=bert, data={"train": ROWS}, train={"max_steps": 1, **setting})
    with pytest.raises(RecipeError, match=next(iter(setting))):
        quick(recipe, loss=lambda outputs, batch: outputs.logits.mean())


def test_a_run_never_shows_more_steps_than_it_has(bert):
    """Neither one that is resumed with a shorter recipe, nor one that is resumed from an earlier checkpoint."""
    settings = {"model": bert, "data": {"train": ROWS}, "out": "run", "checkpoint": {"every": "2 steps", "keep": 9}}
    quick(Recipe(**settings, train={"max_steps": 6}))
    seen = []

    class Looks:
        def on_step(self, state):
            seen.append(read_status(Path("run"))["step"])

    quick(Recipe(**settings, train={"max_steps": 3}), resume=True)
    (run,) = list_runs(Path("."))
    assert (run.step, run.num_steps) == (6, 6)
    quick(Recipe(**settings, train={"max_steps": 3}), resume="step-2", callbacks=[Looks()])
    (run,) = list_runs(Path("."))
    assert max(seen) <= 3  # run.json is written by a thread, up to a second late
    assert (run.step, run.num_steps) == (3, 3)


class Interrupts:
    def on_step(self, state):
        if state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_before_any_evaluation_keeps_the_model(bert):
    recipe = Recipe(model=bert, data={"train": ROWS}, train={"max_steps": 9}, out="run")
    with pytest.raises(Stopped, match="signal SIGINT: saved after step 2; resume with: trimtab resume run") as stopped:
        quick(recipe, callbacks=[Interrupts()])
    assert stopped.value.code == 75
    assert trimtab.load("run").task_name == "classify"
    assert json.loads(Path("run/best/trimtab.json").read_text())["step"] == 2
