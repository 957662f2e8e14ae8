"""Puts every part into the loop."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trimtab.build.batches import EpochCollate, eval_loader, fast_steps, make_loader, train_batches
from trimtab.build.engine import leave_out_unused
from trimtab.build.levers import loads_kernels
from trimtab.build.optimizer import optimizer_of
from trimtab.build.outputs import build_checkpoints, build_keeper, checkpoint_bytes
from trimtab.build.parts import Data, Loaded, Tokens
from trimtab.build.paths import with_absolute_paths
from trimtab.data.metrics import higher_is_better
from trimtab.data.tasks.base import Task
from trimtab.engine.engine import Engine
from trimtab.errors import RecipeError
from trimtab.hardware.memory import budget_in_bytes, cap_memory, memory_outside, usually_outside
from trimtab.log import say_once
from trimtab.model.freeze import Freezing
from trimtab.model.losses import Loss, build_loss, own_loss
from trimtab.optim.schedules import build_schedule
from trimtab.randomness import set_seed
from trimtab.recipe.schema import Recipe
from trimtab.runs.plan import Plan
from trimtab.runs.run_folder import Folder
from trimtab.training.evaluate import Evaluator, OwnMetric
from trimtab.training.loop import Trainer
from trimtab.training.memory_guard import MemoryGuard
from trimtab.training.progress_lines import Progress
from trimtab.training.stopping import Best, EarlyStopping
from trimtab.training.trainer_parts import LoopSettings, ModelSelection, RunOutputs, TrainingParts
from trimtab.units import Every, parse_every, parse_seconds


def build_trainer(
    recipe: Recipe,
    data: Data,
    tokens: Tokens,
    loaded: Loaded,
    engine: Engine,
    plan: Plan,
    freezing: Freezing,
    folder: Folder,
    progress: Progress,
    *,
    asked: Recipe,
    callbacks: list[object],
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, OwnMetric] | None = None,
) -> Trainer:
    """Put every part into the loop; `asked` is the recipe to write down, where `recipe` may have a model's folder."""
    settings, task = recipe.train, data.task
    own_metrics = metrics or {}
    budget = budget_in_bytes(recipe.memory.budget, engine.device)
    outside = usually_outside(loads_kernels(plan.kernels, plan.optimizer, plan.adapter))
    # what is outside now grows with the first steps
    cap = cap_memory(engine.device, budget, max(outside, memory_outside(engine.device)))
    train_loss = _the_loss(task, loss, settings.label_smoothing, plan.loss)
    engine.will_train(freezing.released_later())
    leave_out_unused(loaded.model, freezing, train_loss, task, tokens, engine)
    set_seed(recipe.seed)
    model = engine.prepare(loaded.model)
    optimizer = optimizer_of(recipe, model, plan.optimizer, plan.precision, engine.device)
    d_model = getattr(getattr(model.config, "encoder", model.config), "hidden_size", None)
    scheduler = build_schedule(
        settings.schedule, optimizer, num_steps=plan.num_steps, warmup_steps=plan.warmup_steps, d_model=d_model
    )
    batches = train_batches(recipe, tokens, plan.rows_at_once)
    loader = make_loader(tokens.train, batches, EpochCollate(task, batches), engine.device)
    optimizer, scheduler, loader = engine.prepare(optimizer, scheduler, loader)
    best = Best(plan.metric, _rises(plan.metric, own_metrics, recipe))
    card = {
        "task": task.name,
        "columns": task.columns,
        "max_length": plan.max_length,
        "metric": plan.metric,
        "recipe": with_absolute_paths(recipe).model_dump(mode="json"),  # `merge` reads its data again
    }
    evaluator = _build_evaluator(recipe, task, tokens, engine, loss, plan, own_metrics)
    parts = TrainingParts(engine, model, optimizer, scheduler, loader, train_loss)
    memory_guard = MemoryGuard(
        parts,
        evaluator=evaluator,
        released_later=freezing.released_later(),
        max_grad_norm=settings.max_grad_norm,
        cap=cap,
        rehearses=cap.budget_bytes is not None or engine.device.type != "cpu",
        # on a CPU the peak that is measured is the process's, so that of all that it takes was predicted
        predicted_peak_bytes=plan.predicted_total_bytes if engine.device.type == "cpu" else plan.predicted_peak_bytes,
    )
    checkpoints = build_checkpoints(recipe, engine, folder, asked)
    checkpoints.warn_if_disk_is_small(checkpoint_bytes(optimizer, plan, settings.momentum))
    return Trainer(
        parts,
        LoopSettings(
            num_steps=plan.num_steps,
            steps_per_epoch=plan.steps_per_epoch,
            evaluate_every=_evaluation_interval(recipe),
            save_every=None if recipe.checkpoint.every is None else parse_every(recipe.checkpoint.every),
            log_every=settings.log_every,
            max_seconds=None if settings.max_time is None else parse_seconds(settings.max_time),
            evaluate_at_start=recipe.evaluate.at_start,
            keeps_best=bool(recipe.checkpoint.best),
            max_grad_norm=settings.max_grad_norm,
            on_nan=settings.on_nan,
        ),
        ModelSelection(evaluator, best, _build_stopping(recipe, plan, own_metrics)),
        RunOutputs(build_keeper(folder, engine, loaded, tokens, card, best), checkpoints, progress, callbacks),
        freezing=freezing,
        memory_guard=memory_guard,
    )


