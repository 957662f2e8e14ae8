"""The thread through which a process talks to the others: its report each second, their reports, and meetings.

It alone uses its connection to the store, and only by calls that do not wait for anybody. It may be stuck all the
same: when the store's host is stopped or unreachable, every call blocks for good, whatever timeout was set. So nobody
may wait for this thread without a limit, and the judgement on the others is made elsewhere.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from trimtab.distributed.health.peers import Report
from trimtab.distributed.health.rules import DEADLOCK

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NUM_BEATS_UNREAD = 5  # others are read that rarely where nothing depends on them
MAX_ASKED = 64  # keys asked for one by one in a round, while some processes have not reported yet


class Meeting:
    """A meeting that the main thread waits for and the thread carries out."""

    def __init__(self, verb: str, number: int) -> None:
        self.verb = verb
        self.number = number
        self.problem = ""
        self.is_announced = False
        self.is_over = threading.Event()

    def end(self, problem: str = "") -> None:
        """Let the main thread go on, or let it raise `problem`."""
        if not self.is_over.is_set():
            self.problem = problem
            self.is_over.set()


class Exchange:
    """Reports of all processes, by way of the store.

    Args:
        store: Where the processes meet: a connection that nobody else uses, since a call that waits would hold it up.
        rank: Of this process.
        num_processes: All of them.
        interval_s: Between two reports.
        report: Makes the report of this process; called by the thread with the number of the report.
        hear: Takes the reports of the others; called by the thread.
        wants_news: Whether the others should be read in each interval (by n processes about n² * 0.5 KB); else it
            happens now and then, so that something is known of them should the store go.
        broke: Told, once, that the store cannot be used any more.
    """

    def __init__(
        self,
        store: "Store",
        rank: int,
        num_processes: int,
        interval_s: float,
        *,
        report: Callable[[int], Report],
        hear: Callable[[dict[int, Report]], None],
        wants_news: Callable[[], bool],
        broke: Callable[[str], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(num_processes)
        self._interval_s = interval_s
        self._report = report
        self._hear = hear
        self._wants_news = wants_news
        self._broke = broke
        self._known: set[int] = set()  # others whose report is in the store
        self._meeting: Meeting | None = None
        self._num_meetings = 0
        self._wake = threading.Event()  # something is to be done before the next report is due
        self._is_stopping = threading.Event()
        self._progress = threading.Condition()
        self._num_wanted = 0  # exchanges that somebody waits for
        self._num_done = 0  # of those
        self._thread = threading.Thread(target=self._run, name="trimtab-exchange", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    @property
    def thread_id(self) -> int | None:
        """The system's id of the thread."""
        return self._thread.native_id

    def stop(self, seconds: float) -> None:
        """Send a last report and end the thread, but do not wait for it longer than that."""
        self._is_stopping.set()
        self._wake.set()
        self._thread.join(seconds)

    def now(self, seconds: float) -> None:
        """Report, and read if news are wanted, at once; wait for it, but not longer than that."""
        with self._progress:
            self._num_wanted += 1
            wanted = self._num_wanted
            self._wake.set()
            self._progress.wait_for(lambda: self._num_done >= wanted, seconds)

    def begin_meeting(self, verb: str) -> Meeting:
        """Announce this process at the next meeting. One at a time; `end_meeting` follows."""
        self._num_meetings += 1
        self._meeting = Meeting(verb, self._num_meetings)
        self._wake.set()
        return self._meeting

    def end_meeting(self) -> None:
        """The main thread does not wait any more."""
        self._meeting = None

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # whatever it was: without the store there is no more talking
            self._broke(f"{type(error).__name__}: {error}".partition("\n")[0])
        with self._progress:
            self._num_done = sys.maxsize
            self._progress.notify_all()

    def _talk(self) -> None:
        beat, due_s, pause_s = 0, 0.0, 0.0
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            is_last, wanted = self._is_stopping.is_set(), self._num_wanted  # before the report, which is to hold them
            if is_last or wanted > self._num_done or time.monotonic() >= due_s:
                beat += 1
                self._store.set(f"report/{self._rank}", self._report(beat).to_json())
                if is_last:
                    return
                is_known = len(self._known) == len(self._ranks) - 1
                if self._wants_news() or beat % NUM_BEATS_UNREAD == 1 or not is_known:
                    self._read()
                elif self._store.check([f"report/{self._rank}"]):
                    self._hear({})  # to set a value gets no answer, so this one shows that the store is there
                # Until all are known it goes quickly: one that is lost at once should be one that was seen.
                due_s = time.monotonic() + self._interval_s * (1.0 if is_known or beat > 100 else 0.1)
                with self._progress:
                    self._num_done = wanted
                    self._progress.notify_all()
            meeting = self._meeting
            if meeting is None or meeting.is_over.is_set():
                pause_s = max(0.0, due_s - time.monotonic())
            else:  # again soon at first, for those who come together; later rarely, to spare the store
                pause_s = min(1.3 * pause_s, 0.05) if meeting.is_announced else 0.0005
                self._attend(meeting)

    def _read(self) -> None:
        """Take the reports of the others. A key that is not there yet is not asked for: the call would wait for it."""
        missing = [rank for rank in self._ranks if rank != self._rank and rank not in self._known]
        if missing and self._store.check([f"report/{rank}" for rank in missing]):
            self._known.update(missing)
        else:
            self._known.update([rank for rank in missing[:MAX_ASKED] if self._store.check([f"report/{rank}"])])
        ranks = sorted(self._known)
        texts = self._store.multi_get([f"report/{rank}" for rank in ranks]) if ranks else []
        self._hear({rank: Report.from_json(text) for rank, text in zip(ranks, texts, strict=True)})

    def _attend(self, meeting: Meeting) -> None:
        keys = [f"meeting/{meeting.number}/{rank}" for rank in self._ranks]
        if not meeting.is_announced:
            self._store.set(keys[self._rank], meeting.verb)
            meeting.is_announced = True
            if meeting.number > 2:  # all came to the last one, so all have read what was said in the one before
                self._store.delete_key(f"meeting/{meeting.number - 2}/{self._rank}")
        if self._store.check(keys):
            verbs = [verb.decode() for verb in self._store.multi_get(keys)]
            others = [f"rank {rank} in {verb}" for rank, verb in enumerate(verbs) if verb != meeting.verb]
            differ = f"rank {self._rank} is in {meeting.verb}, {', '.join(others)}"
            meeting.end(f"{differ}{DEADLOCK}" if others else "")
