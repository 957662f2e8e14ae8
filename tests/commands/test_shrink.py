"""`trimtab shrink`: every form that can be made is measured, a form that fails is a line, the bound decides."""

import csv
import json
import shutil
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from tiny_models import config_of, tokenizer
from trimtab.checkpoint.export import export_model
from trimtab.commands.cluster import cluster
from trimtab.commands.export import export
from trimtab.commands.quantize import quantize
from trimtab.commands.shrink import forms_of, shrink
from trimtab.compress.clustering import ClusterSettings
from trimtab.errors import ModelError, RecipeError
from trimtab.inference.held_out import read_held_out
from trimtab.inference.load import load
from trimtab.model.load import load_model

HEAD = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.fixture
def classifier(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = load_model(config_of("bert"), "sequence-classification", HEAD, tokenizer())
    export_model(tmp_path / "model", model, tokenizer(), card={"task": "classify"})
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        rows = [("what a great film it was", "good"), ("the worst film that I ever saw", "bad")] * 8
        csv.writer(file).writerows([("text", "label"), *rows])
    return tmp_path


def write_broken(source):
    """A form whose answers are all the same label."""

    def write(folder):
        loaded = load(source, device="cpu")
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                parameter.zero_()
            loaded.model.classifier.bias[0] = torch.nan
        export_model(folder, loaded.model.half(), loaded.tokenizer, card={"task": "classify"})

    return write


def refuse(folder):
    raise ModelError("this form does not exist here", "use another")


def test_the_bound_decides_and_failures_are_told(classifier):
    place = str(classifier / "model")
    loaded = load(place, device="cpu")
    held_out = read_held_out(loaded, classifier / "rows.csv")
    half = forms_of(loaded, place, held_out, torch.device("cpu"))["fp16"]
    ways = {"fp16": half, "broken": write_broken(place), "refused": refuse}
    found = shrink(place, classifier / "small", data=str(classifier / "rows.csv"), forms=ways, device="cpu")
    assert [one.name for one in found.measurements] == ["original", "fp16", "broken"]
    assert found.best.name == "fp16"
    assert found.folder == classifier / "small" / "fp16"
    assert found.best.disk_bytes < 0.6 * found.measurements[0].disk_bytes
    assert "does not exist here" in found.failed["refused"]
    written = json.loads((classifier / "small" / "frontier.json").read_text())
    assert written["recommended"] == "fp16"
    assert "does not exist here" in (classifier / "small" / "frontier.md").read_text()
    assert (classifier / "small" / "frontier.png").stat().st_size > 1000
    with pytest.raises(RecipeError, match="is not empty"):
        shrink(place, classifier / "small", data=str(classifier / "rows.csv"), device="cpu")


def test_nf4_is_calibrated_on_all_rows(classifier):
    """Rounding that depends on activations would fit the few rows that other forms are measured on."""
    place = str(classifier / "model")
    loaded = load(place, device="cpu")
    held_out = read_held_out(loaded, classifier / "rows.csv")
    forms = forms_of(loaded, place, held_out, torch.device("cpu"))
    assert len(forms["int8"].keywords["data"]) == 8
    assert len(forms["nf4"].keywords["data"]) == len(held_out) == 16


def test_what_holds_a_model_is_not_replaced(classifier, monkeypatch):
    """Neither the model itself nor anything of a run, by any of the commands that write models."""
    run = classifier / "run"
    (run / "best").mkdir(parents=True)
    shutil.copytree(classifier / "model", run / "best", dirs_exist_ok=True)
    (run / "run.json").write_text(json.dumps({"id": "x", "step": 1, "path": "run", "state": "finished"}))
    before = (run / "best" / "model.safetensors").read_bytes()
    settings = ClusterSettings(bits=4)
    writers = [partial(export, to="merged"), partial(cluster, settings=settings), partial(quantize, to=("int8",))]
    for write in writers:
        for source, target in [(run / "best", run / "best"), (classifier / "model", run / "best")]:
            with pytest.raises(RecipeError, match=r"is the model itself|belongs to a run"):
                write(str(source), target)
    assert (run / "best" / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_the_command(classifier):
    from trimtab.cli.main import app

    words = ["shrink", str(classifier / "model"), str(classifier / "small"), "--data", str(classifier / "rows.csv")]
    done = CliRunner().invoke(app, [*words, "--max-loss", "5%"])
    assert done.exit_code == 0, done.output
    assert "recommended: " in done.output


def test_no_rows_judge_nothing(classifier):
    with pytest.raises(RecipeError, match=r"0 rows are not enough to evaluate on[\s\S]*--rows 1 or more"):
        shrink(str(classifier / "model"), classifier / "small", data=str(classifier / "rows.csv"), num_rows=0)


def test_settings_without_effect_are_refused(classifier):
    with pytest.raises(RecipeError, match="--group-rows 4 has no effect with --per tensor"):
        ClusterSettings(bits=4, per="tensor", rows=4)
    with pytest.raises(ModelError, match="is for clustered models"):
        load(classifier / "model", device="cpu", decode="on-use")
