"""Real MLflow for tests: stores in sqlite, servers on loopback, and a proxy that misbehaves on demand."""

import contextlib
import http.client
import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from trimtab.tracking.mlflow.server import valid_key
from trimtab.tracking.upload.metric_rows import rows_of

LARGEST = 1.7976931348623157e308  # which MLflow writes for infinity


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


def make_store(path: Path) -> Path:
    """An empty store; it takes seconds, so that tests copy one."""
    code = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).search_experiments()"
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR"}
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{path}"], check=True, env=environment)
    return path


class Server:
    """An `mlflow server` on a port of its own; it can be killed and started again on the same store.

    Args:
        folder: Where its store and its files are.
        template: An empty store.
    """

    def __init__(self, folder: Path, template: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, free_port()
        self.store = folder / "mlflow.db"
        if not self.store.exists():
            shutil.copy(template, self.store)
        self._process: subprocess.Popen | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Server":
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.store}", "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "files")]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # eight processes that no test needs
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=20):
                return self
            assert self._process.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)

    def kill(self) -> None:
        """End it and its workers, at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


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
            found.append(_row(valid_key(row.key), row.step, row.timestamp_ms, value, is_nan))
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
