"""From a recipe to the parts of a run. Only this file reads the recipe; every part takes plain arguments."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from trimtab.checkpoint.export import PatientExport
from trimtab.checkpoint.mirror import Mirror, mirror_of
from trimtab.checkpoint.shelf import Shelf
from trimtab.data.batching import LengthGroupedBatches, padding_share
from trimtab.data.fingerprint import NoFingerprint, fingerprint
from trimtab.data.metrics import higher_is_better
from trimtab.data.placement import to_device
from trimtab.data.sources import Rows, load_rows, split_off
from trimtab.data.tasks.base import Task
from trimtab.data.tasks.build import build_task
from trimtab.data.tokens import TokenDataset, cached
from trimtab.distributed.data_parallel import leave_out
from trimtab.engine import Engine
from trimtab.errors import CheckpointError, RecipeError
from trimtab.hardware.inventory import find_device, native_precision
from trimtab.hardware.memory import keep_freed_memory
from trimtab.log import say, say_once
from trimtab.model.freeze import Freezing
from trimtab.model.load import load_model, load_tokenizer, max_positions, train_tokenizer
from trimtab.model.losses import Loss, build_loss, own_loss
from trimtab.optim.build import build_optimizer
from trimtab.optim.groups import decay_groups
from trimtab.optim.schedules import build_schedule
from trimtab.randomness import set_seed, use_deterministic_kernels
from trimtab.recipe.plan import Plan
from trimtab.recipe.resuming import flat
from trimtab.recipe.schema import ModelSettings, Recipe
from trimtab.tracking.run_folder import CHECKPOINTS, Folder
from trimtab.train.checkpoints import Checkpoints, NoCheckpoints
from trimtab.train.evaluate import Evaluator, OwnMetric
from trimtab.train.loop import Keeper, Schedule, Trainer
from trimtab.train.progress import Progress
from trimtab.train.stopping import Best, EarlyStopping
from trimtab.units import Every, parse_every, parse_seconds


@dataclass(frozen=True)
class Data:
    """Rows, and the task that says what they are."""

    task: Task
    train: Rows
    eval: Rows | None


@dataclass(frozen=True)
class Tokens:
    """Rows as the model sees them."""

    train: TokenDataset
    eval: TokenDataset | None
    max_length: int


@dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer."""

    model: torch.nn.Module
    tokenizer: Any


def build_data(recipe: Recipe) -> Data:
    """Load the rows, find out the task, and hold rows out for evaluation."""
    settings = recipe.data
    train = load_rows(settings.train, on_bad_rows=settings.on_bad_rows)
    held_out = None if settings.eval is None else load_rows(settings.eval, on_bad_rows=settings.on_bad_rows)
    task = build_task(
        recipe.task,
        train,
        text=settings.text,
        label=settings.label,
        target=settings.target,
        messages=settings.messages,
        prompt=settings.prompt,
        answer=settings.answer,
        eval_rows=held_out,
        seed=recipe.seed,
        on_bad_rows=settings.on_bad_rows,
    )
    for line in task.said:
        say(line)
    train = task.usable(train)
    held_out = None if held_out is None else task.usable(held_out)
    if held_out is None and settings.eval_share > 0:
        label = task.columns.get("label") if task.name == "classify" else None
        train, held_out = split_off(
            train, settings.eval_share, recipe.seed, label=label if isinstance(label, str) else None
        )
        say(f"no eval data given: {len(held_out):,} of {len(train) + len(held_out):,} rows are held out (data.eval)")
    return Data(task, train, held_out)


def build_model(recipe: Recipe, data: Data) -> Loaded:
    """Load the model with the head that the task needs, and its tokenizer."""
    source = recipe.model
    if isinstance(source, ModelSettings):
        named: str | dict[str, Any] = dict(source.config) if source.config else str(source.name)
        tokenizer_source, trust = source.tokenizer or source.name, source.trust_remote_code
    else:
        named, tokenizer_source, trust = source, source, False
    if trust:
        say("model.trust_remote_code is on: Python code that comes with the model is run")
    if tokenizer_source is None:
        raise RecipeError(
            "model.tokenizer is missing: a config alone has none", "a name, a folder, or tokenizer: train"
        )
    if tokenizer_source == "train":
        config = named if isinstance(named, dict) else {}
        tokenizer = train_tokenizer(_texts(data), vocab_size=int(config.get("vocab_size", 8000)))
    else:
        tokenizer = load_tokenizer(tokenizer_source, trust_remote_code=trust)
    torch.manual_seed(recipe.seed)  # a head that is newly initialised depends on the seed alone
    head = data.task.head()
    model = load_model(named, data.task.model_kind, head, tokenizer, trust_remote_code=trust)
    return Loaded(model, tokenizer)


