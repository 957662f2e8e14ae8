"""Each process tells the others what it does, and stops waiting for those that cannot come any more.

Two daemon threads: `exchange` talks to the others and may be stuck; `_watch` keeps the time, judges by `peer_rules` and
never does anything that can block. The main thread only sets attributes, or waits for an event.

While a collective runs, the main thread sits in C++ and cannot be interrupted, so `_watch` ends the process. Where it
can be (in `meet`, or once the collective has raised) it gets a `PeerError` instead.
"""

import atexit
import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from trimtab.distributed.health import rules as peer_rules
from trimtab.distributed.health.exchange import Exchange
from trimtab.distributed.health.peers import Fate, Kind, Patience, Peers, Report, Wait
from trimtab.distributed.health.process_activity import Activity, find_machine, find_process, where_thread_stands
from trimtab.errors import PeerError, RecipeError
from trimtab.units import SECONDS_WORDS, parse_seconds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

EXPLAIN_S = 3.0  # to wait for news of who is gone, after a collective has failed
LAST_WORDS_S = 5.0  # for the last report, and for the hooks before this process is ended
MAX_REASON = 1000  # characters


class _Doing(NamedTuple):
    """Where the main thread is. One object, so that the other threads always see a whole state."""

    kind: Kind = ""
    name: str = ""
    number: int = 0  # of the verb
    num_verbs: int = 0  # entered so far
    can_raise: bool = False
    outer: "_Doing | None" = None


