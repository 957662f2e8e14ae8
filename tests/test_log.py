"""What the log shows, and what is suppressed."""

import logging
import warnings

import pytest

from trimtab.log import logger, quiet_on_request, quiet_package, say


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


def test_quiet_prints_errors_only_where_logging_is_not_configured(monkeypatch, capsys):
    @quiet_on_request
    def work(progress="auto"):
        say("told")
        logger.error("an error")

    work(progress="quiet")
    assert capsys.readouterr().err == "", "pytest has configured logging"
    for one in (logging.getLogger(), logger):
        monkeypatch.setattr(one, "handlers", [])
    for expected in ("trimtab: an error\n", "trimtab: an error\n"):
        work(progress="quiet")
        assert capsys.readouterr().err == expected
    work()
    assert capsys.readouterr().err == "trimtab: told\ntrimtab: an error\n"
