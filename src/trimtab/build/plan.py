"""The plan of a run, from a recipe, its data and the specification of its steps."""

import math

from trimtab.build.batches import fast_steps, num_scored_rows, train_batches
from trimtab.build.parts import Data, Loaded, Tokens
from trimtab.data.batching import LengthGroupedBatches, padding_share
from trimtab.engine.engine import Engine
from trimtab.errors import RecipeError
from trimtab.model.quantization import num_weights
from trimtab.recipe.schema import Recipe
from trimtab.runs.outlook import AnyOutlook
from trimtab.runs.plan import Plan
from trimtab.techniques.apply import batching_of, plan_texts
from trimtab.techniques.base import StepSpec


def build_plan(
    recipe: Recipe,
    data: Data,
    tokens: Tokens,
    loaded: Loaded,
    engine: Engine,
    spec: StepSpec,
    outlook: AnyOutlook | None = None,
) -> Plan:
    """Build the plan of a run on this machine."""
    batch_size, num_processes = recipe.train.batch_size, engine.num_processes
    if batch_size < num_processes:
        raise RecipeError(
            f"train.batch_size is {batch_size}, less than the number of processes ({num_processes})",
            f"set it to {num_processes} or more, or start fewer processes",
        )
    whole = min(spec.micro_batch * num_processes, batch_size)
    parameters = list(loaded.model.parameters())
    return make_plan(
        recipe,
        spec.with_micro_batch(math.ceil(whole / num_processes)),
        device=str(engine.device),
        batches=train_batches(recipe, tokens, whole, batching_of(spec), num_processes),
        tokens=tokens,
        max_length=tokens.max_length,
        num_processes=num_processes,
        default_metric=data.task.default_metric,
        num_parameters=sum(map(num_weights, parameters)),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        outlook=outlook,
    )


def make_plan(
    recipe: Recipe,
    spec: StepSpec,
    *,
    device: str,
    batches: LengthGroupedBatches | None,
    tokens: Tokens | None,
    max_length: int,
    default_metric: str,
    num_parameters: int,
    num_trainable: int,
    outlook: AnyOutlook | None,
    num_steps: int | None = None,
    num_processes: int = 1,
) -> Plan:
    """Build a plan; without data the numbers of rows are 0, and `num_steps` comes from the recipe."""
    steps_per_epoch = 0
    if batches is not None:
        num_steps, steps_per_epoch = count_steps(recipe, batches)
    num_eval_rows = 0 if tokens is None or tokens.eval is None else len(tokens.eval)
    micro_batch = min(spec.micro_batch * num_processes, recipe.train.batch_size)
    return Plan(
        device=device,
        spec=spec,
        texts=plan_texts(spec, recipe),
        batch_size=recipe.train.batch_size,
        num_processes=num_processes,
        num_steps=num_steps or 0,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=count_warmup(recipe, num_steps or 0),
        num_train_rows=0 if tokens is None else len(tokens.train),
        num_eval_rows=num_eval_rows,
        num_scored_rows=num_scored_rows(recipe, num_eval_rows, micro_batch),
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        max_length=max_length if tokens is None else tokens.max_length,
        padding_share=_padding_share(spec, tokens, batches),
        metric=deciding_metric(recipe) or default_metric,
        micro_batch_tokens=None if batches is None else batches.max_tokens,
        outlook=outlook,
    )


def _padding_share(spec: StepSpec, tokens: Tokens | None, batches: LengthGroupedBatches | None) -> float:
    if tokens is None or batches is None or batching_of(spec).is_packed:
        return 0.0
    return padding_share(tokens.train.lengths, list(batches))


def count_steps(recipe: Recipe, batches: LengthGroupedBatches) -> tuple[int, int]:
    """The number of optimizer steps of a run, and of an epoch."""
    per_epoch = len(batches.window_sizes())
    num_steps = recipe.train.num_steps(per_epoch)
    return (min(num_steps, fast_steps(recipe)) if recipe.limits.fast_dev_run else num_steps), per_epoch


def count_warmup(recipe: Recipe, num_steps: int) -> int:
    """The number of warmup steps, which may be given as a share of all steps."""
    warmup = recipe.train.warmup
    return math.ceil(warmup * num_steps) if isinstance(warmup, float) and warmup < 1 else int(warmup)


def deciding_metric(recipe: Recipe) -> str | None:
    """The metric that selects the best model, if the recipe names one."""
    best = recipe.checkpoint.best
    return recipe.evaluate.metric or (best if isinstance(best, str) else None)
