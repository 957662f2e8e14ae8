"""Real MLflow for tests: stores in sqlite, servers on loopback, and a proxy that misbehaves on demand."""

import contextlib
import http.client
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from trimtab.distributed.launch.settings import free_port
from trimtab.tracking.upload.metric_rows import rows_of

LARGEST = 1.7976931348623157e308  # which MLflow writes for infinity


def make_store(path: Path) -> Path:
    """An empty store; it takes seconds, so that tests copy one."""
    code = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).search_experiments()"
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR"}
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{path}"], check=True, env=environment)
    return path


class Background:
    """A program of MLflow in its own session, which can be ended with everything that it has started.

    Args:
        arguments: Of `python -m mlflow`.
        log: Receives its output.
    """

    def __init__(self, arguments: list[str], log: Path) -> None:
        scripts = Path(sys.executable).parent  # MLflow starts programs by their names
        path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"}
        environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # eight processes that no test needs
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *arguments],
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def wait_for(self, request: str | urllib.request.Request) -> bytes:
        """Send a request until the program answers."""
        deadline = time.monotonic() + 400
        while True:
            try:
                with urllib.request.urlopen(request, timeout=200) as reply:
                    return reply.read()
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read().decode()) from error
            except OSError:
                assert self._process.poll() is None, self._log.read_text()[-3000:]
                assert time.monotonic() < deadline, self._log.read_text()[-3000:]
                time.sleep(0.1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Server:
    """An `mlflow server`, which can be killed and started again on the same store.

    Args:
        folder: Folder of its store and its files.
        template: An empty store.
    """

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.store = shutil.copy(template, folder / "mlflow.db")

    def start(self) -> "Server":
        arguments = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        arguments += ["--backend-store-uri", f"sqlite:///{self.store}"]
        arguments += ["--artifacts-destination", str(self.folder / "files")]
        self._process = Background(arguments, self.folder / "server.log")
        self._process.wait_for(f"{self.uri}/health")
        return self

    def kill(self) -> None:
        self._process.kill()


class Proxy:
    """Stands before a server. `mode`: pass, 500, 401, 403, hang (never answers), deaf (passes on, does not answer)."""

    def __init__(self, target_port: int, port: int = 0) -> None:
        self.mode = "pass"
        self.num_requests = 0
        self.released = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def _serve(self):
                proxy.num_requests += 1
                mode = proxy.mode
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if mode == "hang":
                    proxy.released.wait(30)
                    self.close_connection = True
                    return
                if mode.isdigit():
                    self._answer(int(mode), b"no", "text/plain")
                    return
                there = http.client.HTTPConnection("127.0.0.1", target_port, timeout=60)
                headers = {key: value for key, value in self.headers.items() if key.lower() != "transfer-encoding"}
                there.request(self.command, self.path, body, headers)
                answer = there.getresponse()
                text = answer.read()
                there.close()
                if mode == "deaf":
                    self.close_connection = True
                    return
                self._answer(answer.status, text, answer.getheader("Content-Type") or "application/json")

            def _answer(self, status, text, kind):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _row(key, step, timestamp, value, is_nan):
    return key, step, timestamp, "nan" if is_nan else value


def rows_on(store: Path, run_id: str) -> list[tuple]:
    """Every row of a run's metrics, read from the database itself."""
    with contextlib.closing(sqlite3.connect(store, timeout=30)) as database:
        found = database.execute(
            "select key, step, timestamp, value, is_nan from metrics where run_uuid = ?", (run_id,)
        ).fetchall()
    return sorted(map(str, (_row(*row) for row in found)))


def rows_in(folder: Path) -> list[tuple]:
    """Every number of a run's metrics.jsonl, as MLflow writes it."""
    found = []
    for line in (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True):
        for row in rows_of(line):
            is_nan = math.isnan(row.value)
            value = math.copysign(LARGEST, row.value) if math.isinf(row.value) else row.value
            found.append(_row(row.key, row.step, row.timestamp_ms, value, is_nan))
    return sorted(map(str, found))


def tracking_of(folder: Path) -> dict:
    return json.loads((folder / "tracking.json").read_text())


def acked_of(folder: Path) -> int:
    """How far a server has a run; 0 before there is one."""
    servers = tracking_of(folder)["servers"] if (folder / "tracking.json").exists() else []
    return max((one["acked"] for one in servers), default=0)


def run_id_of(folder: Path, which: int = -1) -> str:
    return tracking_of(folder)["servers"][which]["run_id"]


def runs_on(store: Path) -> list[dict]:
    """The runs of a store: id, name, status and tags."""
    with contextlib.closing(sqlite3.connect(store, timeout=30)) as database:
        runs = database.execute("select run_uuid, name, status from runs").fetchall()
        tags = database.execute("select run_uuid, key, value from tags").fetchall()
        params = database.execute("select run_uuid, key, value from params").fetchall()
    return [
        {
            "id": run_id,
            "name": name,
            "status": status,
            "tags": {key: value for owner, key, value in tags if owner == run_id},
            "params": {key: value for owner, key, value in params if owner == run_id},
        }
        for run_id, name, status in runs
    ]


def wait_until(holds, timeout_s: float = 180.0, what: str = "") -> None:
    """Wait; the time only guards against waiting for good."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what or "it did not happen"
        time.sleep(0.05)
