"""Door 3: the command line. It parses and hands over; no logic lives here, and nothing heavy is imported at the top."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

import trimtab
from trimtab.checkpoint.disk_errors import is_no_room, refused_path
from trimtab.cli.output import keep_exit_code, progress_mode, show_table
from trimtab.errors import Stopped, TrimtabError

_INTERRUPTED = 130  # as a shell reports SIGINT

app = typer.Typer(
    name="trimtab",
    help="Fine-tune transformers on the hardware you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Look at data as the model sees it.", no_args_is_help=True)
app.add_typer(data_app, name="data")
track_app = typer.Typer(help="Runs on an MLflow server.", no_args_is_help=True)
app.add_typer(track_app, name="track")

RecipeFile = Annotated[Path | None, typer.Argument(help="A recipe (YAML). Not needed: flags alone will do.")]
Model = Annotated[str | None, typer.Option(help="Hub name, folder, a run, or best:EXPERIMENT.")]
DataSource = Annotated[str | None, typer.Option("--data", help="File, folder, glob or hub name to train on.")]
EvalSource = Annotated[str | None, typer.Option("--eval", help="Held-out data; split off if left out.")]
Task = Annotated[str | None, typer.Option(help="classify, regress, causal-lm, chat, seq2seq or masked-lm.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any key of the recipe: --set train.lr=3e-5")]
Uri = Annotated[str | None, typer.Option(help="Tracking server; MLFLOW_TRACKING_URI, or the store below runs.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trimtab {trimtab.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fine-tune transformers on the hardware you have."""


def _loaded(recipe: Path | None, sets: list[str] | None, **flags: Any) -> Any:
    """A recipe from a file, plain flags and --set, in this order; later wins."""
    from trimtab.recipe.load import load_recipe

    given = {key.replace("__", "."): value for key, value in flags.items() if value is not None}
    return load_recipe(recipe, given, sets or [])


