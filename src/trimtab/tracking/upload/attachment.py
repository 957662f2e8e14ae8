"""Which MLflow runs a run's folder belongs to, and how far each of them has got: `tracking.json` in the folder."""

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
class Attachment:
    """A run on one server.

    Attributes:
        uri: The server, without a password.
        experiment: Its experiment's name there.
        experiment_id: And number.
        run_id: MLflow's name of the run; None before it was made.
        sent: End, in bytes of metrics.jsonl, of what the server may have: noted before it is sent.
        acked: End of what it has for certain.
        ahead_since_ms: Since when the server may know more than this folder, which came back from an older copy.
        params: Whether the recipe is there.
        artifacts: Checksums of the files that are there, by name.
        status: MLflow's word, as it was set last.
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

    def forget(self) -> None:
        """The server no longer knows the run: everything is sent anew, into a new one."""
        self.experiment_id = self.run_id = self.ahead_since_ms = None
        self.acked, self.params, self.artifacts, self.status = 0, False, {}, ""


@dataclass
class About:
    """What is said of a run on every server.

    Attributes:
        run: Made with the run, and kept as a tag, so that a run whose making was not answered is found again.
        name: Of the run.
        experiment: Runs of one experiment stand together.
        parent: MLflow's id of the run that this one is a part of.
        started_ms: When it began.
        tags: Facts: hardware, versions, commit, data, prediction.
        params: The recipe, by dotted key.
        log_model: Whether the best model goes to the server.
        register: The name under which it is registered.
        metric: What makes a model the best.
        higher_is_better: Whether more of it is better.
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
    """The content of `tracking.json`: a run, and its attachments, the one used last at the end."""

    folder: Path
    about: About
    attachments: list[Attachment] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What a folder says; None if it has never been tracked."""
        try:
            text = (folder / TRACKING).read_text(encoding="utf-8")
        except OSError:
            return None
        try:
            said = json.loads(text)
            about = About(**_known(About, said["about"]))
            servers = [one | {"uri": redact(one["uri"])} for one in said["servers"]]  # older files kept user names
            return cls(folder, about, [Attachment(**_known(Attachment, one)) for one in servers])
        except (ValueError, LookupError, TypeError, AttributeError):
            say(f"{folder / TRACKING} cannot be read: the run is tracked anew")
            return None

    def at(self, uri: str) -> Attachment:
        """The attachment to a server, made where there is none; it counts as the one used last."""
        shown = redact(uri)
        found = next((one for one in self.attachments if one.uri == shown), None) or Attachment(shown)
        self.attachments = [*(one for one in self.attachments if one is not found), found]
        return found

    def write(self) -> None:
        """Put it on the disk, whole or not at all."""
        said = {"about": asdict(self.about), "servers": [asdict(one) for one in self.attachments]}
        beside = self.folder / f".{TRACKING}.writing"
        try:
            beside.write_text(json.dumps(said, indent=1), encoding="utf-8")
            beside.replace(self.folder / TRACKING)
        except OSError as error:
            if error.filename is None:  # a write does not say which file has no room
                error.filename = str(self.folder / TRACKING)
            raise


def is_tracked(folder: Path) -> bool:
    """Whether a run has been brought to a server, or somebody is about to."""
    return (folder / TRACKING).exists() or (folder / _LOCK).exists()


def sent_of(folder: Path) -> int:
    """How far, in bytes, a server may know the numbers of a run."""
    found = Tracking.read(folder)
    return max((one.sent for one in found.attachments), default=0) if found is not None else 0


@contextlib.contextmanager
def shipping(folder: Path, patience_s: float) -> Iterator[None]:
    """Who ships a run, or cuts its journal, does so alone. The lock of a process that has died is none.

    Args:
        folder: The run's folder.
        patience_s: How long to wait for another.

    Raises:
        CheckpointError: Another process is still at it.
    """
    with (folder / _LOCK).open("a") as file:
        end = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise CheckpointError(
                        f"another process is sending the numbers of {folder} to its tracking server",
                        "try again when it is done",
                    ) from None
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield


def _known(kind: type, said: dict[str, Any]) -> dict[str, Any]:
    """Values of a dataclass; what this version does not know is left out."""
    names = {own.name for own in fields(kind)}
    return {name: value for name, value in said.items() if name in names}
