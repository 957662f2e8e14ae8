"""Runs a planned launch with torchrun, in this process, and says what went wrong.

torchrun does the work. What is added: exit codes that mean something, the last words of the process that failed,
restarts only where they can help, and processes that end with their launcher.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from trimtab.distributed.launch.command import LaunchPlan
from trimtab.distributed.launch.end_with_parent import ending_with_parent
from trimtab.log import say
from trimtab.units import format_seconds

_NUM_TAIL_LINES = 12
_NAME_PATIENCE_S = 120.0
_DYING_S = 5
# A second attempt cures neither: 2 is a mistake of the user, 75 an end that was asked for.
_RESUMABLE = 75
_FINAL_CODES = (2, _RESUMABLE)
_SAVING_S = 300


@dataclass(frozen=True)
class Ending:
    """How a launch ended: its exit code, and what there is to say about it."""

    code: int
    message: str = ""


def start(plan: LaunchPlan) -> Ending:
    """Run the processes until they end.

    Returns:
        Exit code 0 if all ended well; else that of the process that failed first, 128 + n for signal n.
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
    codes: list[int | None] = []  # of processes that a signal to this one has ended
    try:
        with _borrowed_process(plan.environment):
            _run_torchrun(plan.torchrun, codes)
    except ChildFailedError as error:
        return _explain(error.failures, plan)
    except SignalException as error:
        if _RESUMABLE in codes:
            return Ending(_RESUMABLE, f"stopped by {error.sigval.name}; the run was saved and can go on")
        return Ending(128 + error.sigval, f"stopped by {error.sigval.name}")
    except (RendezvousError, DistError) as error:
        where = f"{settings.address or 'this host'}:{settings.port or 'a free port'}"
        return Ending(1, f"error: the {settings.num_hosts} hosts did not meet at {where}: {_first_line(error)}")
    return Ending(0)


def _run_torchrun(arguments: Sequence[str], codes: list[int | None]) -> None:
    torchrun: Any = import_module("torch.distributed.run")
    api: Any = import_module("torch.distributed.launcher.api")
    plain = api.LocalElasticAgent
    api.LocalElasticAgent = _own_agent(plain, codes)
    try:
        with _quiet_torchrun():
            torchrun.run(torchrun.parse_args(list(arguments)))
    finally:
        api.LocalElasticAgent = plain


def _own_agent(plain: Any, codes: list[int | None]) -> Any:
    """The agent of torchrun, which by itself starts again whatever the exit code was, and leaves processes behind."""

    class Agent(plain):  # type: ignore[misc]
        def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
            command = ending_with_parent([spec.entrypoint])
            spec.entrypoint = command[0]
            # torchrun reads $ in arguments as the beginning of a placeholder
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
                    say(f"rank {rank} {_how(failure.exitcode)}; all processes are started again, attempt {attempt}")
            return result

        def _shutdown(self, *args: Any, **kwargs: Any) -> None:
            if args and "timeout" in inspect.signature(super()._shutdown).parameters:
                kwargs["timeout"] = _SAVING_S  # a signal came: the processes save before they end
            super()._shutdown(*args, **kwargs)
            handlers = getattr(self._pcontext, "subprocess_handlers", {}).values()
            codes.extend(process.proc.returncode for process in handlers)
            # It leaves the log files of processes that have ended open.
            for process in getattr(self._pcontext, "subprocess_handlers", {}).values():
                for stream in (process._stdout, process._stderr):
                    if stream is not None:
                        stream.close()

    return Agent


@contextlib.contextmanager
def _borrowed_process(environment: Mapping[str, str]) -> Iterator[None]:
    """Variables and signal handlers of this process, which torchrun changes, are afterwards as they were."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    handlers = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    variables = dict(os.environ)
    try:
        os.environ.update(environment)
        for name in ("PET_STANDALONE", "PET_RDZV_ENDPOINT"):  # torchrun would take them for the options given to it
            os.environ.pop(name, None)
        sys.stdout.flush()  # what was said before comes before what rank 0 says
        sys.stderr.flush()
        yield
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        for number, handler in handlers.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread, or a handler that is not Python's
                signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_torchrun() -> Iterator[None]:
    """What torchrun logs is said here shorter; who wants it sets LOGLEVEL, as for torchrun."""
    names = ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(names)]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers if "LOGLEVEL" not in os.environ else []:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _wait_for_name(address: str) -> str:
    """In a cluster the name of a host may become known only after this one has started. What is wrong, if it is."""
    deadline = time.monotonic() + _NAME_PATIENCE_S
    has_said = False
    while True:
        try:
            socket.getaddrinfo(address.strip("[]"), None)
            return ""
        except OSError as error:
            if time.monotonic() > deadline:
                return f"address {address} is not known on this host: {error}"
            if not has_said:
                say(f"the name {address} is not known here yet; waiting up to {format_seconds(_NAME_PATIENCE_S)}")
                has_said = True
            time.sleep(1.0)


# ---------------------------------------------------------------------- what went wrong


def _first_failure(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """The process that failed by itself; the others failed, or were ended by torchrun, because it was gone.

    torchrun lists those that it found dead first and then those that it ended, with times in whole seconds. It may find
    one that noticed before one that is still dying, so within a few seconds the kind of death decides.
    """
    begin = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, tuple[int, Any]]) -> tuple[bool, int, int]:
        position, (_, failure) = item
        code = failure.exitcode
        # 1 is the exit code of a process that misses another, 75 may be the answer to torchrun's SIGTERM.
        kind = 3 if code == -signal.SIGTERM else 0 if code < 0 else 2 if code in (1, 75) else 1
        return failure.timestamp > begin + _DYING_S, kind, position

    return min(enumerate(failures.items()), key=order)[1]


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")


def _explain(failures: Mapping[int, Any], plan: LaunchPlan) -> Ending:
    rank, failure = _first_failure(failures)
    code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    if code == 75:
        return Ending(75, "stopped by a time limit or a signal (exit code 75)")
    lines = [f"error: rank {rank} {_how(failure.exitcode)}"]
    for name in ("stdout", "stderr"):
        if found := _newest(plan.log_folder, failure.local_rank, name):
            tail = found.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_TAIL_LINES:]
            if tail:
                lines += [f"  its {name} ended, in {found}:", *(f"    {line}" for line in tail)]
    for other, its in failures.items():
        if other != rank and its.exitcode != -signal.SIGTERM:
            lines.append(f"  also rank {other} {_how(its.exitcode)}")
    if plan.settings.processes > 1:
        lines.append(f"  what the other ranks wrote: {plan.log_folder}")
    return Ending(code, "\n".join(lines))


def _newest(folder: Path, local_rank: int, name: str) -> Path | None:
    """The log of the last attempt."""
    found = list(folder.glob(f"*/attempt_*/{local_rank}/{name}.log"))
    attempts = {int(re.sub(r"\D", "", path.parts[-3])): path for path in found}
    return attempts[max(attempts)] if attempts else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
