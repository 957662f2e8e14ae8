"""How results look on a terminal. rich is imported only when something is drawn."""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trimtab.addresses import redact
from trimtab.errors import RecipeError, as_argument
from trimtab.log import for_stream, logger, printable
from trimtab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trimtab.checkpoint.checkpoints_folder import Checkpoint
    from trimtab.commands.merge import Merged
    from trimtab.commands.verify_resume import Proof
    from trimtab.distributed.launch.command import LaunchPlan
    from trimtab.planner.survey import Survey
    from trimtab.run import Result
    from trimtab.runs.run_folder import RunSummary
    from trimtab.tracking.mlflow.ranking import Ranking

_PIPE_WIDTH = 10_000  # width of a table that is not printed to a terminal: each row must stay on one line


def set_verbosity(quiet: bool, json_lines: bool) -> str:
    """Return the progress mode that the flags select; with `--quiet`, also silence the log below errors."""
    if quiet and json_lines:
        raise RecipeError("--quiet and --json were both given", "pass only one of them")
    if quiet:
        logger.addHandler(logging.NullHandler())  # without a handler, the first message would install a visible one
        logger.setLevel(logging.ERROR)
    return "quiet" if quiet else "json" if json_lines else "auto"


@contextlib.contextmanager
def shown(quiet: bool, json_lines: bool = False) -> Iterator[bool]:
    """Show the work of a command as the flags select; yield whether it prints tables."""
    from trimtab.training.work_progress import work_shown_as

    mode = set_verbosity(quiet, json_lines)
    with work_shown_as(mode):
        yield mode == "auto"


def flush_streams() -> None:
    """Flush standard output and error, or discard what cannot be written.

    Python flushes them again at exit, and would replace our exit code with its own if that failed.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, stream.fileno())
                os.close(devnull)


def echo(text: str = "", *, nl: bool = True, err: bool = False, fg: str | None = None) -> None:
    """Print text to standard output, or to standard error."""
    typer.secho(for_stream(text, sys.stderr if err else sys.stdout), nl=nl, err=err, fg=fg)


def show(renderable: object) -> None:
    """Print anything that rich can render."""
    from trimtab.training.screen import build_console

    build_console().print(renderable)


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, to_stderr: bool = False) -> None:
    """Print a table without borders."""
    from rich.table import Table
    from rich.text import Text

    from trimtab.training.screen import build_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, because rich would interpret [liger] in a str as markup
    console = build_console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(table)


def show_result(result: "Result") -> None:
    """Print the metrics, duration and peak memory of a run, where its files are, and what to do next."""
    from trimtab.checkpoint.export import read_facts

    fit = result.fit
    rows = [(name, f"{value:.4f}") for name, value in fit.metrics.items()]
    if fit.best_metric is not None:
        rows.append((f"best {result.plan.metric}", f"{fit.best_metric:.4f} at step {fit.best_step}"))
    rows += [
        ("steps", f"{fit.step:,} ({fit.stop_reason})"),
        ("time", f"{format_seconds(fit.train_seconds)}, {fit.num_tokens / max(fit.train_seconds, 1e-9):,.0f} tokens/s"),
        ("peak memory", format_bytes(fit.peak_memory_bytes)),
    ]
    if fit.num_skipped:
        rows.append(("skipped fp16 steps", str(fit.num_skipped)))
    if result.best is not None:
        rows.append(("best model", str(result.best)))
    if (result.folder / "report.html").exists():
        rows.append(("report", str(result.folder / "report.html")))
    show_table(("", ""), rows)
    if fit.interruption:
        echo(f"\nnext: trimtab resume {as_argument(result.folder)}")
    elif result.best is not None and result.best.exists():
        is_masked = read_facts(result.best).get("task") == "masked-lm"  # it predicts nothing about a text
        command = "trimtab evaluate {}" if is_masked else 'trimtab predict {} --text "…"'
        echo(f"\nnext: {command.format(as_argument(result.folder))}")


def show_demo(result: "Result") -> None:
    """Print the metric before and after the demo, the path of its report, and commands to try next."""
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    name = result.plan.metric
    before = next(line[f"eval_{name}"] for line in lines if f"eval_{name}" in line)
    after = result.fit.metrics[name]
    show_table(
        ("", "before", "after"),
        [
            (name, f"{before:.3f}", f"{after:.3f}"),
            ("training", "", format_seconds(result.fit.train_seconds)),
            ("peak memory", "", format_bytes(result.fit.peak_memory_bytes)),
        ],
    )
    if (result.folder / "report.html").exists():
        echo(f"\nreport, for a browser: {result.folder / 'report.html'}")
    text = "a film that stays with you" if name == "accuracy" else "The film is"
    recipe, longer = as_argument(result.folder / "recipe.yaml"), as_argument(f"{result.folder}-longer")
    echo(
        "\ntry next:\n"
        f'  trimtab predict {as_argument(result.folder)} --text "{text}"\n'
        f"  trimtab data show {recipe}\n"
        f"  trimtab train {recipe} --epochs 2 --out {longer}"
    )


def show_plans(survey: "Survey", *, as_json: bool) -> None:
    """Print the ladder of plans, the legend of its columns, and why one plan is chosen."""
    from trimtab.planner.explain import legend, table

    if as_json:
        echo(json.dumps(survey.as_dict(), indent=1))
        return
    target, rungs = survey.target, survey.shown()
    echo(f"{target.name}, {format_bytes(target.budget_bytes)}, {survey.precision}, {survey.optimizer}\n")
    show_table(*table(rungs, target.budget_bytes, survey.reference))
    echo(f"\n{legend(rungs)}")
    for line in (survey.why, *survey.notes(), target.note):
        if line:
            echo(line)


def show_runs(runs: Sequence["RunSummary"], root: Path) -> None:
    """Print a table of runs, newest first."""
    if not runs:
        echo(f"no runs below {redact(str(root))}; of another folder: trimtab runs FOLDER")
        return
    rows = []
    for run in runs:
        best = "" if run.best_metric is None else f"{run.metric_name} {run.best_metric:.4f}"
        age = format_seconds(max(0.0, run.age_s))  # negative after the clock was set back
        rows.append((printable(str(run.path)), run.state, f"{run.step}/{run.num_steps}", best, age))
    show_table(("run", "state", "step", "best", "age"), rows)


def show_ranking(ranking: "Ranking", *, as_json: bool) -> None:
    """Print the runs of an experiment and mark the best one."""
    if as_json:
        for run in ranking.runs:
            echo(json.dumps({**asdict(run), "metric": ranking.metric, "is_best": run is ranking.winner}))
        return
    rows = []
    for run in ranking.runs:
        value = "" if run.value is None else f"{run.value:.4f}"
        mark = "best" if run is ranking.winner else ""
        rows.append((mark, run.name, value, run.status.lower(), run.model_id or "", _age(run.started_ms / 1000)))
    show_table(("", "run", ranking.metric, "state", "model", "age"), rows)


def show_checkpoints(checkpoints: Sequence["Checkpoint"], status: Mapping[str, Any]) -> None:
    """Print a table of a run's checkpoints, oldest first."""
    if not checkpoints:
        echo("no checkpoints")
        return
    name = status.get("metric_name")
    rows = []
    for checkpoint in checkpoints:
        value = checkpoint.metrics.get(name) if name else None
        metric = f"{name} {value:.4f}" if isinstance(value, float) else ""
        saved_at = checkpoint.facts.get("time")
        age = _age(saved_at) if isinstance(saved_at, float) else ""
        best = "best" if checkpoint.step == status.get("best_step") else ""
        size, problem = format_bytes(checkpoint.num_bytes), checkpoint.problem or "valid"
        rows.append((checkpoint.path.name, metric, best, size, age, problem))
    show_table(("checkpoint", "metric", "", "size", "age", ""), rows)


