"""The command that clusters weights."""

from typing import Annotated, Any

import typer

from trimtab.cli.options import Device, FolderOfForm, Quiet, folder_of_form
from trimtab.cli.output import echo, show_table, shown
from trimtab.errors import RecipeError

_ROWS = "Rows to evaluate on. Default: all. 0 skips this and reads one weight at a time, for models larger than memory."


def cluster(
    model: Annotated[str, typer.Argument(help="Run, folder, Hub name, or best:EXPERIMENT.")],
    folder: FolderOfForm = None,
    bits: Annotated[int, typer.Option(help="Bits per weight, 1 to 8.")] = 4,
    per: Annotated[str, typer.Option(help="Weights that share a palette: tensor, rows or channel.")] = "rows",
    group_rows: Annotated[
        int | None, typer.Option(help="Rows per group, for --per rows. Default: depends on the size.")
    ] = None,
    scale_block: Annotated[int, typer.Option(help="Columns that share an 8-bit scale; 0 for no scales.")] = 64,
    data: Annotated[str | None, typer.Option(help="Labelled rows. Default: the held-out rows of the run.")] = None,
    rows: Annotated[int | None, typer.Option(help=_ROWS)] = None,
    calibration: Annotated[str | None, typer.Option(help="Calibration data, for importance and compensation.")] = None,
    calibration_rows: Annotated[int | None, typer.Option(help="Calibration rows to use. Default: 256.")] = None,
    importance: Annotated[
        str | None,
        typer.Option(help="Weight errors by: none, activations or gradients. Default: activations with --calibration."),
    ] = None,
    compensate: Annotated[
        bool | None, typer.Option(help="Spread errors over later columns. Default: with --calibration.")
    ] = None,
    train_steps: Annotated[int, typer.Option(help="Steps to train palettes on the calibration rows.")] = 0,
    embeddings: Annotated[bool, typer.Option(help="Also cluster embeddings and the output layer.")] = True,
    rest: Annotated[str, typer.Option(help="Dtype of weights that are not clustered: fp16, or keep.")] = "keep",
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Cluster the weights of a model to palettes of 1 to 8 bits."""
    import torch

    from trimtab.commands.cluster import cluster as cluster_weights
    from trimtab.compress.clustering import ClusterSettings
    from trimtab.report.measurements_table import measurements_table

    if rest not in ("fp16", "keep"):
        raise RecipeError(f"--rest {rest} is not valid", "--rest fp16 or --rest keep")
    calibrated = calibration is not None
    if calibration_rows is not None and not calibrated:
        raise RecipeError("--calibration-rows has no effect without --calibration", "--calibration FILE")
    settings = ClusterSettings(
        bits=bits,
        per=per,
        rows=group_rows,
        scale_block=scale_block,
        importance=importance or ("activations" if calibrated else "none"),
        compensate=calibrated if compensate is None else compensate,
        embeddings=embeddings,
        rest_dtype=torch.float16 if rest == "fp16" else None,
    )
    rows_of: dict[str, Any] = {"data": data, "num_rows": rows, "calibration": calibration}
    rows_of["calibration_rows"] = calibration_rows or 256
    target = folder_of_form(model, f"cluster-{bits}", folder)
    with shown(quiet) as prints:
        done = cluster_weights(model, target, settings, **rows_of, train_steps=train_steps, device=device)
    if not prints:
        return
    if done.measurements:
        show_table(*measurements_table(done.measurements))
    echo(f"{done.bits:.2f} bits per clustered weight, palettes included; written to {done.folder}")
