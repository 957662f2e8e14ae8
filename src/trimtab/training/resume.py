"""Load the state of the run that a trainer resumes."""

import json
import shutil
from pathlib import Path

from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
from trimtab.checkpoint.export import FACTS, find_export_problem, read_facts
from trimtab.checkpoint.store import find_checkpoint_problem, read_manifest
from trimtab.engine.engine import Engine
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.model.hub import is_adapter
from trimtab.optim.schedules import copy_shapes, reshape
from trimtab.runs.journal import JournalMark
from trimtab.runs.run_folder import CHECKPOINTS, find_run
from trimtab.runs.start_point import StartPoint
from trimtab.training.checkpoints import numeric_differences
from trimtab.training.loop import Trainer


def resume_trainer(trainer: Trainer, engine: Engine, beginning: StartPoint) -> JournalMark | None:
    """Load the checkpoint of a start point into a trainer, which keeps the learning rates that it was built with.

    Returns:
        The valid part of the run's journal; None if the run starts from scratch.
    """
    if beginning.checkpoint is None:
        return None
    schedule = trainer.parts.scheduler.scheduler
    shapes, rates = copy_shapes(schedule), [float(rate) for rate in schedule.base_lrs]
    engine.load_state(beginning.checkpoint)
    _repair_best_model(trainer, engine, beginning.path, beginning.checkpoint)
    trainer.seek_data()
    step = trainer.state.step
    say(f"resuming from {beginning.checkpoint.name} ({beginning.checkpoint.parent.parent})")
    words = reshape(schedule, shapes, rates)
    if words is not None:
        say(words)
    if engine.is_main_process:
        CheckpointsFolder(beginning.checkpoint.parent).drop_after(step)
        for difference in numeric_differences(read_manifest(beginning.checkpoint).facts, engine):
            say(f"{difference}: results are the same up to rounding, not bit for bit")
    if beginning.is_longer:
        trainer.loop_state.reset_patience()
    else:
        trainer.loop_state.end_as_saved()
        if trainer.state.should_stop:
            reason = trainer.state.stop_reason
            say(f"the run has already ended ({reason}); to continue: --set train.epochs=… or early_stopping.patience=…")
    if beginning.is_branch and engine.decide_on_main_process(lambda: _set_aside_newer_best(beginning.path, step)):
        trainer.best_model.forget()
    if step >= trainer.state.num_steps:
        say("all steps of the run are done; to continue: --set train.epochs=…")
    return trainer.loop_state.journal_mark


def _repair_best_model(trainer: Trainer, engine: Engine, run: Path, checkpoint: Path) -> None:
    """Write a damaged or lost best model again from the checkpoint of its step; without one, discard it."""
    step = trainer.best_model.kept_step
    problem = "" if step is None else engine.decide_on_main_process(lambda: _why_best_is_damaged(run, checkpoint))
    if step is None or not problem:
        return
    source = CheckpointsFolder(run / CHECKPOINTS).place(step)
    if engine.decide_on_main_process(lambda: not find_checkpoint_problem(source)):
        engine.load_state(source)
        trainer.best_model.rewrite(trainer.state)
        engine.load_state(checkpoint)
        say(f"the best model was damaged ({problem}): it was written again from {source.name}")
        return
    engine.decide_on_main_process(lambda: _set_aside_best(run, f"damaged-step-{step}"))
    trainer.best_model.forget()
    say(
        f"the best model, of step {step}, is lost: {problem}, and no checkpoint contains its weights. From here on the "
        "best model is the best of the evaluations that follow"
    )


def _why_best_is_damaged(run: Path, checkpoint: Path) -> str:
    best = run / "best"
    try:
        step = read_facts(best).get("step")
    except CheckpointError as error:
        return error.problem
    for name in (FACTS, *(() if is_adapter(best) else ("config.json",))):
        if best.is_dir() and not (best / name).is_file():
            return f"{best / name} is missing"
    saved = read_manifest(checkpoint).facts.get("run", {})
    checksums = [status.get("best_files") or {} for status in (find_run(run) or {}, saved)]
    return find_export_problem(
        best, next((known.get("files") for known in checksums if known.get("step") == step), None)
    )


def _set_aside_best(run: Path, name: str) -> Path:
    """Rename the folder of the best model, even if it is incomplete."""
    aside = run / f"best-{name}"
    if (run / "best").exists():
        shutil.rmtree(aside, ignore_errors=True)
        (run / "best").rename(aside)
    return aside


def _set_aside_newer_best(run: Path, step: int) -> bool:
    """Rename a best model of a step after `step`: models of the resumed run might never be better."""
    try:
        newer: int = json.loads((run / "best" / "trimtab.json").read_text())["step"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    if newer <= step:
        return False
    aside = _set_aside_best(run, f"step-{newer}")
    say(f"the best model is of step {newer}, after the start point: it was moved to {aside}, and a new one is selected")
    return True
