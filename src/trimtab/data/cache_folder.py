"""The folder of everything that is cached between runs: tokens, and predictions of the planner."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """$TRIMTAB_CACHE, by default ~/.cache/trimtab; None with TRIMTAB_CACHE=off."""
    folder = os.environ.get("TRIMTAB_CACHE") or "~/.cache/trimtab"
    return None if folder == "off" else Path(os.path.expanduser(folder))
