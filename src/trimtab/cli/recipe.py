"""Commands on a recipe before it trains: init, convert, check, plan and data show."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trimtab.checkpoint.disk_errors import cure_for_os_error
from trimtab.checkpoint.folder import write_file
from trimtab.cli.options import DataSource, Device, EvalSource, Model, Quiet, RecipeFile, Sets, Task
from trimtab.cli.options import load as load_with_flags
from trimtab.cli.output import echo, set_verbosity, show, show_plans, show_proof
from trimtab.errors import DoesNotFit, RecipeError, as_argument


def init(
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    to: Annotated[Path, typer.Option(help="File to write; must not exist.")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe file with every key documented."""
    from trimtab.recipe.load import render_commented_yaml

    _refuse_existing(to, "--to")
    text = render_commented_yaml({"model": model, "data.train": data, "data.eval": eval_data, "task": task})
    _write_recipe(to, text, "--to")
    echo(f"{to} written; next: trimtab check {as_argument(to)}")


def convert(
    config: Annotated[Path, typer.Argument(help="Axolotl config file (YAML).")],
    out: Annotated[Path | None, typer.Option(help="File to write; must not exist. Default: print the recipe.")] = None,
) -> None:
    """Convert an Axolotl config to a commented recipe."""
    from trimtab.commands.convert import convert_axolotl

    if out is not None:
        _refuse_existing(out, "--out")
    converted = convert_axolotl(config)
    text = converted.render(config.name)
    if out is None:
        echo(text, nl=False)
        return
    _write_recipe(out, text, "--out")
    echo(
        f"{out} written: {converted.num_translated} keys translated, {len(converted.omitted) + len(converted.empty)} "
        f"not needed or empty, {len(converted.lost)} without an equivalent"
    )
    for name, _, reason in converted.lost:
        echo(f"  {name}: {reason}")
    echo(f"next: trimtab check {as_argument(out)}")


def _refuse_existing(path: Path, option: str) -> None:
    if path.exists():
        raise RecipeError(f"{path} exists", f"choose another file with {option}, or remove this one")


def _write_recipe(path: Path, text: str, option: str) -> None:
    try:
        write_file(path, text.encode())
    except OSError as error:
        cure = cure_for_os_error(error, f"choose another file with {option}")
        raise RecipeError(f"{path} cannot be written: {error.strerror}", cure) from error


def check(
    recipe: RecipeFile = None,
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    sets: Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Kill a short run and verify a bit-exact resume.")] = False,
    device: Annotated[str | None, typer.Option(help="Device for --resume, such as cuda:1. Default: the best.")] = None,
) -> None:
    """Validate a recipe and print every value with its origin."""
    from trimtab.recipe.load import build_json_schema, load_recipe, render_resolved_yaml

    if schema:
        echo(json.dumps(build_json_schema(), indent=1))
        return
    from trimtab.build.recipe_check import missing_parts

    flags = {"model": model, "data.train": data, "data.eval": eval_data, "task": task}
    loaded = load_recipe(recipe, flags, sets or [], extra_check=missing_parts)
    if not resume:
        echo(render_resolved_yaml(loaded))
        return
    from trimtab.commands.verify_resume import prove_resume

    proof = prove_resume(loaded.recipe, device)
    show_proof(proof)
    if proof.difference:
        raise typer.Exit(1)


def plan(
    recipe: RecipeFile = None,
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    memory: Annotated[str | None, typer.Option(help="Memory budget, such as 8GiB. Default: all device memory.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Plan for another GPU: t4, rtx-4090, a100 …")] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Host memory. Default: what is free; with --gpu twice that GPU's, at least 64GiB."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row, instead of the lengths in the data.")
    ] = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest batch size that fits.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="Find the longest row length that fits.")] = False,
    device: Device = None,
    sets: Sets = None,
    quiet: Quiet = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print all plans as one JSON object.")] = False,
) -> None:
    """Predict memory and speed of training; show the chosen plan."""
    from trimtab.planner.survey import survey

    set_verbosity(quiet, False)
    if gpu is not None and device is not None:
        raise RecipeError(
            "--gpu and --device cannot be used together", "pass --gpu for a GPU that is not in this machine"
        )
    source = data if length is None else "none"  # with a fixed length no data is read, but a recipe must name some
    flags = {"model": model, "data.train": source, "data.eval": eval_data, "task": task, "memory.budget": memory}
    loaded = load_with_flags(recipe, sets, flags)
    found = survey(
        loaded.recipe,
        gpu=gpu,
        device=device,
        host_memory=host_memory,
        length=length,
        max_batch=max_batch,
        longest=longest,
    )
    show_plans(found, as_json=json_lines)
    if found.problem is not None:
        raise DoesNotFit(found.problem)


def data_show(
    recipe: RecipeFile = None,
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    examples: Annotated[int, typer.Option(min=1, help="Number of rows to print.")] = 3,
    sets: Sets = None,
) -> None:
    """Print rows as the model sees them, with lengths and labels."""
    from trimtab.build.data_report import report_data
    from trimtab.data.report_table import render

    flags = {"model": model, "data.train": data, "data.eval": eval_data, "task": task}
    show(render(report_data(load_with_flags(recipe, sets, flags).recipe, examples)))
