"""The memory of one step, asked for by its settings alone: no recipe, no data, no GPU."""

from collections.abc import Mapping
from typing import Any

import torch

from trimtab.build.levers import choose_optimizer, loads_kernels
from trimtab.build.model import adapter_settings
from trimtab.errors import ModelError, RecipeError, TrimtabError, in_one_line
from trimtab.log import unheard
from trimtab.model.load import max_positions
from trimtab.planner.memory import Prediction, predict
from trimtab.planner.recipe_planner import named_task
from trimtab.planner.target import Target, known_target
from trimtab.planner.trace.plain_step import OPTIMIZERS, trace_plain_model
from trimtab.planner.trace.recipe_step import BatchShape, Choice, StepTracer
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.recipe.schema import Recipe
from trimtab.training.garbage_collection import no_collections

_MASKS = ("none", "full", "padded")
_CODES = ("trimtab", "transformers")
_IMPLEMENTATIONS = ("fused", "foreach")
_PLAIN = {"adapter": "none", "loss": "plain", "kernels": "plain", "offload": "none", "num_micro_batches": 1}


@one_plan_at_a_time()
@no_collections()
def predict_step_memory(
    model: str | Mapping[str, Any],
    task: str,
    micro_batch: int,
    length: int,
    *,
    gpu: str = "h200",
    precision: str = "auto",
    optimizer: str = "auto",
    adapter: str | Mapping[str, Any] = "none",
    gradient_checkpointing: Any = "none",
    loss: str = "plain",
    kernels: str = "plain",
    offload: str = "none",
    mask: str = "none",
    target_length: int | None = None,
    num_micro_batches: int = 1,
    code: str = "trimtab",
    implementation: str | None = None,
) -> Prediction:
    """How much memory a training step takes on a GPU, without one, without weights and without data.

    Args:
        model: A config as a dict with its `model_type`, or a folder or name that has one.
        task: As in a recipe: "causal-lm", "classify" …
        micro_batch: Rows that go through the model at once.
        length: Tokens of each row.
        gpu: A device of the catalog, such as "t4" or "RTX 4090".
        precision: As `train.precision`; "auto" is what the device computes natively.
        optimizer: As `train.optimizer`.
        adapter: As in a recipe: "lora", or {"kind": "lora", "rank": 16}.
        gradient_checkpointing: As `memory.gradient_checkpointing`: "none", "all", {"every": 2} …
        loss: "plain" or "chunked".
        kernels: "plain" or "liger".
        offload: "none" or "embeddings".
        mask: "padded" where rows of a batch differ in length; "none" and "full" are the same to trimtab's own step.
        target_length: Tokens to be written, for a model with a decoder of its own; `length` if left out.
        num_micro_batches: Micro-batches of an optimizer step: from the second on gradients are there already.
        code: "trimtab" is the step that `fit` takes; "transformers" that of a plain loop: autocast, the model's own
            loss, one batch, torch's optimizer and transformers' own gradient checkpointing.
        implementation: Of the optimizer of a plain loop: "fused" (if left out) or "foreach".

    Raises:
        RecipeError: Something is not known, or not to be had together.
        ModelError: There is no such model, none for that task, or its step cannot be traced.
        MissingDependency: `loss="liger"` without liger-kernel.
    """
    numbers = {"micro_batch": micro_batch, "length": length, "num_micro_batches": num_micro_batches}
    _check_words(mask, code, implementation)
    _check_numbers(numbers if target_length is None else numbers | {"target_length": target_length})
    levers = {"gradient_checkpointing": gradient_checkpointing, "loss": loss, "kernels": kernels, "offload": offload}
    if "auto" in levers.values():
        raise RecipeError("'auto' is a plan's to decide, and here the step is given", "use trimtab.plan, or say which")
    if not isinstance(gpu, str) or not isinstance(adapter, str | Mapping):
        raise RecipeError(f"gpu={gpu!r} and adapter={adapter!r} have to be words", 'such as gpu="t4", adapter="none"')
    recipe = _recipe(model, task, {"precision": precision, "optimizer": optimizer}, adapter, levers)
    target = known_target(gpu, None)
    writes = named_task(recipe).model_kind == "seq2seq-lm"
    if target_length is not None and not writes:
        raise RecipeError(f"target_length: task {task} writes nothing", "leave it out")
    shape = BatchShape(micro_batch, length, mask == "padded", (target_length or length) if writes else None)
    if code == "transformers":
        _check_plain(levers | {"adapter": adapter, "num_micro_batches": num_micro_batches})
    try:
        if code == "trimtab":
            found = _own_step(recipe, shape, num_micro_batches, target)
        else:
            found = _plain_step(recipe, shape, target, mask, implementation or "fused")
    except TrimtabError:
        raise
    except Exception as error:  # models whose forward reads values, or has kernels that meta does not
        raise ModelError(f"this step cannot be traced ({in_one_line(error)})", "measure it: trimtab compare") from error
    return target.as_here(found)