def _the_loss(
    task: Task, own: Callable[..., Any] | None, label_smoothing: float, how: str, *, counts_hits: bool = False
) -> Loss:
    if own is not None:
        if label_smoothing:
            raise RecipeError(
                f"train.label_smoothing is {label_smoothing}, which a loss of your own does not know",
                "smooth in your function and leave the key out",
            )
        return own_loss(own)
    return build_loss(
        task.loss_kind,
        shifts_labels=task.shifts_labels,
        label_smoothing=label_smoothing,
        how=how,
        counts_hits=counts_hits,
    )


def _evaluation_interval(recipe: Recipe) -> Every:
    if recipe.limits.fast_dev_run:
        return Every(steps=fast_steps(recipe), epochs=None, seconds=None)
    return parse_every(recipe.evaluate.every)


def _build_evaluator(
    recipe: Recipe,
    task: Task,
    tokens: Tokens,
    engine: Engine,
    own: Callable[..., Any] | None,
    plan: Plan,
    own_metrics: Mapping[str, OwnMetric],
) -> Evaluator | None:
    decisive = [plan.metric, _stopping_metric(recipe) or plan.metric]
    names = [*task.metrics().names, *(name for name in decisive if name not in own_metrics)]
    task.metrics(names)  # one that the task does not have is refused now, and not after an epoch
    if recipe.limits.overfit_batches:  # the rows that are trained on, and no others
        batches = train_batches(recipe, tokens, plan.rows_at_once)
        loader = make_loader(tokens.train, batches, task.collate, engine.device)
    elif tokens.eval is not None:
        loader = eval_loader(recipe, task, tokens.eval, plan, engine.device)
    else:
        return None
    # held-out loss and perplexity are those of the true labels, whatever the training smooths; own metrics read logits
    how = "plain" if own_metrics else plan.loss
    loss = _the_loss(task, own, 0.0, how, counts_hits="token_accuracy" in names)
    evaluator = Evaluator(engine, engine.prepare(loader), loss, partial(task.metrics, names), own_metrics)
    evaluator.num_rows = plan.eval_micro_batch
    return evaluator


def _stopping_metric(recipe: Recipe) -> str | None:
    return None if recipe.early_stopping is None else recipe.early_stopping.metric


def _build_stopping(recipe: Recipe, plan: Plan, own_metrics: Mapping[str, OwnMetric]) -> EarlyStopping | None:
    settings = recipe.early_stopping
    if settings is None:
        return None
    metric = settings.metric or plan.metric
    rises = settings.mode == "max" if settings.mode is not None else _rises(metric, own_metrics, recipe)
    return EarlyStopping(metric, rises, settings.patience, settings.min_delta)


def _rises(metric: str, own_metrics: Mapping[str, OwnMetric], recipe: Recipe) -> bool:
    """Whether more of a metric is better; an own one says so by an attribute, or early_stopping.mode does."""
    if metric not in own_metrics:
        return higher_is_better(metric)
    marked: bool | None = getattr(own_metrics[metric], "higher_is_better", None)
    if marked is not None:
        return marked
    stopping = recipe.early_stopping
    if stopping is not None and stopping.mode is not None and stopping.metric in (None, metric):
        return stopping.mode == "max"
    say_once(f"more of your metric {metric} counts as better; if less is, set higher_is_better = False on its function")
    return True
