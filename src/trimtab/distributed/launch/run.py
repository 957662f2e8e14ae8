"""Run a planned launch with torchrun, in this process.

Additions to torchrun: the exit code and last output of the rank that failed first, restarts only if they can help, and
processes that end with their launcher.
"""

import contextlib
import inspect
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from trimtab.distributed.launch.command import LaunchPlan
from trimtab.distributed.launch.parent_death_signal import add_parent_death_signal
from trimtab.log import say
from trimtab.units import format_seconds

_NUM_TAIL_LINES = 12
_NAME_TIMEOUT_S = 120.0
_DYING_S = 5  # between the first failure and its consequences on other ranks
_MISTAKE = 2  # exit code of a mistake by the user
_RESUMABLE = 75
_FINAL_CODES = (_MISTAKE, _RESUMABLE)  # exit codes for which a restart does not help
_SAVING_S = 300  # seconds after a signal, for the processes to save a checkpoint


@dataclass(frozen=True)
class Ending:
    """The exit code of a launch, and a message for the user."""

    code: int
    message: str = ""


def start(plan: LaunchPlan) -> Ending:
    """Run the processes until they end.

    Returns:
        Exit code 0 if all succeed; else that of the process that failed first, 128 + n for signal n.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    settings = plan.settings
    if settings.num_hosts > 1:
        say(f"waiting for {settings.num_hosts} hosts at {settings.address}:{settings.port}")
        if problem := _wait_for_name(settings.address or ""):
            return Ending(2, f"error: {problem}")
    torchrun: Any = import_module("torch.distributed.run")
    api: Any = import_module("torch.distributed.launcher.api")
    plain_agent = api.LocalElasticAgent
    codes: list[int | None] = []  # exit codes of processes that were ended by a signal to this one
    api.LocalElasticAgent = _make_agent_class(plain_agent, codes)
    try:
        with _restored_process(plan.environment):
            torchrun.run(torchrun.parse_args(list(plan.torchrun)))
    except ChildFailedError as error:
        return _describe_failure(error.failures, plan)
    except SignalException as error:
        if _RESUMABLE in codes:
            return Ending(_RESUMABLE, f"stopped by {error.sigval.name}; a checkpoint was saved and the run can resume")
        return Ending(128 + error.sigval, f"stopped by {error.sigval.name}")
    except (RendezvousError, DistError) as error:
        where = f"{settings.address or 'this host'}:{settings.port or 'a free port'}"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Ending(1, f"error: the rendezvous of {settings.num_hosts} hosts at {where} failed: {reason}")
    finally:
        api.LocalElasticAgent = plain_agent
    return Ending(0)


def _make_agent_class(plain_agent: Any, codes: list[int | None]) -> Any:
    """Subclass torchrun's agent, which restarts after any exit code and leaves processes behind if it is killed."""

    class Agent(plain_agent):  # type: ignore[misc]
        def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
            command = add_parent_death_signal([spec.entrypoint])
            spec.entrypoint = command[0]
            # torchrun reads $ as the start of a placeholder
            spec.args = (*(word.replace("$", "$$") for word in command[1:]), *spec.args)
            super().__init__(spec, *args, **kwargs)

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed() and result.failures:
                rank, failure = _first_failure(result.failures)
                if failure.exitcode in _FINAL_CODES:
                    self._remaining_restarts = 0
                elif self._remaining_restarts > 0:
                    attempt = worker_group.spec.max_restarts - self._remaining_restarts + 1
                    say(f"rank {rank} {_describe_exit(failure.exitcode)}; restarting all processes, attempt {attempt}")
            return result

        def _shutdown(self, *args: Any, **kwargs: Any) -> None:
            if args and "timeout" in inspect.signature(super()._shutdown).parameters:
                kwargs["timeout"] = _SAVING_S  # positional arguments: a signal was received
            super()._shutdown(*args, **kwargs)
            for handler in getattr(self._pcontext, "subprocess_handlers", {}).values():
                codes.append(handler.proc.returncode)
                for stream in (handler._stdout, handler._stderr):  # torchrun does not close these log files
                    if stream is not None:
                        stream.close()

    return Agent


