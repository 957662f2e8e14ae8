"""How long a test takes at most: one that hangs is reported with the stacks of all threads."""

import faulthandler
import subprocess

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from xdist.scheduler import LoadFileScheduling

SLOW_LIMIT_S = 900  # unless the mark says otherwise: slow(timeout=60)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    limit_s = float(item.config.getini("faulthandler_timeout"))
    slow = item.get_closest_marker("slow")
    if slow or item.get_closest_marker("gpu"):
        limit_s = slow.kwargs.get("timeout", SLOW_LIMIT_S) if slow else SLOW_LIMIT_S
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(limit_s, file=stderr, exit=True)  # in place of pytest's
    # A subprocess without a timeout of its own is ended before, and only its test fails.
    subprocess.run.__kwdefaults__["timeout"] = 0.9 * limit_s


class OnceEach(LoadFileScheduling):
    """xdist gives all tests that a dead worker has left to others, also the one that ended it, which would end them."""

    def remove_node(self, node):
        units = self.assigned_work[node].values()
        crashed = next(((unit, test) for unit in units for test, is_done in unit.items() if not is_done), None)
        if crashed is None:
            return super().remove_node(node)
        unit, test = crashed
        unit[test] = True
        super().remove_node(node)
        return test


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return OnceEach(config, log) if config.getoption("dist") == "loadfile" else None
