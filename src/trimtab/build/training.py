"""Build the trainer of a run from all its parts."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from trimtab.build.batches import EpochCollate, eval_loader, fast_steps, make_collate, make_loader, train_batches
from trimtab.build.engine import leave_out_unused
from trimtab.build.optimizer import optimizer_of
from trimtab.build.outputs import build_checkpoints, build_run_writer, checkpoint_bytes
from trimtab.build.parts import ResolvedRun
from trimtab.build.paths import with_absolute_paths
from trimtab.build.report_facts import held_out_rows
from trimtab.build.teacher import student_loss
from trimtab.data.fingerprint import FingerprintError, content_fingerprint
from trimtab.data.metrics import higher_is_better
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Task
from trimtab.errors import RecipeError
from trimtab.hardware.memory import (
    MemoryCap,
    cap_memory,
    expected_non_allocator_memory,
    non_allocator_memory,
    resolve_budget,
)
from trimtab.log import log_info_once
from trimtab.model.losses import Loss, loss_from_function
from trimtab.optim.schedules import build_schedule
from trimtab.randomness import set_seed
from trimtab.recipe.schema import Recipe
from trimtab.runs.outlook import MeasuredOutlook
from trimtab.runs.plan import Plan
from trimtab.runs.run_folder import Folder
from trimtab.techniques.apply import (
    batching_of,
    loads_kernels,
    make_loss,
    plain_values,
    states_of,
    warm_up,
    wrap_step,
)
from trimtab.techniques.base import LossRequest, StepSpec
from trimtab.training.evaluate import Evaluator, OwnMetric
from trimtab.training.failure_picture import FailurePicture
from trimtab.training.loop import Trainer
from trimtab.training.memory_guard import MemoryGuard
from trimtab.training.progress_lines import Progress
from trimtab.training.row_outcomes import RowOutcomes
from trimtab.training.stopping import Best, EarlyStopping
from trimtab.training.trainer_parts import LoopSettings, ModelSelection, RunOutputs, TrainingParts
from trimtab.units import Every, parse_every, parse_seconds


def build_trainer(
    run: ResolvedRun,
    folder: Folder,
    progress: Progress,
    *,
    callbacks: list[object],
    metrics: Mapping[str, OwnMetric] | None = None,
    picture: FailurePicture | None = None,
) -> Trainer:
    """Build the loop of a resolved run.

    Args:
        run: The run.
        folder: Its folder.
        progress: The progress display.
        callbacks: The user's callbacks.
        metrics: The user's metrics.
        picture: Draws the memory of a step that ran out of memory.
    """
    recipe, engine, plan, own_metrics = run.recipe, run.engine, run.plan, metrics or {}
    budget = resolve_budget(recipe.memory.budget, engine.device)
    outside = expected_non_allocator_memory(loads_kernels(plan.spec))
    # memory outside the allocator still grows during the first steps
    cap = cap_memory(engine.device, budget, max(outside, non_allocator_memory(engine.device)))
    parts = build_parts(run)
    best = Best(plan.metric, _rises(plan.metric, own_metrics, recipe))
    evaluator = build_evaluator(run, own_metrics)
    memory_guard = _build_memory_guard(run, parts, evaluator, cap, picture)
    checkpoints = build_checkpoints(recipe, engine, folder, run.asked)
    checkpoints.warn_if_disk_is_small(checkpoint_bytes(parts.optimizer, plan, recipe.train.momentum))
    writer = build_run_writer(folder, engine, run.loaded, run.tokens, _model_card(run), best)
    return Trainer(
        parts,
        _loop_settings(recipe, plan),
        ModelSelection(evaluator, best, _build_stopping(recipe, plan, own_metrics)),
        RunOutputs(writer, checkpoints, progress, [*callbacks, *held_out_rows(run, folder, evaluator)]),
        freezing=run.freezing,
        memory_guard=memory_guard,
    )


def build_parts(run: ResolvedRun) -> TrainingParts:
    """Prepare everything that computes an optimizer step."""
    recipe, engine, plan, task, tokens = run.recipe, run.engine, run.plan, run.data.task, run.tokens
    settings, spec, outputs = recipe.train, plan.spec, None if run.teacher is None else run.teacher.outputs
    loss = _build_training_loss(run)
    engine.include_frozen_parameters(run.freezing.released_later())
    uses_model = loss if outputs is None else _build_loss(task, None, 0.0, spec)  # a single row has no cached outputs
    leave_out_unused(run.loaded.model, run.freezing, uses_model, task, tokens, engine)
    set_seed(recipe.seed)
    model = engine.prepare(run.loaded.model)
    optimizer = optimizer_of(recipe, model, spec, engine.device)
    d_model = getattr(getattr(model.config, "encoder", model.config), "hidden_size", None)
    scheduler = build_schedule(
        settings.schedule, optimizer, num_steps=plan.num_steps, warmup_steps=plan.warmup_steps, d_model=d_model
    )
    batching = batching_of(spec)
    batches = train_batches(recipe, tokens, plan.global_micro_batch, batching, plan.num_processes)
    in_epoch = EpochCollate(task, batches)
    collate = make_collate(task, in_epoch if outputs is None else outputs.added_to(in_epoch), batching, batches)
    loader = make_loader(tokens.train, batches, collate)
    optimizer, scheduler, loader = engine.prepare(optimizer, scheduler, loader)
    return TrainingParts(
        engine,
        model,
        optimizer,
        scheduler,
        loader,
        loss,
        wrap_step=partial(wrap_step, spec),
        warm_up=partial(warm_up, run.loaded.model, spec),
        technique_states=states_of(run.loaded.model, spec) | ({} if run.teacher is None else {"teacher": run.teacher}),
    )


def _build_memory_guard(
    run: ResolvedRun,
    parts: TrainingParts,
    evaluator: Evaluator | None,
    cap: MemoryCap,
    picture: FailurePicture | None,
) -> MemoryGuard:
    plan, is_cpu = run.plan, run.engine.device.type == "cpu"
    return MemoryGuard(
        parts,
        evaluator=evaluator,
        released_later=run.freezing.released_later(),
        max_grad_norm=run.recipe.train.max_grad_norm,
        cap=cap,
        rehearses=cap.budget_bytes is not None or not is_cpu,
        # on a CPU the measured peak is that of the process, so the prediction must include all its memory
        predicted_peak_bytes=plan.predicted_total_bytes if is_cpu else plan.predicted_peak_bytes,
        measured_peak_bytes=plan.outlook.measured_peak_bytes if isinstance(plan.outlook, MeasuredOutlook) else None,
        picture=picture,
    )


def _loop_settings(recipe: Recipe, plan: Plan) -> LoopSettings:
    settings, checkpoint = recipe.train, recipe.checkpoint
    return LoopSettings(
        num_steps=plan.num_steps,
        steps_per_epoch=plan.steps_per_epoch,
        evaluate_every=_evaluation_interval(recipe),
        save_every=None if checkpoint.every is None else parse_every(checkpoint.every),
        log_every=settings.log_every,
        max_seconds=None if settings.max_time is None else parse_seconds(settings.max_time),
        evaluate_at_start=recipe.evaluate.at_start,
        keeps_best=bool(checkpoint.best),
        max_grad_norm=settings.max_grad_norm,
        on_nan=settings.on_nan,
    )


def _model_card(run: ResolvedRun) -> dict[str, Any]:
    """The facts about its training that an exported model contains."""
    parts = {"training": run.data.train, "evaluation": run.data.eval}
    return {
        "task": run.data.task.name,
        "columns": run.data.task.columns,
        "max_length": run.plan.max_length,
        "metric": run.plan.metric,
        "scored_on": _scored_on(run),
        "recipe": with_absolute_paths(run.recipe).model_dump(mode="json"),  # `merge` reads its data again
        "data": {part: _facts_of_rows(rows) for part, rows in parts.items() if rows is not None},
    }


def _scored_on(run: ResolvedRun) -> str:
    """The rows of which the metrics are, in words."""
    if num_batches := run.recipe.limits.overfit_batches:
        return f"{num_batches} batches of training rows (limits.overfit_batches)"
    plan = run.plan
    return "the held-out rows" if plan.num_scored_rows == plan.num_eval_rows else plan.held_out_words()


def _facts_of_rows(rows: Rows) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": rows.origin, "num_rows": len(rows)}
    with suppress(FingerprintError):
        facts["fingerprint"] = content_fingerprint(rows)
    return facts


def _build_training_loss(run: ResolvedRun) -> Loss:
    task, smoothing, weights = run.data.task, run.recipe.train.label_smoothing, run.data.class_weights
    if run.teacher is None:
        if run.loss is not None and weights is not None:
            raise RecipeError(
                "train.class_weights is set, which has no effect on a custom loss",
                "weight rows in your function, return (mean, sum of the weights), and remove the key",
            )
        return _build_loss(task, run.loss, smoothing, run.plan.spec, class_weights=weights)
    if run.loss is not None:
        raise RecipeError("a custom loss does not use the teacher of distill", "remove distill or the custom loss")
    request = LossRequest(task.loss_kind, task.shifts_labels, smoothing)
    return student_loss(run.recipe, request, run.teacher.model)


def _build_loss(
    task: Task,
    own: Callable[..., Any] | None,
    label_smoothing: float,
    spec: StepSpec,
    *,
    counts_hits: bool = False,
    class_weights: tuple[float, ...] | None = None,
) -> Loss:
    if own is None:
        request = LossRequest(task.loss_kind, task.shifts_labels, label_smoothing, counts_hits, class_weights)
        return make_loss(spec, request)
    if label_smoothing:
        raise RecipeError(
            f"train.label_smoothing is {label_smoothing}, which has no effect on a custom loss",
            "smooth labels in your function and remove the key",
        )
    return loss_from_function(own)


def _evaluation_interval(recipe: Recipe) -> Every:
    if recipe.limits.fast_dev_run:
        return Every(steps=fast_steps(recipe), epochs=None, seconds=None)
    return parse_every(recipe.evaluate.every)


def build_evaluator(run: ResolvedRun, own_metrics: Mapping[str, OwnMetric]) -> Evaluator | None:
    """Build the evaluator of a run on its held-out rows; None if there are none."""
    recipe, task, tokens, engine, plan = run.recipe, run.data.task, run.tokens, run.engine, run.plan
    decisive = [plan.metric, _stopping_metric(recipe) or plan.metric]
    names = [*task.metrics().names, *(name for name in decisive if name not in own_metrics)]
    task.metrics(names)  # refuses unknown metrics before training, not after an epoch
    # evaluate without label smoothing; custom metrics need logits of padded rows
    spec = plan.spec.having(plain_values()) if own_metrics else plan.spec
    batching = replace(batching_of(spec), has_few_sizes=False)
    collate = make_collate(task, task.collate, batching)
    if recipe.limits.overfit_batches:  # evaluate only on the training rows
        batches = train_batches(recipe, tokens, plan.global_micro_batch, batching, plan.num_processes)
        loader = make_loader(tokens.train, batches, collate)
    elif tokens.eval is not None:
        loader = eval_loader(recipe, collate, tokens.eval, plan)
    else:
        return None
    loss = _build_loss(task, run.loss, 0.0, spec, counts_hits="token_accuracy" in names)
    evaluator = Evaluator(
        engine,
        engine.prepare(loader),
        loss,
        partial(task.metrics, names),
        own_metrics,
        partial(RowOutcomes, task.loss_kind, getattr(run.loaded.model.config, "num_labels", 0)),
    )
    evaluator.num_rows = None if plan.outlook is None else plan.outlook.eval_micro_batch
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
    """Whether higher values are better; for a custom metric, by its attribute or by early_stopping.mode."""
    if metric not in own_metrics:
        return higher_is_better(metric)
    marked: bool | None = getattr(own_metrics[metric], "higher_is_better", None)
    if marked is not None:
        return marked
    stopping = recipe.early_stopping
    if stopping is not None and stopping.mode is not None and stopping.metric in (None, metric):
        return stopping.mode == "max"
    log_info_once(
        f"metric {metric}: higher counts as better; if lower is better, set higher_is_better = False on its function"
    )
    return True
