"""Decides what a recipe leaves open."""

import math
from dataclasses import replace

from trimtab.build.batches import fast_steps, train_batches
from trimtab.build.levers import choose_loss, choose_optimizer, describe_adapter, spelled
from trimtab.build.parts import Data, Loaded, Tokens
from trimtab.data.batching import LengthGroupedBatches, padding_share
from trimtab.engine.engine import Engine
from trimtab.errors import RecipeError
from trimtab.model.nf4 import num_weights
from trimtab.recipe.schema import Recipe
from trimtab.runs.plan import Outlook, Plan


def build_plan(
    recipe: Recipe,
    data: Data,
    tokens: Tokens,
    loaded: Loaded,
    engine: Engine,
    has_own_loss: bool,
    outlook: Outlook | None = None,
) -> Plan:
    """Decide what the recipe left open; what was predicted of it is written down with it."""
    train = recipe.train
    num_processes = engine.num_processes
    if train.batch_size < num_processes:
        raise RecipeError(
            f"train.batch_size {train.batch_size} is less than the {num_processes} processes that share it",
            f"set it to {num_processes} or more, or start fewer processes",
        )
    micro = recipe.memory.micro_batch
    whole = train.batch_size if micro == "auto" else min(int(micro) * num_processes, train.batch_size)
    batches = train_batches(recipe, tokens, whole)
    num_steps, steps_per_epoch = count_steps(recipe, batches)
    micro_batch_size = math.ceil(whole / num_processes)
    plan = Plan(
        device=str(engine.device),
        precision={"no": "fp32"}.get(engine.mixed_precision, engine.mixed_precision),
        batch_size=train.batch_size,
        micro_batch_size=micro_batch_size,
        num_processes=num_processes,
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=count_warmup(recipe, num_steps),
        num_train_rows=len(tokens.train),
        num_eval_rows=0 if tokens.eval is None else len(tokens.eval),
        num_parameters=sum(map(num_weights, loaded.model.parameters())),
        num_trainable=sum(p.numel() for p in loaded.model.parameters() if p.requires_grad),
        max_length=tokens.max_length,
        padding_share=padding_share(tokens.train.lengths, list(batches)),
        metric=deciding_metric(recipe) or data.task.default_metric,
        optimizer=choose_optimizer(recipe, engine.device),
        adapter=describe_adapter(recipe),
        gradient_checkpointing=spelled(recipe.memory.gradient_checkpointing),
        loss=choose_loss(recipe, data.task, tokens, loaded, engine, micro_batch_size, has_own_loss),
        kernels=loaded.kernels,
        offload=recipe.memory.offload,
    )
    return plan if outlook is None else replace(plan, **vars(outlook))


def count_steps(recipe: Recipe, batches: LengthGroupedBatches) -> tuple[int, int]:
    """The optimizer steps of a run, and of an epoch."""
    per_epoch = len(batches.window_sizes())
    num_steps = recipe.train.max_steps or max(1, math.ceil(recipe.train.epochs * per_epoch))
    return (min(num_steps, fast_steps(recipe)) if recipe.limits.fast_dev_run else num_steps), per_epoch


def count_warmup(recipe: Recipe, num_steps: int) -> int:
    """The steps of the warmup, which may be a share of all."""
    warmup = recipe.train.warmup
    return math.ceil(warmup * num_steps) if isinstance(warmup, float) and warmup < 1 else int(warmup)


def deciding_metric(recipe: Recipe) -> str | None:
    """The metric that chooses the best model, if the recipe names one."""
    best = recipe.checkpoint.best
    return recipe.evaluate.metric or (best if isinstance(best, str) else None)