def _texts(data: Data) -> list[str]:
    names = [name for value in data.task.columns.values() for name in ([value] if isinstance(value, str) else value)]
    return [text for name in names if name in data.train.columns for text in _strings(data.train.columns[name])]


def _strings(value: Any) -> Iterator[str]:
    """Every text in a column, those in the messages of a chat too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def build_tokens(recipe: Recipe, data: Data, loaded: Loaded) -> Tokens:
    """Tokenize, or take what an earlier run with the same rows, tokenizer and settings tokenized."""
    limit = max_positions(loaded.model)
    max_length = recipe.data.max_length or limit or 512
    if limit is not None and max_length > limit:
        say(f"data.max_length {max_length} is more than the model's {limit} positions: {limit} is used")
        max_length = limit
    task = data.task
    task.bind(loaded.tokenizer, loaded.model.config)

    def encode(rows: Rows) -> TokenDataset:
        key = [task.name, task.settings, rows, loaded.tokenizer, max_length]
        return cached(key, lambda: task.encode(rows, loaded.tokenizer, max_length))

    train = encode(data.train)
    held_out = encode(data.eval) if data.eval is not None else None
    if train.num_truncated:
        say(f"{train.num_truncated:,} of {len(train):,} rows are longer than {max_length} tokens and were cut")
    return Tokens(train, held_out, max_length)


class _Collate:
    """Collates a micro-batch in the epoch of its sampler: masking depends on (seed, epoch, row) alone."""

    def __init__(self, task: Task, batches: LengthGroupedBatches) -> None:
        self._task = task
        self._batches = batches

    def __call__(self, examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = self._task.collate(examples, epoch=self._batches.epoch)
        return batch


def _loader(
    rows: TokenDataset | Subset[Any], batches: LengthGroupedBatches, collate: Callable[..., Any], device: torch.device
) -> DataLoader[Any]:
    # one worker keeps an accelerator's host free; on the CPU it would only take a core from the training
    num_workers = 1 if device.type != "cpu" else 0
    return DataLoader(rows, batch_sampler=batches, collate_fn=collate, num_workers=num_workers)


def build_freezing(recipe: Recipe, loaded: Loaded) -> Freezing:
    """Freeze what the recipe says; what begins to train later does so in the loop."""
    until = {pattern: None if word == "always" else parse_every(word) for pattern, word in recipe.train.freeze.items()}
    freezing = Freezing(loaded.model, until)
    freezing.apply()
    return freezing


def build_plan(recipe: Recipe, data: Data, tokens: Tokens, loaded: Loaded, engine: Engine) -> Plan:
    """Decide what the recipe left open."""
    train = recipe.train
    num_processes = engine.num_processes
    if train.batch_size < num_processes:
        raise RecipeError(
            f"train.batch_size {train.batch_size} is less than the {num_processes} processes that share it",
            f"set it to {num_processes} or more, or start fewer processes",
        )
    micro = recipe.memory.micro_batch
    whole = train.batch_size if micro == "auto" else min(int(micro) * num_processes, train.batch_size)
    batches = _train_batches(recipe, tokens, whole)
    steps_per_epoch = len(batches.window_sizes())
    num_steps = train.max_steps or max(1, math.ceil(train.epochs * steps_per_epoch))
    if recipe.limits.fast_dev_run:
        num_steps = min(num_steps, _fast_steps(recipe))
    warmup = train.warmup
    warmup_steps = math.ceil(warmup * num_steps) if isinstance(warmup, float) and warmup < 1 else int(warmup)
    return Plan(
        device=str(engine.device),
        precision={"no": "fp32"}.get(engine.mixed_precision, engine.mixed_precision),
        batch_size=train.batch_size,
        micro_batch_size=math.ceil(whole / num_processes),
        num_processes=num_processes,
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=warmup_steps,
        num_train_rows=len(tokens.train),
        num_eval_rows=0 if tokens.eval is None else len(tokens.eval),
        num_parameters=sum(p.numel() for p in loaded.model.parameters()),
        num_trainable=sum(p.numel() for p in loaded.model.parameters() if p.requires_grad),
        max_length=tokens.max_length,
        padding_share=padding_share(tokens.train.lengths, list(batches)),
        metric=_deciding_metric(recipe) or data.task.default_metric,
    )


def _deciding_metric(recipe: Recipe) -> str | None:
    best = recipe.checkpoint.best
    return recipe.evaluate.metric or (best if isinstance(best, str) else None)


def _fast_steps(recipe: Recipe) -> int:
    wanted = recipe.limits.fast_dev_run
    return 3 if wanted is True else int(wanted)


def _train_batches(recipe: Recipe, tokens: Tokens, micro_batch_size: int) -> LengthGroupedBatches:
    limit = recipe.limits.train
    num_batches = math.ceil(len(tokens.train) / recipe.train.batch_size)
    return LengthGroupedBatches(
        tokens.train.lengths,
        recipe.train.batch_size,
        micro_batch_size,
        seed=recipe.seed,
        group_by_length=recipe.train.group_by_length,
        shuffle=not recipe.limits.overfit_batches,
        limit_batches=recipe.limits.overfit_batches or _limited(limit, num_batches),
    )


def _limited(limit: int | float | None, num_batches: int) -> int | None:
    """A limit as Lightning writes it: a whole number of batches, or a share of them."""
    if limit is None:
        return None
    return max(1, round(limit * num_batches)) if isinstance(limit, float) else limit


def build_engine(recipe: Recipe, device: str | None) -> Engine:
    """The engine in the precision asked for; `auto` is a rule on what the device does natively."""
    found = find_device(device)
    if found.type == "cpu":
        keep_freed_memory()
    if recipe.train.deterministic:
        use_deterministic_kernels()
    wanted = recipe.train.precision
    precision = native_precision(found) if wanted == "auto" else wanted
    return Engine("no" if precision == "fp32" else precision, device=device)


def compare_processes(recipe: Recipe, data: Data, tokens: Tokens, engine: Engine) -> None:
    """See that every process was given the same recipe and found the same rows."""
    if not engine.use_distributed:
        return
    engine.require_same("recipe", flat(recipe.model_dump(mode="json")))
    found: dict[str, Any] = {"rows": len(tokens.train), "tokens": int(sum(tokens.train.lengths))}
    with suppress(NoFingerprint):
        found |= {"data.train": fingerprint([data.train]), "data.eval": fingerprint([data.eval])}
    engine.require_same("data", found)


def _leave_out_unused(
    model: torch.nn.Module, freezing: Freezing, loss: Loss, task: Task, tokens: Tokens, engine: Engine
) -> None:
    """Find the parameters that take no part in the loss, which processes must not wait for, from one row."""
    if not engine.use_distributed:
        return
    model.to(engine.device)
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    was_training = model.training
    batch = to_device(task.collate([tokens.train[0]]), engine.device)
    try:
        model.eval()
        for parameter in freezing.released_later():
            parameter.requires_grad_(True)
        loss(model, batch).value.backward()  # type: ignore[no-untyped-call]
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    finally:
        model.train(was_training).zero_grad(set_to_none=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains[name])
    leave_out(model, unused)


class BestKeeper:
    """Writes the best model as a plain Hugging Face folder, and the numbers into the run's journal."""

    def __init__(
        self, folder: Folder, engine: Engine, loaded: Loaded, tokens: TokenDataset, card: dict[str, Any], metric: str
    ) -> None:
        self._folder, self._loaded, self._card, self._metric = folder, loaded, card, metric
        self._tokens = tokens
        self._export = PatientExport(folder.best, engine.unwrap_model(loaded.model), loaded.tokenizer)
        self._facts: dict[str, Any] = {}

    @property
    def problem(self) -> CheckpointError | None:
        """Why the best model is not written yet."""
        return self._export.problem

    def keep_best(self, step: int, metrics: dict[str, float]) -> str | None:
        """Write the model beside the one before, then take its place."""
        value = metrics.get(self._metric)
        best = value if value is not None and math.isfinite(value) else None
        self._facts = {"metric_name": self._metric, "best_metric": best, "best_step": step}
        return self._written(self._export.write({**self._card, "step": step, "metrics": metrics}))

    def write_waiting(self) -> str | None:
        """Try again to write a model for which there was no room."""
        return self._written(self._export.write_waiting())

    def _written(self, is_written: bool) -> str | None:
        if not is_written:
            return None
        self._folder.update(**self._facts)
        return str(self._folder.best)

    def record(self, values: dict[str, Any], step: int) -> None:
        """Write a line of numbers."""
        self._folder.record(values, step)

    def position(self) -> int:
        """How far the journal has been written."""
        return self._folder.journal_position()

    def keep_bad_rows(self, step: int, rows: list[int]) -> str:
        """Write rows as the model saw them: their numbers in the data, their text, and what carries loss."""
        lines = []
        for row in rows:
            # a label of a row is a plain number
            fields = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in self._tokens[row].items()}
            text = self._loaded.tokenizer.decode(fields["input_ids"])
            lines.append(json.dumps({"row": row, "text": text, **fields}, ensure_ascii=False))
        name = f"bad-rows-step-{step}.jsonl"
        self._folder.write_text(name, "\n".join(lines) + "\n")
        return str(self._folder.path / name)


