"""Decide which MLflow store a run is uploaded to; `local` means a sqlite file next to the runs."""

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

from trimtab.addresses import redact
from trimtab.errors import ModelError, RecipeError

_LOCKED_S = 5.0  # how long to wait for another program
RUNS = "runs"  # default parent of run folders
_STORE = "mlflow.db"
_ARTIFACTS = "mlartifacts"
_SERVER = "MLFLOW_TRACKING_URI"
_SWITCH = "TRIMTAB_TRACK"
_SQLITE = re.compile(r"(?P<before>sqlite(?:\+\w+)?:///)(?P<path>[^?]+)(?P<after>(?:\?.*)?)")


def tracking_uri(setting: str, run_folder: Path) -> str | None:
    """Return the MLflow address for a run; None if it is not tracked.

    MLFLOW_TRACKING_URI replaces `local`, and TRIMTAB_TRACK=none disables it; neither affects an explicit address.

    Args:
        setting: The recipe's `track.uri`.
        run_folder: The run folder, which determines the location of a local store.
    """
    if setting != "local":
        # absolute, because tracking.json may be read from another working directory
        return None if setting == "none" else with_sqlite_file(setting, Path.absolute)
    if os.environ.get(_SWITCH, "").strip().lower() == "none":
        return None
    return default_uri(store_root(run_folder))


def check_address(uri: str) -> None:
    """Refuse text that is not an address: MLflow would treat it as a folder.

    Raises:
        RecipeError: It has no scheme.
    """
    if "://" not in uri and uri not in ("local", "none", "databricks"):
        raise RecipeError(
            f"{uri!r} is not the address of a tracking server", "use http://HOST:PORT, sqlite:///FILE or local"
        )


def default_uri(root: Path = Path(RUNS)) -> str:
    """Return the address that `local` means for runs below `root`: MLFLOW_TRACKING_URI, or the sqlite file there."""
    return os.environ.get(_SERVER, "").strip() or local_uri(root)


def gets_credentials(uri: str) -> bool:
    """Whether MLFLOW_TRACKING_TOKEN, _USERNAME and _PASSWORD may be sent to an address.

    Next to an MLFLOW_TRACKING_URI they are those of that server, and are sent to no other.
    """
    given, asked = (urlsplit(redact(address)) for address in (os.environ.get(_SERVER, "").strip(), uri))
    return given.scheme not in ("http", "https") or (given.scheme, given.netloc) == (asked.scheme, asked.netloc)


def local_uri(root: Path) -> str:
    """Return the address of the sqlite file in a folder."""
    return f"sqlite:///{root.absolute() / _STORE}"


def store_root(run_folder: Path) -> Path:
    """Return the folder of the local store: `runs` for runs/EXPERIMENT/NAME, else the parent of the run folder."""
    home = run_folder.absolute().parent
    return home.parent if home.name != RUNS and home.parent.name == RUNS else home


def artifact_location(uri: str) -> str | None:
    """Return the artifact root of a sqlite store, next to the file; None for a server, which has its own."""
    path = sqlite_file(uri)
    return None if path is None else (path.parent / _ARTIFACTS).absolute().as_uri()


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a sqlite address; None for any other address."""
    found = _SQLITE.fullmatch(uri)
    return None if found is None or found["path"] == ":memory:" else Path(found["path"])


def check_store(uri: str) -> None:
    """Refuse a sqlite file that is damaged or locked: MLflow would try for a minute, then fail with a traceback.

    Raises:
        ModelError: It cannot be read.
    """
    path = sqlite_file(uri)
    if path is None or not path.is_file():
        return
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=_LOCKED_S)) as store:
            store.execute("SELECT * FROM sqlite_master").fetchall()
    except sqlite3.OperationalError as error:
        raise ModelError(f"the tracking store {path} cannot be read: {error}", "end what uses it; try again") from error
    except sqlite3.DatabaseError as error:
        cure = "restore it from a copy, or upload each run to a new one: trimtab track sync RUN --to sqlite:///NEW.db"
        raise ModelError(f"the tracking store {path} is damaged: {error}", cure) from error


def with_sqlite_file(uri: str, change: Callable[[Path], Path]) -> str:
    """Apply a function to the path of a sqlite address; any other address is returned unchanged."""
    found, path = _SQLITE.fullmatch(uri), sqlite_file(uri)
    return uri if found is None or path is None else f"{found['before']}{change(path)}{found['after']}"
