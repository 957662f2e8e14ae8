"""The command that stores a model in fewer bits."""

from typing import Annotated, Any

import typer

from trimtab.cli.options import Device, FolderOfForm, Quiet, folder_of_form
from trimtab.cli.output import echo, show_table, shown

_TO = "int8-dynamic, int8, int4, fp8, fp8-dynamic, nf4 or bnb-int8; several (int8,int4) with --max-loss or --size."
_ROWS = "Rows to evaluate on. 0 skips this and reads one weight at a time, for models larger than memory."
_LOSS = "Quantize as many layers as this loss of quality allows, such as 0.5%."
_SIZE = "Quantize the least harmful layers until the files have this size, such as 40MB."


def quantize(
    model: Annotated[str, typer.Argument(help="Run, folder, Hub name, or best:EXPERIMENT.")],
    folder: FolderOfForm = None,
    to: Annotated[str, typer.Option(help=_TO)] = "int8",
    data: Annotated[str | None, typer.Option(help="Labelled rows. Default: the held-out rows of the run.")] = None,
    rows: Annotated[int, typer.Option(help=_ROWS)] = 512,
    max_loss: Annotated[str | None, typer.Option(help=_LOSS)] = None,
    size: Annotated[str | None, typer.Option(help=_SIZE)] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of all other weights: auto, fp32, bf16, fp16.")] = "auto",
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Quantize the linear layers of a model to 8 or 4 bits; compare."""
    from trimtab.commands.quantize import quantize as quantize_model
    from trimtab.commands.quantize_mix import Bound
    from trimtab.report.measurements_table import measurements_table
    from trimtab.units import parse_bytes, parse_share

    bound = None
    if max_loss is not None or size is not None:
        share = None if max_loss is None else parse_share(max_loss)
        bound = Bound(share, None if size is None else parse_bytes(size))
    names = [name.strip() for name in to.split(",")]
    target = folder_of_form(model, "-".join(names), folder)
    options: dict[str, Any] = {"data": data, "num_rows": rows, "bound": bound, "dtype": dtype, "device": device}
    with shown(quiet) as prints:
        done = quantize_model(model, target, names, **options)
    if not prints:
        return
    if done.measurements:
        show_table(*measurements_table(done.measurements))
    left = f", {done.num_left} not quantized" if done.num_left else ""
    echo(f"{done.folder}: {len(done.formats)} linear layers quantized{left}; embeddings and heads are not quantized")
