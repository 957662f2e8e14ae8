"""What this rank knows about the other ranks: their reports, how old these are, and their processes on this host.

The caller passes in the time, without the time in which this process itself did not run. `rules` draws the conclusions.
"""

import json
import threading
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, NamedTuple

from trimtab.distributed.health.process_activity import Activity, find_process

Kind = Literal["", "collective", "long"]  # what the main thread is in; "" if neither
End = Literal["", "failed", "exited"]
Liveness = Literal["unknown", "alive", "traced", "stopped", "gone"]  # "traced": stopped by a debugger


class Timeouts(NamedTuple):
    """How long to wait before a rank is considered lost."""

    lost_s: float = 10.0  # a rank whose process is stopped; 2.5 times as long if it is silent on another host
    idle_s: float = 18.0  # a rank that is alive and idle
    busy_s: float = 600.0  # a rank that is busy, and does not enter the collective

    @property
    def interval_s(self) -> float:
        """Time between two reports of a rank."""
        return min(1.0, self.lost_s / 10)


class Wait(NamedTuple):
    """The collective in which this rank waits."""

    operation: str
    number: int  # number of collectives that this rank has entered, including this one


@dataclass(frozen=True)
class Report:
    """The report that a rank sends to the others, once per interval."""

    beat: int = 0  # number of the report; 0 if none was received yet
    host: str = ""
    pid: int = 0
    pid_namespace: str = ""
    started: int = 0  # see `Process`
    kind: Kind = ""
    operation: str = ""  # name of the collective or of the long operation
    number: int = 0  # name of the collective
    num_collectives: int = 0  # number of collectives entered so far
    progress: str = ""  # such as "step 12: forward"
    idle_s: float = 0.0
    stack: str = ""  # stack of the main thread, while it is idle
    in_debugger: bool = False
    end: End = ""
    reason: str = ""  # message of a failure
    by_peer: bool = False  # whether it failed because another rank did

    def to_json(self) -> str:
        """Serialize."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> "Report":
        """Deserialize; unknown fields are ignored, because ranks compare their versions only later."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in names})


@dataclass
class Peer:
    """Another rank, as seen from this one. All durations are measured here."""

    rank: int
    report: Report = Report()
    silent_s: float = 0.0  # the store answered, without a new report
    unchanged_s: float = 0.0  # seconds between the first and the last report from the same operation
    num_unchanged: int = 0  # number of reports from that operation
    missing_s: float = 0.0  # this rank waits in a collective that the peer has not entered
    liveness: Liveness = "unknown"
    liveness_s: float = 0.0
    # state of its process, while it is silent and on this host
    activity: Activity | None = field(default=None, repr=False)

    def receive(self, report: Report) -> None:
        """Take a report, if it is new."""
        old = self.report
        if report.beat == old.beat:
            return
        is_same = all(getattr(report, name) == getattr(old, name) for name in ("kind", "operation", "num_collectives"))
        self.num_unchanged = self.num_unchanged + 1 if is_same else 1
        self.unchanged_s = self.unchanged_s + self.silent_s if is_same else 0.0
        self.report, self.silent_s, self.activity = report, 0.0, None

    def look_up(self, seconds: float, pid_namespace: str) -> None:
        """Look up the process, `seconds` after the last look, if it is in this pid namespace."""
        if not pid_namespace or self.report.pid_namespace != pid_namespace:
            return
        found = find_process(self.report.pid)
        liveness: Liveness
        if found is None or found.started != self.report.started:
            liveness = "unknown" if self.liveness == "unknown" else "gone"  # never seen: the system may hide it
        else:
            states: dict[str, Liveness] = {"Z": "gone", "X": "gone", "T": "stopped", "t": "traced"}
            liveness = states.get(found.state, "alive")
        self.liveness_s = self.liveness_s + seconds if liveness == self.liveness else 0.0
        self.liveness = liveness

    def has_not_entered(self, wait: Wait) -> bool:
        """Whether it has yet to enter the collective in which this rank waits."""
        return self.report.num_collectives < wait.number

    @property
    def has_ended(self) -> bool:
        """Whether it has sent its last report."""
        return self.report.end != ""

    @property
    def in_collective(self) -> bool:
        """Whether it waits in a collective."""
        return self.report.kind == "collective"

    @property
    def may_take_long(self) -> bool:
        """Whether it announced a long operation, or is being debugged."""
        return self.report.kind == "long" or self.report.in_debugger or self.liveness == "traced"

    @property
    def title(self) -> str:
        """Its rank, host and pid."""
        if not self.report.beat:
            return f"rank {self.rank}"
        host = f"host {self.report.host}, " if self.report.host else ""
        return f"rank {self.rank} ({host}pid {self.report.pid})"

    @property
    def last(self) -> str:
        """The last that is known about it."""
        if not self.report.beat:
            return "it never reported"
        now = {"": "", "collective": ", now in ", "long": ", now in the long operation "}[self.report.kind]
        return f"last progress: {self.report.progress or 'none'}{now}{self.report.operation}"


