"""`trimtab report`: the report of a run as an HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import Device
from trimtab.cli.output import echo
from trimtab.errors import RecipeError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are shown side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: report.html in the run or the current folder.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Add text generated before and after training, for N rows.")
    ] = None,
    device: Device = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on this machine; it refreshes itself.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="Port for --watch. Default: a free one.")] = None,
) -> None:
    """Write the report of a run, or of several runs, as one HTML file."""
    from trimtab.commands.report import watch as watch_runs
    from trimtab.commands.report import write_page

    if samples is not None:
        from trimtab.commands.samples import write_samples  # loads what runs a model, which a page does not need

        for run in runs:
            write_samples(run, samples, device=device)
    if not watch:
        if port is not None:
            raise RecipeError(f"--port {port} has no effect without --watch", "add --watch, or remove --port")
        echo(str(write_page(runs, out)))
        return
    if out is not None:
        raise RecipeError("--watch serves the page and writes no file", "leave out --out or --watch")
    watch_runs(runs, port or 0, echo)
