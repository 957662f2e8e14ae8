"""Which MLflow store a run goes to: `local` is a sqlite file beside the runs, everything else is taken as it is."""

import os
import re
from collections.abc import Callable
from pathlib import Path

RUNS = "runs"  # where runs go that are not told otherwise
_STORE = "mlflow.db"
_ARTIFACTS = "mlartifacts"
_SERVER = "MLFLOW_TRACKING_URI"
_SWITCH = "TRIMTAB_TRACK"
_SQLITE = re.compile(r"(?P<before>sqlite(?:\+\w+)?:///)(?P<path>[^?]+)(?P<after>(?:\?.*)?)")


def tracking_uri(setting: str, run_folder: Path) -> str | None:
    """The MLflow address of a run.

    MLFLOW_TRACKING_URI takes the place of `local`, and TRIMTAB_TRACK=none switches `local` off; an address that is
    written out stands above both.

    Args:
        setting: The recipe's `track.uri`.
        run_folder: The run's folder; it decides where a local store is.

    Returns:
        None where nothing is tracked.
    """
    if setting != "local":
        # the run's folder may be looked at from elsewhere
        return None if setting == "none" else with_sqlite_file(setting, Path.absolute)
    if os.environ.get(_SWITCH, "").strip().lower() == "none":
        return None
    return default_uri(store_root(run_folder))


def default_uri(root: Path = Path(RUNS)) -> str:
    """The address that `local` means for runs below `root`: MLFLOW_TRACKING_URI, or the sqlite file there."""
    return os.environ.get(_SERVER, "").strip() or local_uri(root)


def local_uri(root: Path) -> str:
    """The address of the sqlite file in a folder."""
    return f"sqlite:///{root.absolute() / _STORE}"


def store_root(run_folder: Path) -> Path:
    """The folder of the local store: `runs` for runs/EXPERIMENT/NAME, else the folder that the run lies in."""
    home = run_folder.absolute().parent
    return home.parent if home.name != RUNS and home.parent.name == RUNS else home


def artifact_location(uri: str) -> str | None:
    """Where experiments of a store keep their files: beside a sqlite file; a server decides for itself (None)."""
    path = sqlite_file(uri)
    return None if path is None else (path.parent / _ARTIFACTS).absolute().as_uri()


def sqlite_file(uri: str) -> Path | None:
    """The file of a sqlite address; None for any other address."""
    found = _SQLITE.fullmatch(uri)
    return None if found is None or found["path"] == ":memory:" else Path(found["path"])


def with_sqlite_file(uri: str, change: Callable[[Path], Path]) -> str:
    """A sqlite address with another path; any other address as it is."""
    found, path = _SQLITE.fullmatch(uri), sqlite_file(uri)
    return uri if found is None or path is None else f"{found['before']}{change(path)}{found['after']}"
