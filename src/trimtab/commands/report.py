"""`trimtab report`: write the report of a run again, or of several runs side by side, or serve it."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trimtab.checkpoint.disk_errors import cure_for_os_error
from trimtab.checkpoint.folder import write_file
from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.report.page.document import MARK, PAGE
from trimtab.report.page.run_files import FACTS, read_run
from trimtab.report.page.run_page import run_page
from trimtab.report.page.runs_page import runs_page
from trimtab.report.serve import report_server


def make_page(runs: Sequence[Path], tag: str | None = None) -> str:
    """Return the page of a run, or of several runs side by side."""
    found = [read_run(run) for run in runs]
    if len(found) > 1:
        return runs_page(found, tag)
    try:
        return run_page(found[0], tag)
    except (LookupError, TypeError, AttributeError, ValueError):  # other parts of the page need only the other files
        if not found[0].facts:
            raise
        say(f"{found[0].path / FACTS} is damaged: what it describes is left out of the report")
        return run_page(replace(found[0], facts={}), tag)


def write_page(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page.

    Args:
        runs: Folders of runs.
        out: The file; by default report.html in the folder of the run, or in the current folder for several runs.

    Returns:
        The file.

    Raises:
        RecipeError: A folder is not a run, or the file cannot be written, or is not a report.
    """
    text = make_page(runs)
    target = out or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    if target.is_dir():
        target = target / PAGE
    refuse_other_file(target)
    write_text(target, text)
    return target


def write_text(target: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        RecipeError: The file cannot be written.
    """
    try:
        write_file(target, text.encode())
    except OSError as error:
        cure = cure_for_os_error(error, "choose another --out")
        raise RecipeError(f"{target} cannot be written: {error.strerror or error}", cure) from error


def refuse_other_file(target: Path) -> None:
    """Refuse to replace any file that is not a page of trimtab.

    Raises:
        RecipeError: The file exists and is not a page of trimtab.
    """
    try:
        with target.open(encoding="utf-8", errors="replace") as file:
            if MARK not in file.read(2000):
                raise RecipeError(f"{target} exists and is not a trimtab report", "choose another --out")
    except (FileNotFoundError, NotADirectoryError):
        return  # reported when the page is written
    except OSError as error:
        raise RecipeError(f"{target} cannot be read: {error.strerror or error}", "choose another --out") from error


def watch(runs: Sequence[Path], port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; it refreshes itself.

    Args:
        runs: Folders of runs.
        port: Port on this machine; 0 chooses a free one.
        tell: Called with a line for the user.
    """
    make_page(runs)  # a folder that is not a run is an error now, not in the browser
    with report_server(lambda tag: make_page(runs, tag), port) as server:
        tell(f"http://127.0.0.1:{server.server_address[1]} shows the report and refreshes itself; stop it with Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
