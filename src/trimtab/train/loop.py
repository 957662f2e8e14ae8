"""The one loop. Methods differ by the parts put into it: model, data, loss, optimizer, freezing, metrics."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from trimtab.engine import Engine
from trimtab.hardware.memory import memory_in_use, peak_memory, reset_peak_memory
from trimtab.log import say
from trimtab.model.freeze import Freezing
from trimtab.model.losses import Loss
from trimtab.train.callbacks import call_all
from trimtab.train.evaluate import Evaluator
from trimtab.train.progress import Progress, StepLine
from trimtab.train.step import StepResult, train_step
from trimtab.train.stopping import Best, EarlyStopping
from trimtab.units import Every


class Keeper(Protocol):
    """Keeps the best model and the numbers of a run."""

    def keep_best(self, step: int, metrics: dict[str, float]) -> str:
        """Write the model as the best one so far and give its folder."""

    def record(self, values: dict[str, Any], step: int) -> None:
        """Write numbers of a step."""


@dataclass
class RunState:
    """Where a run is; callbacks see it and may set `should_stop`."""

    num_steps: int
    steps_per_epoch: int
    model: torch.nn.Module
    optimizer: Any
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: str = "finished"
    _should_stop: bool = False

    @property
    def should_stop(self) -> bool:
        """Whether somebody wants the run to end. Once set it stays: a callback cannot take another's wish back."""
        return self._should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._should_stop = self._should_stop or bool(value)

    @property
    def epoch(self) -> float:
        """Epochs done, as a fraction."""
        return self.step / self.steps_per_epoch

    @property
    def is_over(self) -> bool:
        """Whether the last step was taken."""
        return self.should_stop or self.step >= self.num_steps


@dataclass(frozen=True)
class FitResult:
    """How a run ended."""

    step: int
    metrics: dict[str, float]
    best_metric: float | None
    best_step: int | None
    stop_reason: str
    train_seconds: float
    num_tokens: int
    num_skipped: int
    peak_memory_bytes: int


@dataclass(frozen=True)
class Schedule:
    """How long a run lasts and when it looks around."""

    num_steps: int
    steps_per_epoch: int
    evaluate_every: Every
    log_every: int = 10
    max_seconds: float | None = None
    evaluate_at_start: bool = False
    keeps_best: bool = True  # False keeps the last model instead
    max_grad_norm: float | None = 1.0