@app.command()
def train(
    recipe: RecipeFile = None,
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    text: Annotated[str | None, typer.Option(help="Column of the text.")] = None,
    label: Annotated[str | None, typer.Option(help="Column of the label.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many optimizer steps.")] = None,
    max_time: Annotated[str | None, typer.Option(help="Stop after so long: 3h, 45min.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows for each optimizer step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a row; longer ones are cut.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, tf32, fp16, bf16 or bf16-pure.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run; runs/EXPERIMENT/NAME if left out.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    fast_dev_run: Annotated[bool | None, typer.Option("--fast-dev-run", help="Try everything on a few steps.")] = None,
    overfit_batches: Annotated[int | None, typer.Option(help="Train and evaluate on so many batches only.")] = None,
    limit_train: Annotated[str | None, typer.Option(help="Batches of an epoch: 100, or a share of them: 10%.")] = None,
    limit_eval: Annotated[str | None, typer.Option(help="Batches of an evaluation: 100, or a share: 10%.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1 …; found if left out.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that is there, if there is one.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace the run that is there.")] = False,
    sets: Sets = None,
    quiet: Quiet = False,
    json_lines: Json = False,
) -> None:
    """Train what a recipe, or the flags, say; keep the best model."""
    from trimtab.run import fit

    loaded = _loaded(
        recipe,
        sets,
        model=model,
        data__train=data,
        data__eval=eval_data,
        task=task,
        data__text=text,
        data__label=label,
        train__epochs=epochs,
        train__max_steps=max_steps,
        train__max_time=max_time,
        train__batch_size=batch_size,
        train__lr=lr,
        data__max_length=max_length,
        train__precision=precision,
        seed=seed,
        out=out,
        name=name,
        limits__fast_dev_run=fast_dev_run,
        limits__overfit_batches=overfit_batches,
        limits__train=limit_train,
        limits__eval=limit_eval,
    )
    mode = progress_mode(quiet, json_lines)
    _ended(fit(loaded, progress=mode, device=device, resume=resume, fresh=fresh), mode)


def _ended(result: Any, mode: str) -> None:
    """Show how a run ended, and leave with its exit code."""
    from trimtab.cli.output import show_result

    if mode in ("auto", "plain", "bar") and result.is_main_process:
        with suppress(OSError):  # the run is done, also if its output goes to a disk that is full
            show_result(result)
    if result.fit.interruption:
        raise typer.Exit(75)
    if result.fit.save_failure:
        typer.secho(f"error: the run is done, but its last state was not saved: {result.fit.save_failure}", err=True)
        raise typer.Exit(1)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its mirror.")],
    from_step: Annotated[str | None, typer.Option("--from", help="The state to go on from: step-100.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for a mirror's copy; runs/EXPERIMENT/NAME if left out.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1 …; found if left out.")] = None,
    sets: Sets = None,
    quiet: Quiet = False,
    json_lines: Json = False,
) -> None:
    """Go on with a run that was killed or stopped, or train a finished one for longer."""
    from trimtab.run import resume as go_on

    mode = progress_mode(quiet, json_lines)
    _ended(go_on(run, from_step=from_step, sets=sets or [], out=out, progress=mode, device=device), mode)


@app.command()
def checkpoints(run: Annotated[Path, typer.Argument(help="A run's folder, or its mirror.")]) -> None:
    """List the saved states of a run: step, metric, size, valid or why not."""
    from trimtab.checkpoint.checkpoints_folder import Shelf
    from trimtab.cli.output import show_checkpoints
    from trimtab.errors import RecipeError
    from trimtab.runs.run_folder import CHECKPOINTS, find_run

    status = find_run(run)
    if status is None:
        raise RecipeError(f"{run} is no run", "pass a run's folder; trimtab runs lists them")
    show_checkpoints(Shelf(run / CHECKPOINTS).checkpoints(checksums=True), status)


@app.command()
def init(
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    to: Annotated[Path, typer.Option(help="Where to write it.")] = Path("recipe.yaml"),
) -> None:
    """Write a commented recipe to start from."""
    from trimtab.errors import RecipeError
    from trimtab.recipe.load import commented_yaml

    if to.exists():
        raise RecipeError(f"{to} exists", "choose another with --to, or remove it")
    given = {"model": model, "data.train": data, "data.eval": eval_data, "task": task}
    text = commented_yaml({key: value for key, value in given.items() if value is not None})
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{to} cannot be written: {error.strerror}", "choose another with --to") from error
    typer.echo(f"{to} written; next: trimtab check {to}")


@app.command()
def check(
    recipe: RecipeFile = None,
    sets: Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema for editors.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Kill a few steps of it and see that resuming is exact.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="For --resume: cpu, cuda:1 …; found if left out.")] = None,
) -> None:
    """Validate a recipe, see that what it names is there, and print it with the origin of every value."""
    if schema:
        import json

        from trimtab.recipe.load import recipe_json_schema

        typer.echo(json.dumps(recipe_json_schema(), indent=1))
        return
    from trimtab.build.recipe_check import missing_parts
    from trimtab.recipe.load import load_recipe, resolved_yaml

    loaded = load_recipe(recipe, {}, sets or [], further=missing_parts)
    if not resume:
        typer.echo(resolved_yaml(loaded))
        return
    from trimtab.cli.output import show_proof
    from trimtab.commands.verify_resume import prove_resume

    proof = prove_resume(loaded.recipe, device)
    show_proof(proof)
    if proof.difference:
        raise typer.Exit(1)


