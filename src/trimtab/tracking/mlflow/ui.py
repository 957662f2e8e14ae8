"""`trimtab ui`: start MLflow's UI on the store of a folder of runs."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trimtab.addresses import redact
from trimtab.errors import RecipeError, TrimtabError
from trimtab.tracking.mlflow.uri import artifact_location, default_uri, local_uri, sqlite_file

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight more processes for features that runs do not use
    "MLFLOW_WORKERS": "1",  # enough for one user; each worker imports mlflow again
}
_POLL_S = 0.2
_SHOWN_LINES = 15  # of the server's output if it fails to start


def serve_ui(root: Path, port: int, tell: Callable[[str], None]) -> int:
    """Serve MLflow's UI for the runs below a folder, until Ctrl-C.

    Args:
        root: A folder of runs, of an experiment, or of one run.
        port: Port of the UI on this machine.
        tell: Called with a line for the user.

    Returns:
        MLflow's exit code.

    Raises:
        TrimtabError: The server has ended before it responded; the message has the end of its output.
    """
    uri = _find_store(root)
    if sqlite_file(uri) is None and uri.startswith("http"):
        tell(f"the runs are on {redact(uri)}: open it in a browser")
        return 0
    _check_port(port)
    tell(f"starting MLflow's UI for {redact(uri)} …")
    with tempfile.TemporaryFile("w+", errors="replace") as output, _start_server(uri, port, output.fileno()) as process:
        if not _wait_until_ready(process, port):
            output.seek(0)
            lines = redact(output.read()).splitlines()[-_SHOWN_LINES:]
            raise TrimtabError("\n".join([f"mlflow server ended with {process.returncode}:", *lines]))
        tell(f"http://127.0.0.1:{port} is ready; stop it with Ctrl-C")
        try:
            return process.wait()
        except KeyboardInterrupt:
            return 0


@contextlib.contextmanager
def _start_server(uri: str, port: int, output: int) -> "Iterator[subprocess.Popen[bytes]]":
    """Run `mlflow server`. Addresses are passed in its environment: other users can read command lines."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**_SETTINGS, **os.environ, "MLFLOW_BACKEND_STORE_URI": uri}
    files = artifact_location(uri)
    if files is not None:
        environment["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = files
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    before = {number: signal.signal(number, signal.default_int_handler) for number in _endings()}
    try:
        yield process
    finally:  # the server and its workers are one session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _endings() -> list[signal.Signals]:
    """The signals, besides Ctrl-C, that end the UI: a closed terminal must not leave a server; nohup ignores it."""
    return [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int) -> bool:
    """Wait until the server responds; return False if it ends first."""
    while process.poll() is None:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),  # it is not listening yet
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection,
        ):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        time.sleep(_POLL_S)
    return False


def _find_store(root: Path) -> str:
    """Return the address of the store in a folder or one of its two parents, else the default store."""
    for folder in (root, *root.absolute().parents[:2]):
        path = sqlite_file(local_uri(folder))
        if path is not None and path.is_file():
            return local_uri(folder)
    uri = default_uri(root)
    if sqlite_file(uri) is not None:
        raise RecipeError(
            f"no tracked runs below {root}: there is no {sqlite_file(uri)}",
            "pass the folder of the experiments; to upload a run afterwards: trimtab track sync RUN --to local",
        )
    return uri


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RecipeError(f"port {port} cannot be used: {error.strerror}", f"--port {port + 1}") from error
        except OverflowError as error:
            raise RecipeError(f"port {port} does not exist", "--port 5000; ports are numbers up to 65535") from error