class Monitor:
    """Tells every process what the others do, and ends this one when the others cannot come any more.

    Every process has to enter the same verbs in the same order. `did`, `waiting`, `long` and `meet` belong to the main
    thread. The environment variable TRIMTAB_PATIENCE ("1h") overrides `timeout_s`, and gives as long to a process that
    does nothing.

    Args:
        store: Where the processes meet, under a prefix of its own and by a connection of its own (`store.clone()`): on
            a shared one a call that waits for somebody would silence this process.
        rank: Of this process.
        num_processes: All of them.
        host: The name to show for this host; its own by default.
        timeout_s: How long to wait for a process that works and does not come.
        lost_after_s: How long for one that is stopped; 2.5 times that for one that is silent on another host.
        idle_after_s: How long for one that does nothing.

    Raises:
        RecipeError: TRIMTAB_PATIENCE is no length of time.
    """

    def __init__(
        self,
        store: "Store",
        rank: int,
        num_processes: int,
        *,
        host: str = "",
        timeout_s: float = 600.0,
        lost_after_s: float = 10.0,
        idle_after_s: float = 18.0,
    ) -> None:
        self.at_abort: list[Callable[[str], None]] = []
        patience_s = _patience_of_user()
        if patience_s is not None:
            timeout_s, idle_after_s = patience_s, max(idle_after_s, patience_s)
        self._rank = rank
        self._host = host or socket.gethostname()
        self._machine = find_machine()
        patience = Patience(lost_after_s, idle_after_s, timeout_s)
        self._interval_s = patience.interval_s
        self._peers = Peers(rank, num_processes, patience, self._machine)
        self._lock = threading.Lock()  # of _peers
        # Set by the main thread.
        self._pid = 0
        self._started = 0
        self._thread = 0  # the main one, which need not be Python's
        self._doing = _Doing()
        self._what = ""
        self._num_did = 0
        self._waitings: dict[str, _Waiting] = {}
        self._fate: Fate = ""
        self._reason = ""
        self._by_peer = False
        self._is_explaining = False
        # Set by the thread that watches.
        self._activity = Activity(0)
        self._seen_doing = self._doing
        self._seen_did = 0
        self._wait: Wait | None = None
        self._what_s = 0.0
        self._stack = ""
        self._in_debugger = False

        self._is_stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="trimtab-monitor", daemon=True)
        self._meeting_problem: Callable[[str], None] | None = None
        self._exchange = Exchange(
            store,
            rank,
            num_processes,
            self._interval_s,
            report=self._report,
            hear=self._hear,
            wants_news=lambda: self._peers.waited_s > 0 or self._is_explaining,  # most waits are short
            broke=self._lost_store,
        )

    @property
    def _is_on(self) -> bool:
        """It was started, by this process: a forked loader worker must not speak for its parent."""
        return self._pid == os.getpid() and not self._is_stopping.is_set()

    def start(self) -> None:
        """Begin to report and to watch."""
        if self._pid:
            return
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        own = find_process(self._pid)
        self._started = own.started if own else 0
        self._exchange.start()
        self._activity = Activity(self._pid, ignored_thread=self._exchange.thread_id)
        self._watcher.start()
        # An interpreter that finishes while a thread is inside the store aborts, so the threads have to end before.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Tell the others that this process has ended, unless it failed, and stop watching them."""
        if not self._is_on:
            return
        self._set_fate("ended")
        self._is_stopping.set()
        self._exchange.stop(LAST_WORDS_S)  # a store that does not answer cannot hold up the end for longer
        self._watcher.join(LAST_WORDS_S)
        atexit.unregister(self.stop)

    def did(self, what: str) -> None:
        """Note what this process does now, such as "step 12: forward"."""
        self._what = what
        self._num_did += 1

    def waiting(self, verb: str) -> AbstractContextManager[None]:
        """Inside, this process waits for all others to do the same."""
        found = self._waitings.get(verb)
        if found is None:
            found = self._waitings[verb] = _Waiting(self, verb)
        return found

    def long(self, what: str) -> AbstractContextManager[None]:
        """Inside, this process may be silent for as long as it likes: the others begin to count at its end."""
        return _Long(self, what)

    def meet(self, verb: str) -> None:
        """Return when every process has called this with the same verb.

        Raises:
            PeerError: Another process called it with another verb, or cannot come.
        """
        if not self._is_on:
            raise PeerError(f"rank {self._rank} is in {verb}, but has not begun to watch the others, or has ended")
        self._enter_verb(verb, can_raise=True)
        meeting = self._exchange.begin_meeting(verb)
        self._meeting_problem = meeting.end
        try:
            meeting.is_over.wait()
        finally:
            self._meeting_problem = None
            self._exchange.end_meeting()
            self._leave()
        if meeting.problem:
            raise PeerError(meeting.problem)

    def explain(self, error: BaseException) -> PeerError:
        """Say why a collective failed in this process, after at most a few seconds in which news may come.

        Args:
            error: What the collective raised.
        """
        if isinstance(error, PeerError):
            return error
        self._is_explaining = True
        with self._lock:
            beats = {peer.rank: peer.report.beat for peer in self._peers.all}
        began_s = time.monotonic()
        cause: str | None = None
        while cause is None and (passed_s := time.monotonic() - began_s) < EXPLAIN_S:
            with self._lock:
                self._peers.look()  # before the exchange, which brings the last word of those who are gone
            self._exchange.now(0.5)
            with self._lock:
                # One that ended may have done so because of a third one, which shows a moment later.
                cause = peer_rules.find_departed(self._peers, None, count_ended=passed_s >= EXPLAIN_S / 2)
            if cause is None:
                time.sleep(0.1)
        with self._lock:
            cause = cause or peer_rules.find_stopped_by_peer(self._peers)
            cause = cause or peer_rules.find_silent_since(self._peers, beats)
        self._is_explaining = False
        noticed = f"{type(error).__name__}: {_short(error)}"
        if cause is None:
            return PeerError(f"a collective failed in rank {self._rank}, and all others are there: {noticed}")
        return PeerError(f"{cause}\n  rank {self._rank} noticed it by {noticed}")

    def failed(self, error: BaseException) -> None:
        """Tell the others that this process dies of `error`."""
        if self._is_on:
            self._set_fate("failed", error)
            self._exchange.now(self._interval_s)

    # ------------------------------------------------------------------ the main thread

    def _set_fate(self, fate: Fate, error: BaseException | None = None) -> None:
        """The first one counts: a process that failed will also end."""
        if self._fate:
            return
        self._by_peer = isinstance(error, PeerError)
        if error is not None:
            reason = str(error) if self._by_peer else f"{type(error).__name__}: {_first_line(error)}"
            self._reason = reason[:MAX_REASON]
        self._fate = fate

    def _enter_verb(self, verb: str, can_raise: bool = False) -> None:
        number = self._doing.num_verbs + 1
        self._doing = _Doing("verb", verb, number, number, can_raise, self._doing)

    def _enter_long(self, what: str) -> None:
        self._doing = _Doing("long", what, 0, self._doing.num_verbs, False, self._doing)
        if self._is_on:
            self._exchange.now(self._interval_s / 4)  # what follows may not let any thread run for a while

    def _leave(self, *, has_failed: bool = False) -> None:
        """A verb that failed does not count: what is tried again has the number that the others have it under."""
        num_verbs = self._doing.number - 1 if has_failed and self._doing.number else self._doing.num_verbs
        kind, name, number, _, can_raise, outer = self._doing.outer or _Doing()
        self._doing = _Doing(kind, name, number, num_verbs, can_raise, outer)

    # ------------------------------------------------------------------ the thread that talks

    def _report(self, beat: int) -> Report:
        doing = self._doing
        return Report(
            beat=beat,
            host=self._host,
            pid=self._pid,
            machine=self._machine,
            started=self._started,
            kind=doing.kind,
            name=doing.name,
            number=doing.number,
            num_verbs=doing.num_verbs,
            what=self._what[:MAX_REASON],
            what_s=round(self._what_s, 1),
            idle_s=round(self._activity.idle_s, 1),
            stack=self._stack,
            in_debugger=self._in_debugger,
            fate=self._fate,
            reason=self._reason,
            by_peer=self._by_peer,
        )

    def _hear(self, reports: dict[int, Report]) -> None:
        with self._lock:
            self._peers.hear(reports)

    def _lost_store(self, error: str) -> None:
        with self._lock:
            self._peers.store_error = error

    # ------------------------------------------------------------------ the thread that watches

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._is_stopping.wait(self._interval_s):
            now_s = time.monotonic()
            # Time in which this process did not run (stopped, swapped out) says nothing about the others.
            seconds = min(now_s - before_s, 2 * self._interval_s)
            before_s = now_s
            doing = self._doing
            self._look_at_itself(doing, seconds)
            with self._lock:
                self._peers.pass_time(seconds, self._wait)
                fault = peer_rules.find_fault(self._peers, can_raise=doing.can_raise)
            is_handled = self._fate or self._is_explaining or self._doing is not doing
            if fault and not is_handled:
                self._act(doing, fault)

    def _look_at_itself(self, doing: _Doing, seconds: float) -> None:
        self._activity.pass_time(seconds)
        self._what_s += seconds
        if self._num_did != self._seen_did:
            self._seen_did = self._num_did
            self._what_s = self._activity.idle_s = 0.0
        if doing is not self._seen_doing:
            self._seen_doing = doing
            self._wait = Wait(doing.name, doing.number) if doing.kind == "verb" else None
            self._activity.idle_s = 0.0
        self._stack, self._in_debugger = "", False
        if doing.kind == "" and self._activity.idle_s > 2 * seconds:
            self._stack, self._in_debugger = where_thread_stands(self._thread)

    def _act(self, doing: _Doing, fault: str) -> None:
        tell = self._meeting_problem
        if not doing.can_raise:
            self._abort(doing.name, fault)
        elif tell is not None:
            tell(fault)

    def _abort(self, verb: str, fault: str) -> None:
        """Say why, and end this process. A hook that blocks cannot prevent it."""
        self._set_fate("failed", PeerError(fault))
        message = f"rank {self._rank} stops waiting in {verb}: {fault}"

        def last_words() -> None:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"trimtab: {message}\n")
                sys.stderr.flush()
            for hook in self.at_abort:
                with contextlib.suppress(Exception):
                    hook(message)
            with contextlib.suppress(Exception):
                sys.stdout.flush()

        speaker = threading.Thread(target=last_words, name="trimtab-last-words", daemon=True)
        speaker.start()
        self._exchange.now(self._interval_s / 2)
        speaker.join(LAST_WORDS_S)
        os._exit(PeerError.exit_code)