@app.command()
def plan(
    recipe: RecipeFile = None,
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    memory: Annotated[str | None, typer.Option(help="The budget: 8GiB; all of the device if left out.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU that is not here: t4, rtx-4090, a100 …")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a row; no data is read then.")] = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="Find the longest rows that fit.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1 …; found if left out.")] = None,
    sets: Sets = None,
    quiet: Quiet = False,
    json_lines: Annotated[bool, typer.Option("--json", help="The whole ladder as one JSON object.")] = False,
) -> None:
    """Show, before anything runs, which ways to train fit into memory, how fast they are, and which is taken."""
    from trimtab.cli.output import show_plans
    from trimtab.errors import DoesNotFit, RecipeError
    from trimtab.run import look_at_plans

    progress_mode(quiet, False)
    if gpu is not None and device is not None:
        raise RecipeError("--gpu is for a device that is not here, --device for one that is", "leave one of them out")
    source = data if length is None else "none"  # the rows of a length need no source
    loaded = _loaded(
        recipe, sets, model=model, data__train=source, data__eval=eval_data, task=task, memory__budget=memory
    )
    found = look_at_plans(loaded, gpu=gpu, device=device, length=length, max_batch=max_batch, longest=longest)
    show_plans(found, as_json=json_lines)
    if found.problem is not None:
        raise DoesNotFit(found.problem)


@data_app.command("show")
def data_show(
    recipe: RecipeFile = None,
    model: Model = None,
    data: DataSource = None,
    eval_data: EvalSource = None,
    task: Task = None,
    examples: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 3,
    sets: Sets = None,
) -> None:
    """Print rows as the model sees them: tokens, which carry loss, lengths, labels, duplicates."""
    from trimtab.cli.output import show
    from trimtab.data.report import render
    from trimtab.run import look_at_data

    loaded = _loaded(recipe, sets, model=model, data__train=data, data__eval=eval_data, task=task)
    show(render(look_at_data(loaded, examples)))


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="A run, a folder, a hub name, or best:EXPERIMENT.")],
    file: Annotated[
        Path | None, typer.Argument(help="csv, tsv, jsonl, json, parquet or txt; - reads lines from standard input.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the rows with predictions: .csv, .tsv, .jsonl or .parquet.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="One line of text instead of a file.")] = None,
    column: Annotated[str | None, typer.Option(help="Column of the text in the file.")] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Add a column with the probability of every label.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --out if it exists.")] = False,
    batch_size: Annotated[int, typer.Option(help="Rows at a time.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="Length of what causal models write.")] = 100,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1 …; found if left out.")] = None,
) -> None:
    """Predict labels or text with a trained model."""
    from trimtab.errors import RecipeError
    from trimtab.hardware.inventory import find_device
    from trimtab.inference.load import load
    from trimtab.inference.predict_file import check_files, predict_file, predict_lines
    from trimtab.inference.predict_text import predict_text

    if (file is None) == (text is None):
        raise RecipeError("predict wants a FILE or --text", 'trimtab predict MODEL --text "…"')
    where = find_device(device)
    if text is not None:
        if out is not None or column is not None or probabilities or overwrite:
            raise RecipeError(
                "--out, --column, --probabilities and --overwrite belong to a FILE, not to --text", "leave them out"
            )
        typer.echo(predict_text(load(model, device=where), text, max_new_tokens=max_new_tokens))
        return
    assert file is not None
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "probabilities": probabilities,
    }
    if str(file) == "-":
        if out is not None or column is not None or overwrite:
            raise RecipeError(
                "standard input has one text a line, and its predictions go to standard output",
                "leave --out, --column and --overwrite out: trimtab predict MODEL - < texts.txt > predicted.jsonl",
            )
        typer.echo(predict_lines(load(model, device=where), read_stdin(), **settings), nl=False)
        return
    if out is None:
        raise RecipeError("--out is missing: where should the predictions go?", f"--out {file.stem}-predicted.csv")
    check_files(file, out, overwrite=overwrite)
    num_rows = predict_file(load(model, device=where), file, out, text=column, overwrite=overwrite, **settings)
    typer.echo(f"{num_rows:,} rows written to {out}")


@app.command()
def merge(
    run: Annotated[str, typer.Argument(help="A run, or the folder of an adapter.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the model: a new folder.")],
    onto: Annotated[
        str, typer.Option(help="original, or (of qlora) dequantized: the values of the 4 bits.")
    ] = "original",
    rows: Annotated[int, typer.Option(help="Rows of the run's data on which both are compared.")] = 64,
    max_kl: Annotated[float | None, typer.Option(help="Largest mean KL divergence; 0.02 if left out.")] = None,
    min_agreement: Annotated[
        float | None, typer.Option(help="Smallest share of equal answers; 0.9 if left out.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write it however much they differ.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto (as the base has them), fp32, bf16, fp16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1 …; found if left out.")] = None,
) -> None:
    """Make one plain model of an adapter and its base, if it answers as the adapter does."""
    from trimtab.cli.output import show_merged
    from trimtab.commands.merge import merge as merge_adapter

    limits = {"max_kl": max_kl, "min_agreement": min_agreement}
    given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    show_merged(merge_adapter(run, folder, onto=onto, num_rows=rows, force=force, dtype=dtype, device=device, **given))


@app.command()
def runs(root: Annotated[Path, typer.Argument(help="Where to look.")] = Path("runs")) -> None:
    """List runs: state, step, best metric, age."""
    from trimtab.cli.output import show_runs
    from trimtab.runs.run_folder import list_runs

    show_runs(list_runs(root), root)