def _age(since_s: float) -> str:
    return format_seconds(max(0.0, time.time() - since_s))


def show_proof(proof: "Proof") -> None:
    """Print whether a resumed run equals an uninterrupted one, or the first difference."""
    if proof.difference:
        echo(f"not equal: {proof.difference}")
        return
    echo(
        f"equal: killed, resumed from step {proof.resumed_from}; all {proof.num_tensors} tensors of the final state "
        f"and all {proof.num_lines} lines of metrics match bit for bit"
    )


def show_merged(merged: "Merged") -> None:
    """Print how close the merged model's predictions are to the adapter's, and where it is."""
    found = merged.closeness
    if found is not None:
        echo(
            f"on {found.num_rows:,} rows ({found.num_answers:,} predictions): mean KL {found.kl_mean:.3g}, maximum "
            f"{found.kl_max:.3g}; {found.agreement:.2%} of the predictions are equal"
        )
    echo(f"{merged.folder}: {merged.base} with the adapter merged ({merged.onto}), in {merged.dtype}")


def show_launch(plan: "LaunchPlan", *, to_stderr: bool) -> None:
    """Print every launch setting with its origin, and the equivalent torchrun command."""
    show_table(("launch", "", "from"), plan.settings.rows(), to_stderr=to_stderr)
    echo(f"\n{plan.command}\n", err=to_stderr)


def ask(question: str, default: str, complaint: str) -> str:
    """Ask a question on the terminal.

    Args:
        question: The question.
        default: The answer if the user enters nothing.
        complaint: What was wrong with the previous answer; printed first.
    """
    if complaint:
        echo(f"  {complaint}")
    try:
        answer: str = typer.prompt(question, default=default, show_default=bool(default))
    except typer.Abort:
        raise RecipeError("no answer on standard input", "--default asks no questions; edit the file later") from None
    return answer
