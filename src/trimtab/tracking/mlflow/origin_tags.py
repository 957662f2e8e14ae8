"""Tags for the origin of a run, under MLflow's names: program, user, git commit."""

import getpass
import subprocess
import sys
from pathlib import Path


def origin_tags(folder: Path) -> dict[str, str]:
    """Return tags for the program, its user and the run folder."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container without user names
        user = "unknown"
    return {"mlflow.source.name": Path(sys.argv[0]).name, "mlflow.user": user, "trimtab.folder": str(folder)}


def commit_tags(folder: Path) -> dict[str, str]:
    """Return tags for the git commit of a folder; none without git or outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        is_changed = bool(commit and git("status", "--porcelain", "--untracked-files=no"))
    except FileNotFoundError:
        return {}
    if not commit:
        return {}
    return {"mlflow.source.git.commit": commit, "trimtab.uncommitted_changes": str(is_changed).lower()}