class NoMonitor:
    """One process: nobody to watch."""

    def __init__(self) -> None:
        self.at_abort: list[Callable[[str], None]] = []

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def did(self, what: str) -> None:
        """Nobody wants to know."""

    def waiting(self, verb: str) -> AbstractContextManager[None]:
        """Nobody to wait for."""
        return _NOTHING

    def long(self, what: str) -> AbstractContextManager[None]:
        """Nobody waits."""
        return _NOTHING

    def meet(self, verb: str) -> None:
        """Everybody is here."""

    def explain(self, error: BaseException) -> PeerError:
        """There is nobody to blame."""
        return error if isinstance(error, PeerError) else PeerError(f"{type(error).__name__}: {_first_line(error)}")

    def failed(self, error: BaseException) -> None:
        """Nobody to tell."""


_NOTHING: AbstractContextManager[None] = nullcontext()


class _Waiting:
    """`Monitor.waiting`. Holds nothing of a wait, so that one object serves all waits for a verb."""

    def __init__(self, monitor: Monitor, verb: str) -> None:
        self._monitor = monitor
        self._verb = verb

    def __enter__(self) -> None:
        self._monitor._enter_verb(self._verb)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._monitor._leave(has_failed=kind is not None)


class _Long:
    """`Monitor.long`."""

    def __init__(self, monitor: Monitor, what: str) -> None:
        self._monitor = monitor
        self._what = what

    def __enter__(self) -> None:
        self._monitor._enter_long(self._what)

    def __exit__(self, *exception: object) -> None:
        self._monitor._leave()


def _patience_of_user() -> float | None:
    text = os.environ.get(peer_rules.PATIENCE_VARIABLE, "")
    if not text:
        return None
    try:
        return parse_seconds(text)
    except RecipeError:
        problem = f"{peer_rules.PATIENCE_VARIABLE}={text!r} is not a length of time"
        raise RecipeError(problem, f"write {SECONDS_WORDS}") from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:MAX_REASON]


def _short(error: BaseException) -> str:
    """The first sentence, without the place in the C++ source with which gloo's messages begin."""
    return re.split(r"\. |\n", re.sub(r"^\[\S*\] ", "", str(error)), maxsplit=1)[0][:MAX_REASON]
