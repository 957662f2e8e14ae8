"""The command line: register the commands, run one, and turn errors into messages and exit codes.

The commands are in the other files of this folder, one file per group. They parse and call the library; heavy imports
happen inside them, which keeps `trimtab --help` fast.
"""

import errno
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

import trimtab
from trimtab.addresses import path_problem, redact
from trimtab.checkpoint.disk_errors import failed_path, is_disk_full, is_not_allowed
from trimtab.cli.cluster import cluster
from trimtab.cli.distill import distill
from trimtab.cli.end_signals import EndSignals
from trimtab.cli.evaluate import evaluate
from trimtab.cli.export import export
from trimtab.cli.machine import config, doctor, launch
from trimtab.cli.memory import memory
from trimtab.cli.model import merge, predict
from trimtab.cli.output import echo, flush_streams
from trimtab.cli.quantize import quantize
from trimtab.cli.recipe import check, convert, data_show, init, plan
from trimtab.cli.report import report
from trimtab.cli.runs import best, checkpoints, pull, runs, track_sync, ui
from trimtab.cli.shrink import shrink
from trimtab.cli.train import INTERRUPTED, compare, demo, resume, train
from trimtab.errors import RecipeError, Stopped, TrimtabError
from trimtab.hardware.extras import import_failure

app = typer.Typer(name="trimtab", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# in the order in which --help lists them
for _command in (train, resume, checkpoints, init, check, plan, memory, predict, merge, runs, report, best, pull, ui):
    app.command()(_command)
app.command()(doctor)
app.command()(demo)
app.command()(config)
app.command(context_settings={"allow_interspersed_args": False})(launch)
app.command()(compare)
app.command()(shrink)
app.command()(evaluate)
app.command()(quantize)
app.command()(cluster)
app.command()(export)
app.command()(distill)
app.command()(convert)
_data = typer.Typer(help="Inspect training data.", no_args_is_help=True)
_data.command("show")(data_show)
app.add_typer(_data, name="data")
_track = typer.Typer(help="Manage runs on an MLflow server.", no_args_is_help=True)
_track.command("sync")(track_sync)
app.add_typer(_track, name="track")


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"trimtab {trimtab.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune transformers on the hardware you have."""


def main() -> None:
    """Run the command line. A user error ends in one message and its exit code, never in a traceback."""
    with EndSignals() as signals:
        try:
            _run()
        except SystemExit as ended:
            if ended.code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this exit code and prints nothing
                _print_interrupted(signals)
                signals.end_process()
            if not ended.code:
                _end_rank()
            raise
        finally:
            flush_streams()


def _run() -> None:
    try:
        _check_current_folder()
        app()
    except Stopped as stopped:
        _print_error(str(stopped))
        sys.exit(stopped.exit_code)
    except TrimtabError as error:
        _print_error(f"error: {error}", fg="red" if sys.stderr.isatty() else None)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before typer has taken over
        sys.exit(INTERRUPTED)
    except OSError as error:
        place = failed_path(error)
        if is_disk_full(error):
            cure = "free space on that disk"
        elif is_not_allowed(error) and place is not None:
            cure = f"see its owner and permissions: {shlex.join(['ls', '-ld', str(Path(place).parent), place])}"
        elif error.errno == errno.ENAMETOOLONG:
            problem = path_problem(place or "") or error.strerror
            _print_error(f"error: {redact(place or 'a path')}: {problem}\n  cure: shorten it")
            sys.exit(RecipeError.exit_code)
        elif error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            cure = "pass another path"
        else:
            raise
        _print_error(f"error: {place or 'the output disk'}: {error.strerror}\n  cure: {cure}")
        sys.exit(1)
    except Exception as error:
        failure = import_failure(error)
        if failure is None:
            raise
        _print_error(f"error: {failure}", fg="red" if sys.stderr.isatty() else None)
        sys.exit(failure.exit_code)


def _check_current_folder() -> None:
    """Refuse a current folder that was deleted: libraries of torch end the process there without an exception."""
    try:
        os.getcwd()
    except OSError as error:
        raise RecipeError(f"the current folder does not exist any more: {error.strerror}", "cd FOLDER") from error


def _end_rank() -> None:
    if "trimtab.distributed.rendezvous" in sys.modules:
        from trimtab.distributed.process_exit import end_finished_rank, is_rank_of_many

        if is_rank_of_many():
            end_finished_rank()


def _print_interrupted(signals: EndSignals) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C while Python exits would print a traceback
    _print_error("stopped" if signals.received is None else f"stopped by {signals.received.name}")


def _print_error(text: str, fg: str | None = None) -> None:
    """Print to standard error. That may be a file on a full disk: the exit code must be right even then."""
    with suppress(OSError):
        echo(text, err=True, fg=fg)