class Peers:
    """All other ranks. Two threads use it: hold `lock` around each call.

    Args:
        rank: Rank of this process.
        num_processes: World size.
        timeouts: How long to wait.
        pid_namespace: The pid namespace of this process.
    """

    def __init__(self, rank: int, num_processes: int, timeouts: Timeouts, pid_namespace: str = "") -> None:
        self.lock = threading.Lock()
        self.rank = rank
        self.timeouts = timeouts
        self.pid_namespace = pid_namespace
        self.all = [Peer(other) for other in range(num_processes) if other != rank]
        self.store_silent_s = 0.0
        self.store_error = ""
        self.wait: Wait | None = None
        self.waited_s = 0.0
        self.all_idle_s = 0.0  # this rank waits, and every rank outside a collective is idle

    def receive(self, reports: dict[int, Report]) -> None:
        """Record that the store has answered, with these reports by rank."""
        self.store_silent_s = 0.0
        for peer in self.all:
            if peer.rank in reports:
                is_first = not peer.report.beat
                peer.receive(reports[peer.rank])
                if is_first:
                    peer.look_up(0.0, self.pid_namespace)  # only a process that was seen can disappear later

    def look_up(self, seconds: float = 0.0) -> None:
        """Look up the processes on this host, `seconds` after the last look."""
        for peer in self.all:
            peer.look_up(seconds, self.pid_namespace)

    def pass_time(self, seconds: float, wait: Wait | None) -> None:
        """Add `seconds` in which this process ran. `wait` is the same object for the whole wait."""
        self.store_silent_s += seconds
        if self.store_answers:
            for peer in self.all:
                peer.silent_s += seconds
        if wait is None or wait is not self.wait:
            self.wait, self.waited_s, self.all_idle_s = wait, 0.0, 0.0
            for peer in self.all:
                peer.missing_s = 0.0
            return
        self.waited_s += seconds
        self.look_up(seconds)
        for peer in self.all:
            is_missing = peer.has_not_entered(wait) and not peer.may_take_long
            peer.missing_s = peer.missing_s + seconds if is_missing else 0.0
            if peer.liveness == "alive" and peer.silent_s > 2 * self.timeouts.interval_s:
                peer.activity = peer.activity or Activity(peer.report.pid)
                peer.activity.pass_time(seconds)
        self.all_idle_s = 0.0 if any(self._is_working(peer) for peer in self.all) else self.all_idle_s + seconds

    @property
    def store_answers(self) -> bool:
        """Whether the store has answered recently."""
        return not self.store_error and self.store_silent_s <= 4 * self.timeouts.interval_s

    def is_fresh(self, peer: Peer) -> bool:
        """Whether its report shows its current activity."""
        return self.store_answers and peer.report.beat > 0 and peer.silent_s <= 4 * self.timeouts.interval_s

    def idle_s(self, peer: Peer) -> float:
        """How long it has certainly been idle."""
        if self.is_fresh(peer):
            return peer.report.idle_s
        return peer.activity.idle_s if peer.activity else 0.0

    def _is_working(self, peer: Peer) -> bool:
        """Whether it is working outside a collective; idle ranks may wait for it in ways that are not visible here."""
        if peer.in_collective or peer.has_ended:
            return False
        is_watched = self.is_fresh(peer) or peer.activity is not None
        return peer.may_take_long or (is_watched and self.idle_s(peer) < 1.5 * self.timeouts.interval_s)
