"""Commands on runs, here and on a tracking server: checkpoints, runs, best, pull, track sync and ui."""

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import Json, NewFolder, RunFolder, Uri
from trimtab.cli.output import echo, show_checkpoints, show_ranking, show_runs
from trimtab.errors import RecipeError


def checkpoints(run: RunFolder) -> None:
    """List the checkpoints of a run and whether each is valid."""
    from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
    from trimtab.runs.run_folder import CHECKPOINTS, find_run

    status = find_run(run)
    if status is None:
        raise RecipeError(f"{run} is not a run", "pass the folder of a run; trimtab runs lists them")
    show_checkpoints(CheckpointsFolder(run / CHECKPOINTS).checkpoints(checksums=True), status)


def runs(root: Annotated[Path, typer.Argument(help="Folder to search.")] = Path("runs")) -> None:
    """List runs: state, step, best metric and age."""
    from trimtab.runs.run_folder import list_runs

    show_runs(list_runs(root), root)


def best(
    experiment: Annotated[str, typer.Argument(help="Experiment to list.")],
    metric: Annotated[
        str | None, typer.Option(help="Metric to rank by. Default: the one that chose the best models.")
    ] = None,
    uri: Uri = None,
    json_lines: Json = False,
) -> None:
    """List the runs of an experiment, best first."""
    from trimtab.tracking.mlflow.registry import rank_runs

    show_ranking(rank_runs(experiment, metric, uri), as_json=json_lines)


def pull(
    model: Annotated[str, typer.Argument(help="Experiment (for its best model), or models:/NAME@best.")],
    folder: NewFolder,
    metric: Annotated[str | None, typer.Option(help="Metric that chooses the best model of an experiment.")] = None,
    uri: Uri = None,
) -> None:
    """Download a model from the tracking server."""
    from trimtab.tracking.mlflow.registry import pull_model

    found = pull_model(model, folder, metric=metric, uri=uri)
    echo(f"{folder}: {found.words}")


def track_sync(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    to: Annotated[str | None, typer.Option(help="Upload to this server: http://…, sqlite:///… or local.")] = None,
) -> None:
    """Upload the part of a run's history that the server lacks."""
    from trimtab.build.tracking import sync_run

    echo(sync_run(run, to))


def ui(
    root: Annotated[Path, typer.Argument(help="Folder with the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port of the UI.")] = 5000,
) -> None:
    """Serve the MLflow UI for the runs in a folder until Ctrl-C."""
    from trimtab.tracking.mlflow.ui import serve_ui

    raise typer.Exit(serve_ui(root, port, echo))
