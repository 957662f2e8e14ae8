"""Commands on a trained model: predict and merge."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.options import Device, NewFolder
from trimtab.cli.output import echo, show_merged
from trimtab.errors import DataError, RecipeError, as_argument


def predict(
    model: Annotated[str, typer.Argument(help="Run, folder, Hub name, or best:EXPERIMENT.")],
    file: Annotated[
        Path | None, typer.Argument(help="Input: csv, tsv, jsonl, json, parquet or txt; - for stdin.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for predictions: .csv, .tsv, .jsonl or .parquet.")] = None,
    text: Annotated[str | None, typer.Option(help="Text to predict, instead of a file.")] = None,
    column: Annotated[str | None, typer.Option(help="Column of the file with the text.")] = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add each label's probability.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite the --out file if it exists.")] = False,
    safe_csv: Annotated[
        bool, typer.Option("--safe-csv", help="Write an apostrophe before cells that a spreadsheet would compute.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate (causal models).")] = 100,
    device: Device = None,
) -> None:
    """Predict labels or generate text with a trained model."""
    from trimtab.hardware.inventory import find_device
    from trimtab.inference.load import load
    from trimtab.inference.predict_file import check_files, predict_file, predict_lines
    from trimtab.inference.predict_text import predict_text

    if (file is None) == (text is None):
        raise RecipeError("pass either a FILE or --text", 'trimtab predict MODEL --text "…"')
    where = find_device(device)
    sizes: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": max_new_tokens}
    if file is None:
        if out is not None or column is not None or probabilities or overwrite or safe_csv:
            found = "--out, --column, --probabilities, --overwrite and --safe-csv need a FILE, not --text"
            raise RecipeError(found, "remove them")
        echo(predict_text(load(model, device=where), str(text), max_new_tokens=max_new_tokens))
    elif str(file) == "-":
        if out is not None or column is not None or overwrite or safe_csv:
            raise RecipeError(
                "stdin contains one text per line, and predictions go to stdout",
                "remove options of files: trimtab predict MODEL - < texts.txt > predicted.jsonl",
            )
        lines = predict_lines(load(model, device=where), _read_stdin(), probabilities=probabilities, **sizes)
        echo(lines, nl=False)
    elif out is None:
        raise RecipeError("--out is missing", f"--out {as_argument(f'{file.stem}-predicted.csv')}")
    else:
        output = {"overwrite": overwrite, "safe_csv": safe_csv}
        check_files(file, out, **output)
        columns: dict[str, Any] = {"text": column, "probabilities": probabilities}
        num_rows = predict_file(load(model, device=where), file, out, **output, **columns, **sizes)
        echo(f"{num_rows:,} rows written to {out}")


def _read_stdin() -> str:
    """Read standard input as UTF-8, whatever the locale."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"stdin is not UTF-8 ({error.reason})", "convert it: iconv -t UTF-8") from error


def merge(
    run: Annotated[str, typer.Argument(help="Run, or folder of an adapter.")],
    folder: NewFolder,
    onto: Annotated[
        str, typer.Option(help="Base to merge into: original, or dequantized if it was quantized.")
    ] = "original",
    rows: Annotated[int, typer.Option(help="Rows of the run's data to compare both models on.")] = 64,
    max_kl: Annotated[float | None, typer.Option(help="Maximum mean KL divergence. Default: 0.02.")] = None,
    min_agreement: Annotated[
        float | None, typer.Option(help="Minimum share of equal predictions. Default: 0.9.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write the model even if the comparison fails.")] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: auto (as the base), fp32, bf16, fp16.")] = "auto",
    device: Device = None,
) -> None:
    """Merge an adapter into its base model; compare predictions."""
    from trimtab.commands.merge import merge as merge_adapter

    limits = {"max_kl": max_kl, "min_agreement": min_agreement}
    given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    show_merged(merge_adapter(run, folder, onto=onto, num_rows=rows, force=force, dtype=dtype, device=device, **given))
