"""What happens to rows that cannot be read: the first one is an error, or they are skipped, counted and said."""

import re

from trimtab.errors import DataError
from trimtab.log import say

SKIP_CURE = "or skip such rows with data.on_bad_rows: skip"
# Bytes that are no UTF-8 are decoded to these where bad rows are skipped, so that only their own row is lost.
_ESCAPED_BYTES = re.compile("[\udc80-\udcff]")


class BadRows:
    """Collects the rows of one source that cannot be read.

    Args:
        on_bad_rows: "stop" makes the first bad row an error; "skip" counts them.
    """

    def __init__(self, on_bad_rows: str) -> None:
        if on_bad_rows not in ("stop", "skip"):
            raise DataError(f"on_bad_rows is {on_bad_rows!r}", 'set it to "stop" or "skip"')
        self.skips = on_bad_rows == "skip"
        self.num_skipped = 0
        self._first = ""

    def add(self, place: str, problem: str, cure: str) -> None:
        """A row cannot be used.

        Raises:
            DataError: Where bad rows stop the run.
        """
        if not self.skips:
            raise DataError(f"{place}: {problem}", f"{cure}, {SKIP_CURE}")
        self.num_skipped += 1
        self._first = self._first or f"{place}: {problem}"

    def has_escaped_bytes(self, text: str) -> bool:
        """Whether a text holds bytes that were no UTF-8; where bad rows stop the run none gets this far."""
        return self.skips and _ESCAPED_BYTES.search(text) is not None

    def report(self, origin: str) -> None:
        """Say how many rows were skipped, if any."""
        if self.num_skipped:
            say(f"{origin}: {self.num_skipped} bad row(s) skipped; the first is {self._first}")
