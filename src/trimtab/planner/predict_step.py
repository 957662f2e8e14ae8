"""Predict the memory of one step from its settings alone: no recipe, no data, no GPU."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch

from trimtab.errors import ModelError, RecipeError, TrimtabError, summarize_error
from trimtab.garbage_collection import gc_disabled
from trimtab.log import muted
from trimtab.model.load import max_positions
from trimtab.planner.memory import Prediction, predict, predict_captured
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.shapes import BatchShape, OneLength, named_task
from trimtab.planner.target import Target, known_target
from trimtab.planner.trace.plain_step import trace_plain_model
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.recipe.schema import Recipe
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.apply import batching_of, captures, loads_kernels
from trimtab.techniques.base import StepSpec

_MASKS = ("none", "full", "padded")
_CODES = ("trimtab", "transformers")
_IMPLEMENTATIONS = ("fused", "foreach")


@one_plan_at_a_time()
@gc_disabled()
def predict_step_memory(
    model: str | Mapping[str, Any],
    task: str,
    micro_batch: int,
    length: int,
    *,
    gpu: str = "h200",
    precision: str = "auto",
    mask: str = "none",
    target_length: int | None = None,
    num_micro_batches: int = 1,
    code: str = "trimtab",
    implementation: str | None = None,
    max_grad_norm: float | None = 1.0,
    **techniques: Any,
) -> Prediction:
    """Predict the memory of a training step on a GPU; neither the GPU nor weights or data are needed.

    Args:
        model: A config as a dict with its `model_type`, or the folder or name of a model that has a config.
        task: The task, as in a recipe: "causal-lm", "classify" …
        micro_batch: Rows of one forward.
        length: Tokens of each row.
        gpu: A GPU of the catalog, such as "t4" or "RTX 4090".
        precision: As `train.precision`; "auto" uses what the device computes natively.
        mask: "padded" if the rows of a batch differ in length; "none" and "full" make no difference for
            `code="trimtab"`.
        target_length: Tokens to generate, for an encoder-decoder model; by default `length`.
        num_micro_batches: Micro-batches of an optimizer step. From the second one on, gradients already exist.
        code: "trimtab" for the step of `fit`; "transformers" for that of a plain loop: autocast, the model's own loss,
            one batch, a torch optimizer.
        implementation: The optimizer implementation of a plain loop: "fused" (the default) or "foreach".
        max_grad_norm: The norm to which gradients are clipped; None does not clip.
        techniques: The techniques of the step, by the keys of plan.json, with values as in a recipe:
            `optimizer="adamw8bit"`, `adapter={"kind": "lora", "rank": 16}`, `loss="chunked"` … Other techniques are not
            used; the default optimizer is adamw, and the attention backend follows its rule.

    Returns:
        The prediction; `total` is the memory that the step needs on the device, in bytes.

    Raises:
        RecipeError: A value is unknown, or values cannot be combined.
        ModelError: The model does not exist or does not suit the task, or its step cannot be traced.

    Example:
        prediction = predict_step_memory("meta-llama/Llama-3.2-1B", "causal-lm", 4, 2048, gpu="rtx-4090")
        print(prediction.total / 2**30, "GiB", dict(prediction.parts))
    """
    numbers = {"micro_batch": micro_batch, "length": length, "num_micro_batches": num_micro_batches}
    _check_names(gpu, mask, code, implementation)
    _check_numbers(numbers if target_length is None else numbers | {"target_length": target_length})
    _check_techniques(techniques)
    recipe = _recipe(model, task, precision, max_grad_norm, techniques)
    target = known_target(gpu, None)
    writes = named_task(recipe).model_kind == "seq2seq-lm"
    if target_length is not None and not writes:
        raise RecipeError(f"target_length: task {task} generates nothing", "leave it out")
    shape = BatchShape(micro_batch, length, mask == "padded", (target_length or length) if writes else None)
    try:
        if code == "trimtab":
            found = _own_step(recipe, shape, num_micro_batches, target)
        else:
            found = _plain_step(recipe, shape, num_micro_batches, target, mask, implementation or "fused")
    except TrimtabError:
        raise
    # models whose forward reads values, or uses kernels without an implementation for meta tensors
    except Exception as error:
        raise ModelError(
            f"this step cannot be traced ({summarize_error(error)})", "measure it: trimtab compare"
        ) from error
    return target.as_here(found)


def _check_names(gpu: str, mask: str, code: str, implementation: str | None) -> None:
    if not isinstance(gpu, str):
        raise RecipeError(f"gpu={gpu!r} must be a string", 'such as gpu="t4"')
    known = [("mask", mask, _MASKS), ("code", code, _CODES)]
    if implementation is not None:
        known.append(("implementation", implementation, _IMPLEMENTATIONS))
    for name, word, words in known:
        if word not in words:
            raise RecipeError(f"{name}={word!r} is not valid", f"use one of {', '.join(words)}")
    if implementation is not None and code == "trimtab":
        raise RecipeError('implementation has no effect with code="trimtab"', 'code="transformers", or leave it out')


def _check_numbers(numbers: dict[str, int]) -> None:
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise RecipeError(f"{name}={number!r} is not a positive integer", f"{name}=1 or more")


def _check_techniques(asked: Mapping[str, Any]) -> None:
    known = {technique.key: technique for technique in TECHNIQUES}
    for key, value in asked.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            raise RecipeError(f"{key}={value!r} is not valid", hint)
        is_open = isinstance(value, str) and value == "auto"
        if is_open and known[key].effect == "exact" and known[key].off is not None:
            raise RecipeError("'auto' needs a plan, which predict_step does not make", "use trimtab.plan, or a value")


def _recipe(
    model: str | Mapping[str, Any], task: str, precision: str, max_grad_norm: float | None, asked: Mapping[str, Any]
) -> Recipe:
    values: dict[str, Any] = {
        "model": {"config": dict(model), "tokenizer": "train"} if isinstance(model, Mapping) else model,
        "task": task,
        "data": {"train": "rows.jsonl"},  # required, but never read
        "train": {"precision": precision, "max_grad_norm": max_grad_norm},
        "memory": {},
    }
    for technique in TECHNIQUES:
        if technique.key in asked or technique.off is not None:
            value = asked.get(technique.key, technique.off)
            section, _, name = technique.setting.rpartition(".")
            (values[section] if section else values)[name] = dict(value) if isinstance(value, Mapping) else value
    return Recipe.model_validate(values)


def _own_step(recipe: Recipe, shape: BatchShape, num_micro: int, target: Target) -> Prediction:
    lengths = OneLength(shape.length, has_targets=shape.target_length is not None)
    planner = RecipePlanner(recipe, named_task(recipe), target, lengths)
    _check_length(planner.case.model, shape)
    axes = planner.space.axes
    values = {axis.technique.key: axis.values[0] for axis in axes}
    spec = StepSpec.of(shape.rows, planner.precision, values)
    batching = batching_of(spec)
    if batching.is_packed:
        marks = batching.marks_equal_rows and not shape.is_padded
        shape = replace(shape, is_packed=True, is_padded=False, marks_equal_rows=marks)
    is_captured = captures(spec)
    with muted():
        trace = planner.tracer(spec).trace(spec, shape, 2 if is_captured else min(2, num_micro))
    return (predict_captured if is_captured else predict)(trace, with_kernels=loads_kernels(spec))


def _plain_step(
    recipe: Recipe, shape: BatchShape, num_micro: int, target: Target, mask: str, implementation: str
) -> Prediction:
    options = _plain_options(recipe, target, num_micro)
    precision = target.precision(recipe.train.precision)
    tracer = StepTracer(recipe, named_task(recipe), target.gpu)
    skeleton = tracer.skeleton(torch.bfloat16 if precision == "bf16-pure" else torch.float32)
    _check_length(skeleton, shape)
    with muted():
        trace = trace_plain_model(
            skeleton,
            shape.rows,
            shape.length,
            precision=precision,
            implementation=implementation,
            mask=mask,
            target_length=shape.target_length,
            gpu=target.gpu,
            **options,
        )
    return predict(trace)


def _plain_options(recipe: Recipe, target: Target, num_micro: int) -> dict[str, Any]:
    """Return the arguments of a plain loop, which supports few techniques."""
    planner = RecipePlanner(recipe, named_task(recipe), target, OneLength(1))
    options: dict[str, Any] = {}
    beyond = ["micro-batches"] if num_micro > 1 else []
    for technique in TECHNIQUES:
        value = technique.before or "" if technique.is_open(recipe) else technique.values(planner.case)[0]
        found = technique.plain_loop(value)
        if found is None:
            beyond.append(f"{technique.key} {value}")
        else:
            options |= found
    if beyond:
        raise RecipeError(f'code="transformers" does not support {", ".join(beyond)}', 'code="trimtab"')
    return options


def _check_length(model: Any, shape: BatchShape) -> None:
    limit, longest = max_positions(model), max(shape.length, shape.target_length or 0)
    if limit is not None and longest > limit:
        raise RecipeError(f"{longest} tokens exceed the model's {limit} positions", f"length={limit} or less")
