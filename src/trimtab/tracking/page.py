"""MLflow's own page, on the store beside the runs."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from trimtab.errors import RecipeError
from trimtab.tracking.uri import artifact_location, default_uri, local_uri, sqlite_file

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight more processes, for what runs here do not use
}


def serve_page(root: Path, port: int, tell: Callable[[str], None]) -> int:
    """Show the runs below a folder in a browser, until Ctrl-C.

    Args:
        root: Where the runs are; a run's own folder, or an experiment's, will do.
        port: Of the page, on this machine only.
        tell: Takes a line for the user.

    Returns:
        MLflow's exit code.
    """
    uri = _store(root)
    if sqlite_file(uri) is None and uri.startswith("http"):
        tell(f"the runs are on {uri}: open it in a browser")
        return 0
    _check_port(port)
    tell(f"http://127.0.0.1:{port} shows {uri}; Ctrl-C ends it")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", uri]
    files = artifact_location(uri)
    if files is not None:
        command += ["--default-artifact-root", files]
    process = subprocess.Popen(command, env={**_SETTINGS, **os.environ}, start_new_session=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:  # it has started others, which are in its session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        signal.signal(signal.SIGTERM, before)


def _store(root: Path) -> str:
    """The store of a folder of runs, of an experiment in it, or of a run."""
    for folder in (root, *root.absolute().parents[:2]):
        path = sqlite_file(local_uri(folder))
        if path is not None and path.is_file():
            return local_uri(folder)
    uri = default_uri(root)
    if sqlite_file(uri) is not None:
        raise RecipeError(
            f"no tracked runs below {root}: there is no {sqlite_file(uri)}",
            "pass the folder that holds the experiments; trimtab track sync RUN --to local tracks a run afterwards",
        )
    return uri


def _check_port(port: int) -> None:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            raise RecipeError(f"port {port} cannot be used: {error.strerror}", f"--port {port + 1}") from error
