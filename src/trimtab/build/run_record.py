"""The files that a run writes besides checkpoints: recipe and plan at the start, and how it ended."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from trimtab.build.consent import record_agreed
from trimtab.build.parts import Data, EndedRun, ResolvedRun
from trimtab.build.report_facts import write_data_card, write_report
from trimtab.build.samples import add_samples, report_unused_setting
from trimtab.build.tracking import build_uploader
from trimtab.checkpoint.export import read_facts
from trimtab.distributed.environment import read_rank_info
from trimtab.engine.engine import Engine
from trimtab.errors import Stopped, TrimtabError, as_argument
from trimtab.inference.load import load
from trimtab.inference.predict_text import predict_text
from trimtab.log import say
from trimtab.model.hub import is_adapter
from trimtab.recipe.load import LoadedRecipe, render_resolved_yaml
from trimtab.runs.journal import JournalMark
from trimtab.runs.lock import RunLock
from trimtab.runs.run_folder import HEARTBEAT_TIMEOUT_S, Folder, ReadOnlyRunFolder, RunFolder, clear_folder
from trimtab.runs.start_point import StartPoint
from trimtab.training.loop import Trainer
from trimtab.training.progress_lines import Progress
from trimtab.training.run_state import FitResult


def open_folder(start: StartPoint, engine: Engine) -> Folder:
    """The run's folder: the main process holds its lock, the others only know its path."""
    made: list[RunFolder] = []
    place = read_rank_info()

    def make() -> Path:
        if start.replaces_run:
            with RunLock(start.path, take_over=place.attempt > 0, patience_s=HEARTBEAT_TIMEOUT_S):
                clear_folder(start.path)
        made.append(RunFolder(start.path, place.job, resumes=start.is_resumed, restarted=place.attempt > 0))
        return made[0].path

    path = engine.decide_on_main_process(make)
    return made[0] if made else ReadOnlyRunFolder(path)


@contextmanager
def released_on_failure(folder: Folder) -> Iterator[None]:
    """Release the folder if building the run fails: a mistake in the recipe must not use up a name or `--out`."""
    try:
        yield
    except BaseException:
        folder.give_up()
        raise


@contextmanager
def failure_recorded(run: ResolvedRun, folder: Folder, show: Progress) -> Iterator[None]:
    """Record and show why a run did not end normally."""
    try:
        yield
    except BaseException as error:
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        is_kept = not run.recipe.limits.fast_dev_run
        report = partial(write_report, folder) if is_kept else lambda: None
        folder.finish(state, before_upload=report, error=f"{type(error).__name__}: {error}")
        show.finish(f"{state}: {folder.path}", failed=True)
        if run.recipe.limits.fast_dev_run:
            folder.remove()
        raise


def record_start(
    run: ResolvedRun, origins: dict[str, str], trainer: Trainer, folder: Folder, journal_mark: JournalMark | None
) -> None:
    """Write the recipe and the plan, and start the upload of metrics."""
    for line in run.plan.describe():
        say(line)
    report_unused_setting(run.recipe, run.data.task.name)
    folder.write_recipe(render_resolved_yaml(LoadedRecipe(run.asked, origins)))
    folder.write_text("plan.json", json.dumps(run.plan.as_dict(), indent=1))
    folder.start(run.recipe.model_dump(mode="json"), run.plan.num_steps, journal_mark, trainer.state.step)
    if isinstance(folder, RunFolder) and not run.recipe.limits.fast_dev_run:
        record_agreed(run.asked, folder.path, run.tracked.uri if run.tracked is not None else None)
    write_data_card(run, folder)
    if run.tracked is not None:
        folder.update(model_source=run.tracked.as_dict())
    folder.track(build_uploader(run.recipe, run.plan, run.tokens, run.engine, folder, trainer.higher_is_better))


def record_end(run: EndedRun, result: FitResult, folder: Folder, show: Progress) -> None:
    """Write how a run ended.

    Raises:
        Stopped: After a signal; a checkpoint was saved.
        TrimtabError: After a signal; no checkpoint was saved.
    """
    state = "stopped" if result.interruption else "finished"
    folder.finish(state, before_upload=partial(_write_report, run, result, folder, show), **result.summary())
    show.finish(f"{result.stop_reason} after {result.step} steps: {folder.path}")
    if run.recipe.limits.fast_dev_run:
        with run.engine.busy("trying the saved model"):
            _try_saved_model(run.data, folder, has_metrics=bool(result.metrics))
    elif result.interruption and result.interruption != "time limit":
        if run.recipe.checkpoint.every is None or result.save_failure:
            why = result.save_failure or "checkpoint.every is null"
            problem = f"stopped after step {result.step}; no checkpoint was saved: {why}"
            raise TrimtabError(f"{result.interruption}: {problem}")
        cure = f"resume with: trimtab resume {as_argument(folder.path)}"
        raise Stopped(f"{result.interruption}: saved after step {result.step}; {cure}")


def _write_report(run: EndedRun, result: FitResult, folder: Folder, show: Progress) -> None:
    """Write the report, and again with samples: a run that is killed in between keeps the first one."""
    if run.recipe.limits.fast_dev_run:
        return
    write_report(folder)
    if add_samples(run, result, folder, show):
        write_report(folder)


def _try_saved_model(data: Data, folder: Folder, *, has_metrics: bool) -> None:
    """At the end of a fast_dev_run, load the saved model, use it once, and remove everything."""
    if isinstance(folder, ReadOnlyRunFolder):
        return
    done = ["train", *(["evaluate"] if has_metrics else []), "save"]
    try:
        if not is_adapter(folder.best) or read_facts(folder.best).get("base") is not None:
            model = load(folder.best)
            done.append("load")
            if data.task.name != "masked-lm":  # it predicts masked tokens, nothing about a text
                say(f"prediction of the saved model: {predict_text(model, _first_text(data), max_new_tokens=8)!r}")
                done.append("predict")
        say(f"fast_dev_run: {', '.join(done)} work; nothing was kept")
    finally:
        folder.remove()


def _first_text(data: Data) -> str:
    first = data.task.columns.get("text") or data.task.columns.get("prompt")
    name = first[0] if isinstance(first, list) else first
    return str(data.train.columns[name][0]) if name in data.train.columns else "a text"