@contextlib.contextmanager
def _restored_process(environment: Mapping[str, str]) -> Iterator[None]:
    """Set variables and silence torchrun's log; on exit restore these and the signal handlers that it installs."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    handlers = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    loggers = ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")
    loud = {
        logger: logger.level
        for name in list(logging.root.manager.loggerDict)
        if name.startswith(loggers) and "LOGLEVEL" not in os.environ  # LOGLEVEL shows its log, as with torchrun
        for logger in (logging.getLogger(name),)
    }
    variables = dict(os.environ)
    try:
        os.environ.update(environment)
        for name in ("PET_STANDALONE", "PET_RDZV_ENDPOINT"):  # would override the options we pass to torchrun
            os.environ.pop(name, None)
        for logger in loud:
            logger.setLevel(logging.CRITICAL)
        sys.stdout.flush()  # before rank 0 writes to the same terminal
        sys.stderr.flush()
        yield
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        for logger, level in loud.items():
            logger.setLevel(level)
        for number, handler in handlers.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread, or not a handler of Python's
                signal.signal(number, handler)


def _wait_for_name(address: str) -> str:
    """Wait until the name of the first host resolves, which may take time in a cluster; return the problem, if any."""
    deadline = time.monotonic() + _NAME_TIMEOUT_S
    is_first = True
    while True:
        try:
            socket.getaddrinfo(address.strip("[]"), None)
            return ""
        except OSError as error:
            if time.monotonic() > deadline:
                return f"the address {address} cannot be resolved on this host: {error}"
            if is_first:
                say(f"{address} does not resolve yet; waiting up to {format_seconds(_NAME_TIMEOUT_S)}")
            is_first = False
            time.sleep(1.0)


def _first_failure(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Return the rank that failed by itself; the others failed, or were ended by torchrun, because of it.

    torchrun lists the processes that it found dead, then those that it ended, with timestamps in whole seconds. It may
    find a consequence before the cause, whose process is still ending, so within a few seconds the kind of exit
    decides.
    """
    begin = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, tuple[int, Any]]) -> tuple[bool, int, bool, int]:
        position, (rank, failure) = item
        code = failure.exitcode
        # 1 is the exit code of a rank that lost another one, 75 may be the response to torchrun's SIGTERM.
        kind = 3 if code == -signal.SIGTERM else 0 if code < 0 else 2 if code in (1, _RESUMABLE) else 1
        # Every rank finds the same mistake in a recipe; rank 0 has printed it to the terminal, and once is enough.
        is_printed = code == _MISTAKE and rank == 0
        return failure.timestamp > begin + _DYING_S, kind, not is_printed, position

    return min(enumerate(failures.items()), key=order)[1]


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")


def _describe_failure(failures: Mapping[int, Any], plan: LaunchPlan) -> Ending:
    rank, failure = _first_failure(failures)
    code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    if code == _RESUMABLE:
        return Ending(code, "stopped by a time limit or a signal (exit code 75)")
    lines = [f"error: rank {rank} {_describe_exit(failure.exitcode)}"]
    for name in ("stdout", "stderr"):
        logs = plan.log_folder.glob(f"*/attempt_*/{failure.local_rank}/{name}.log")
        attempts = {int(re.sub(r"\D", "", path.parts[-3])): path for path in logs}
        if attempts:
            last = attempts[max(attempts)]
            tail = last.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_TAIL_LINES:]
            lines += [f"  end of its {name}, {last}:", *(f"    {line}" for line in tail)] if tail else []
    for other, its in failures.items():
        if other != rank and its.exitcode != -signal.SIGTERM:
            lines.append(f"  also rank {other} {_describe_exit(its.exitcode)}")
    if plan.settings.processes > 1:
        lines.append(f"  output of the other ranks: {plan.log_folder}")
    return Ending(code, "\n".join(lines))
