"""Where a run comes from, as tags that MLflow knows: the program, its user, the commit."""

import getpass
import shutil
import subprocess
import sys
from pathlib import Path


def origin_tags(folder: Path) -> dict[str, str]:
    """The program and its user, and the run's folder."""
    return {"mlflow.source.name": Path(sys.argv[0]).name, "mlflow.user": _user(), "trimtab.folder": str(folder)}


def commit_tags(folder: Path) -> dict[str, str]:
    """The commit of the repository that a folder lies in, under MLflow's name for it."""

    def git(*words: str) -> str:
        if shutil.which("git") is None:
            return ""
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if not commit:
        return {}
    is_changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    return {"mlflow.source.git.commit": commit, "trimtab.uncommitted_changes": str(is_changed).lower()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without names
        return "not known"
