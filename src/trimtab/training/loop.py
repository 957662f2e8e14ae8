"""The training loop. Training methods differ only in the parts passed to it; the loop is the same."""

from collections.abc import Iterator
from pathlib import Path

import torch

from trimtab.errors import CheckpointError, DoesNotFit, LossNotFinite, as_argument
from trimtab.garbage_collection import gc_frozen
from trimtab.hardware.memory import is_out_of_memory, peak_memory, reset_peak_memory
from trimtab.model.freeze import Freezing
from trimtab.training.best_model import BestModel
from trimtab.training.callbacks import call_callbacks
from trimtab.training.data_position import DataPosition
from trimtab.training.finite_watch import FiniteWatch, explain_nonfinite
from trimtab.training.interval import Interval
from trimtab.training.loop_state import LoopState
from trimtab.training.memory_guard import CURES, MemoryGuard, WeightsChanged
from trimtab.training.meter import Meter
from trimtab.training.next_actions import NextActions, agree_on
from trimtab.training.rollback import OutOfMemory
from trimtab.training.run_state import FitResult, RunState
from trimtab.training.step import StepResult, take_step, window_gradients
from trimtab.training.step_report import StepReporter
from trimtab.training.stop_signals import StopSignals
from trimtab.training.trainer_parts import LoopSettings, ModelSelection, RunOutputs, TrainingParts


