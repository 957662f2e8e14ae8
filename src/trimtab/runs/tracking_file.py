"""`tracking.json`: the MLflow runs that a run folder was uploaded to, and the progress of each upload."""

import contextlib
import fcntl
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from trimtab.addresses import redact
from trimtab.errors import CheckpointError
from trimtab.log import say

TRACKING = "tracking.json"
_LOCK = "tracking.lock"


@dataclass
class ServerState:
    """The upload of a run to one tracking server.

    Attributes:
        uri: Address of the server, without credentials.
        experiment: Name of the MLflow experiment.
        experiment_id: Its id on this server.
        run_id: MLflow's id of the run; None until the server has created it.
        sent: Offset in metrics.jsonl, in bytes, up to which the server may have the lines. Written before a batch is
            sent, so it is an upper bound even after a kill.
        acked: Offset up to which the server has confirmed the lines.
        ahead_since_ms: Timestamp from which the server may have rows that this folder lacks, because the folder was
            restored from an older copy.
        params: Whether the recipe was uploaded.
        artifacts: Checksum of each uploaded file, by name.
        status: MLflow status that was set last.
    """

    uri: str
    experiment: str = ""
    experiment_id: str | None = None
    run_id: str | None = None
    sent: int = 0
    acked: int = 0
    ahead_since_ms: int | None = None
    params: bool = False
    artifacts: dict[str, str] = field(default_factory=dict)
    status: str = ""

    def reset(self) -> None:
        """Prepare to upload everything into a new run, after the server has lost this one."""
        self.experiment_id = self.run_id = self.ahead_since_ms = None
        self.acked, self.params, self.artifacts, self.status = 0, False, {}, ""


@dataclass
class RunDescription:
    """Description of a run that every server receives.

    Attributes:
        run: Unique id of the run, stored as a tag. If the response to `create_run` is lost, the run is found by it.
        name: Name of the run.
        experiment: Name of the experiment.
        parent: MLflow's id of the parent run.
        started_ms: Start of the run, in Unix milliseconds.
        tags: Hardware, versions, commit, data, predictions.
        params: The recipe, by dotted key.
        log_model: Whether to upload the best model.
        register: Name under which to register it.
        metric: Metric that selects the best model.
        higher_is_better: Direction of that metric.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    name: str = ""
    experiment: str = ""
    parent: str | None = None
    started_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    log_model: bool = True
    register: str | None = None
    metric: str | None = None
    higher_is_better: bool | None = None


@dataclass
class Tracking:
    """Contents of `tracking.json`; the most recently used server comes last."""

    folder: Path
    about: RunDescription
    servers: list[ServerState] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the file of a run folder; None if there is none or it is damaged."""
        try:
            text = (folder / TRACKING).read_text(encoding="utf-8")
        except OSError:
            return None
        try:
            content = json.loads(text)
            about = RunDescription(**_known_fields(RunDescription, content["about"]))
            # files of older versions may contain user names
            servers = [server | {"uri": redact(server["uri"])} for server in content["servers"]]
            return cls(folder, about, [ServerState(**_known_fields(ServerState, server)) for server in servers])
        except (ValueError, LookupError, TypeError, AttributeError):
            say(f"{folder / TRACKING} is damaged: the run will be uploaded again as a new one")
            return None

    def at(self, uri: str) -> ServerState:
        """Return the state of a server, created if needed, and make it the one that was used last."""
        address = redact(uri)
        state = next((known for known in self.servers if known.uri == address), None) or ServerState(address)
        self.servers = [*(known for known in self.servers if known is not state), state]
        return state

    def write(self) -> None:
        """Replace the file atomically."""
        content = {"about": asdict(self.about), "servers": [asdict(server) for server in self.servers]}
        temporary = self.folder / f".{TRACKING}.writing"
        try:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
            temporary.replace(self.folder / TRACKING)
        except OSError as error:
            if error.filename is None:  # ENOSPC from write() names no file
                error.filename = str(self.folder / TRACKING)
            raise


def is_tracked(folder: Path) -> bool:
    """Whether a run was uploaded to a server, or an upload is starting."""
    return (folder / TRACKING).exists() or (folder / _LOCK).exists()


def sent_bytes(folder: Path) -> int:
    """Return the offset in metrics.jsonl, in bytes, up to which some server may have the lines."""
    tracking = Tracking.read(folder)
    return max((server.sent for server in tracking.servers), default=0) if tracking is not None else 0


@contextlib.contextmanager
def upload_lock(folder: Path, patience_s: float) -> Iterator[None]:
    """Hold the lock under which a run is uploaded or its journal truncated. It ends with the process that holds it.

    Args:
        folder: The run folder.
        patience_s: How long to wait for another holder.

    Raises:
        CheckpointError: Another process still holds the lock.
    """
    with (folder / _LOCK).open("a") as file:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"another process is uploading {folder} to its tracking server",
                        "run the command again when it is done",
                    ) from None
                time.sleep(0.05)
            except OSError:  # the file system does not support flock
                break
        yield


def _known_fields(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Drop keys that a newer version has written."""
    names = {own.name for own in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
