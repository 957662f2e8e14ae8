"""The one loop. Methods differ by the parts put into it: model, data, loss, optimizer, freezing, metrics."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from trimtab.engine.engine import Engine
from trimtab.errors import CheckpointError, DoesNotFit, LossNotFinite
from trimtab.hardware.memory import is_out_of_memory, memory_in_use, peak_memory, reset_peak_memory
from trimtab.log import say
from trimtab.model.freeze import Freezing
from trimtab.model.losses import Loss
from trimtab.randomness import host_randomness_kept
from trimtab.training.callbacks import call_all
from trimtab.training.checkpoints import Checkpoints, NoCheckpoints
from trimtab.training.evaluate import Evaluator
from trimtab.training.finite_watch import FiniteWatch, explanation
from trimtab.training.garbage_collection import older_objects_set_aside
from trimtab.training.intervals import Due
from trimtab.training.memory_guard import Hold
from trimtab.training.meter import Meter
from trimtab.training.progress import Progress, StepLine
from trimtab.training.step import StepResult, take_step, window_gradients
from trimtab.training.stop_signals import StopSignals
from trimtab.training.stopping import Best, EarlyStopping
from trimtab.units import Every


class Keeper(Protocol):
    """Keeps the best model and the numbers of a run."""

    @property
    def problem(self) -> CheckpointError | None:
        """Why the best model is not written yet; None if it is."""

    def keep_best(self, step: int, metrics: dict[str, float]) -> str | None:
        """Write the model as the best one so far and give its folder; None if it has to wait for room on the disk."""

    def write_waiting(self) -> str | None:
        """Try again to write a model that waits, and give its folder; None if none was written."""

    def record(self, values: dict[str, Any], step: int) -> None:
        """Write numbers of a step."""

    def position(self) -> int:
        """How far the numbers have been written."""

    def keep_bad_rows(self, step: int, rows: list[int]) -> str:
        """Write the rows of a step for a look, and give the file."""

    def forget_best(self) -> None:
        """The best model so far is gone."""


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
    interruption: str | None = None  # a signal or the time limit: the run is not over, it will go on from here
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
    interruption: str | None = None  # a signal, or the time limit: the run can go on
    save_failure: str | None = None  # why there is no checkpoint of the last step
    rows_at_once: int | None = None  # that went through the model in the end, over all processes

    def summary(self) -> dict[str, Any]:
        """What is worth keeping beside the numbers of the steps."""
        names = ("step", "train_seconds", "num_tokens", "num_skipped", "peak_memory_bytes")
        return {name: getattr(self, name) for name in names} | {"stop_reason": self.interruption or self.stop_reason}


@dataclass(frozen=True)
class Schedule:
    """How long a run lasts and when it looks around."""

    num_steps: int
    steps_per_epoch: int
    evaluate_every: Every
    save_every: Every | None = None
    log_every: int = 10
    max_seconds: float | None = None
    evaluate_at_start: bool = False
    keeps_best: bool = True  # False keeps the last model instead
    max_grad_norm: float | None = 1.0
    on_nan: str = "stop"  # or "skip", "rewind"


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
        hold: Keeps the run within its memory.
        keeper: Writes the best model and the numbers.
        checkpoints: Saves the state.
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
        hold: Hold,
        keeper: Keeper,
        checkpoints: Checkpoints | NoCheckpoints,
        progress: Progress,
        callbacks: list[object],
    ) -> None:
        self._engine, self._model, self._optimizer, self._scheduler = engine, model, optimizer, scheduler
        self._batches, self._loss, self._schedule = batches, loss, schedule
        self._evaluator, self._best, self._early_stopping = evaluator, best, early_stopping
        self._freezing, self._keeper, self._progress, self._callbacks = freezing, keeper, progress, callbacks
        self._checkpoints, self._hold = checkpoints, hold
        self.state = RunState(schedule.num_steps, schedule.steps_per_epoch, model, optimizer)
        self._meter = Meter(engine)
        self._evaluation = Due(schedule.evaluate_every, schedule.steps_per_epoch)
        self._saving = Due(schedule.save_every, schedule.steps_per_epoch)
        self._signals = StopSignals()
        self._watch = FiniteWatch(engine.device, norm_counts=not engine.scaler.is_scaling)
        self._has_kept = False
        self._num_passed_over = 0  # batches that a rewind has left behind
        self._is_recut = False  # the epoch is begun again in its middle, in smaller micro-batches
        self._is_stepping = False  # weights are being changed: what there is now is no state to go on from
        engine.register_for_checkpointing(self)

    def fit(self) -> FitResult:
        """Train until the steps are done, time is up, or early stopping, a signal or a callback says so."""
        state, schedule = self.state, self._schedule
        self._progress.start(schedule.num_steps)
        self._model.train()
        self._announce_unfrozen()
        self._hold.look_ahead(self._progress.note)
        self._meter.start()
        reset_peak_memory(self._engine.device)
        try:
            with self._signals, older_objects_set_aside():
                if self._is_evaluation_owed() or (schedule.evaluate_at_start and state.step == 0):
                    self._evaluate()  # owed by a run that was stopped just before
                while not state.is_over:
                    self._one_epoch()
                if state.interruption is None:
                    self._end()
        except DoesNotFit:
            self._save_before_the_end()
            raise
        finally:
            with self._engine.busy("the end of the run"):
                call_all(self._callbacks, "on_end", state)
                failure = self._checkpoints.close()
        return self._result(failure or self._keeper.problem)

    def _is_evaluation_owed(self) -> bool:
        """Whether a run that goes on was stopped just before an evaluation."""
        step, seconds = self.state.step, self._meter.seconds()
        return self._engine.first_decides(lambda: step > 0 and self._evaluation.now(step, seconds))

    def _one_epoch(self) -> None:
        """The rest of an epoch: step, look around, save."""
        state = self.state
        for num_micro_batches, micro_batches in self._windows():
            if self._one_step(micro_batches, num_micro_batches):
                return None
            is_evaluation_due, is_save_due, bad_step = self._agreed()
            if bad_step is not None:
                return self._not_finite(bad_step)
            # a run that is stopped early has a last step too, and its model may be the best one
            if state.interruption is None and (is_evaluation_due or state.is_over):
                self._evaluate()
                self._agree_to_stop()
            if is_save_due or state.is_over:
                self._save_state(wait=state.is_over)
            if state.is_over:
                return None
        return None

    def _end(self) -> None:
        if self._best.step is None or not self._schedule.keeps_best:
            self._keep_last()
        self._write_waiting()
        if self.state.step < self._schedule.num_steps and self.state.stop_reason == "finished":
            self.state.stop_reason = "callback"
        self._keeper.record(self._hold.measured(), self.state.step)
        words = self._hold.last_words()
        if words:
            self._progress.note(words)

    def _one_step(self, micro_batches: Iterator[dict[str, torch.Tensor]], num_micro_batches: int) -> bool:
        """One optimizer step; True where memory ran out in it, and it has to be done again in smaller pieces."""
        state, schedule = self.state, self._schedule
        result = self._hold.attempt(
            lambda: window_gradients(
                self._engine,
                self._model,
                self._loss,
                micro_batches,
                num_micro_batches,
                schedule.max_grad_norm,
                leaves_out_nonfinite=schedule.on_nan == "skip" and not self._engine.scaler.is_scaling,
            ),
            state.step + 1,
        )
        if isinstance(result, str):
            self._begin_again_smaller(result)
            return True
        self._take_step(result)
        state.step += 1
        self._meter.add(result)
        if schedule.on_nan != "skip":
            self._watch.note(state.step, result)
        if result.was_left_out:
            self._say_left_out()
        self._announce_unfrozen()
        if state.step % schedule.log_every == 0 or state.step in (1, schedule.num_steps):
            self._show()
        call_all(self._callbacks, "on_step", state)
        return False

    def _take_step(self, result: StepResult) -> None:
        self._is_stepping = True
        try:
            take_step(self._optimizer, self._scheduler, result)
        except Exception as error:
            if is_out_of_memory(error):
                raise DoesNotFit(
                    f"out of memory in the optimizer, at step {self.state.step + 1}: its weights are not whole any "
                    "more\n  cure: go on from the last saved state, with a larger memory.budget or fewer rows at once "
                    "(memory.micro_batch)"
                ) from error
            raise
        self._is_stepping = False

    def _begin_again_smaller(self, why: str) -> None:
        """Memory ran out in a step, which was taken back: its rows come again, in smaller micro-batches."""
        self._progress.note(why)
        self._keeper.record({"note": why, "micro_batch": self._hold.micro_batch_size}, self.state.step)
        self._is_recut = True
        self.find_place()

    def _save_before_the_end(self) -> None:
        """A run that cannot go on here may go on elsewhere."""
        state = self.state
        if self._is_stepping or state.step == 0 or self._engine.use_distributed:
            return  # half a step, nothing at all, or processes that are not at the same place
        saved = self._checkpoints.newest()
        if saved is None or saved.step < state.step:
            self.find_place()
            self._save_state(wait=True)

    def _agreed(self) -> tuple[bool, bool, int | None]:
        """Whether an evaluation and a save are due, and whether a step was not finite; and whether to stop.

        Processes stop together, if any of them wants to; what depends on time follows the clock of the first one.
        """
        state, seconds = self.state, self._meter.seconds()
        limit = self._schedule.max_seconds
        is_time_up = limit is not None and self._meter.session_seconds() + self._checkpoints.seconds_needed >= limit
        evaluation, save = (due.now(state.step, seconds) for due in (self._evaluation, self._saving))
        is_signalled = self._signals.received is not None
        # what is looked at, saved or left behind now must not come from a step that nobody has looked at
        is_look_due = evaluation or save or is_time_up or is_signalled or state.is_over
        bad_step = self._watch.bad_step(flush=is_look_due)
        looked_at = state.step if bad_step is None else bad_step
        wishes = [evaluation, save, is_time_up, state.should_stop, is_signalled, bad_step is not None]
        if self._engine.use_distributed:
            if not self._engine.is_main_process:
                wishes[:3] = [False] * 3
            wishes = [bool(wish) for wish in self._engine.reduce(torch.tensor(wishes, dtype=torch.int32)).tolist()]
        evaluation, save, is_time_up, should_stop, is_signalled, is_bad = wishes
        if is_bad and self._engine.use_distributed:  # one process may have looked further than another
            looked_at = int(self._engine.gather(torch.tensor(looked_at)).min())
        if should_stop:
            state.should_stop = True
        elif is_signalled and state.step < state.num_steps:
            state.should_stop = True
            state.stop_reason = state.interruption = f"signal {self._signals.received or 'in another process'}"
        elif is_time_up and state.step < state.num_steps:
            state.should_stop = True
            state.stop_reason = state.interruption = "time limit"
        return evaluation, save, looked_at if is_bad else None

    def _agree_to_stop(self) -> None:
        """A callback may have wished to stop in one process only."""
        if self._engine.use_distributed:
            wish = torch.tensor(int(self.state.should_stop), dtype=torch.int32)
            self.state.should_stop = bool(self._engine.reduce(wish))

    def _windows(self) -> Iterator[tuple[int, Iterator[dict[str, torch.Tensor]]]]:
        """For each batch that is left of an epoch: how many micro-batches it has, and these, loaded when taken."""
        # an epoch that is begun again draws nothing: the random numbers are those of the step that was taken back
        with host_randomness_kept() if self._is_recut else nullcontext():
            micro_batches = iter(self._batches)  # first: it tells the sampler its epoch, which decides the sizes
        self._is_recut = False
        for size in self._batches.batch_sampler.window_sizes()[self._place_in_epoch()[1] :]:
            yield size, islice(micro_batches, size)

    def _place_in_epoch(self, step: int | None = None) -> tuple[int, int]:
        """The epoch and the batches of it that are done."""
        done = (self.state.step if step is None else step) + self._num_passed_over
        return divmod(done, self._schedule.steps_per_epoch)

    # ------------------------------------------------------------------ saving and going on

    def _save_state(self, wait: bool = False) -> None:
        state = self.state
        self._saving.done(state.step, self._meter.seconds())  # before, so that the state says so
        with self._meter.paused():
            self._meter.share()
            self._write_waiting()
            problem = self._keeper.problem
            self._checkpoints.save(state.step, state.metrics, self._best.step, wait=wait, problem=problem)
        if state.interruption is not None and not self._has_kept:  # better a half-trained model than none
            self._save()

    def state_dict(self) -> dict[str, Any]:
        """Where the run is: everything that the engine does not know."""
        return {
            "step": self.state.step,
            "steps_per_epoch": self._schedule.steps_per_epoch,
            "rows": self._batches.dataset.likeness(),
            "num_passed_over": self._num_passed_over,
            "metrics": dict(self.state.metrics),
            "has_kept": self._has_kept,
            # a wish to end the run, which is over with this state; a signal or the time limit only interrupt it
            "ended": self.state.stop_reason if self.state.should_stop and self.state.interruption is None else None,
            "journal": self._keeper.position(),
            "meter": self._meter.state_dict(),
            "evaluation": self._evaluation.state_dict(),
            "saving": self._saving.state_dict(),
            "best": self._best.state_dict(),
            "memory": self._hold.state_dict(),
            "early_stopping": None if self._early_stopping is None else self._early_stopping.state_dict(),
            "freezing": self._freezing.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        if state["steps_per_epoch"] != self._schedule.steps_per_epoch:
            raise CheckpointError(
                f"an epoch of the checkpoint has {state['steps_per_epoch']} steps, here it has "
                f"{self._schedule.steps_per_epoch}: the data are not the same",
                "resume with the data and the batch size of the run",
            )
        if state["rows"] != self._batches.dataset.likeness():
            raise CheckpointError(
                "the training rows are not those that the run has seen so far",
                "resume with the same data, or start a new run from the model",
            )
        self._best.load_state_dict(state["best"])
        if self._early_stopping is not None and state["early_stopping"] is not None:
            self._early_stopping.load_state_dict(state["early_stopping"])
        self._freezing.load_state_dict(state["freezing"])
        self._meter.load_state_dict(state["meter"])
        self._evaluation.load_state_dict(state["evaluation"])
        self._saving.load_state_dict(state["saving"])
        if "memory" in state:  # states of older versions have none
            self._hold.load_state_dict(state["memory"])
        self.state.step, self.state.metrics = state["step"], dict(state["metrics"])
        self._num_passed_over, self._has_kept = state["num_passed_over"], state["has_kept"]
        self.journal_position, self._ended = state["journal"], state["ended"]

    @property
    def schedule(self) -> Any:
        """The learning-rate schedule itself."""
        return self._scheduler.scheduler

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the metric that chooses the best model is better."""
        return self._best.higher_is_better

    def end_as_saved(self) -> None:
        """If the state that was loaded is the last one of a run which somebody wanted to end: end it."""
        if self._ended is not None:
            self.state.should_stop, self.state.stop_reason = True, self._ended

    def forget_patience(self) -> None:
        """A run that is trained for longer begins to count evaluations without improvement anew."""
        if self._ended is not None and self._early_stopping is not None:
            self._early_stopping.num_without_improvement = 0

    @property
    def kept_step(self) -> int | None:
        """The step of the best model that was written; None if none was."""
        return self._best.step if self._has_kept else None

    def write_best_again(self) -> None:
        """The state that was loaded is that of the best model, which has to be written once more."""
        self._keeper.keep_best(self.state.step, self.state.metrics)

    def forget_best(self) -> None:
        """The best model so far is not at hand any more: the next one that is evaluated is the best."""
        self._best.value = self._best.step = None
        self._has_kept, self._has_forgotten = False, True
        self._keeper.forget_best()

    _has_forgotten = False  # the best model was lost, and there was no evaluation since
    _ended: str | None = None
    journal_position = 0  # how far the numbers had been written when the state was saved that was loaded

    def find_place(self) -> None:
        """After a state was loaded: let the data go on after its steps, however they are cut into micro-batches."""
        epoch, done = self._place_in_epoch()
        sampler = self._batches.batch_sampler
        sampler.set_epoch(epoch)
        self._batches.go_to(epoch, sum(sampler.window_sizes()[:done]))

    def _not_finite(self, step: int) -> None:
        """A loss was not finite: go back to the last checkpoint, once, or stop with what a user needs to know."""
        rows = self._keep_rows_of(step)
        saved = self._checkpoints.newest()
        if self._schedule.on_nan == "rewind" and not self._num_passed_over and saved is not None:
            return self._rewind(saved.path, step, rows)
        if saved is None:
            found = "no state was saved before"
        else:
            resume = f"trimtab resume {Path(rows).parent} --from step-{saved.step} --set train.on_nan=skip"
            found = f"the last good state is that of step {saved.step}: {resume}"
        raise LossNotFinite(explanation(step, rows, self._engine.mixed_precision == "fp16", found))

    def _rewind(self, to: Path, step: int, rows: str) -> None:
        best, has_kept = self._best.state_dict(), self._has_kept
        self._engine.load_state(to)
        self._best.load_state_dict(best)  # a model that was kept since then is still there, and still the best one
        self._has_kept = has_kept
        self._num_passed_over = step - self.state.step
        self._watch.forget()
        self._progress.note(
            f"step {step} was not finite (its rows are in {rows}): back to step {self.state.step}, and on with the "
            f"data after them; this is done once"
        )
        self._optimizer.zero_grad()
        self.find_place()

    def _say_left_out(self) -> None:
        rows = self._keep_rows_of(self.state.step)
        self._progress.note(f"step {self.state.step} was not finite and is left out; its rows are in {rows}")

    def _keep_rows_of(self, step: int) -> str:
        epoch, done = self._place_in_epoch(step - 1)
        sampler = self._batches.batch_sampler
        epoch_now = sampler.epoch
        sampler.set_epoch(epoch)
        rows = [row for micro_batch in sampler.windows()[done] for row in micro_batch]
        sampler.set_epoch(epoch_now)
        return self._keeper.keep_bad_rows(step, rows)

    def _announce_unfrozen(self) -> None:
        for name in self._freezing.at_step(self.state.step, self.state.epoch):
            self._progress.note(f"step {self.state.step}: {name} begins to train")

    def _show(self) -> None:
        loss, grad_norm, tokens_per_s = self._meter.read()
        if not math.isfinite(loss):
            say(f"step {self.state.step}: the loss is {loss}")
        in_use = memory_in_use(self._engine.device)
        line = StepLine(
            step=self.state.step,
            epoch=self.state.epoch,
            loss=loss,
            lr=self._optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            tokens_per_s=tokens_per_s,
            memory_bytes=in_use,
            memory_share=self._hold.cap.share(in_use),
            num_skipped=self._engine.num_skipped_steps,
            seconds_left=self._meter.seconds() / self.state.step * (self._schedule.num_steps - self.state.step),
        )
        self._progress.step(line)
        values = {"loss": loss, "lr": line.lr, "epoch": round(line.epoch, 4), "tokens_per_s": round(tokens_per_s)}
        if grad_norm is not None:
            values["grad_norm"] = grad_norm
        self._keeper.record(values, self.state.step)

    def _evaluate(self) -> None:
        state = self.state
        if self._evaluator is None:
            self._evaluation.done(state.step, self._meter.seconds())
            return
        with self._meter.paused():
            state.metrics = self._evaluator.run(self._model, lambda done: self._progress.eval_progress(done, None))
            self._has_forgotten = False
            improved = self._best.update(state.metrics, state.step)
            self._keeper.record({f"eval_{name}": value for name, value in state.metrics.items()}, state.step)
            self._progress.evaluation(state.metrics, state.step, improved)
            if improved and self._schedule.keeps_best:
                self._save()
            call_all(self._callbacks, "on_eval", state, state.metrics)
            if self._early_stopping is not None and self._early_stopping.update(state.metrics):
                state.should_stop, state.stop_reason = True, "early stopping"
        self._evaluation.done(state.step, self._meter.seconds())

    def _save(self) -> None:
        self._has_kept = True
        with self._engine.busy("writing the best model"):
            folder = self._keeper.keep_best(self.state.step, self.state.metrics)
        if folder is not None:
            call_all(self._callbacks, "on_save", self.state, folder)

    def _write_waiting(self) -> None:
        with self._engine.busy("writing the best model"):
            folder = self._keeper.write_waiting()
        if folder is not None:
            call_all(self._callbacks, "on_save", self.state, folder)

    def _keep_last(self) -> None:
        if self._evaluator is not None and self._schedule.keeps_best:
            never = f"{self._best.metric} was never a finite number"
            why = "no evaluation followed the loss of the best model" if self._has_forgotten else never
            say(f"{why}: the last model is kept as the best one")
        self._save()

    def _result(self, save_failure: CheckpointError | None) -> FitResult:
        return FitResult(
            step=self.state.step,
            metrics=self.state.metrics,
            best_metric=self._best.value,
            best_step=self._best.step,
            stop_reason=self.state.stop_reason,
            train_seconds=self._meter.seconds(),
            num_tokens=self._meter.tokens_of_all(),
            num_skipped=self._engine.num_skipped_steps,
            peak_memory_bytes=peak_memory(self._engine.device),
            interruption=self.state.interruption,
            save_failure=None if save_failure is None else str(save_failure),
            rows_at_once=self._hold.micro_batch_size,
        )
