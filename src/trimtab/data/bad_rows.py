"""Handling of rows that cannot be used: raise at the first one, or skip, count and report them."""

import re
from typing import Any

from trimtab.errors import DataError
from trimtab.log import say

SKIP_CURE = "or skip such rows with data.on_bad_rows: skip"
# Bytes that are not UTF-8 are decoded to these (surrogateescape) if bad rows are skipped, so that only their own row is
# lost.
_ESCAPED_BYTES = re.compile("[\udc80-\udcff]")

_MAX_NESTING = 100  # levels of lists and dicts; Python functions that recurse into values fail at about 300
NESTED_TOO_DEEPLY = f"values are nested in more than {_MAX_NESTING} levels"


def is_nested_too_deeply(value: Any) -> bool:
    """Whether a value has more levels of lists and dicts than code that reads rows can handle."""
    level = [value]
    for _ in range(_MAX_NESTING + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list | tuple)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list | tuple)
        ]
        if not level:
            return False
    return True


class BadRows:
    """Collects the rows of one source that cannot be used.

    Args:
        on_bad_rows: "stop" raises at the first bad row; "skip" counts them.
    """

    def __init__(self, on_bad_rows: str) -> None:
        if on_bad_rows not in ("stop", "skip"):
            raise DataError(f"data.on_bad_rows is {on_bad_rows!r}", 'set data.on_bad_rows to "stop" or "skip"')
        self.skips = on_bad_rows == "skip"
        self.num_skipped = 0
        self._first = ""

    def add(self, location: str, problem: str, cure: str) -> None:
        """Record a bad row.

        Raises:
            DataError: Bad rows are not skipped.
        """
        if not self.skips:
            raise DataError(f"{location}: {problem}", f"{cure}, {SKIP_CURE}")
        self.num_skipped += 1
        self._first = self._first or f"{location}: {problem}"

    def has_escaped_bytes(self, text: str) -> bool:
        """Whether a text contains bytes that were not UTF-8; without `skips`, decoding has already raised."""
        return self.skips and _ESCAPED_BYTES.search(text) is not None

    def report(self, origin: str) -> None:
        """Log how many rows were skipped, if any."""
        if self.num_skipped:
            say(f"{origin}: skipped {self.num_skipped} bad row(s); the first: {self._first}")