class Trainer:
    """Puts the parts into the loop.

    Args:
        engine: The engine that prepared everything below.
        model: The prepared model.
        optimizer: The prepared optimizer.
        scheduler: The prepared learning-rate schedule.
        batches: The prepared loader of micro-batches; its sampler tells how many make a batch.
        loss: The loss of a batch, with its weight.
        schedule: How long, and when to evaluate.
        evaluator: Held-out data, or None where there is none.
        best: Remembers the best metric.
        early_stopping: Decides when to give up, or None.
        freezing: What is frozen, and until when.
        keeper: Writes the best model and the numbers.
        progress: What the user sees.
        callbacks: The user's own.
    """

    def __init__(
        self,
        engine: Engine,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
        batches: Any,
        loss: Loss,
        schedule: Schedule,
        *,
        evaluator: Evaluator | None,
        best: Best,
        early_stopping: EarlyStopping | None,
        freezing: Freezing,
        keeper: Keeper,
        progress: Progress,
        callbacks: list[object],
    ) -> None:
        self._engine, self._model, self._optimizer, self._scheduler = engine, model, optimizer, scheduler
        self._batches, self._loss, self._schedule = batches, loss, schedule
        self._evaluator, self._best, self._early_stopping = evaluator, best, early_stopping
        self._freezing, self._keeper, self._progress, self._callbacks = freezing, keeper, progress, callbacks
        self.state = RunState(schedule.num_steps, schedule.steps_per_epoch, model, optimizer)
        self._meter = _Meter(engine)
        self._has_kept = False

    def fit(self) -> FitResult:
        """Train until the steps are done, time is up, or early stopping or a callback says so."""
        state, schedule = self.state, self._schedule
        self._progress.start(schedule.num_steps)
        self._model.train()
        self._announce_unfrozen()
        self._meter.start()
        due = _Due(schedule.evaluate_every, schedule.steps_per_epoch)
        reset_peak_memory(self._engine.device)
        try:
            if schedule.evaluate_at_start:
                self._evaluate()
            while not state.is_over:
                for num_micro_batches, micro_batches in self._windows():
                    self._one_step(micro_batches, num_micro_batches)
                    # a run that is stopped early has a last step too, and its model may be the best one
                    if due.now(state.step, self._meter.seconds()) or state.is_over:
                        self._evaluate()
                    if state.is_over:
                        break
            if self._best.step is None or not schedule.keeps_best:
                self._keep_last()
            if state.step < schedule.num_steps and state.stop_reason == "finished":
                state.stop_reason = "callback"
        except KeyboardInterrupt:
            if state.step and not self._has_kept:  # better a half-trained model than none
                self._save()
            raise
        finally:
            call_all(self._callbacks, "on_end", state)
        return self._result()

    def _one_step(self, micro_batches: Iterator[dict[str, torch.Tensor]], num_micro_batches: int) -> None:
        state, schedule = self.state, self._schedule
        result = train_step(
            self._engine,
            self._model,
            self._optimizer,
            self._scheduler,
            self._loss,
            micro_batches,
            num_micro_batches,
            schedule.max_grad_norm,
        )
        state.step += 1
        self._meter.add(result)
        self._announce_unfrozen()
        if state.step % schedule.log_every == 0 or state.step in (1, schedule.num_steps):
            self._show()
        call_all(self._callbacks, "on_step", state)
        limit = schedule.max_seconds
        if limit is not None and self._meter.wall_seconds() >= limit and state.step < schedule.num_steps:
            state.should_stop, state.stop_reason = True, "time limit"

    def _windows(self) -> Iterator[tuple[int, Iterator[dict[str, torch.Tensor]]]]:
        """For each batch of one epoch: how many micro-batches it has, and these, each loaded when it is taken."""
        micro_batches = iter(self._batches)  # first: it tells the sampler its epoch, which decides the sizes
        for size in self._batches.batch_sampler.window_sizes():
            yield size, islice(micro_batches, size)

    def _announce_unfrozen(self) -> None:
        for name in self._freezing.at_step(self.state.step, self.state.epoch):
            self._progress.note(f"step {self.state.step}: {name} begins to train")

    def _show(self) -> None:
        loss, grad_norm, tokens_per_s = self._meter.read()
        if not math.isfinite(loss):
            say(f"step {self.state.step}: the loss is {loss}")
        line = StepLine(
            step=self.state.step,
            epoch=self.state.epoch,
            loss=loss,
            lr=self._optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            tokens_per_s=tokens_per_s,
            memory_bytes=memory_in_use(self._engine.device),
            memory_share=None,
            num_skipped=self._engine.num_skipped_steps,
            seconds_left=self._meter.seconds() / self.state.step * (self._schedule.num_steps - self.state.step),
        )
        self._progress.step(line)
        values = {"loss": loss, "lr": line.lr, "epoch": round(line.epoch, 4), "tokens_per_s": round(tokens_per_s)}
        if grad_norm is not None:
            values["grad_norm"] = grad_norm
        self._keeper.record(values, self.state.step)

    def _evaluate(self) -> None:
        if self._evaluator is None:
            return
        state = self.state
        with self._meter.paused():
            state.metrics = self._evaluator.run(self._model, lambda done: self._progress.eval_progress(done, None))
            improved = self._best.update(state.metrics, state.step)
            self._keeper.record({f"eval_{name}": value for name, value in state.metrics.items()}, state.step)
            self._progress.evaluation(state.metrics, state.step, improved)
            if improved and self._schedule.keeps_best:
                self._save()
            call_all(self._callbacks, "on_eval", state, state.metrics)
            if self._early_stopping is not None and self._early_stopping.update(state.metrics):
                state.should_stop, state.stop_reason = True, "early stopping"

    def _save(self) -> None:
        self._has_kept = True
        call_all(self._callbacks, "on_save", self.state, self._keeper.keep_best(self.state.step, self.state.metrics))

    def _keep_last(self) -> None:
        if self._evaluator is not None and self._schedule.keeps_best:
            say(f"{self._best.metric} was never a finite number: the last model is kept as the best one")
        self._save()

    def _result(self) -> FitResult:
        return FitResult(
            step=self.state.step,
            metrics=self.state.metrics,
            best_metric=self._best.value,
            best_step=self._best.step,
            stop_reason=self.state.stop_reason,
            train_seconds=self._meter.seconds(),
            num_tokens=int(self._meter.num_tokens),
            num_skipped=self._engine.num_skipped_steps,
            peak_memory_bytes=peak_memory(self._engine.device),
        )


class _Due:
    """When the next evaluation is due: by steps, by epochs, or by time spent on training.

    Evaluations themselves do not count as time, else a long one would be due again at once.
    """

    def __init__(self, every: Every, steps_per_epoch: int) -> None:
        self._seconds = every.seconds
        self._steps: float | None = every.steps or (every.epochs * steps_per_epoch if every.epochs else None)
        self._last_s = 0.0

    def now(self, step: int, train_seconds: float) -> bool:
        if self._steps is not None:
            # the first step at or after each multiple, which may fall between steps: half of an epoch of 5
            done, before = (math.floor(count / self._steps + 1e-9) for count in (step, step - 1))
            return done > before
        due = self._seconds is not None and train_seconds - self._last_s >= self._seconds
        if due:
            self._last_s = train_seconds
        return due


class _Meter:
    """Sums between two looks. Training time leaves evaluations out; the device is read only when somebody looks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_tokens: torch.Tensor | int = 0
        self._start = time.monotonic()
        self._paused_s = 0.0
        self._results: list[StepResult] = []
        self._last = (0.0, 0)

    def start(self) -> None:
        self._start, self._paused_s = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Time spent on training."""
        return self.wall_seconds() - self._paused_s

    def wall_seconds(self) -> float:
        """Time since the start, whatever it was spent on."""
        return time.monotonic() - self._start

    def add(self, result: StepResult) -> None:
        self.num_tokens = self.num_tokens + result.num_tokens
        self._results.append(result)

    def paused(self) -> "_Pause":
        return _Pause(self)

    def read(self) -> tuple[float, float | None, float]:
        """Mean loss and last gradient norm since the last look, and tokens a second."""
        results, self._results = self._results, []
        weight = float(sum(result.weight for result in results))
        loss = float(torch.stack([result.loss_sum for result in results]).sum()) / weight if weight else math.nan
        norm = results[-1].grad_norm
        num_tokens = int(self.num_tokens)
        seconds, tokens = self.seconds() - self._last[0], num_tokens - self._last[1]
        self._last = (self.seconds(), num_tokens)
        return loss, None if norm is None else float(norm), tokens / max(seconds, 1e-9)


class _Pause:
    """Time inside does not count as training."""

    def __init__(self, meter: _Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self._meter._paused_s += time.monotonic() - self._since
