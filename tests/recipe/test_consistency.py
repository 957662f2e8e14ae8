"""Settings that contradict each other, or of which one would have no effect, are refused."""

import pytest

from trimtab.errors import RecipeError
from trimtab.recipe.schema import Recipe


def make(**values):
    return Recipe(**{"model": "bert", "data": {"train": "rows.csv"}, **values})


def data(**columns):
    return {"train": "rows.csv", **columns}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"train": {"momentum": 0.9}}, "train.momentum"),
        ({"train": {"optimizer": "sgd", "betas": [0.9, 0.98]}}, "train.betas"),
        ({"train": {"optimizer": "sgd", "eps": 1e-6}}, "train.eps"),
        ({"train": {"optimizer": "adafactor", "eps": 1e-6}}, "train.eps"),
        ({"train": {"schedule": "noam"}}, "train.warmup"),
        ({"train": {"max_steps": 10, "epochs": 5}}, "train.epochs"),
        ({"train": {"label_smoothing": 0.1}, "task": "regress"}, "train.label_smoothing"),
        ({"train": {"class_weights": "balanced"}, "task": "chat"}, "train.class_weights"),
        ({"train": {"class_weights": {"a": 2}}, "distill": {"teacher": "t"}}, "train.class_weights"),
        ({"train": {"batch_size": 4}, "memory": {"micro_batch": 8}}, "memory.micro_batch"),
        ({"train": {"optimizer": "paged-adagrad8bit", "betas": [0.9, 0.98]}}, "train.betas"),
        ({"train": {"optimizer": "adafactor", "precision": "bf16-pure"}}, "train.precision"),
        ({"train": {"precision": "bf16-pure"}, "adapter": "lora"}, "train.precision"),
        ({"train": {"freeze": {"base": "always"}}, "adapter": "lora"}, "train.freeze.base"),
        ({"memory": {"loss": "chunked"}, "task": "classify"}, "memory.loss"),
        ({"data": data(eval="e.csv", eval_share=0.2)}, "data.eval_share"),
        ({"data": data(messages="m"), "task": "classify"}, "data.messages"),
        ({"data": data(label="l"), "task": "causal-lm"}, "data.label"),
        ({"data": data(label="l", target="t")}, "data"),
        ({"data": data(text=["a", "b"]), "task": "seq2seq"}, "data.text"),
        ({"data": data(messages="m", prompt="p"), "task": "chat"}, "data.prompt"),
        ({"limits": {"overfit_batches": 2, "train": 5}}, "limits.train"),
        ({"out": "a", "name": "b"}, "name"),
        ({"track": {"uri": "none", "register_as": "a"}}, "track.register_as"),
        ({"track": {"log_model": False, "register_as": "a"}}, "track.register_as"),
        ({"early_stopping": {}, "data": data(eval_share=0)}, "early_stopping"),
        ({"model": {"name": "bert", "config": {"model_type": "bert"}}}, "model"),
        ({"model": {"tokenizer": "x"}}, "model"),
        ({"model": {"config": {"model_type": "bert"}}}, "model.tokenizer"),
        ({"adapter": {"kind": "qlora", "base": "fp8"}}, "adapter.base"),
        ({"adapter": {"kind": "qlora", "init": "pissa"}}, "adapter.init"),
        ({"adapter": {"kind": "lora", "base": "fp8", "init": "olora"}}, "adapter.init"),
        ({"adapter": {"kind": "lora", "base": "fp8", "dora": True}}, "adapter.dora"),
        ({"adapter": {"kind": "ia3", "rank": 4}}, "adapter.rank"),
        ({"adapter": {"kind": "lora", "reduction": 4}}, "adapter.reduction"),
        ({"adapter": {"kind": "prompt", "rank": 4}}, "adapter.rank"),
        ({"adapter": {"kind": "lora", "tokens": 4}}, "adapter.tokens"),
        ({"adapter": {"kind": "side", "targets": ["q_proj"]}}, "adapter.targets"),
        ({"adapter": {"kind": "side", "base": "fp8"}}, "adapter.base"),
        ({"adapter": {"kind": "ia3", "base": "fp8"}}, "adapter.base"),
    ],
)
def test_contradictions(values, key):
    with pytest.raises(RecipeError) as caught:
        make(**values)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the recipe has 1 problem:"
    assert lines[1].strip().startswith(f"{key}: ")


@pytest.mark.parametrize(
    "values",
    [
        {"train": {"momentum": 0.9, "optimizer": "sgd"}},
        {"train": {"eps": 1e-6, "optimizer": "adagrad"}},
        {"train": {"schedule": "noam", "warmup": 4000, "optimizer": "adam", "betas": [0.9, 0.98], "eps": 1e-9}},
        {"train": {"betas": [0.9, 0.98], "eps": 1e-6}},
        {"train": {"optimizer": "paged-adamw8bit", "betas": [0.9, 0.98], "eps": 1e-6}},
        {"train": {"optimizer": "adagrad8bit", "eps": 1e-6}},
        {"train": {"precision": "bf16-pure", "optimizer": "adamw8bit"}},
        {"train": {"freeze": {"*.lora_A.*": "always"}}, "adapter": "lora"},
        {"adapter": {"base": "fp8"}, "train": {"precision": "bf16"}},
        {"adapter": {"kind": "qlora", "dora": True, "lr_ratio": 16}},
        {"adapter": {"kind": "lora", "dora": True, "init": "pissa"}},
        {"adapter": {"kind": "ia3", "targets": ["q_proj"], "layers": [0, 1], "trains": ["lm_head"]}},
        {"memory": {"loss": "chunked"}, "task": "chat"},
        {"train": {"max_steps": 10}},
        {"train": {"batch_size": 8}, "memory": {"micro_batch": 8}},
        {"data": data(eval="e.csv", eval_share=0.1)},  # the default, as a resolved recipe has it
        {"data": data(text=["a", "b"], label=["x", "y"]), "task": "regress"},
        {"data": data(prompt="p", answer="a")},
        {"data": data(text="t", target="s"), "task": "seq2seq"},
        {"model": {"name": "bert", "trust_remote_code": True}},
        {"model": {"config": {"model_type": "bert"}, "tokenizer": "train"}},
        {"early_stopping": {}, "data": data(eval_share=0, eval=None), "limits": {"overfit_batches": 2}},
    ],
)
def test_what_goes_together(values):
    assert make(**values)
