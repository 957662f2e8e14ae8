"""`trimtab evaluate`: tables, files, two models, messages with a cure."""

import csv
import json
from pathlib import Path

import pytest
import torch

from tiny_runs import reviews, tiny_config, tokenizer, write_csv, write_jsonl
from trimtab.checkpoint.export import export_model
from trimtab.commands.evaluate import evaluate_model
from trimtab.errors import CheckpointError
from trimtab.model.load import load_model
from trimtab.report.evaluation import as_dict, confusion_table, write_evaluation

LABELS = ("bad", "good")


def export(folder, data, *, seed=0, names=LABELS):
    """A classifier as a run leaves it."""
    torch.manual_seed(seed)
    tok = tokenizer()
    head = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {n: i for i, n in enumerate(names)},
    }
    head["problem_type"] = "single_label_classification"
    model = load_model(tiny_config("bert", initializer_range=0.5), "sequence-classification", head, tok)
    recipe = {"model": "tiny", "task": "classify", "data": {"train": str(data), "text": "text", "eval_share": 0.5}}
    export_model(folder, model, tok, card={"task": "classify", "max_length": 32, "recipe": recipe})
    return folder


@pytest.fixture
def data(own_folder):
    return write_csv(own_folder / "reviews.csv", reviews(60))


@pytest.fixture
def model(own_folder, data):
    return export("model", data)


def test_tables_and_files(model, data, trimtab_command):
    code, out, _ = trimtab_command("evaluate", model, data, "--out", "found", "--worst", "2", "--device", "cpu")
    assert code == 0
    for expected in ("60 rows", "accuracy", "95% interval", "precision", "true \\ predicted", "reviews.csv, line"):
        assert expected in out
    found = json.loads(Path("found/evaluation.json").read_text())
    result = evaluate_model(model, data, device="cpu", num_worst=2)
    assert found == json.loads(json.dumps(result.evaluation.as_dict()))
    assert f"{result.evaluation.metrics['accuracy']:.4f}" in out
    with Path("found/worst_rows.csv").open(newline="") as file:
        worst = list(csv.DictReader(file))
    assert [row["text"] for row in worst] == [row.text for row in result.evaluation.worst]
    assert Path("found/confusion.png").read_bytes().startswith(b"\x89PNG")
    # again: the folder is replaced as a whole; a folder of something else is not
    assert trimtab_command("evaluate", model, data, "--out", "found", "--worst", "1")[0] == 0
    assert len(json.loads(Path("found/evaluation.json").read_text())["worst"]) == 1
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("…")
    with pytest.raises(CheckpointError):
        write_evaluation(Path("mine"), result.evaluation)
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]


def test_a_read_only_folder_is_refused_before_the_model_is_loaded(trimtab_command, as_somebody):
    place, unprivileged = as_somebody
    place.chmod(0o555)
    with unprivileged():
        code, out, err = trimtab_command("evaluate", "nothing", "nowhere.csv", "--out", place / "found")
    assert (code, out) == (2, "")
    assert f"found cannot be written: {place} is not writable\n  cure: make it writable, or choose another" in err


def test_the_rows_of_the_run_by_default(model, trimtab_command):
    code, out, _ = trimtab_command("evaluate", model, "--json", "--rows", "20")
    assert code == 0
    assert json.loads(out)["num_rows"] == 20
    assert json.loads(trimtab_command("evaluate", model, "--json")[1])["num_rows"] == 30


def test_against_another_model(model, data, trimtab_command):
    export("other", data, seed=3, names=("good", "bad"))
    code, out, _ = trimtab_command("evaluate", model, data, "--against", "other", "--out", "found")
    assert code == 0
    assert "McNemar" in out
    found = json.loads(Path("found/evaluation.json").read_text())
    accuracy = found["differences"]["accuracy"]
    assert accuracy["first"] == found["metrics"]["accuracy"]
    assert accuracy["second"] == found["against"]["metrics"]["accuracy"]
    assert 0 < accuracy["p_value"] <= 1
    _, out, _ = trimtab_command("evaluate", model, data, "--against", model, "--json")
    assert {each["p_value"] for each in json.loads(out)["differences"].values()} == {1.0}


def test_messages_name_options(model, own_folder, trimtab_command):
    code, _, err = trimtab_command("evaluate", model, write_jsonl(own_folder / "odd.jsonl", [{"a": "x", "b": "y"}]))
    assert code == 2
    assert "--label" in err
    assert "data.label" not in err
    unknown = write_csv(own_folder / "unknown.csv", [{"text": "fine", "label": "good"}, {"text": "so", "label": "meh"}])
    code, _, err = trimtab_command("evaluate", model, unknown)
    assert code == 2
    assert "label 'meh' in column 'label' is not one of the 2 labels of the model" in err
    renamed = write_csv(own_folder / "renamed.csv", [{"t": "fine", "y1": "good"}, {"t": "so", "y1": "bad"}])
    assert trimtab_command("evaluate", model, renamed, "--text", "t", "--label", "y1")[0] == 0
    assert "cure: --rows 1 or more" in trimtab_command("evaluate", model, renamed, "--rows", "0")[2]
    code, out, err = trimtab_command("evaluate", model, unknown, "--out", unknown)
    assert (code, out) == (2, ""), "before anything is evaluated"
    assert "unknown.csv is a file" in err
    code, out, err = trimtab_command("evaluate", model, renamed, "--text", "t", "--label", "y1", "--out", ".")
    assert (code, out) == (2, ""), "before anything is evaluated"
    assert "contains other files, which the evaluation would replace" in err


def test_many_labels_are_shown_as_confusions(data, own_folder):
    names = tuple(f"label {index}" for index in range(15))
    export("many", data, names=names)
    rows = [{"text": row["text"], "label": names[index % 15]} for index, row in enumerate(reviews(60))]
    found = evaluate_model("many", rows, device="cpu").evaluation
    header, rows = confusion_table(found)
    assert header == ["true", "predicted", "rows"]
    assert 0 < len(rows) <= 12
    assert [int(row[2]) for row in rows] == sorted((int(row[2]) for row in rows), reverse=True)
    assert "against" not in as_dict(found)
