"""Keys of HF Trainer, Accelerate and Lightning: all are known, and the answers are valid recipe keys."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from trimtab.errors import RecipeError
from trimtab.recipe.foreign_keys import _LIBRARIES, translate_key
from trimtab.recipe.load import load_recipe
from trimtab.recipe.schema import Recipe
from trimtab.recipe.schema_keys import keys_of

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


def fields_of(cls: ast.ClassDef) -> list[str]:
    names = [node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)]
    return [name for name in names if not name.startswith("_") and name != "framework"]


@pytest.mark.parametrize(
    ("package", "file", "name", "names_of", "at_least"),
    [
        ("transformers", "training_args.py", "TrainingArguments", fields_of, 80),
        ("accelerate", "accelerator.py", "Accelerator", parameters_of, 15),
        ("lightning", "pytorch/trainer/trainer.py", "Trainer", parameters_of, 30),
    ],
)
def test_every_argument_is_known(package, file, name, names_of, at_least):
    names = names_of(class_in(package, file, name))
    assert len(names) > at_least
    assert [name for name in names if name not in KEYS and not translate_key(name, 1, {name: 1})] == []


def test_packing_is_a_way_to_pad():
    for section in ({"packing": True}, {"memory": {"packing": True}}, {"train": {"packing": True}}):
        with pytest.raises(RecipeError) as caught:
            Recipe(model="bert", data={"train": "rows.csv"}, **section)
        assert "write memory.padding: none" in str(caught.value)


@pytest.mark.parametrize(
    ("found", "written"),
    [
        ({"num_train_epochs": 3}, "train.epochs: 3"),
        ({"per_device_train_batch_size": 16}, "train.batch_size: 16"),
        ({"learning_rate": 3e-5}, "train.lr: 3.0e-05"),
        ({"fp16": True}, "train.precision: fp16"),
        ({"fp16": False}, "train.precision: fp32"),
        ({"mixed_precision": "no"}, "train.precision: fp32"),
        ({"precision": "bf16-mixed"}, "train.precision: bf16"),
        ({"precision": 32}, "train.precision: fp32"),
        ({"tf32": True}, "train.precision: tf32"),
        ({"lr_scheduler_type": "cosine"}, "train.schedule: cosine"),
        ({"lr_scheduler_type": "polynomial"}, "train.schedule: linear"),
        ({"optim": "paged_adamw_8bit"}, "train.optimizer: paged-adamw8bit"),
        ({"use_liger_kernel": True}, "memory.kernels: liger"),
        ({"gradient_checkpointing": True}, "memory.gradient_checkpointing: all"),
        ({"lora_r": 8}, "adapter: {kind: lora, rank: 8}"),
        ({"target_modules": ["q_proj"]}, "adapter: {kind: lora, targets: [q_proj]}"),
        ({"load_in_4bit": True}, "adapter: qlora"),
        ({"num_virtual_tokens": 8}, "adapter: {kind: prompt, tokens: 8}"),
        ({"use_dora": True}, "adapter: {kind: lora, dora: true}"),
        ({"peft_use_dora": True}, "adapter: {kind: lora, dora: true}"),
        ({"loraplus_lr_ratio": 16}, "adapter: {kind: lora, lr_ratio: 16}"),
        ({"init_lora_weights": "pissa_niter_4"}, "adapter: {kind: lora, init: pissa-fast}"),
        ({"peft_init_lora_weights": "olora"}, "adapter: {kind: lora, init: olora}"),
        ({"init_lora_weights": "gaussian"}, "adapter: {kind: lora, init: zero}"),
        ({"adam_beta2": 0.98}, "train.betas: [0.9, 0.98]"),
        ({"eval_strategy": "epoch"}, "evaluate.every: epoch"),
        ({"eval_strategy": "no"}, "evaluate.every: 1000 epochs"),
        ({"eval_steps": 200}, "evaluate.every: 200 steps"),
        ({"eval_steps": 0.1}, "evaluate.every: 0.1 epochs"),
        ({"val_check_interval": 0.25}, "evaluate.every: 0.25 epochs"),
        ({"val_check_interval": 1.0}, "evaluate.every: epoch"),
        ({"val_check_interval": 100}, "evaluate.every: 100 steps"),
        ({"check_val_every_n_epoch": 2}, "evaluate.every: 2 epochs"),
        ({"save_strategy": "best"}, "checkpoint.best: true"),
        ({"save_strategy": "no"}, "checkpoint.every: null"),
        ({"save_strategy": "steps", "save_steps": 50}, "checkpoint.every: 50 steps"),
        ({"save_total_limit": 3}, "checkpoint.keep: 3"),
        ({"full_determinism": True}, "train.deterministic: true"),
        ({"deterministic": "warn"}, "train.deterministic: true"),
        ({"logging_strategy": "steps", "logging_steps": 50}, "train.log_every: 50"),
        ({"metric_for_best_model": "eval_f1"}, "evaluate.metric: f1"),
        ({"monitor": "val_loss"}, "early_stopping.metric: loss"),
        ({"greater_is_better": False}, "early_stopping.mode: min"),
        ({"max_time": "00:12:30:00"}, "train.max_time: 12h30min"),
        ({"max_time": {"days": 1, "hours": 2}}, "train.max_time: 1d2h"),
        ({"max_steps": -1}, "train.max_steps: null"),
        ({"num_sanity_val_steps": 2}, "evaluate.at_start: true"),
        ({"validation_split_percentage": 5}, "data.eval_share: 5%"),
        ({"report_to": "wandb"}, "track.uri: local"),
    ],
)
@pytest.mark.parametrize("section", ["", "limits"])
def test_answers_are_recipes(found, written, section):
    """At the top level and inside a section: the answer is a valid line of a recipe, with the value converted."""
    name = next(iter(found))
    settings = {section: found} if section else found
    with pytest.raises(RecipeError) as caught:
        Recipe(model="bert", data={"train": "rows.csv"}, **settings)
    dotted = f"{section}.{name}" if section else name
    line = next(line.strip() for line in str(caught.value).splitlines() if line.strip().startswith(f"{dotted}: "))
    assert re.search(rf"write {re.escape(written)}(?= \(|$|,)", line), line
    key, _, value = written.partition(": ")
    load_recipe(None, {"model": "bert", "data.train": "rows.csv"}, [f"{key}={value}"])


def test_keys_that_belong_together_are_answered_together():
    section = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    for name, value in section.items():
        answer = translate_key(name, value, section)
        assert "write train.batch_size: 32 " in answer
        assert "8 × 4" in answer
        assert "memory.micro_batch: 8" in answer
    section = {"adam_beta1": 0.8, "adam_beta2": 0.95}
    assert translate_key("adam_beta1", 0.8, section).endswith("train.betas: [0.8, 0.95]")
    section = {"eval_strategy": "steps", "eval_steps": 50}
    assert translate_key("eval_strategy", "steps", section).endswith("evaluate.every: 50 steps")
    assert translate_key("fp16", False, {"fp16": False, "bf16": True}).endswith("leave it out: bf16 decides")


def test_the_library_is_named():
    assert translate_key("mixed_precision", "fp16", {}).startswith("a key of Accelerate; ")
    assert translate_key("gradient_accumulation_steps", 2, {}).startswith("a key of HF Trainer and Accelerate; ")
    assert translate_key("accumulate_grad_batches", 2, {}).startswith("a key of Lightning; ")
    assert translate_key("no_such_thing", 2, {}) == ""


@pytest.mark.parametrize("value", [None, True, "text", 1, 1.5, [], {}, {"a": 1}, object()])
def test_every_answer_names_known_keys_whatever_the_value(value):
    names = {name for answers in _LIBRARIES.values() for name in answers}
    assert len(names) > 180
    for name in names:
        answer = translate_key(name, value, {name: value})
        written = re.findall(r"; write ([\w.]+):", answer)
        assert set(written) <= KEYS, answer
        assert written or "; leave it out: " in answer or "; slice the data: " in answer, answer
