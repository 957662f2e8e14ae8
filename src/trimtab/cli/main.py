"""Door 3: the command line. It parses and hands over; no logic lives here."""

import sys
from typing import Annotated

import typer

import trimtab
from trimtab.errors import TrimtabError

app = typer.Typer(
    name="trimtab",
    help="Fine-tune transformers on the hardware you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


def main() -> None:
    """Run the command line; a mistake of the user ends in one message and its exit code, never in a traceback."""
    try:
        app()
    except TrimtabError as error:
        typer.secho(f"error: {error}", err=True, fg="red" if sys.stderr.isatty() else None)
        sys.exit(error.exit_code)
