"""`trimtab evaluate`: evaluate a model on labelled rows."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.options import Device, Json
from trimtab.cli.output import echo, show_table, shown
from trimtab.errors import DataError

if TYPE_CHECKING:
    from trimtab.commands.evaluate import EvaluationResult

# Messages about columns name keys of a recipe; on the command line they are options.
_OPTIONS = {
    **dict.fromkeys(("data.label", "data.target", "data.answer"), "--label"),
    **dict.fromkeys(("data.text", "data.messages", "data.prompt"), "--text"),
}


def evaluate(
    model: Annotated[str, typer.Argument(help="Run, folder, Hub name, or best:EXPERIMENT.")],
    data: Annotated[str | None, typer.Argument(help="Labelled rows. Default: the held-out rows of the run.")] = None,
    against: Annotated[str | None, typer.Option(help="Second model to compare with, on the same rows.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text column; pass it twice for pairs.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="Column with the label, or with the expected text.")] = None,
    rows: Annotated[int | None, typer.Option(help="Maximum number of rows, chosen at random.")] = None,
    worst: Annotated[int, typer.Option(help="Number of rows with the highest loss to list.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.json, confusion.png, worst_rows.csv.")] = None,
    track: Annotated[bool, typer.Option("--track", help="Log metrics and files to MLflow.")] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on labelled rows: metrics with intervals, confusion matrix, worst rows."""
    from trimtab.commands.evaluate import evaluate_model
    from trimtab.commands.evaluate import track as track_evaluation
    from trimtab.report.evaluation import check_evaluation_folder, write_evaluation

    if out is not None:  # checked before an evaluation that may take long
        check_evaluation_folder(out)
    columns = {"text": _one_or_list(text), "label": _one_or_list(label)}
    try:
        with shown(quiet=False, json_lines=as_json):
            result = evaluate_model(
                model, data, against=against, num_rows=rows, num_worst=worst, device=device, **columns
            )
    except DataError as error:
        raise DataError(error.problem, _with_options(error.cure)) from error
    _show(result, as_json)
    with ExitStack() as stack:
        folder = out
        if folder is None and track:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "evaluation"
        if folder is None:
            return
        files = write_evaluation(folder, result.evaluation, result.against, result.differences)
        lines = [] if out is None else [" ".join(str(file) for file in files)]
        lines += [track_evaluation(result, files)] if track else []
    if not as_json:
        echo("\n" + "\n".join(lines))


def _one_or_list(names: list[str] | None) -> str | list[str] | None:
    return names[0] if names and len(names) == 1 else names or None


def _with_options(cure: str) -> str:
    for key, option in _OPTIONS.items():
        cure = cure.replace(f"set {key} to", f"{option}").replace(key, option)
    return cure


def _show(result: "EvaluationResult", as_json: bool) -> None:
    from trimtab.report import evaluation as report

    found = result.evaluation
    if as_json:
        echo(json.dumps(report.as_dict(found, result.against, result.differences), ensure_ascii=False))
        return
    echo(f"{result.model} ({found.task_name}) on {found.num_rows:,} rows of {found.origin}\n")
    show_table(*report.metrics_table(found))
    tables = [report.labels_table(found)] if found.by_label else []
    tables += [report.confusion_table(found)] if found.confusion else []
    tables += [report.worst_table(found)] if found.worst else []
    for table in tables:
        echo()
        show_table(*table)
    if result.differences is not None:
        echo(f"\nfirst: {result.model}\nsecond: {result.other}\n")
        show_table(*report.differences_table(result.differences))
