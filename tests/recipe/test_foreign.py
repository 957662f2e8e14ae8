"""The words of HF Trainer, Accelerate and Lightning: all are known, and the answers are recipes that work."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from trimtab.errors import RecipeError
from trimtab.recipe.describe import keys_of
from trimtab.recipe.foreign_keys import our_word
from trimtab.recipe.load import load_recipe
from trimtab.recipe.schema import Recipe

KEYS = {key.dotted for key in keys_of(Recipe)}


def class_in(package: str, file: str, name: str) -> ast.ClassDef:
    """The source of a class, without importing what it belongs to: that would take longer than all tests here."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def parameters_of(cls: ast.ClassDef) -> list[str]:
    init = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return [argument.arg for argument in (*init.args.args, *init.args.kwonlyargs) if argument.arg != "self"]


def answered(names):
    missing = [name for name in names if name not in KEYS and not our_word(name, 1, {name: 1})]
    assert missing == []


def test_every_training_argument_is_known():
    arguments = class_in("transformers", "training_args.py", "TrainingArguments")
    fields = [node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign)]
    names = [name for name in fields if not name.startswith("_") and name != "framework"]
    assert len(names) > 80
    answered(names)


def test_every_argument_of_accelerator_is_known():
    names = parameters_of(class_in("accelerate", "accelerator.py", "Accelerator"))
    assert len(names) > 15
    answered(names)


def test_packing_is_not_taken_for_padding():
    for section in ({"packing": True}, {"memory": {"packing": True}}, {"train": {"packing": True}}):
        with pytest.raises(RecipeError) as caught:
            Recipe(model="bert", data={"train": "rows.csv"}, **section)
        assert "rows are not packed yet; task: causal-lm joins all texts" in str(caught.value)
        assert "memory.padding" not in str(caught.value)


def test_every_argument_of_the_lightning_trainer_is_known():
    names = parameters_of(class_in("lightning", "pytorch/trainer/trainer.py", "Trainer"))
    assert len(names) > 30
    answered(names)