def _build_keeper(
    folder: Folder, engine: Engine, loaded: Loaded, tokens: Tokens, card: dict[str, Any], metric: str
) -> Keeper:
    if not engine.is_main_process:
        return NoKeeper(folder)
    return BestKeeper(folder, engine, loaded, tokens.train, card, metric)


def build_checkpoints(recipe: Recipe, engine: Engine, folder: Folder) -> Checkpoints | NoCheckpoints:
    """What saves the state of a run."""
    settings = recipe.checkpoint
    if settings.every is None or recipe.limits.fast_dev_run:
        return NoCheckpoints()
    mirror = None
    if settings.mirror is not None and engine.is_main_process:
        # experiment and name: several runs share a drive
        place = Path(settings.mirror, *folder.path.absolute().parts[-2:])
        known = mirror_of(folder.path)  # of a run that came back from its mirror to another place
        if known is not None and Path(settings.mirror).absolute() in known.parents:
            place = known
        mirror = Mirror(folder.path, place, files=("recipe.yaml", "plan.json", "run.json", "metrics.jsonl"))
    shelf = Shelf(folder.path / CHECKPOINTS, keep=settings.keep)
    return Checkpoints(engine, shelf, mirror, on_saved=lambda step: folder.update(saved_step=step))


def _checkpoint_bytes(optimizer: Any, kind: str, momentum: float) -> int:
    """The size of a checkpoint once the optimizer has its state: what trains, and as much again for each moment."""
    num_moments = {"adamw": 2, "adam": 2, "adagrad": 1, "sgd": 1 if momentum else 0}.get(kind, 0)
    weights: int = sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
    return weights * (1 + num_moments)


