"""How results look on a terminal. rich is imported when something is shown."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import RecipeError
from trimtab.log import logger
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

_WIDEST = 10_000  # of a table that goes into a file or a program: a line of it is a row


def progress_mode(quiet: bool, json_lines: bool) -> str:
    """What the flags mean for the progress display; a quiet run has no lines about guesses and plans either."""
    if quiet and json_lines:
        raise RecipeError("--quiet and --json were both given", "leave one of them out")
    if quiet:
        logger.addHandler(logging.NullHandler())  # else the first line said would bring a handler of its own
        logger.setLevel(logging.ERROR)
    return "quiet" if quiet else "json" if json_lines else "auto"


def keep_exit_code() -> None:
    """Write what is still buffered, or drop it: Python would else fail when it ends, with an exit code of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def show(renderable: object) -> None:
    """Anything that rich can draw."""
    from rich.console import Console

    Console().print(renderable)


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, to_stderr: bool = False) -> None:
    """A plain table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: rich would take [liger] for markup
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = _WIDEST
    console.print(table)


def show_result(result: "Result") -> None:
    """How a run ended, and where its model is."""
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
    show_table(("", ""), rows)


def show_demo(result: "Result") -> None:
    """What the demo did, and what to try next."""
    import json

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
    from rich.console import Console

    text = "a film that stays with you" if name == "accuracy" else "The film is"
    Console().print(
        "\ntry next:\n"
        f'  trimtab predict {result.folder} --text "{text}"\n'
        f"  trimtab data show {result.folder / 'recipe.yaml'}\n"
        f"  trimtab train {result.folder / 'recipe.yaml'} --epochs 2 --out {result.folder}-longer",
        highlight=False,
        soft_wrap=True,
    )


def show_plans(survey: "Survey", *, as_json: bool) -> None:
    """The ladder of plans, what its letters mean, and why one is taken."""
    import json

    import typer

    from trimtab.planner.explain import legend, table

    if as_json:
        typer.echo(json.dumps(survey.as_dict(), indent=1))
        return
    target, rungs = survey.target, survey.shown()
    typer.echo(f"{target.name}, {format_bytes(target.budget_bytes)}, {survey.precision}, {survey.optimizer}\n")
    show_table(*table(rungs, target.budget_bytes, survey.reference))
    typer.echo(f"\n{legend(rungs)}")
    for line in (survey.why, *survey.notes(), target.note):
        if line:
            typer.echo(line)


def show_runs(runs: Sequence["RunSummary"], root: Path) -> None:
    """A table of runs, newest first."""
    import typer

    if not runs:
        typer.echo(f"no runs below {root}")
        return
    rows = []
    for run in runs:
        best = "" if run.best_metric is None else f"{run.metric_name} {run.best_metric:.4f}"
        rows.append((str(run.path), run.state, f"{run.step}/{run.num_steps}", best, format_seconds(run.age_s)))
    show_table(("run", "state", "step", "best", "age"), rows)


def show_ranking(ranking: "Ranking", *, as_json: bool) -> None:
    """The runs of an experiment, the winner marked."""
    import json
    import time
    from dataclasses import asdict

    import typer

    if as_json:
        for run in ranking.runs:
            typer.echo(json.dumps({**asdict(run), "metric": ranking.metric, "is_best": run is ranking.winner}))
        return
    rows = []
    for run in ranking.runs:
        value = "" if run.value is None else f"{run.value:.4f}"
        age = format_seconds(max(0.0, time.time() - run.started_ms / 1000))
        mark = "best" if run is ranking.winner else ""
        rows.append((mark, run.name, value, run.status.lower(), run.model_id or "", age))
    show_table(("", "run", ranking.metric, "state", "model", "age"), rows)


def show_checkpoints(checkpoints: Sequence["Checkpoint"], status: Mapping[str, Any]) -> None:
    """The saved states of a run, the oldest first."""
    import time

    import typer

    if not checkpoints:
        typer.echo("no saved states")
        return
    name = status.get("metric_name")
    rows = []
    for checkpoint in checkpoints:
        value = checkpoint.metrics.get(name) if name else None
        metric = f"{name} {value:.4f}" if isinstance(value, float) else ""
        saved_at = checkpoint.facts.get("time")
        age = format_seconds(max(0.0, time.time() - saved_at)) if isinstance(saved_at, float) else ""
        best = "best" if checkpoint.step == status.get("best_step") else ""
        rows.append(
            (
                checkpoint.path.name,
                metric,
                best,
                format_bytes(checkpoint.num_bytes),
                age,
                checkpoint.problem or "valid",
            )
        )
    show_table(("state", "metric", "", "size", "age", ""), rows)


def show_proof(proof: "Proof") -> None:
    """Equal, or the first thing that is not."""
    import typer

    if proof.difference:
        typer.echo(f"not equal: {proof.difference}")
        return
    typer.echo(
        f"equal: killed, resumed from step {proof.resumed_from}, and at the end all {proof.num_tensors} tensors of the "
        f"state and all {proof.num_lines} lines of metrics are the same, bit for bit"
    )


def show_merged(merged: "Merged") -> None:
    """How near the merged model is to the adapter, and where it is."""
    import typer

    found = merged.closeness
    if found is not None:
        typer.echo(
            f"on {found.num_rows:,} rows ({found.num_answers:,} answers) KL {found.kl_mean:.3g}, at most "
            f"{found.kl_max:.3g}; the same answer in {found.agreement:.2%}"
        )
    typer.echo(f"{merged.folder}: {merged.base} with the adapter merged ({merged.onto}), in {merged.dtype}")


def show_launch(plan: "LaunchPlan", *, to_stderr: bool) -> None:
    """Every setting with its origin, where the other ranks write, and the torchrun command that does the same."""
    import typer

    show_table(("launch", "", "from"), plan.settings.rows(), to_stderr=to_stderr)
    typer.echo(f"\n{plan.command}\n", err=to_stderr)


def ask(question: str, default: str, complaint: str) -> str:
    """Ask once on the terminal.

    Args:
        question: What to ask.
        default: What an empty answer means.
        complaint: What was wrong with the answer before; shown first.
    """
    import typer

    if complaint:
        typer.echo(f"  {complaint}")
    try:
        answer: str = typer.prompt(question, default=default, show_default=bool(default))
    except typer.Abort:
        raise RecipeError("nobody answered", "--default asks nothing; every key can be set in the file") from None
    return answer
