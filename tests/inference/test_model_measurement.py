"""Measurements of a model: its size counts shared storage once, its quality is that of the task's metrics."""

import csv

import pytest
import torch

from tiny_models import config_of, tokenizer
from trimtab.checkpoint.export import export_model
from trimtab.inference.held_out import quality_of, read_held_out
from trimtab.inference.load import load
from trimtab.inference.model_measurement import measure, memory_bytes, weight_bytes
from trimtab.model.load import load_model
from trimtab.report.measurements_table import measurements_table

HEAD = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
ROWS = [("what a great film it was", "good"), ("the worst film that I ever saw", "bad"), ("great", "good")] * 4


@pytest.fixture
def classifier(tmp_path):
    model = load_model(config_of("bert"), "sequence-classification", HEAD, tokenizer())
    export_model(tmp_path / "model", model, tokenizer(), card={"task": "classify"})
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *ROWS])
    return tmp_path


def test_measurements(classifier):
    loaded = load(classifier / "model", device="cpu")
    held_out = read_held_out(loaded, classifier / "rows.csv")
    comparison = held_out.compare_with(loaded)
    with torch.no_grad():
        loaded.model.classifier.bias += torch.tensor([0.0, 50.0])  # everything is good now
    found = measure("changed", loaded, held_out, folder=classifier / "model", comparison=comparison)
    assert found.quality["accuracy"] == pytest.approx(8 / 12)
    assert found.quality["recall"] == 1.0
    assert found.disk_bytes == (classifier / "model" / "model.safetensors").stat().st_size
    assert found.divergence.num_rows == 12
    assert found.divergence.kl_mean > 0.1
    assert found.latency_1_s > 0
    header, rows = measurements_table([found])
    assert dict(zip(header, rows[0], strict=True))["accuracy"] == "0.6667"


def test_quality_does_not_depend_on_the_batch_size(classifier):
    loaded = load(classifier / "model", device="cpu")
    held_out = read_held_out(loaded, classifier / "rows.csv")
    one, all_rows = quality_of(loaded, held_out, 1), quality_of(loaded, held_out, 12)
    assert one["loss"] == pytest.approx(all_rows["loss"], rel=1e-5)
    assert one["accuracy"] == all_rows["accuracy"]


def test_shared_storage_counts_once():
    first = torch.nn.Linear(8, 8, bias=False)
    second = torch.nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    assert memory_bytes(torch.nn.Sequential(first, second)) == 8 * 8 * 4


def test_only_weight_files_count(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 1000)
    assert weight_bytes(tmp_path) == 100
    assert weight_bytes(tmp_path / "tokenizer.json") == 1000