@pytest.mark.parametrize(
    ("found", "written"),
    [
        ({"num_train_epochs": 3}, {"train.epochs": "3"}),
        ({"per_device_train_batch_size": 16}, {"train.batch_size": "16"}),
        ({"learning_rate": 3e-5}, {"train.lr": "3.0e-05"}),
        ({"fp16": True}, {"train.precision": "fp16"}),
        ({"bf16": True}, {"train.precision": "bf16"}),
        ({"fp16": False}, {"train.precision": "fp32"}),
        ({"mixed_precision": "no"}, {"train.precision": "fp32"}),
        ({"precision": "bf16-mixed"}, {"train.precision": "bf16"}),
        ({"precision": 32}, {"train.precision": "fp32"}),
        ({"lr_scheduler_type": "inverse_sqrt"}, {"train.schedule": "inverse-sqrt"}),
        ({"lr_scheduler_type": "cosine"}, {"train.schedule": "cosine"}),
        ({"lr_scheduler_type": "polynomial"}, {"train.schedule": "linear"}),
        ({"optim": "adamw_torch_fused"}, {"train.optimizer": "adamw"}),
        ({"optim": "paged_adamw_8bit"}, {"train.optimizer": "paged-adamw8bit"}),
        ({"use_liger_kernel": True}, {"memory.kernels": "liger"}),
        ({"tf32": True}, {"train.precision": "tf32"}),
        ({"lora_r": 8}, {"adapter": "{kind: lora, rank: 8}"}),
        ({"target_modules": ["q_proj"]}, {"adapter": "{kind: lora, targets: [q_proj]}"}),
        ({"load_in_4bit": True}, {"adapter": "qlora"}),
        ({"warmup_ratio": 0.06}, {"train.warmup": "0.06"}),
        ({"warmup_steps": 500}, {"train.warmup": "500"}),
        ({"adam_beta2": 0.98}, {"train.betas": "[0.9, 0.98]"}),
        ({"adam_epsilon": 1e-6}, {"train.eps": "1.0e-06"}),
        ({"eval_strategy": "epoch"}, {"evaluate.every": "epoch"}),
        ({"eval_strategy": "no"}, {"evaluate.every": "1000 epochs"}),
        ({"eval_steps": 200}, {"evaluate.every": "200 steps"}),
        ({"eval_steps": 0.1}, {"evaluate.every": "0.1 epochs"}),
        ({"val_check_interval": 0.25}, {"evaluate.every": "0.25 epochs"}),
        ({"val_check_interval": 1.0}, {"evaluate.every": "epoch"}),
        ({"val_check_interval": 100}, {"evaluate.every": "100 steps"}),
        ({"check_val_every_n_epoch": 2}, {"evaluate.every": "2 epochs"}),
        ({"logging_strategy": "steps", "logging_steps": 50}, {"train.log_every": "50"}),
        ({"metric_for_best_model": "eval_f1"}, {"evaluate.metric": "f1"}),
        ({"monitor": "val_loss"}, {"early_stopping.metric": "loss"}),
        ({"greater_is_better": False}, {"early_stopping.mode": "min"}),
        ({"load_best_model_at_end": True}, {"checkpoint.best": "true"}),
        ({"save_strategy": "best"}, {"checkpoint.best": "true"}),
        ({"gradient_clip_val": 0.5}, {"train.max_grad_norm": "0.5"}),
        ({"max_time": "00:12:30:00"}, {"train.max_time": "12h30min"}),
        ({"max_time": {"days": 1, "hours": 2}}, {"train.max_time": "1d2h"}),
        ({"max_steps": -1}, {"train.max_steps": "null"}),
        ({"limit_train_batches": 0.1}, {"limits.train": "0.1"}),
        ({"fast_dev_run": True}, {"limits.fast_dev_run": "true"}),
        ({"num_sanity_val_steps": 2}, {"evaluate.at_start": "true"}),
        ({"model_name_or_path": "bert"}, {"model": "bert"}),
        ({"train_file": "x.csv"}, {"data.train": "x.csv"}),
        ({"validation_split_percentage": 5}, {"data.eval_share": "5%"}),
        ({"max_seq_length": 128}, {"data.max_length": "128"}),
        ({"output_dir": "runs/x"}, {"out": "runs/x"}),
    ],
)
@pytest.mark.parametrize("section", ["", "memory"])
def test_answers_are_recipes(found, written, section):
    """At the top and inside a section alike; what the answer says to write is valid, with the value carried over."""
    name = next(iter(found))
    settings = {section: found} if section else found
    recipe = {"model": "bert", "data": {"train": "rows.csv"}}
    with pytest.raises(RecipeError) as caught:
        Recipe(**{**recipe, **settings})
    dotted = f"{section}.{name}" if section else name
    line = next(line.strip() for line in str(caught.value).splitlines() if line.strip().startswith(f"{dotted}: "))
    ((key, value),) = written.items()
    assert re.search(rf"write {re.escape(key)}: {re.escape(value)}(?= \(|$|,)", line), line
    assert key in KEYS
    load_recipe(None, {"model": "bert", "data.train": "rows.csv"}, [f"{key}={value}"])


def test_a_word_that_is_ours_elsewhere():
    with pytest.raises(RecipeError, match="write memory.gradient_checkpointing: all"):
        Recipe(model="bert", data={"train": "rows.csv"}, gradient_checkpointing=True)


def test_words_that_belong_together_are_answered_together():
    beside = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    for name, value in beside.items():
        answer = our_word(name, value, beside)
        assert "write train.batch_size: 32 " in answer
        assert "8 × 4" in answer
        assert "memory.micro_batch: 8" in answer
    beside = {"adam_beta1": 0.8, "adam_beta2": 0.95}
    assert our_word("adam_beta1", 0.8, beside).endswith("train.betas: [0.8, 0.95]")
    beside = {"eval_strategy": "steps", "eval_steps": 50}
    assert our_word("eval_strategy", "steps", beside).endswith("evaluate.every: 50 steps")
    assert our_word("fp16", False, {"fp16": False, "bf16": True}).endswith("leave it out: bf16 decides")


def test_the_library_is_named():
    assert our_word("mixed_precision", "fp16", {}).startswith("a word of Accelerate; ")
    assert our_word("gradient_accumulation_steps", 2, {}).startswith("a word of HF Trainer and Accelerate; ")
    assert our_word("accumulate_grad_batches", 2, {}).startswith("a word of Lightning; ")
    assert our_word("no_such_thing", 2, {}) == ""


@pytest.mark.parametrize("value", [None, True, "text", 1, 1.5, [], {}, {"a": 1}, object()])
def test_no_value_breaks_an_answer(value):
    from trimtab.recipe import foreign_keys as foreign

    names = {name for words in foreign._WORDS.values() for name in words}
    assert len(names) > 180
    for name in names:
        assert our_word(name, value, {name: value})
