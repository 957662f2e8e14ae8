"""Rows without padding: every task trains and evaluates as with padding, up to rounding."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rounding import rounding_error
from tiny_runs import NO_DROPOUT, Watch, lines_of, reviews, tiny_config, write_csv, write_jsonl
from trimtab import Recipe, fit, predict_step_memory
from trimtab.build.batches import micro_batch_asked, train_batches
from trimtab.data.batching import Batching
from trimtab.model.load import load_model
from trimtab.techniques.attention_backend import AttentionBackend
from trimtab.techniques.base import Accelerator, Case
from trimtab.techniques.padding import Padding

RECIPE = {"model": "nowhere", "data": {"train": "nowhere"}}
TASKS = ("classify", "regress", "masked-lm", "causal-lm", "chat")


def recipe_of(tiny, folder: Path, task: str, padding: str = "none", model: str = "", **changes) -> Recipe:
    """Twelve batches of eight rows of different lengths."""
    rows = reviews(48)
    if task == "chat":
        turns = [
            {"messages": [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["label"]}]}
            for row in rows
        ]
        data = write_jsonl(folder / "rows.jsonl", turns)
    else:
        if task == "regress":
            rows = [{"text": row["text"], "label": str(len(row["text"]) / 10)} for row in rows]
        data = write_csv(folder / "rows.csv", rows)
    name = model or ("llama" if task in ("chat", "causal-lm") else "bert")
    memory = {"padding": padding, **changes.pop("memory", {})}
    train = {
        "batch_size": 8,
        "epochs": 2,
        "lr": 0.1,
        "optimizer": "sgd",
        "precision": "fp32",
        **changes.pop("train", {}),
    }
    return Recipe(
        model=tiny.folder(name, chat=task == "chat", **NO_DROPOUT.get(name, {})),
        task=task,
        data={"train": str(data), "eval_share": 0.25, "max_length": 12 if task == "causal-lm" else 64},
        train=train,
        memory=memory,
        track="none",
        seed=1,
        **changes,
    )


def trained(recipe: Recipe, out: Path):
    """The weights after every step, the loss of every evaluation, and the plan."""
    watch = Watch()
    fit(recipe.model_copy(update={"out": str(out)}), callbacks=[watch], progress="quiet", device="cpu")
    evaluations = [line for line in lines_of(out) if "eval_loss" in line]
    assert evaluations
    return watch.weights, evaluations, json.loads((out / "plan.json").read_text())


def assert_same_training(found, expected) -> None:
    """Up to 1e-5 of the largest change of a weight, and the rounding of the weights themselves."""
    weights, evaluations, _ = found
    other_weights, other_evaluations, _ = expected
    assert len(weights) == len(other_weights) > 2
    largest = max(float((weights[-1][name] - weights[0][name]).abs().max()) for name in weights[0])
    for these, those in zip(weights, other_weights, strict=True):
        for name, value in these.items():
            allowed = 1e-5 * largest + rounding_error(those[name], 8)
            assert float((value - those[name]).abs().max()) <= allowed, name
    for this, that in zip(evaluations, other_evaluations, strict=True):
        assert this["eval_loss"] == pytest.approx(that["eval_loss"], rel=1e-5)
        assert {key for key in this if key.startswith("eval_")} == {key for key in that if key.startswith("eval_")}


# ---------------------------------------------------------------------- exact


@pytest.mark.parametrize(
    "task", [task if task in ("classify", "chat") else pytest.param(task, marks=pytest.mark.slow) for task in TASKS]
)
def test_trains_as_with_padding(tiny, tmp_path, task):
    found, padded = (
        trained(recipe_of(tiny, tmp_path, task, padding), tmp_path / padding) for padding in ("none", "longest")
    )
    assert [plan["padding"] for *_, plan in (found, padded)] == ["none", "longest"]
    assert found[2]["padding_share"] == 0 < padded[2]["padding_share"]
    assert_same_training(found, padded)


MICRO_BATCHES = [{"micro_batch": 3}, {"micro_batch_tokens": 20}, {"micro_batch_tokens": 20, "micro_batch": 2}]


def test_a_plan_names_the_tokens_of_a_micro_batch(tiny, tmp_path, caplog):
    with caplog.at_level("INFO", "trimtab"):
        *_, plan = trained(recipe_of(tiny, tmp_path, "classify", memory={"micro_batch_tokens": 20}), tmp_path / "run")
    assert plan["micro_batch_tokens"] == 20
    assert "steps of 8 rows in micro-batches of 20 tokens" in caplog.text


@pytest.mark.parametrize(
    ("task", "memory"),
    [
        ("classify", MICRO_BATCHES[0]),
        ("chat", MICRO_BATCHES[2]),
        *(pytest.param("classify", memory, marks=pytest.mark.slow) for memory in MICRO_BATCHES[1:]),
        *(pytest.param("chat", memory, marks=pytest.mark.slow) for memory in MICRO_BATCHES[:2]),
    ],
)
def test_micro_batches_change_nothing(tiny, tmp_path, task, memory):
    whole = trained(recipe_of(tiny, tmp_path, task), tmp_path / "whole")
    divided = trained(recipe_of(tiny, tmp_path, task, memory=memory), tmp_path / "divided")
    assert_same_training(divided, whole)


@pytest.mark.parametrize("memory", [{}, {"micro_batch_tokens": 999}, {"micro_batch_tokens": 999, "micro_batch": 4}])
def test_memory_that_runs_out_leads_to_single_rows(memory):
    """Also if the limit of tokens is far above a batch: each smaller size has fewer tokens."""

    class Rows:
        lengths = (50, *[10] * 31)

        def __len__(self):
            return len(self.lengths)

    recipe = Recipe(**RECIPE, train={"batch_size": 8}, memory=memory)
    rows = min(8, micro_batch_asked(recipe, max(Rows.lengths)) or 8)
    batches = train_batches(recipe, SimpleNamespace(train=Rows()), rows, Batching(is_packed=True))
    assert batches.max_tokens == 50 + 10 * (rows - 1)
    batches.set_micro_batch_size(1)
    assert batches.max_tokens == 50
    assert all(sum(Rows.lengths[row] for row in micro) <= 50 for micro in batches)


@pytest.mark.parametrize(
    "more", [{"memory": {"gradient_checkpointing": "all"}}, pytest.param({"adapter": "lora"}, marks=pytest.mark.slow)]
)
def test_with_other_techniques(tiny, tmp_path, more):
    padded = trained(recipe_of(tiny, tmp_path, "chat", "longest", **more), tmp_path / "padded")
    assert_same_training(trained(recipe_of(tiny, tmp_path, "chat", **more), tmp_path / "packed"), padded)


def test_the_loss_in_chunks(tiny, tmp_path):
    plain = trained(recipe_of(tiny, tmp_path, "chat", memory={"loss": "plain"}), tmp_path / "plain")
    chunked = trained(recipe_of(tiny, tmp_path, "chat", memory={"loss": "chunked"}), tmp_path / "chunked")
    assert_same_training(chunked, plain)


# ---------------------------------------------------------------------- where rows are padded


def test_auto_pads(tiny, tmp_path):
    assert trained(recipe_of(tiny, tmp_path, "classify", "auto"), tmp_path / "run")[2]["padding"] == "longest"


@pytest.mark.parametrize(
    ("accelerator", "precision", "expected"),
    [
        (Accelerator("cuda", (9, 0)), "bf16", "none"),
        (Accelerator("cuda", (8, 0)), "fp16", "none"),
        (Accelerator("cuda", (9, 0)), "fp32", "longest"),
        (Accelerator("cuda", (7, 5)), "fp16", "longest"),
        (Accelerator("cpu"), "fp32", "longest"),
    ],
    ids=str,
)
def test_auto_packs_where_the_flash_kernel_runs(accelerator, precision, expected):
    model = load_model(tiny_config("bert"), "sequence-classification", {}, None)
    case = Case(model, accelerator, precision, Recipe(**RECIPE), model_kind="sequence-classification")
    assert Padding().values(case) == (expected,)
    assert Padding().values(replace(case, has_own_loss=True)) == ("longest",)
    assert Padding().values(replace(case, recipe=None)) == ("longest",)


def test_models_that_need_padding_get_it(tiny, tmp_path, caplog):
    model = load_model(tiny_config("t5"), "seq2seq-lm", {}, None)
    recipe = Recipe(**RECIPE, memory={"padding": "none"})
    case = Case(model, Accelerator("cpu"), "fp32", recipe, model_kind="seq2seq-lm")
    with caplog.at_level("INFO", "trimtab"):
        assert Padding().values(case) == ("longest",)
    assert "memory.padding: longest, because t5 models with a seq2seq-lm head" in caplog.text


def test_an_attention_backend_without_effect_is_reported(caplog):
    memory = {"padding": "none", "attention_backend": "flash"}
    case = Case(torch.nn.Linear(2, 2), Accelerator("cpu"), "fp32", Recipe(**RECIPE, memory=memory))
    with caplog.at_level("INFO", "trimtab"):
        AttentionBackend().values(case)
    assert "memory.attention_backend: flash applies to padded rows only" in caplog.text


def test_a_custom_loss_gets_padded_rows(tiny, tmp_path):
    shapes = []

    def loss(outputs, batch):
        shapes.append(batch["attention_mask"].shape[0])
        return torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])

    recipe = recipe_of(tiny, tmp_path, "classify")
    result = fit(recipe.model_copy(update={"out": str(tmp_path / "run")}), loss=loss, progress="quiet", device="cpu")
    assert result.plan.spec["padding"] == "longest"
    assert max(shapes) == 8


def test_a_custom_metric_gets_padded_rows(tiny, tmp_path):
    def rows(logits, batch):
        assert logits.shape[0] == len(batch["attention_mask"])
        return torch.ones(len(logits))

    recipe = recipe_of(tiny, tmp_path, "chat").model_copy(update={"out": str(tmp_path / "run")})
    result = fit(recipe, metrics={"rows": rows}, progress="quiet", device="cpu")
    assert result.plan.spec["padding"] == "none"


# ---------------------------------------------------------------------- what it needs


def test_a_trace_has_the_tokens_and_no_mask():
    model = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"task": "classify", "precision": "bf16", "micro_batch": 4, "length": 256, "gpu": "h200"}
    padded = predict_step_memory(model, mask="padded", **options)
    packed = predict_step_memory(model, padding="none", **options)
    assert packed.parts["weights"] == padded.parts["weights"]
    mask_bytes = 4 * 256 * 256
    assert packed.allocated < padded.allocated - mask_bytes
