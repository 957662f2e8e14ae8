"""The thread that sends the reports of this rank through the store and reads those of the other ranks.

It calls nothing that waits for another rank, but it may still block: while the host of the store is stopped or
unreachable, every call blocks, whatever timeout was set. So each wait for this thread has a limit, and another thread
evaluates the reports.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from trimtab.distributed.health.peers import Peers, Report

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NUM_BEATS_UNREAD = 5  # reports of this rank between two reads, while nothing depends on the other ranks
MAX_CHECKED = 64  # keys checked one by one per interval, while some ranks have not reported yet


class ReportExchange:
    """Exchange reports with the other ranks.

    Args:
        store: Key-value store that all ranks are connected to.
        peers: Receives the reports of the other ranks.
        make_report: Creates the report of this rank from the report's number; called by the thread.
    """

    def __init__(self, store: "Store", peers: Peers, make_report: Callable[[int], Report]) -> None:
        self.is_urgent = False  # read the other ranks at every interval
        self._store = store
        self._peers = peers
        self._make_report = make_report
        self._key = f"report/{peers.rank}"
        self._reported: set[int] = set()  # ranks that have a report in the store
        self._is_stopping = False
        self._requests: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="trimtab-exchange", daemon=True)

    def stop(self, timeout_s: float) -> None:
        """Send a last report and end the thread; do not wait longer than `timeout_s`."""
        self._is_stopping = True
        self._requests.put(threading.Event())
        self.thread.join(timeout_s)

    def report_now(self, timeout_s: float) -> None:
        """Report before the interval is over, and wait at most `timeout_s` for it."""
        if self.thread.is_alive():
            sent = threading.Event()
            self._requests.put(sent)
            sent.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._exchange()
        except Exception as error:  # an exception of any type: without the store there is nothing left to do
            with self._peers.lock:
                self._peers.store_error = f"{type(error).__name__}: {error}".partition("\n")[0]

    def _exchange(self) -> None:
        beat, due_s = 0, 0.0
        while True:
            request = None
            with contextlib.suppress(queue.Empty):
                request = self._requests.get(timeout=max(0.0, due_s - time.monotonic()))
            is_last = self._is_stopping  # read before the report, which has to include the end of this rank
            beat += 1
            self._store.set(self._key, self._make_report(beat).to_json())
            if is_last:
                return
            have_all = len(self._reported) == len(self._peers.all)
            # Reading costs n² · 0.5 KB for n ranks, so it is rare until a wait lasts, but frequent enough that
            # something is known about each rank if the store is lost.
            if self._peers.waited_s > 0 or self.is_urgent or beat % NUM_BEATS_UNREAD == 1 or not have_all:
                self._read()
            elif self._store.check([self._key]):  # `set` is not acknowledged: this shows that the store answers
                self._receive({})
            # More often until each rank has been seen once, so that a rank that is lost right away can also be named.
            interval_s = self._peers.timeouts.interval_s
            due_s = time.monotonic() + interval_s * (1.0 if have_all or beat > 100 else 0.1)
            if request is not None:
                request.set()

    def _read(self) -> None:
        """Read the reports of the other ranks. `get` of a key that does not exist would wait, so keys are checked."""
        missing = [peer.rank for peer in self._peers.all if peer.rank not in self._reported]
        if missing and self._store.check([f"report/{rank}" for rank in missing]):
            self._reported.update(missing)
        else:
            self._reported.update([rank for rank in missing[:MAX_CHECKED] if self._store.check([f"report/{rank}"])])
        ranks = sorted(self._reported)
        texts = self._store.multi_get([f"report/{rank}" for rank in ranks]) if ranks else []
        self._receive({rank: Report.from_json(text) for rank, text in zip(ranks, texts, strict=True)})

    def _receive(self, reports: dict[int, Report]) -> None:
        with self._peers.lock:
            self._peers.receive(reports)
