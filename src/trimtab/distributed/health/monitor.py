"""Monitor the other ranks: each rank reports what it does, and none waits for a lost rank.

A daemon thread exchanges reports and may block in the store (`ReportExchange`). A second one, `_watch`, measures time,
applies `rules` and never blocks. The main thread only sets attributes.

While a collective runs, the main thread is in C++ and cannot be interrupted, so `_watch` ends the process. If an
exception can be raised (in `meet`, or after the collective itself has raised), it is a `PeerError`.
"""

import atexit
import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from trimtab.distributed.health import rules
from trimtab.distributed.health.exchange import ReportExchange
from trimtab.distributed.health.peers import End, Kind, Peers, Report, Timeouts, Wait
from trimtab.distributed.health.process_activity import Activity, describe_stack, find_pid_namespace, find_process
from trimtab.errors import PeerError, RecipeError
from trimtab.units import SECONDS_SYNTAX, parse_seconds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

EXPLAIN_S = 3.0  # time for reports to arrive after a collective has failed
LAST_REPORT_S = 5.0  # time for the last report, and for the message before this process is ended
MAX_REASON = 1000  # characters


class Monitor:
    """The monitor of a run of one process, which does nothing."""

    def did(self, what: str) -> None:
        """Record the progress of this rank, such as "step 12: forward"."""

    def waiting(self, operation: str) -> AbstractContextManager[None]:
        """A context for a collective, in which this rank waits for all others.

        Args:
            operation: Name of the collective; every rank has to enter the same names in the same order.
        """
        return nullcontext()

    def long(self, what: str) -> AbstractContextManager[None]:
        """A context in which this rank may be silent for as long as it takes: timeouts start at its end."""
        return nullcontext()

    def meet(self, operation: str) -> None:
        """Wait until every rank has called this with the same name.

        Raises:
            PeerError: A rank called it with another name, or is lost.
        """

    def others_enter(self, operation: str) -> bool:
        """Wait until another rank has called `meet`, or cannot: it waits in another collective, or is lost.

        Args:
            operation: What this rank is about to do.

        Returns:
            Whether another rank has called `meet`.
        """
        return True

    def explain(self, error: BaseException) -> PeerError:
        """Return an error that names the rank that made a collective fail.

        Args:
            error: What the collective raised.
        """
        return error if isinstance(error, PeerError) else PeerError(f"{type(error).__name__}: {_first_line(error)}")


class _State(NamedTuple):
    """What the main thread is doing. It is one object, so that other threads see a consistent state."""

    kind: Kind = ""
    operation: str = ""
    number: int = 0  # name of the collective
    num_collectives: int = 0  # number of collectives entered so far
    can_raise: bool = False


