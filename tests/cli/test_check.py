"""`trimtab check` finds missing files, models, tokenizers and unknown metrics: all at once, with their lines."""

import shutil
from pathlib import Path

import pytest
import torch

from tiny_runs import reviews, tiny_config, write_csv
from trimtab.build.recipe_check import missing_parts
from trimtab.data.metrics import metrics_of_task
from trimtab.data.tasks.build import TASK_NAMES
from trimtab.errors import RecipeError
from trimtab.recipe.load import load_recipe
from trimtab.recipe.yaml_text import as_yaml

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def bert(tiny):
    write_csv(Path("reviews.csv"), reviews(4))
    return tiny.folder("bert")


def problems(model, data="{train: reviews.csv}", *more):
    """The lines of the error about a recipe."""
    Path("r.yaml").write_text("\n".join([f"model: {as_yaml(model)}", f"data: {data}", *more]))
    try:
        load_recipe(Path("r.yaml"), {}, [], extra_check=missing_parts)
    except RecipeError as error:
        return [line.strip() for line in error.problem.splitlines()[1:]]
    return []


def test_everything_missing_is_reported_at_once(bert):
    found = problems("no-such-model", "{train: review.csv, eval: held-out/}", "evaluate: {metric: acuracy}", "lr: 1e-3")
    assert [line.split(": ")[:2] for line in found] == [
        ["r.yaml:1", "model"],
        ["r.yaml:2", "data.train"],
        ["r.yaml:2", "data.eval"],
        ["r.yaml:3", "evaluate.metric"],
        ["r.yaml:4", "lr"],
    ]
    assert "is neither a folder nor in the Hub's cache" in found[0]
    assert "'review.csv' does not exist; did you mean reviews.csv?" in found[1]
    assert "found 'acuracy'; no such metric" in found[3]
    assert found[3].endswith("did you mean accuracy?")


def test_nothing_is_said_about_the_value_of_a_key_that_is_misspelt(bert):
    Path("r.yaml").write_text("model_name_or_path: bert\ndata_files: reviews.csv\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("r.yaml"), {}, [], extra_check=missing_parts)
    assert "model_name_or_path: found 'bert'" in caught.value.problem
    assert "?" not in caught.value.problem


def test_existing_parts_pass(bert):
    Path("folder").mkdir()
    write_csv(Path("folder/a.csv"), reviews(2))
    for source in ("reviews.csv", "reviews.csv[:2]", "'*.csv'", "folder", "./folder/a.csv[10%:]"):
        assert problems(bert, f"{{train: {source}}}", "evaluate: {metric: mcc}", "early_stopping: {metric: loss}") == []
    assert problems(bert, "{train: [reviews.csv, folder/a.csv]}") == []
    (line,) = problems(bert, "{train: [reviews.csv, folder/b.csv]}")
    assert "data.train: 'folder/b.csv' is not a file" in line
    assert problems({"config": tiny_config("bert"), "tokenizer": bert}) == []
    assert problems({"config": tiny_config("bert"), "tokenizer": "train"}) == []


def test_rows_are_read_as_a_run_reads_them(bert, monkeypatch):
    lines = []
    monkeypatch.setattr("trimtab.build.data.say", lines.append)
    write_csv(Path("more.csv"), [row | {"stars": 1} for row in reviews(6)])
    assert problems(bert, "{train: more.csv, eval: reviews.csv}") == []
    assert "more.csv: columns that are not used: 'stars'" in lines
    assert any(line.startswith("4 rows of data.eval are also in data.train") for line in lines)
    (line,) = problems(bert, "{train: reviews.csv, text: label, label: label}")
    assert line.startswith("r.yaml:2: data: data.text and data.label are the same column 'label'")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("no/such/place", "'no/such/place' is not a local file or folder"),
        ("no-such-name", "'no-such-name' is not a local file or folder"),
        ("/no/such.csv", "'/no/such.csv' does not exist"),
        ("'x*.csv'", "no file matches 'x*.csv'"),
        ("notes.doc", "notes.doc: unsupported file format"),
        ("'reviews.csv[:ten]'", "reviews.csv: 'ten' is not a slice bound"),
        ("empty", "empty has no data files"),
        ("'review*'", "has files of several formats"),
    ],
)
def test_missing_data(bert, source, problem):
    Path("notes.doc").write_text("x")
    Path("reviews.txt").write_text("x")
    Path("empty").mkdir()
    (line,) = problems(bert, f"{{train: {source}}}")
    assert line.startswith("r.yaml:2: data.train: ")
    assert problem in line


def test_missing_models(bert, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    (folder / "model.safetensors").unlink()
    assert problems(str(folder)) == []  # weights are not looked at
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (line,) = problems(str(folder))
    assert "contains no tokenizer; set model.tokenizer" in line
    assert problems({"name": str(folder), "tokenizer": bert}) == []
    (line,) = problems({"name": bert, "tokenizer": "./nowhere"})
    assert "model.tokenizer: there is no folder './nowhere'" in line
    (folder / "config.json").unlink()
    assert "is not a model: it has no config.json" in problems(str(folder))[0]
    (line,) = problems("best:nothing")
    assert line.startswith("r.yaml:1: model: ")


def test_unknown_settings_of_a_config(bert):
    (line,) = problems({"config": tiny_config("bert") | {"hiden_size": 3}, "tokenizer": "train"})
    assert line.startswith("r.yaml:1: model.config: model.config.hiden_size: bert has no such setting; did you mean")


@pytest.mark.parametrize("task", TASK_NAMES)
def test_metrics_of_another_task(bert, task):
    other = "mae" if task != "regress" else "f1"
    more = [f"task: {task}", f"checkpoint: {{best: {other}}}", f"early_stopping: {{metric: {other}}}"]
    found = problems(bert, "{train: reviews.csv}", *more)
    assert [line.split(": ")[1] for line in found] == ["checkpoint.best", "early_stopping.metric"]
    assert all(f"no such metric for task {task}; allowed: {', '.join(metrics_of_task(task))}" in line for line in found)


def test_a_precision_that_is_emulated_here_is_reported(bert, monkeypatch, caplog):
    caplog.set_level("INFO", logger="trimtab")
    monkeypatch.setattr("trimtab.build.recipe_check.find_device", lambda: torch.device("cpu"))
    assert problems(bert, "{train: reviews.csv}", "train: {precision: fp16}") == []
    assert "fp16 is emulated on this CPU: correct, but many times slower than fp32" in caplog.text