@app.command()
def best(
    experiment: Annotated[str, typer.Argument(help="Of which runs.")],
    metric: Annotated[str | None, typer.Option(help="accuracy, f1 …; that by which models were chosen.")] = None,
    uri: Uri = None,
    json_lines: Json = False,
) -> None:
    """Show the runs of an experiment, the best first."""
    from trimtab.cli.output import show_ranking
    from trimtab.tracking.mlflow.registry import rank_runs

    show_ranking(rank_runs(experiment, metric, uri), as_json=json_lines)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="An experiment (its best model), or models:/NAME@best.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the model: a new folder.")],
    metric: Annotated[str | None, typer.Option(help="What makes a model of an experiment the best.")] = None,
    uri: Uri = None,
) -> None:
    """Fetch a model from the tracking server, as a Hugging Face folder."""
    from trimtab.tracking.mlflow.registry import pull_model

    found = pull_model(model, folder, metric=metric, uri=uri)
    typer.echo(f"{folder}: {found.words}")


@track_app.command("sync")
def track_sync(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    to: Annotated[str | None, typer.Option(help="Another server: http://…, sqlite:///…, local.")] = None,
) -> None:
    """Bring a run's whole history to its tracking server, or to another one; what is there already stays."""
    from trimtab.build import sync_run

    typer.echo(sync_run(run, to))


@app.command()
def ui(
    root: Annotated[Path, typer.Argument(help="Where the runs are.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Of the page.")] = 5000,
) -> None:
    """Open MLflow's own page on the runs below a folder; Ctrl-C ends it."""
    from trimtab.tracking.mlflow.ui import serve_page

    raise typer.Exit(serve_page(root, port, typer.echo))


@app.command()
def doctor() -> None:
    """Say what this machine is, what is installed, what is native, and what is missing."""
    from trimtab.hardware.doctor import examine

    show_table(("", "found", "cure"), [(f.topic, f.found, f.cure) for f in examine()])


@app.command()
def demo(
    lm: Annotated[bool, typer.Option("--lm", help="A small decoder instead of a classifier.")] = False,
    out: Annotated[str | None, typer.Option(help="Folder of the run.")] = None,
    quiet: Quiet = False,
    json_lines: Json = False,
) -> None:
    """Fine-tune a real pretrained model on real text, on this machine, in about a minute."""
    from trimtab.cli.output import show_demo
    from trimtab.commands.demo import run_classifier_demo, run_language_model_demo

    mode = progress_mode(quiet, json_lines)
    result = (run_language_model_demo if lm else run_classifier_demo)(mode, out)
    if mode == "auto":
        show_demo(result)


