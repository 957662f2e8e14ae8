"""A stand-in for a Databricks workspace, of which there is none for tests: a proxy before a real `mlflow server`.

It speaks what MLflow's client speaks to a workspace, and refuses what a workspace refuses: requests without the bearer
token, experiments that are not paths below an existing folder, batches and values above the documented limits, and
names in Unity Catalog without three parts. Files go through the files API. The rest is MLflow's own server.
"""

import http.client
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

TOKEN, USER = "dapi-0123456789", "somebody@example.com"
MLFLOW, CATALOG, FILES = "/api/2.0/mlflow/", "/api/2.0/mlflow/unity-catalog/", "/api/2.0/fs/"
MAX_PER_BATCH = {"metrics": 1000, "params": 100, "tags": 100}
MAX_ENTITIES, MAX_REQUEST_BYTES = 1000, 1_000_000
MAX_VALUE_BYTES = {"params": 6000, "tags": 5000}
MAX_KEY_BYTES = 250
PROBED = ("/.well-known/", f"{FILES}create-")  # what the client tries, and does without
_FOLDERS = ("/Shared/", f"/Users/{USER}/")


class Refused(Exception):
    """An error as the workspace answers it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Databricks:
    """A workspace before a server.

    Args:
        server_port: Port of a real `mlflow server`.
        folder: Where the files of the workspace are.
    """

    def __init__(self, server_port: int, folder: Path) -> None:
        self.folder, self._server_port = folder, server_port
        self.num_to_throttle = 0  # so many requests are answered with 429
        self.requests: list[str] = []
        self.refusals: list[str] = []
        workspace = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def _serve(self):
                chunked = "chunked" in (self.headers.get("Transfer-Encoding") or "")
                body = self._chunks() if chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
                url = urlparse(self.path)
                try:
                    if url.path.startswith(PROBED):
                        raise Refused(404, "ENDPOINT_NOT_FOUND", url.path)
                    workspace.admit(self.command, url.path, self.headers.get("Authorization"))
                    if url.path.startswith(FILES):
                        status, text = workspace.serve_file(self.command, unquote(url.path[len(FILES) :]), body)
                    else:
                        status, text = workspace.pass_on(self.command, url.path, url.query, body)
                    self._answer(status, text)
                except Refused as refused:
                    if not url.path.startswith(PROBED):
                        workspace.refusals.append(f"{refused.code}: {refused}")
                    text = json.dumps({"error_code": refused.code, "message": str(refused)}).encode()
                    self._answer(refused.status, text, {"Retry-After": "1"} if refused.status == 429 else {})

            def _chunks(self):
                found = b""
                while size := int(self.rfile.readline(), 16):
                    found += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return found

            def _answer(self, status, text, headers=()):
                self.send_response(status)
                for key, value in dict(headers).items():
                    self.send_header(key, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Connection", "close")  # so that none outlives the workspace
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _serve

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self) -> dict[str, str]:
        """What a user sets."""
        return {"DATABRICKS_HOST": self.host, "DATABRICKS_TOKEN": TOKEN}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def admit(self, method: str, path: str, authorization: str | None) -> None:
        self.requests.append(f"{method} {path}")
        if authorization != f"Bearer {TOKEN}":
            raise Refused(403, "403", "Invalid access token.")
        if self.num_to_throttle > 0:
            self.num_to_throttle -= 1
            raise Refused(429, "REQUEST_LIMIT_EXCEEDED", "Exceeded the rate limit")

    def serve_file(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """The files API: `files/PATH` and `directories/PATH`."""
        kind, _, name = path.partition("/")
        place = self.folder / name.lstrip("/")
        if method == "PUT":
            (place if kind == "directories" else place.parent).mkdir(parents=True, exist_ok=True)
            if kind == "files":
                place.write_bytes(body)
            return 204, b""
        if not (place.is_dir() if kind == "directories" else place.is_file()):
            raise Refused(404, "NOT_FOUND", f"{name} does not exist")
        if kind == "files":
            return 200, place.read_bytes()
        entries = [
            {"path": f"/{name.strip('/')}/{one.name}", "name": one.name, "is_directory": one.is_dir()}
            | ({} if one.is_dir() else {"file_size": one.stat().st_size})
            for one in sorted(place.iterdir())
        ]
        return 200, json.dumps({"contents": entries}).encode()

    def pass_on(self, method: str, path: str, query: str, body: bytes) -> tuple[int, bytes]:
        if not path.startswith(MLFLOW):
            raise Refused(404, "ENDPOINT_NOT_FOUND", path)
        if path.endswith(":is-databricks-sdk-models-artifact-repository-enabled"):
            return 200, b'{"is_databricks_sdk_models_artifact_repository_enabled": true}'
        if len(body) > MAX_REQUEST_BYTES:
            raise Refused(400, "INVALID_PARAMETER_VALUE", f"the request has {len(body)} bytes")
        values = json.loads(body or b"{}")
        asked = {key: found[0] for key, found in parse_qs(query).items()} | values
        if path.startswith(CATALOG):
            method, path, query, body = _registry(method, path, query, body, asked)
        elif path.startswith((MLFLOW + "registered-models", MLFLOW + "model-versions")):
            raise Refused(404, "FEATURE_DISABLED", "the workspace's own model registry is disabled")
        elif path == MLFLOW + "experiments/create":
            _check_experiment(asked["name"])
        elif path == MLFLOW + "runs/log-batch":
            _check_batch(values)
        elif path.endswith(("runs/log-parameter", "runs/set-tag", "runs/log-metric")):
            _check_batch({path.rpartition("-")[2].replace("parameter", "param") + "s": [values]})
        connection = http.client.HTTPConnection("127.0.0.1", self._server_port, timeout=60)
        connection.request(method, f"{path}?{query}" if query else path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        root = "dbfs:/databricks/mlflow-tracking"
        text = re.sub(r"mlflow-artifacts:/(\d+)/models/(m-\w+)/", rf"{root}/\1/logged_models/\2/", text)
        return answer.status, re.sub(r"mlflow-artifacts:/(\d+)/(\w+)/", rf"{root}/\1/\2/", text).encode()


def _check_experiment(name: str) -> None:
    if not name.startswith("/"):
        raise Refused(400, "INVALID_PARAMETER_VALUE", f"Got an invalid experiment name {name!r}: not an absolute path")
    if not name.startswith(_FOLDERS) or "/" in name.removeprefix(next(one for one in _FOLDERS if name.startswith(one))):
        raise Refused(404, "RESOURCE_DOES_NOT_EXIST", f"Parent directory {name.rpartition('/')[0]} does not exist")


def _check_batch(values: dict) -> None:
    found = {kind: values.get(kind, []) for kind in MAX_PER_BATCH}
    if sum(map(len, found.values())) > MAX_ENTITIES:
        raise Refused(400, "INVALID_PARAMETER_VALUE", f"more than {MAX_ENTITIES} entities in a batch")
    for kind, entities in found.items():
        if len(entities) > MAX_PER_BATCH[kind]:
            raise Refused(400, "INVALID_PARAMETER_VALUE", f"{len(entities)} {kind} in a batch")
        for entity in entities:
            if len(entity["key"].encode()) > MAX_KEY_BYTES:
                raise Refused(400, "INVALID_PARAMETER_VALUE", f"the key {entity['key']} is too long")
            limit = MAX_VALUE_BYTES.get(kind)
            if limit is not None and len(entity.get("value", "").encode()) > limit:
                raise Refused(400, "INVALID_PARAMETER_VALUE", f"{entity['key']} has more than {limit} bytes")


def _registry(method: str, path: str, query: str, body: bytes, asked: dict) -> tuple[str, str, str, bytes]:
    """The request to MLflow's registry for one to Unity Catalog."""
    name = asked.get("name")
    if name is not None and not re.fullmatch(r"\w+\.\w+\.\w+", name):
        raise Refused(400, "INVALID_PARAMETER_VALUE", f"{name!r} is not catalog.schema.model")
    searched = asked.get("filter")
    if searched and not re.fullmatch(r"name ?= ?'[\w.]+'", searched):
        raise Refused(400, "INVALID_PARAMETER_VALUE", f"Unsupported filter query: {searched}")
    path = path.replace("unity-catalog/", "")
    if path.endswith("model-versions/finalize"):
        return "GET", path.replace("finalize", "get"), f"name={name}&version={asked['version']}", b""
    if path.endswith("model-versions/create"):
        known = ("name", "source", "run_id", "description", "tags", "model_id")
        body = json.dumps({key: asked[key] for key in known if key in asked}).encode()
    return method, path, query, body