def _check_words(mask: str, code: str, implementation: str | None) -> None:
    known = [("mask", mask, _MASKS), ("code", code, _CODES)]
    if implementation is not None:
        known.append(("implementation", implementation, _IMPLEMENTATIONS))
    for name, word, words in known:
        if word not in words:
            raise RecipeError(f"{name}={word!r} is not known", f"one of {', '.join(words)}")
    if implementation is not None and code == "trimtab":
        raise RecipeError("implementation is a plain loop's to choose", 'code="transformers", or leave it out')


def _check_numbers(numbers: dict[str, int]) -> None:
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise RecipeError(f"{name}={number!r} is no number of anything", f"{name}=1 or more")


def _check_plain(asked: dict[str, Any]) -> None:
    beyond = [name for name, value in _PLAIN.items() if asked[name] != value]
    if beyond or asked["gradient_checkpointing"] not in ("none", "all"):
        what = ", ".join(beyond) or "gradient checkpointing of some blocks"
        raise RecipeError(f"a plain loop has no {what}", 'code="trimtab"')


def _recipe(
    model: str | Mapping[str, Any], task: str, train: dict[str, Any], adapter: Any, levers: dict[str, Any]
) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"config": dict(model), "tokenizer": "train"} if isinstance(model, Mapping) else model,
            "task": task,
            "data": {"train": "rows.jsonl"},  # which nobody reads
            "train": train,
            "adapter": adapter if isinstance(adapter, str) else dict(adapter),
            "memory": levers,
        }
    )


def _own_step(recipe: Recipe, shape: BatchShape, num_micro: int, target: Target) -> Prediction:
    memory, optimizer = recipe.memory, choose_optimizer(recipe, target.torch_device)
    choice = Choice(
        target.precision(recipe.train.precision),
        optimizer,
        memory.loss,
        memory.kernels,
        memory.gradient_checkpointing,
        memory.offload,
    )
    with unheard():
        trace = _tracer(recipe, target, shape).trace(choice, shape, min(2, num_micro))
    settings = adapter_settings(recipe)
    has_kernels = loads_kernels(memory.kernels, optimizer, "none" if settings is None else settings.kind)
    return predict(trace, with_kernels=has_kernels)


def _plain_step(recipe: Recipe, shape: BatchShape, target: Target, mask: str, implementation: str) -> Prediction:
    optimizer = "adamw" if recipe.train.optimizer == "auto" else recipe.train.optimizer
    if optimizer not in OPTIMIZERS:
        raise RecipeError(f"the optimizer {optimizer} is none of a plain loop", f"one of {', '.join(OPTIMIZERS)}")
    precision = target.precision(recipe.train.precision)
    skeleton = _tracer(recipe, target, shape).skeleton(torch.bfloat16 if precision == "bf16-pure" else torch.float32)
    with unheard():
        trace = trace_plain_model(
            skeleton,
            shape.rows,
            shape.length,
            precision=precision,
            optimizer=optimizer,
            implementation=implementation,
            gradient_checkpointing=recipe.memory.gradient_checkpointing == "all",
            mask=mask,
            target_length=shape.target_length,
            gpu=target.gpu,
        )
    return predict(trace)


def _tracer(recipe: Recipe, target: Target, shape: BatchShape) -> StepTracer:
    task: Any = named_task(recipe)
    tracer = StepTracer(recipe, task, target.gpu)
    limit, longest = max_positions(tracer.skeleton()), max(shape.length, shape.target_length or 0)
    if limit is not None and longest > limit:
        raise RecipeError(f"{longest} tokens are more than the model's {limit} positions", f"at most {limit}")
    return tracer
