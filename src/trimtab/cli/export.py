"""The command `trimtab export`."""

from typing import Annotated, Any

import typer

from trimtab.cli.options import FolderOfForm, folder_of_form
from trimtab.cli.output import echo, show_table


def export(
    model: Annotated[str, typer.Argument(help="Run, folder, Hub name, or best:EXPERIMENT.")],
    to: Annotated[str, typer.Option(help="onnx, onnx-int8, gguf, or merged.")],
    folder: FolderOfForm = None,
    data: Annotated[
        str | None, typer.Option(help="Rows to compare both models on. Default: held-out rows of the run.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of a GGUF file: f32, f16 (default) or q8_0.")] = None,
    push: Annotated[
        str | None, typer.Option(help="Upload to this Hub repository, USER/NAME; created as private.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Merge an adapter even if the comparison fails.")] = False,
    rows: Annotated[int, typer.Option(help="Maximum number of rows to compare on.")] = 1000,
) -> None:
    """Export a model as ONNX, GGUF or a plain folder; check it."""
    from trimtab.commands.export import export as export_to
    from trimtab.report.measurements_table import measurements_table

    options: dict[str, Any] = {"dtype": dtype, "push": push, "force": force}
    target = folder_of_form(model, to, folder)
    exported = export_to(model, target, to=to, data=data, num_rows=rows, **options)
    for note in exported.notes:
        echo(note)
    if exported.measurements:
        show_table(*measurements_table(exported.measurements))
    else:
        echo("pass --data FILE for a table of quality, latency and agreement")
    echo(f"{exported.folder}: {model} as {to}")
    if exported.address is not None:
        echo(f"uploaded to {exported.address}")