class Trainer:
    """Train a model, evaluate it, and save it."""

    def __init__(
        self,
        parts: TrainingParts,
        settings: LoopSettings,
        selection: ModelSelection,
        outputs: RunOutputs,
        *,
        freezing: Freezing,
        memory_guard: MemoryGuard,
    ) -> None:
        engine = parts.engine
        self.parts, self._settings, self._selection, self._outputs = parts, settings, selection, outputs
        self._engine, self._model, self._progress = engine, parts.model, outputs.progress
        self._freezing, self._memory_guard = freezing, memory_guard
        self.state = RunState(settings.num_steps, settings.steps_per_epoch, parts.model, parts.optimizer)
        self._position = DataPosition(parts.batches, settings.steps_per_epoch)
        self._compute_gradients = parts.wrap_step(lambda *args, **kwargs: window_gradients(*args, **kwargs))
        self._meter = Meter(engine)
        self._reporter = StepReporter(engine, self._meter, memory_guard.cap, outputs)
        self.best_model = BestModel(engine, selection.best, outputs.writer, outputs.callbacks)
        self._evaluation = Interval(settings.evaluate_every, settings.steps_per_epoch)
        self._saving = Interval(settings.save_every, settings.steps_per_epoch)
        self._signals = StopSignals(saves=outputs.checkpoints.saves)
        self._watch = FiniteWatch(engine.device, norm_counts=not engine.scaler.is_scaling)
        self._is_stepping = False  # the optimizer is changing the weights: no state can be resumed
        stateful = {
            "meter": self._meter,
            "evaluation": self._evaluation,
            "saving": self._saving,
            "best": selection.best,
            "memory": memory_guard,
            "early_stopping": selection.early_stopping,
            "freezing": freezing,
            **{f"technique {key}": state for key, state in parts.technique_states.items()},
        }
        self.loop_state = LoopState(self.state, self._position, self.best_model, outputs.writer, stateful)
        engine.register_for_checkpointing(self.loop_state)

    # ------------------------------------------------------------------ the loop

    def fit(self) -> FitResult:
        """Train until all steps are done or early stopping, a callback, a signal or the time limit ends the run."""
        state, settings = self.state, self._settings
        self._progress.start(settings.num_steps, state.step)
        self._model.train()
        self._unfreeze()
        self._memory_guard.rehearse(self._progress.note)
        reset_peak_memory(self._engine.device)  # everything captured in the warm-up allocates nothing later
        with self._engine.busy("preparing the first step"):
            self.parts.warm_up(lambda: self._memory_guard.find_trials(self._compute_gradients))
        self._meter.start()
        try:
            with self._signals, gc_frozen():
                if self._is_evaluation_missing() or (settings.evaluate_at_start and state.step == 0):
                    self._evaluate()
                while not state.is_over:
                    self._one_epoch()
                if state.interruption is None:
                    self._finish()
        except DoesNotFit:
            self._save_before_failing()
            raise
        finally:
            with self._engine.busy("the end of the run"):
                call_callbacks(self._outputs.callbacks, "on_end", state)
                failure = self._outputs.checkpoints.close()
        return self._result(failure or self._outputs.writer.problem)

    def _one_epoch(self) -> None:
        """Train on the rest of an epoch, with its evaluations and saves.

        Returns early if the data continues elsewhere: after a rewind, or in smaller micro-batches.
        """
        state = self.state
        for num_micro_batches, micro_batches in self._position.windows(state.step):
            if not self._one_step(micro_batches, num_micro_batches):
                return
            actions = self._agree_on_actions()
            if actions.bad_step is not None:
                self._handle_bad_step(actions.bad_step)
                return
            # a run that is stopped early is also evaluated: its last model may be the best one
            if state.interruption is None and (actions.evaluate or state.is_over):
                self._evaluate()
                self._agree_to_stop()
            if actions.save or state.is_over:
                self._save_checkpoint(wait=state.is_over)
            if state.is_over:
                return

    def _one_step(self, micro_batches: Iterator[dict[str, torch.Tensor]], num_micro_batches: int) -> bool:
        """Take an optimizer step; return False if memory ran out and the step was rolled back, or the run rewound."""
        state, settings = self.state, self._settings
        try:
            result = self._memory_guard.attempt(
                lambda: self._compute_gradients(
                    self._engine,
                    self._model,
                    self.parts.loss,
                    micro_batches,
                    num_micro_batches,
                    settings.max_grad_norm,
                    skips_nonfinite=settings.on_nan == "skip" and not self._engine.scaler.is_scaling,
                ),
                state.step + 1,
            )
        except WeightsChanged as changed:
            self._restart_smaller(changed.failure)
            return False
        if isinstance(result, str):
            self._retry_smaller(result)
            return False
        self._take_step(result)
        state.step += 1
        self._meter.add(result)
        if settings.on_nan != "skip":
            self._watch.note(state.step, result)
        if result.was_skipped:
            rows = self._write_rows_of(state.step)
            self._progress.note(f"step {state.step} is not finite and was skipped; its rows are in {rows}")
        self._unfreeze()
        if state.step % settings.log_every == 0 or state.step in (1, settings.num_steps):
            self._reporter.report(state)
        call_callbacks(self._outputs.callbacks, "on_step", state)
        return True

    def _take_step(self, result: StepResult) -> None:
        self._is_stepping = True
        try:
            take_step(self.parts.optimizer, self.parts.scheduler, result)
        except Exception as error:
            if is_out_of_memory(error):
                where = f"in the optimizer at step {self.state.step + 1}"
                drawn = self._memory_guard.draw_now(error, where)
                raise DoesNotFit(
                    f"out of memory {where}, with some of the weights already changed\n"
                    f"  cure: resume from the last checkpoint with a larger memory.budget or a smaller "
                    f"memory.micro_batch{drawn}"
                ) from error
            raise
        self._is_stepping = False

    def _retry_smaller(self, why: str) -> None:
        """Repeat a step that was rolled back: its rows are read again, in smaller micro-batches."""
        self._progress.note(why)
        what = why.partition("\n")[0]  # without the path of the picture
        values = {"note": what, "micro_batch": self._memory_guard.micro_batch_size}
        self._outputs.writer.record(values, self.state.step)
        self._position.seek(self.state.step, is_retry=True)

    def _restart_smaller(self, failure: OutOfMemory) -> None:
        """Go back to the last checkpoint after a step that cannot be undone, and continue in smaller micro-batches."""
        self._is_stepping = True
        step, saved = self.state.step + 1, self._outputs.checkpoints.newest()
        if saved is None:
            raise DoesNotFit(
                f"{failure} in backward at step {step}, with some of the weights already updated, and there is no "
                f"checkpoint to restart from\n  cure: start again with a shorter checkpoint.every, {CURES}"
            )
        what, newline, drawn = self._memory_guard.shrink(failure, f"in backward at step {step}").partition("\n")
        self._go_back_to(saved.path)
        self._is_stepping = False
        self.seek_data()
        note = f"{what}; restarted from the checkpoint of step {self.state.step}"
        self._progress.note(f"{note}{newline}{drawn}")
        values = {"note": note, "micro_batch": self._memory_guard.micro_batch_size}
        self._outputs.writer.record(values, self.state.step)

    def _unfreeze(self) -> None:
        for name in self._freezing.at_step(self.state.step, self.state.epoch):
            self._progress.note(f"step {self.state.step}: {name} is now trainable")

    # ------------------------------------------------------------------ after a step

    def _agree_on_actions(self) -> NextActions:
        """Agree with the other processes on what follows the step; store a stop in the run's state."""
        state, seconds = self.state, self._meter.seconds()
        limit = self._settings.max_seconds
        needed = self._outputs.checkpoints.seconds_needed
        time_is_up = limit is not None and self._meter.session_seconds() + needed >= limit
        evaluate, save = (interval.has_passed(state.step, seconds) for interval in (self._evaluation, self._saving))
        was_signalled = self._signals.received is not None
        # Before a model is evaluated or saved, its last step must be known to be finite, which takes a host-device
        # sync.
        needs_sync = evaluate or save or time_is_up or was_signalled or state.is_over
        bad_step = self._watch.bad_step(flush=needs_sync)
        wanted = NextActions(evaluate, save, time_is_up, state.should_stop, was_signalled, bad_step)
        actions = agree_on(wanted, state.step, self._engine)
        if actions.stop:
            state.should_stop = True
        elif actions.was_signalled and state.step < state.num_steps:
            state.interrupt(f"signal {self._signals.received or 'in another process'}")
        elif actions.time_is_up and state.step < state.num_steps:
            state.interrupt("time limit")
        return actions

    def _agree_to_stop(self) -> None:
        """Stop if a callback set `should_stop` in any process."""
        if self._engine.use_distributed:
            wish = torch.tensor(int(self.state.should_stop), dtype=torch.int32)
            self.state.should_stop = bool(self._engine.reduce(wish))

    def _is_evaluation_missing(self) -> bool:
        """Whether the resumed run was stopped just before an evaluation."""
        step, seconds = self.state.step, self._meter.seconds()
        return self._engine.decide_on_main_process(lambda: step > 0 and self._evaluation.has_passed(step, seconds))

    def _evaluate(self) -> None:
        state, evaluator, early_stopping = self.state, self._selection.evaluator, self._selection.early_stopping
        if evaluator is None:
            self._evaluation.restart(state.step, self._meter.seconds())
            return
        with self._meter.paused():
            state.metrics = evaluator.run(self._model, self._progress.eval_progress)
            improved = self.best_model.update(state)
            self._outputs.writer.record({f"eval_{name}": value for name, value in state.metrics.items()}, state.step)
            self._progress.evaluation(state.metrics, state.step, improved)
            if improved and self._settings.keeps_best:
                self.best_model.write(state)
            call_callbacks(self._outputs.callbacks, "on_eval", state, state.metrics)
            if early_stopping is not None and early_stopping.update(state.metrics):
                state.should_stop, state.stop_reason = True, "early stopping"
        self._evaluation.restart(state.step, self._meter.seconds())

    def _save_checkpoint(self, wait: bool = False) -> None:
        state = self.state
        self._saving.restart(state.step, self._meter.seconds())  # before the save: the state contains it
        with self._meter.paused():
            self._meter.share()
            self.best_model.write_pending(state)
            problem = self._outputs.writer.problem
            best_step = self._selection.best.step
            self._outputs.checkpoints.save(state.step, state.metrics, best_step, wait=wait, problem=problem)
        if state.interruption is not None and not self.best_model.is_kept:  # a half-trained model is better than none
            self.best_model.write(state)

    # ------------------------------------------------------------------ steps that are not finite

    def _handle_bad_step(self, step: int) -> None:
        """Rewind to the last checkpoint, once, or end the run with an explanation."""
        rows = self._write_rows_of(step)
        saved = self._outputs.checkpoints.newest()
        if self._settings.on_nan == "rewind" and not self._position.num_passed_over and saved is not None:
            self._rewind(saved.path, step, rows)
            return
        if saved is None:
            found = "there is no checkpoint of an earlier step"
        else:
            resume = f"trimtab resume {as_argument(Path(rows).parent)} --from step-{saved.step} --set train.on_nan=skip"
            found = f"the last good checkpoint is that of step {saved.step}: {resume}"
        raise LossNotFinite(explain_nonfinite(step, rows, self._engine.mixed_precision == "fp16", found))

    def _rewind(self, checkpoint: Path, step: int, rows: str) -> None:
        self._go_back_to(checkpoint)
        self._position.num_passed_over = step - self.state.step
        self._progress.note(
            f"step {step} is not finite (its rows are in {rows}): rewound to step {self.state.step}, continuing with "
            "the rows after them; a run is rewound only once"
        )
        self.seek_data()

    def _go_back_to(self, checkpoint: Path) -> None:
        """Load an earlier state of this run; the best model so far is kept."""
        with self.best_model.preserved():
            self._engine.load_state(checkpoint)
        self._watch.forget()
        self.parts.optimizer.zero_grad()

    def _write_rows_of(self, step: int) -> str:
        return self._outputs.writer.write_bad_rows(step, self._position.rows_of(step))

    # ------------------------------------------------------------------ the end

    def _finish(self) -> None:
        state, writer = self.state, self._outputs.writer
        if self._selection.best.step is None or not self._settings.keeps_best:
            if self._selection.evaluator is not None and self._settings.keeps_best:
                self.best_model.explain_last()
            self.best_model.write(state)
        self.best_model.write_pending(state)
        if state.step < self._settings.num_steps and state.stop_reason == "finished":
            state.stop_reason = "callback"
        writer.record(self._memory_guard.measured(), state.step)
        summary = self._memory_guard.summary()
        if summary:
            self._progress.note(summary)

    def _save_before_failing(self) -> None:
        """Save the state of a run that does not fit here: it may be resumed on a larger device."""
        state = self.state
        if self._is_stepping or state.step == 0 or self._engine.use_distributed:
            return  # half a step, no step, or processes that may be at different steps cannot be saved
        saved = self._outputs.checkpoints.newest()
        if saved is None or saved.step < state.step:
            self.seek_data()
            self._save_checkpoint(wait=True)

    def _result(self, save_failure: CheckpointError | None) -> FitResult:
        state, best, limit = self.state, self._selection.best, self._settings.max_seconds
        return FitResult(
            step=state.step,
            metrics=state.metrics,
            best_metric=best.value,
            best_step=best.step,
            stop_reason=state.stop_reason,
            train_seconds=self._meter.seconds(),
            num_tokens=self._meter.tokens_of_all(),
            num_skipped=self._engine.num_skipped_steps,
            peak_memory_bytes=peak_memory(self._engine.device),
            interruption=state.interruption,
            save_failure=None if save_failure is None else str(save_failure),
            micro_batch_size=self._memory_guard.micro_batch_size,
            seconds_left=None if limit is None else limit - self._meter.session_seconds(),
        )

    # ------------------------------------------------------------------ used to resume a run

    @property
    def higher_is_better(self) -> bool:
        """Whether higher values of the metric that selects the best model are better."""
        return self._selection.best.higher_is_better

    def seek_data(self) -> None:
        """Continue with the rows after the current step, whatever the micro-batch size was before."""
        self._position.seek(self.state.step)
