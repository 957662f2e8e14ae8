"""Palettes are trained by the loop of every run, with the steps of a plain loop."""

import copy
import signal

import pytest
import torch

from tiny_runs import reviews, write_jsonl
from trimtab.compress.block_clustering import cluster_model
from trimtab.compress.clustered_modules import ClusteredModule
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.clustering import ClusterSettings
from trimtab.compress.palette_training import divergence, train_palettes, use_clustered
from trimtab.data.batching import LengthGroupedBatches
from trimtab.errors import LossNotFinite, TrimtabError
from trimtab.inference.held_out import read_held_out
from trimtab.inference.load import load

HEAD = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
DROPOUT = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
KIND, NUM_STEPS, LEARNING_RATE = "cross-entropy", 5, 3e-3


@pytest.fixture
def models(own_folder, tiny):
    """A student with clustered modules, its teacher, and rows."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    loaded = load(tiny.folder("bert", kind="sequence-classification", head=HEAD, **sizes, **DROPOUT))
    loaded.model.classifier.weight.data *= 50  # outputs of a random head hardly depend on the input
    rows = read_held_out(loaded, write_jsonl(own_folder / "reviews.jsonl", reviews(40)))
    teacher, student = copy.deepcopy(loaded.model), loaded.model
    weights = dict(cluster_model(student, ClusterSettings(bits=2)))
    use_clustered(student, {name: weight for name, weight in weights.items() if isinstance(weight, ClusteredWeight)})
    return student, teacher, rows


def palettes_of(model):
    return [module.palettes for module in model.modules() if isinstance(module, ClusteredModule)]


def plain_loop(student, teacher, rows):
    """Adam on the batches of the loop, each palette with its own learning rate; models are in eval mode."""
    batches = LengthGroupedBatches(rows.tokens.lengths, 16, 16, seed=0, group_by_length=False)
    palettes = palettes_of(student.requires_grad_(False).eval())
    rates = [LEARNING_RATE * palette.detach().square().mean().sqrt().item() for palette in palettes]
    groups = [{"params": [p.requires_grad_()], "lr": rate} for p, rate in zip(palettes, rates, strict=True)]
    optimizer, step = torch.optim.Adam(groups), 0
    for epoch in (0, 1):
        batches.set_epoch(epoch)
        for numbers in list(batches)[: NUM_STEPS - step]:
            batch = rows.task.collate([rows.tokens[number] for number in numbers])
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            with torch.no_grad():
                wanted = teacher.eval()(**inputs).logits
            divergence(student(**inputs).logits, wanted, batch, KIND)[0].backward()
            torch.nn.utils.clip_grad_norm_(palettes, 1.0)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - step / NUM_STEPS)
            optimizer.step()
            optimizer.zero_grad()
            step += 1


def test_the_steps_are_those_of_a_plain_loop(models):
    student, teacher, rows = models
    raw = copy.deepcopy(student)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    result = train_palettes(student, teacher, rows.tokens, rows.task.collate, kind=KIND, num_steps=NUM_STEPS)
    plain_loop(raw, teacher, rows)
    assert result.step == NUM_STEPS
    for found, wanted in zip(palettes_of(student), palettes_of(raw), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())
        assert not found.requires_grad
    changed = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.endswith(".palettes") for name in changed)
    assert not student.training


def test_outputs_that_are_not_finite_end_it(models):
    student, teacher, rows = models
    teacher.classifier.bias.data[0] = torch.nan
    with pytest.raises(LossNotFinite, match="remove --train-steps"):
        train_palettes(student, teacher, rows.tokens, rows.task.collate, kind=KIND, num_steps=2)


def test_an_interrupt_says_that_nothing_is_saved(models, monkeypatch, caplog):
    student, teacher, rows = models

    def interrupt(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return divergence(*arguments, **options)

    monkeypatch.setattr("trimtab.compress.palette_training.divergence", interrupt)
    with (
        caplog.at_level("INFO", "trimtab"),
        pytest.raises(TrimtabError, match="SIGINT: stopped at step 1 .*nothing is"),
    ):
        train_palettes(student, teacher, rows.tokens, rows.task.collate, kind=KIND, num_steps=NUM_STEPS)
    assert "SIGINT: stopping after this step (Ctrl-C again: immediately)" in caplog.text
    assert "and saving" not in caplog.text
