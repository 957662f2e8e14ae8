"""What the log shows, and what is suppressed."""

import logging
import warnings

import pytest

from trimtab.log import quiet_package


def test_a_quiet_package_gives_errors_only_and_is_restored(caplog):
    theirs = logging.getLogger("a_package")
    theirs.setLevel(logging.DEBUG)

    def fail():
        with quiet_package("a_package"):
            warnings.warn("which would be an error here", stacklevel=1)
            theirs.warning("hidden")
            theirs.error("shown")
            raise ValueError("a failure")

    with pytest.raises(ValueError, match="a failure"):
        fail()
    assert [record.getMessage() for record in caplog.records] == ["shown"]
    assert theirs.level == logging.DEBUG
    with pytest.raises(UserWarning, match="again"):
        warnings.warn("again", stacklevel=1)
