"""What the user agreed to for a run, recorded outside the run's folder, whose files other people may edit."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from trimtab.addresses import redact
from trimtab.log import say

ADDRESSES = "addresses"  # of tracking servers that the user gave for the run


def consent_of(run: Path) -> dict[str, Any]:
    """Return what was recorded for a run folder by this user; empty for a folder from elsewhere."""
    try:
        found = json.loads(_place(run).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return {}
    return found if isinstance(found, dict) else {}


def record_consent(run: Path, values: dict[str, Any]) -> None:
    """Replace what is recorded for a run folder, except addresses, which are added."""
    before = consent_of(run)
    addresses = list(dict.fromkeys([*before.get(ADDRESSES, []), *values.get(ADDRESSES, [])]))
    now = values | ({ADDRESSES: addresses} if addresses else {})
    if now == {key: value for key, value in before.items() if key != "run"}:
        return
    try:
        place = _place(run)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = place.with_name(f"{place.name}.{os.getpid()}")
        temporary.write_text(json.dumps(now | {"run": str(run.resolve())}), encoding="utf-8")
        temporary.replace(place)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        say(f"what you agreed to for {run} cannot be recorded ({error}): trimtab resume will ask for it again")


def add_address(run: Path, uri: str) -> None:
    """Record the address of a tracking server that the user gave for a run."""
    kept = {key: value for key, value in consent_of(run).items() if key != "run"}
    record_consent(run, kept | {ADDRESSES: [redact(uri)]})


def forget_consent(run: Path) -> None:
    """Remove the record of a folder whose content is replaced by files from elsewhere."""
    try:
        _place(run).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        say(f"what was recorded for {run} cannot be removed: {error}")


def _place(run: Path) -> Path:
    """The file of a run folder, in the user's state folder: a cache may be deleted at any time."""
    root = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return root / "trimtab" / "consent" / f"{hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:32]}.json"
