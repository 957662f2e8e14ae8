"""The command that tries all smaller forms of a model."""

from typing import Annotated

import typer

from trimtab.cli.options import Device, FolderOfForm, Quiet, folder_of_form
from trimtab.cli.output import echo, show_table, shown


def shrink(
    model: Annotated[str, typer.Argument(help="Run, folder, Hub name, or best:EXPERIMENT.")],
    folder: FolderOfForm = None,
    data: Annotated[str | None, typer.Option(help="Labelled rows. Default: the held-out rows of the run.")] = None,
    max_loss: Annotated[
        str, typer.Option(help="Largest accepted drop of accuracy, or rise of loss: 1% or 0.01.")
    ] = "1%",
    rows: Annotated[int, typer.Option(help="Maximum number of rows to evaluate on.")] = 1000,
    track: Annotated[bool, typer.Option("--track", help="Log all forms to MLflow.")] = False,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Make a model smaller: try every method, and recommend one."""
    from trimtab.commands.shrink import shrink as shrink_model
    from trimtab.commands.shrink import track_forms
    from trimtab.report.frontier import frontier_table
    from trimtab.units import parse_share

    target = folder_of_form(model, "small", folder)
    share = parse_share(max_loss)
    with shown(quiet) as prints:
        found = shrink_model(model, target, data=data, max_loss=share, num_rows=rows, device=device)
    if prints:
        show_table(*frontier_table(found.measurements, found.max_loss))
        if found.folder is None:
            echo(f"no smaller form stays within a loss of {found.max_loss:.2%}: keep the original")
        else:
            echo(f"recommended: {found.folder}, see {target / 'frontier.png'}")
    if track:  # last: a server that does not answer must not hide the results
        with shown(quiet):
            line = track_forms(found, target)
        if prints:
            echo(line)