class NoKeeper:
    """Of several processes one writes; the others keep nothing."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    problem: CheckpointError | None = None

    def keep_best(self, step: int, metrics: dict[str, float]) -> str | None:
        """Where the first process writes it."""
        return str(self._folder.best)

    def write_waiting(self) -> str | None:
        """The first process does that."""
        return None

    def record(self, values: dict[str, Any], step: int) -> None:
        """The first process does that."""

    def position(self) -> int:
        """The first process knows it."""
        return 0

    def keep_bad_rows(self, step: int, rows: list[int]) -> str:
        """Where the first process writes them."""
        return str(self._folder.path / f"bad-rows-step-{step}.jsonl")


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
    callbacks: list[object],
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, OwnMetric] | None = None,
) -> Trainer:
    """Put every part into the loop."""
    settings, task = recipe.train, data.task
    unfreezes = any(until != "always" for until in settings.freeze.values())
    own_metrics = metrics or {}
    train_loss = _the_loss(task, loss, settings.label_smoothing)
    engine.will_train(freezing.released_later())
    _leave_out_unused(loaded.model, freezing, train_loss, task, tokens, engine)
    set_seed(recipe.seed)
    model = engine.prepare(loaded.model)
    optimizer = build_optimizer(
        settings.optimizer,
        decay_groups(
            model, settings.weight_decay, decay_embeddings=settings.decay_embeddings, include_frozen=unfreezes
        ),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        momentum=settings.momentum,
        device=engine.device,
    )
    d_model = getattr(getattr(model.config, "encoder", model.config), "hidden_size", None)
    scheduler = build_schedule(
        settings.schedule, optimizer, num_steps=plan.num_steps, warmup_steps=plan.warmup_steps, d_model=d_model
    )
    batches = _train_batches(recipe, tokens, plan.rows_at_once)
    loader = _loader(tokens.train, batches, _Collate(task, batches), engine.device)
    optimizer, scheduler, loader = engine.prepare(optimizer, scheduler, loader)
    best = Best(plan.metric, _rises(plan.metric, own_metrics, recipe))
    card = {
        "task": task.name,
        "columns": task.columns,
        "max_length": plan.max_length,
        "metric": plan.metric,
        "recipe": recipe.model_dump(mode="json"),
    }
    checkpoints = build_checkpoints(recipe, engine, folder)
    checkpoints.warn_if_disk_is_small(_checkpoint_bytes(optimizer, settings.optimizer, settings.momentum))
    return Trainer(
        engine,
        model,
        optimizer,
        scheduler,
        loader,
        train_loss,
        Schedule(
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
        # held-out loss and perplexity are those of the true labels, whatever the training smooths
        evaluator=_build_evaluator(recipe, task, tokens, engine, _the_loss(task, loss, 0.0), plan, own_metrics),
        best=best,
        early_stopping=_build_stopping(recipe, plan, own_metrics),
        freezing=freezing,
        keeper=_build_keeper(folder, engine, loaded, tokens, card, plan.metric),
        checkpoints=checkpoints,
        progress=progress,
        callbacks=callbacks,
    )


def _the_loss(task: Task, own: Callable[..., Any] | None, label_smoothing: float) -> Loss:
    if own is not None:
        if label_smoothing:
            raise RecipeError(
                f"train.label_smoothing is {label_smoothing}, which a loss of your own does not know",
                "smooth in your function and leave the key out",
            )
        return own_loss(own)
    return build_loss(task.loss_kind, shifts_labels=task.shifts_labels, label_smoothing=label_smoothing)


def _evaluation_interval(recipe: Recipe) -> Every:
    if recipe.limits.fast_dev_run:
        return Every(steps=_fast_steps(recipe), epochs=None, seconds=None)
    return parse_every(recipe.evaluate.every)


def _build_evaluator(
    recipe: Recipe,
    task: Task,
    tokens: Tokens,
    engine: Engine,
    loss: Loss,
    plan: Plan,
    own_metrics: Mapping[str, OwnMetric],
) -> Evaluator | None:
    decisive = [plan.metric, _stopping_metric(recipe) or plan.metric]
    names = [*task.metrics().names, *(name for name in decisive if name not in own_metrics)]
    task.metrics(names)  # one that the task does not have is refused now, and not after an epoch
    if recipe.limits.overfit_batches:  # the rows that are trained on, and no others
        batches = _train_batches(recipe, tokens, plan.rows_at_once)
        loader = _loader(tokens.train, batches, task.collate, engine.device)
    elif tokens.eval is not None:
        loader = _eval_loader(recipe, task, tokens.eval, plan, engine.device)
    else:
        return None
    return Evaluator(engine, engine.prepare(loader), loss, partial(task.metrics, names), own_metrics)


def _eval_loader(recipe: Recipe, task: Task, tokens: TokenDataset, plan: Plan, device: torch.device) -> DataLoader[Any]:
    """Held-out rows, the longest first; where only some batches are wanted, of rows drawn by the seed.

    Collated as in epoch 0 every time, so that evaluations of one run ask for the same masked tokens.
    """
    batch_size = recipe.evaluate.batch_size or max(plan.rows_at_once, 8)
    limit = 3 if recipe.limits.fast_dev_run else _limited(recipe.limits.eval, math.ceil(len(tokens) / batch_size))
    lengths, rows = tokens.lengths, list(range(len(tokens)))
    if limit is not None:
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(recipe.seed))
        rows = sorted(order[: limit * batch_size].tolist())
    batches = LengthGroupedBatches(
        [lengths[row] for row in rows], batch_size, batch_size, seed=recipe.seed, shuffle=False
    )
    return _loader(Subset(tokens, rows), batches, task.collate, device)


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


def run_name(recipe: Recipe) -> str:
    """The experiment of a recipe that names none: after its data."""
    if recipe.track.experiment:
        return recipe.track.experiment
    source = recipe.data.train
    if isinstance(source, str | Path):
        words = [part.split("[")[0].split(":")[0].split(".")[0] for part in reversed(Path(str(source)).parts)]
        return next((word for word in words if word and not set(word) & set("*?/")), "run")
    return "run"