@app.command()
def config(
    to: Annotated[Path, typer.Option(help="Where to write it; launch reads launch.yaml by itself.")] = Path(
        "launch.yaml"
    ),
    default: Annotated[bool, typer.Option("--default", help="Ask nothing: everything is found.")] = False,
) -> None:
    """Write a commented launch file: how many processes, on which hosts."""
    from trimtab.cli.output import ask
    from trimtab.distributed.launch.questions import QUESTIONS, write_launch_file

    typer.echo(write_launch_file(to, [] if default else QUESTIONS, ask))


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    target: Annotated[str, typer.Argument(help="A script, a recipe (YAML), or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script gets.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="The target is a module, as in python -m.")] = False,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="A launch file; launch.yaml is read by itself.")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="On each host; one for each GPU if left out.")] = None,
    hosts: Annotated[str | None, typer.Option(help="Their names: a,b,c. Run the same command on each.")] = None,
    num_hosts: Annotated[int | None, typer.Option(help="Instead of --hosts: how many.")] = None,
    host_index: Annotated[int | None, typer.Option(help="Which one this is, from 0.")] = None,
    address: Annotated[str | None, typer.Option(help="Of the host with index 0.")] = None,
    port: Annotated[int | None, typer.Option(help="Of the meeting point; a free one if left out.")] = None,
    max_restarts: Annotated[int | None, typer.Option(help="Start all again so often after a failure.")] = None,
    log_dir: Annotated[str | None, typer.Option(help="Where the other ranks write; runs/logs if left out.")] = None,
    cpu: Annotated[bool | None, typer.Option("--cpu", help="Train on the CPU although there are GPUs.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, show the torchrun command, start nothing.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Start a script or a recipe on several processes, here or on several hosts."""
    from trimtab.cli.output import show_launch
    from trimtab.distributed.launch.command import plan_launch
    from trimtab.distributed.launch.file import read_launch_file, split_hosts
    from trimtab.distributed.launch.run import start

    given = {
        "processes": processes,
        "hosts": None if hosts is None else split_hosts(hosts),
        "num_hosts": num_hosts,
        "host_index": host_index,
        "address": address,
        "port": port,
        "max_restarts": max_restarts,
        "log_dir": log_dir,
        "cpu": cpu,
    }
    progress_mode(quiet, False)
    file = read_launch_file(config_file)
    plan = plan_launch(target, arguments or [], module=module, file=file, given=given)
    if dry_run or not quiet:
        show_launch(plan, to_stderr=not dry_run)
    if dry_run:
        return
    ending = start(plan)
    if ending.message and not (quiet and ending.code == 75):
        typer.echo(ending.message, err=True)
    raise typer.Exit(ending.code)


@app.command()
def compare(
    recipe: RecipeFile = None,
    vary: Annotated[
        list[str] | None, typer.Option(help="A key and its values: --vary train.precision=fp32,bf16")
    ] = None,
    study: Annotated[
        str | None, typer.Option(help="precisions, optimizers, accumulation, checkpointing or methods.")
    ] = None,
    variants: Annotated[Path | None, typer.Option(help="A YAML file: {name: {key: value, …}, …}.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 200,
    repeats: Annotated[int, typer.Option(help="Runs of each variant, interleaved.")] = 2,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps not timed; a tenth if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; runs/EXPERIMENT/compare-N.")] = None,
    sets: Sets = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1 …; found if left out.")] = None,
    timeout: Annotated[str | None, typer.Option(help="End a run that takes longer: 10min.")] = None,
    quiet: Quiet = False,
) -> None:
    """Measure variants of a recipe side by side: memory, speed, loss; each run in a fresh process."""
    from trimtab.commands.compare import Protocol, candidates_of, make_folder
    from trimtab.commands.compare import compare as run_comparison
    from trimtab.commands.variants import choose_variants
    from trimtab.report.tables import anatomy_table, main_table, notes, write_folder
    from trimtab.report.verdict import verdict
    from trimtab.units import parse_seconds

    progress_mode(quiet, False)
    base = _loaded(recipe, sets).recipe
    chosen = choose_variants(base, vary or [], study, variants)
    limit = None if timeout is None else parse_seconds(timeout)
    protocol = Protocol(steps, repeats, warmup_steps, device, limit)
    candidates = candidates_of(recipe, chosen, sets or [])
    folder = make_folder(base, out)
    found = run_comparison(base, candidates, protocol, logs=folder / "logs")
    files = write_folder(found, folder, f"Variants of {recipe or 'a recipe'}")
    if not quiet:
        show_table(*main_table(found))
        show_table(*anatomy_table(found))
        lines = [verdict(found), *notes(found), " ".join(str(file) for file in files)]
        typer.echo("\n" + "\n\n".join(lines))
    if not found.is_complete:
        raise typer.Exit(_INTERRUPTED)


def read_stdin() -> str:
    """What was piped into the command; UTF-8 in any locale."""
    from trimtab.errors import DataError

    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not UTF-8 ({error.reason})", "pipe it through iconv -t UTF-8") from error


def main() -> None:
    """Run the command line; a mistake of the user ends in one message and its exit code, never in a traceback."""
    try:
        app()
    except Stopped as stopped:
        _tell(str(stopped))
        sys.exit(stopped.exit_code)
    except TrimtabError as error:
        _tell(f"error: {error}", fg="red" if sys.stderr.isatty() else None)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:  # typer turns a KeyboardInterrupt into this, without a word
            _tell("stopped")
        raise
    except OSError as error:
        if not is_no_room(error):
            raise
        place = refused_path(error) or "the disk that this was written to"
        _tell(f"error: {place}: {error.strerror}\n  cure: make room on that disk")
        sys.exit(1)
    finally:
        keep_exit_code()


def _tell(text: str, fg: str | None = None) -> None:
    """Write to standard error, which may be a file on a full disk: the exit code still tells."""
    with suppress(OSError):
        typer.secho(text, err=True, fg=fg)
