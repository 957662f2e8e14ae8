"""Commands that train: train, resume, compare and demo."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.options import (
    DataSource,
    Device,
    EvalSource,
    Fresh,
    Json,
    Model,
    Quiet,
    RecipeFile,
    Resume,
    RunFolder,
    Sets,
    Task,
)
from trimtab.cli.options import load as load_with_flags
from trimtab.cli.output import echo, set_verbosity, show_demo, show_result, show_table

if TYPE_CHECKING:
    from trimtab.run import Result

INTERRUPTED = 130  # the exit code that a shell reports for SIGINT


def train(
    recipe: RecipeFile = None,
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    text: Annotated[str | None, typer.Option(help="Column with the text.")] = None,
    label: Annotated[str | None, typer.Option(help="Column with the label.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Number of passes over the training data.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many optimizer steps.")] = None,
    max_time: Annotated[str | None, typer.Option(help="Save and stop after this time, such as 3h or 45min.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per optimizer step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Maximum tokens per row; longer rows are truncated.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, tf32, fp16, bf16 or bf16-pure.")] = None,
    budget: Annotated[str | None, typer.Option("--memory", help="Memory budget, such as 8GiB.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run. Default: runs/EXPERIMENT/NAME.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    fast_dev_run: Annotated[
        bool | None, typer.Option("--fast-dev-run", help="Smoke-test the whole run on a few steps.")
    ] = None,
    overfit_batches: Annotated[int | None, typer.Option(help="Train and evaluate on this many batches only.")] = None,
    limit_train: Annotated[str | None, typer.Option(help="Training batches per epoch: 100, or 10%.")] = None,
    limit_eval: Annotated[str | None, typer.Option(help="Batches per evaluation: 100, or 10%.")] = None,
    device: Device = None,
    resume: Resume = False,
    fresh: Fresh = False,
    sets: Sets = None,
    quiet: Quiet = False,
    json_lines: Json = False,
) -> None:
    """Train a model from a recipe or flags and save the best one."""
    from trimtab.run import fit

    flags = {
        "model": model,
        "data.train": data,
        "data.eval": eval_data,
        "task": task,
        "data.text": text,
        "data.label": label,
        "train.epochs": epochs,
        "train.max_steps": max_steps,
        "train.max_time": max_time,
        "train.batch_size": batch_size,
        "train.lr": lr,
        "data.max_length": max_length,
        "train.precision": precision,
        "memory.budget": budget,
        "seed": seed,
        "out": out,
        "name": name,
        "limits.fast_dev_run": fast_dev_run,
        "limits.overfit_batches": overfit_batches,
        "limits.train": limit_train,
        "limits.eval": limit_eval,
    }
    mode = set_verbosity(quiet, json_lines)
    loaded = load_with_flags(recipe, sets, flags)
    finish(fit(loaded, progress=mode, device=device, resume=resume, fresh=fresh), mode)


def resume(
    run: RunFolder,
    from_step: Annotated[str | None, typer.Option("--from", help="Checkpoint to resume from: step-100.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder to copy a mirror to. Default: runs/EXPERIMENT/NAME.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Agree to execute Python code of the model that the run names.")
    ] = False,
    device: Device = None,
    sets: Sets = None,
    quiet: Quiet = False,
    json_lines: Json = False,
) -> None:
    """Resume a stopped or killed run, or extend a finished one."""
    from trimtab.run import resume as resume_run

    mode = set_verbosity(quiet, json_lines)
    result = resume_run(
        run,
        from_step=from_step,
        sets=sets or [],
        out=out,
        trust_remote_code=trust_remote_code,
        progress=mode,
        device=device,
    )
    finish(result, mode)


def finish(result: "Result", mode: str) -> None:
    """Print the result of a run, and exit with 75 if it was interrupted, with 1 if its state was not saved."""
    if mode == "auto" and result.is_main_process:
        with suppress(OSError):  # standard output may be a file on a full disk; the run itself is complete
            show_result(result)
    _end(result)


def _end(result: "Result") -> None:
    if result.fit.interruption:
        raise typer.Exit(75)
    if result.fit.save_failure:
        echo(f"error: training finished, but its last state was not saved: {result.fit.save_failure}", err=True)
        raise typer.Exit(1)


def compare(
    recipe: RecipeFile = None,
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    vary: Annotated[list[str] | None, typer.Option(help="Key and values: --vary train.precision=fp32,bf16.")] = None,
    study: Annotated[
        str | None,
        typer.Option(
            help="Predefined variants: precisions, optimizers, accumulation, checkpointing, methods, attention, "
            "padding or compile."
        ),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="Measure N random combinations of --vary, chosen by the seed.")
    ] = None,
    variants: Annotated[Path | None, typer.Option(help="YAML file of variants: {name: {key: value, …}, …}.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps per run.")] = 200,
    repeats: Annotated[int, typer.Option(help="Runs per variant, interleaved.")] = 2,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps excluded from timing. Default: a tenth.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results. Default: runs/EXPERIMENT/compare-N.")] = None,
    sets: Sets = None,
    device: Device = None,
    track: Annotated[bool, typer.Option("--track", help="Log all variants to MLflow.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Stop a run that takes longer than this, such as 10min.")] = None,
    quiet: Quiet = False,
) -> None:
    """Measure memory, speed and loss of variants of a recipe."""
    from trimtab.commands.compare import Protocol, check_variants, make_folder
    from trimtab.commands.compare import compare as run_comparison
    from trimtab.commands.tracked_comparison import track_comparison
    from trimtab.commands.variants import choose_variants
    from trimtab.report.tables import anatomy_table, main_table, notes, write_folder
    from trimtab.report.verdict import verdict
    from trimtab.units import parse_seconds

    set_verbosity(quiet, False)
    flags = {"model": model, "data.train": data, "data.eval": eval_data, "task": task}
    base = load_with_flags(recipe, sets, flags).recipe
    chosen = choose_variants(base, vary or [], study, variants, sample)
    limit = None if timeout is None else parse_seconds(timeout)
    protocol = Protocol(steps, repeats, warmup_steps, device, limit)
    origin = str(variants or ("--vary" if vary else "--study"))
    candidates = check_variants(recipe, chosen, sets or [], flags, origin=origin)
    folder = make_folder(base, out)
    found = run_comparison(base, candidates, protocol, logs=folder / "logs")
    if not quiet:  # first: a full disk must not hide what took long to measure
        show_table(*main_table(found))
        show_table(*anatomy_table(found))
        echo("\n" + "\n\n".join([verdict(found), *notes(found)]))
    files = write_folder(found, folder, f"Variants of {recipe or 'a recipe'}")
    if not quiet:
        echo("\n" + " ".join(str(file) for file in files))
    if track:  # last: a server that does not answer must not hide the results
        line = track_comparison(found, base, folder, files)
        if not quiet:
            echo(line)
    if not found.is_complete:
        raise typer.Exit(INTERRUPTED)


def demo(
    lm: Annotated[bool, typer.Option("--lm", help="Train a small decoder instead of a classifier.")] = False,
    out: Annotated[str | None, typer.Option(help="Folder of the run.")] = None,
    resume: Resume = False,
    fresh: Fresh = False,
    quiet: Quiet = False,
    json_lines: Json = False,
) -> None:
    """Fine-tune a small model on this machine in about a minute."""
    from trimtab.commands.demo import classifier_recipe, language_model_recipe
    from trimtab.run import fit

    mode = set_verbosity(quiet, json_lines)
    recipe = language_model_recipe(out) if lm else classifier_recipe(out)
    result = fit(recipe, progress=mode, resume=resume, fresh=fresh)
    if mode == "auto" and not result.fit.interruption:
        show_demo(result)
    _end(result)
