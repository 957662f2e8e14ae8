"""The command that draws the memory of a training step."""

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import DataSource, Device, EvalSource, Model, Quiet, RecipeFile, Sets, Task, load
from trimtab.cli.output import echo, set_verbosity
from trimtab.errors import DoesNotFit, RecipeError


def memory(
    recipe: RecipeFile = None,
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    budget: Annotated[str | None, typer.Option("--memory", help="Memory budget, such as 8GiB.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Predict for another GPU: t4, rtx-4090, a100 …")] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row, instead of the lengths in the data.")
    ] = None,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("memory.html"),
    snapshot: Annotated[Path | None, typer.Option(help="Also write a file for torch's memory viewer.")] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure", help="Run a few steps and measure one. Default: on a GPU in this machine."
        ),
    ] = None,
    device: Device = None,
    sets: Sets = None,
    quiet: Quiet = False,
) -> None:
    """Draw the memory of one training step, by part, over time."""
    from trimtab.commands.memory import check_targets, draw_memory, write_page, write_snapshot

    set_verbosity(quiet, False)
    if gpu is not None and device is not None:
        raise RecipeError(
            "--gpu and --device cannot be used together", "pass --gpu for a GPU that is not in this machine"
        )
    check_targets(out, snapshot)
    source = data if length is None else "none"  # with a fixed length no data is read, but a recipe must name some
    flags = {"model": model, "data.train": source, "data.eval": eval_data, "task": task, "memory.budget": budget}
    picture = draw_memory(load(recipe, sets, flags).recipe, gpu=gpu, device=device, length=length, measures=measure)
    write_page(picture.page, out)
    if snapshot is not None:
        write_snapshot(picture.snapshot, snapshot)
    if not quiet:
        for line in picture.summary():
            echo(line)
        viewer = "" if snapshot is None else f", and {snapshot} for https://pytorch.org/memory_viz"
        echo(f"{out} written{viewer}")
    if picture.page.problem:
        raise DoesNotFit(picture.page.problem)
