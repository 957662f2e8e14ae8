"""The command that trains a student with a teacher."""

from typing import Annotated

import typer

from trimtab.cli.options import Device, Fresh, Json, Quiet, RecipeFile, Resume, Sets
from trimtab.cli.options import load as load_with_flags
from trimtab.cli.output import set_verbosity, show_table
from trimtab.cli.train import finish


def distill(
    recipe: RecipeFile = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run. Default: runs/EXPERIMENT/NAME.")] = None,
    device: Device = None,
    resume: Resume = False,
    fresh: Fresh = False,
    sets: Sets = None,
    quiet: Quiet = False,
    json_lines: Json = False,
) -> None:
    """Train a small model to reproduce the outputs of a large one."""
    from trimtab.commands.distill import distill as train_student
    from trimtab.report.measurements_table import measurements_table

    mode = set_verbosity(quiet, json_lines)
    loaded = load_with_flags(recipe, sets, {"out": out})
    found = train_student(loaded, progress=mode, device=device, resume=resume, fresh=fresh)
    finish(found.result, mode)
    if found.measurements and mode == "auto":
        show_table(*measurements_table(found.measurements))