class PeerMonitor(Monitor):
    """The monitor of one rank of several. It ends the process if it waits for a lost rank.

    Only the main thread calls `did`, `waiting`, `long` and `meet`.

    Args:
        store: Key-value store of all ranks, with a separate prefix and connection: on a shared connection, a waiting
            call would silence this rank.
        rank: Rank of this process.
        num_processes: World size.
        timeouts: How long to wait. The environment variable TRIMTAB_PATIENCE ("1h") overrides the timeout for a busy
            rank, and the one for an idle rank if it is longer.

    Raises:
        RecipeError: TRIMTAB_PATIENCE is not a duration.
    """

    def __init__(self, store: "Store", rank: int, num_processes: int, timeouts: Timeouts) -> None:
        patience_s = _read_patience()
        if patience_s is not None:
            timeouts = timeouts._replace(busy_s=patience_s, idle_s=max(timeouts.idle_s, patience_s))
        self._rank = rank
        self._num_processes = num_processes
        self._interval_s = timeouts.interval_s
        self._peers = Peers(rank, num_processes, timeouts, find_pid_namespace())
        self._store = store
        self._exchange = ReportExchange(store, self._peers, self._make_report)
        # Set by the main thread.
        self._pid = 0
        self._started = 0
        self._thread = 0  # the thread of the loop, which need not be Python's main thread
        self._state = _State()
        self._progress = ""
        self._num_progress = 0
        self._num_barriers = 0
        self._end: End = ""
        self._reason = ""
        self._by_peer = False
        self._is_explaining = False
        # Set by the thread that watches.
        self._activity = Activity(0)
        self._seen_state = self._state
        self._seen_progress = 0
        self._wait: Wait | None = None
        self._stack, self._in_debugger = "", False
        self._barrier_fault, self._barrier_fault_s = "", 0.0

        self._is_stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="trimtab-monitor", daemon=True)

    @property
    def _is_on(self) -> bool:
        """Whether it was started, and by this process: a forked loader worker must not report for its parent."""
        return self._pid == os.getpid() and not self._is_stopping.is_set()

    def start(self) -> None:
        """Start to report and to watch."""
        if self._pid:
            return
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        own = find_process(self._pid)
        self._started = own.started if own else 0
        self._exchange.thread.start()
        self._activity = Activity(self._pid, ignored_thread=self._exchange.thread.native_id)
        self._watcher.start()
        # The interpreter aborts if it finalizes while a thread is in the store, so the threads have to end before.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Report that this rank exits, unless it failed, and stop watching."""
        if not self._is_on:
            return
        self._set_end("exited")
        self._is_stopping.set()
        self._exchange.stop(LAST_REPORT_S)  # a store that does not answer must not delay the exit any longer
        self._watcher.join(LAST_REPORT_S)
        atexit.unregister(self.stop)

    def did(self, what: str) -> None:
        """Record the progress of this rank."""
        self._progress = what
        self._num_progress += 1

    @contextmanager
    def waiting(self, operation: str, can_raise: bool = False) -> Iterator[None]:
        """A context for a collective."""
        outer = self._state
        number = outer.num_collectives + 1
        self._state = _State("collective", operation, number, number, can_raise)
        try:
            yield
        except BaseException:
            self._state = outer  # not counted: a second attempt must have the same number as on the other ranks
            raise
        self._state = outer._replace(num_collectives=self._state.num_collectives)

    @contextmanager
    def long(self, what: str) -> Iterator[None]:
        """A context in which this rank may be silent."""
        outer = self._state
        self._state = _State("long", what, num_collectives=outer.num_collectives)
        if self._is_on:
            self._exchange.report_now(self._interval_s / 4)  # inside, the GIL may not be released for a while
        try:
            yield
        finally:
            self._state = outer._replace(num_collectives=self._state.num_collectives)

    def meet(self, operation: str) -> None:
        """Wait until every rank has called this with the same name."""
        if not self._is_on:
            raise PeerError(f"rank {self._rank} is in {operation}, but its monitor is not running")
        self._barrier_fault = ""
        with self.waiting(operation, can_raise=True):
            problem = self._wait_in_store(operation)
        if problem:
            raise PeerError(problem)

    def others_enter(self, operation: str) -> bool:
        """Wait until another rank has called `meet`, or cannot."""
        others = [rank for rank in range(self._num_processes) if rank != self._rank]
        keys = [f"barrier/{self._num_barriers + 1}/{rank}" for rank in others]
        number = self._state.num_collectives + 1
        pause_s = 0.0005
        with self.long(f"{operation}: waiting for the other ranks"):
            while not any(self._store.check([key]) for key in keys):
                with self._peers.lock:
                    self._peers.look_up()
                    if rules.find_absent(self._peers, Wait(operation, number)):
                        return False
                time.sleep(pause_s)
                pause_s = min(1.3 * pause_s, 0.05)
        return True

    def explain(self, error: BaseException) -> PeerError:
        """Return the error that names the lost rank, after waiting at most a few seconds for reports."""
        if isinstance(error, PeerError):
            return error
        self._is_explaining = self._exchange.is_urgent = True
        began_s = time.monotonic()
        cause: str | None = None
        while cause is None and (passed_s := time.monotonic() - began_s) < EXPLAIN_S:
            with self._peers.lock:
                self._peers.look_up()  # before the exchange, which delivers the last reports of the lost ranks
            self._exchange.report_now(0.5)
            with self._peers.lock:
                # A rank that exited may have done so because of a third one, which becomes visible a moment later.
                cause = rules.find_departed(self._peers, None, count_exited=passed_s >= EXPLAIN_S / 2)
            if cause is None:
                time.sleep(0.1)
        with self._peers.lock:
            cause = cause or rules.find_secondary_failure(self._peers)
            cause = cause or rules.find_silent(self._peers, 0.6 * EXPLAIN_S)
        self._is_explaining = self._exchange.is_urgent = False
        noticed = f"{type(error).__name__}: {_first_sentence(error)}"
        if cause is None:
            return PeerError(f"a collective failed in rank {self._rank}, and all other ranks are alive: {noticed}")
        return PeerError(f"{cause}\n  rank {self._rank} saw: {noticed}")

    def failed(self, error: BaseException) -> None:
        """Report that this rank ends because of `error`."""
        if self._is_on:
            self._set_end("failed", error)
            self._exchange.report_now(self._interval_s)

    # ------------------------------------------------------------------ the main thread

    def _set_end(self, end: End, error: BaseException | None = None) -> None:
        """Set the end once: a rank that failed also exits."""
        if self._end:
            return
        self._by_peer = isinstance(error, PeerError)
        if error is not None:
            reason = str(error) if self._by_peer else f"{type(error).__name__}: {_first_line(error)}"
            self._reason = reason[:MAX_REASON]
        self._end = end

    def _wait_in_store(self, operation: str) -> str:
        """Announce this rank and poll until all ranks have arrived; return the problem, if any."""
        self._num_barriers += 1
        number = self._num_barriers
        keys = [f"barrier/{number}/{rank}" for rank in range(self._num_processes)]
        pause_s = 0.0005  # short at first, for ranks that arrive together; longer later, to spare the store
        try:
            self._store.set(keys[self._rank], operation)
            if number > 2:  # every rank has entered the previous barrier, so every rank has read the one before it
                self._store.delete_key(f"barrier/{number - 2}/{self._rank}")
            while not self._store.check(keys):
                if self._barrier_fault:
                    return self._barrier_fault
                time.sleep(pause_s)
                pause_s = min(1.3 * pause_s, 0.05)
            operations = [text.decode() for text in self._store.multi_get(keys)]
        except RuntimeError as error:
            return str(self.explain(error))
        others = [f"rank {rank} in {other}" for rank, other in enumerate(operations) if other != operation]
        return f"rank {self._rank} is in {operation}, {', '.join(others)}{rules.DEADLOCK}" if others else ""

    # ------------------------------------------------------------------ the thread that reports

    def _make_report(self, beat: int) -> Report:
        state = self._state
        return Report(
            beat=beat,
            host=socket.gethostname(),
            pid=self._pid,
            pid_namespace=self._peers.pid_namespace,
            started=self._started,
            kind=state.kind,
            operation=state.operation,
            number=state.number,
            num_collectives=state.num_collectives,
            progress=self._progress[:MAX_REASON],
            idle_s=round(self._activity.idle_s, 1),
            stack=self._stack,
            in_debugger=self._in_debugger,
            end=self._end,
            reason=self._reason,
            by_peer=self._by_peer,
        )

    # ------------------------------------------------------------------ the thread that watches

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._is_stopping.wait(self._interval_s):
            now_s = time.monotonic()
            # Time in which this process did not run (stopped, swapped out) is no evidence against the other ranks.
            seconds = min(now_s - before_s, 2 * self._interval_s)
            before_s = now_s
            state = self._state
            self._watch_own_rank(state, seconds)
            with self._peers.lock:
                self._peers.pass_time(seconds, self._wait)
                fault = rules.find_fault(self._peers, can_raise=state.can_raise)
            is_handled = self._end or self._is_explaining or self._state is not state
            if fault and not is_handled:
                self._handle(state, fault, now_s)

    def _watch_own_rank(self, state: _State, seconds: float) -> None:
        self._activity.pass_time(seconds)
        if self._num_progress != self._seen_progress:
            self._seen_progress = self._num_progress
            self._activity.idle_s = 0.0
        if state is not self._seen_state:
            self._seen_state = state
            self._wait = Wait(state.operation, state.number) if state.kind == "collective" else None
            self._activity.idle_s = 0.0
        self._stack, self._in_debugger = "", False
        if state.kind == "" and self._activity.idle_s > 2 * seconds:
            self._stack, self._in_debugger = describe_stack(self._thread)

    def _handle(self, state: _State, fault: str, now_s: float) -> None:
        """Make `meet` raise, or end this process, even if `meet` itself is stuck in the store."""
        if state.can_raise and not self._barrier_fault:
            self._barrier_fault, self._barrier_fault_s = fault, now_s
        elif not state.can_raise or now_s > self._barrier_fault_s + LAST_REPORT_S:
            self._abort(state.operation, fault)

    def _abort(self, operation: str, fault: str) -> None:
        """Write the fault to stderr and end this process, even if a stream is blocked."""
        self._set_end("failed", PeerError(fault))

        def write() -> None:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"trimtab: rank {self._rank} stops waiting in {operation}: {fault}\n")
                sys.stderr.flush()
                sys.stdout.flush()

        writer = threading.Thread(target=write, name="trimtab-abort", daemon=True)
        writer.start()
        self._exchange.report_now(self._interval_s / 2)
        writer.join(LAST_REPORT_S)
        os._exit(PeerError.exit_code)


def _read_patience() -> float | None:
    text = os.environ.get(rules.PATIENCE_VARIABLE, "")
    if not text:
        return None
    try:
        return parse_seconds(text)
    except RecipeError:
        problem = f"{rules.PATIENCE_VARIABLE}={text!r} is not a duration"
        raise RecipeError(problem, f"write {SECONDS_SYNTAX}") from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:MAX_REASON]


def _first_sentence(error: BaseException) -> str:
    """Remove the location in the C++ source with which messages of gloo start."""
    return re.split(r"\. |\n", re.sub(r"^\[\S*\] ", "", str(error)), maxsplit=1)[0][:MAX_REASON]
