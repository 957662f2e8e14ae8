"""What one process knows of the others: their reports, how old those are, and what can be seen of them on this host.

Time is passed in by the caller, who leaves out what this process itself slept through. The verdict on what is known
here is `peer_rules`.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, NamedTuple

from trimtab.distributed.health.process_activity import Activity, find_process
from trimtab.units import format_seconds

Kind = Literal["", "verb", "long"]  # works; waits in a verb; does something that may take long
Fate = Literal["", "failed", "ended"]
Sight = Literal["unknown", "there", "held", "stopped", "gone"]  # "held": by a debugger


@dataclass(frozen=True)
class Patience:
    """How long a process waits before it believes something."""

    lost_s: float  # that a process is stopped, or the store's host gone
    idle_s: float  # that a process hangs which is there and does nothing
    timeout_s: float  # that a process will not come which works

    @property
    def interval_s(self) -> float:
        """Between two reports of a process."""
        return min(1.0, self.lost_s / 10)

    @property
    def grace_s(self) -> float:
        """For a collective that is about to end, or to raise by itself, although a process has just gone."""
        return 0.3 * self.lost_s

    @property
    def agree_s(self) -> float:
        """For two processes that are in different verbs."""
        return 0.5 * self.lost_s

    @property
    def far_s(self) -> float:
        """For the silence of what cannot be looked at: a process on another host, a store that does not answer."""
        return 2.5 * self.lost_s


class Wait(NamedTuple):
    """The verb in which this process waits."""

    verb: str
    number: int  # of verbs that this process has entered, this one included


@dataclass(frozen=True)
class Report:
    """What a process tells the others each second."""

    beat: int = 0  # one more in each report; 0: nothing was heard yet
    host: str = ""
    pid: int = 0
    machine: str = ""  # see `find_machine`
    started: int = 0
    kind: Kind = ""
    name: str = ""  # of the verb, or of what takes long
    number: int = 0  # of the verb
    num_verbs: int = 0  # entered so far
    what: str = ""  # it last did
    what_s: float = 0.0  # since then
    idle_s: float = 0.0
    stack: str = ""
    in_debugger: bool = False
    fate: Fate = ""
    reason: str = ""
    by_peer: bool = False  # it failed because of another process

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> "Report":
        """From text; fields that another version may have are left out, since versions are compared later."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in names})


@dataclass
class Peer:
    """Another process, as it is seen from here."""

    rank: int
    report: Report = Report()
    silent_s: float = 0.0  # the store answered, and had nothing new of it
    same_s: float = 0.0  # from the first to the last report from the same place
    num_same: int = 0  # reports from that place
    absent_s: float = 0.0  # this process waits, and it has not come
    sight: Sight = "unknown"
    sight_s: float = 0.0  # it has been seen so
    activity: Activity | None = field(default=None, repr=False)  # while it is silent and can be seen

    def hear(self, report: Report) -> None:
        """Take what it said, if it is new."""
        old = self.report
        if report.beat == old.beat:
            return
        stayed = (report.kind, report.name, report.num_verbs) == (old.kind, old.name, old.num_verbs)
        self.num_same, self.same_s = (self.num_same + 1, self.same_s + self.silent_s) if stayed else (1, 0.0)
        self.report, self.silent_s, self.activity = report, 0.0, None

    def look(self, seconds: float, machine: str) -> None:
        """Look at the process itself, `seconds` after the last look, where this one can see it."""
        if not machine or self.report.machine != machine:
            return
        found = find_process(self.report.pid)
        sight: Sight
        if found is None or found.started != self.report.started:
            # One that was never seen may be hidden by the system.
            sight = "unknown" if self.sight == "unknown" else "gone"
        elif found.is_gone:
            sight = "gone"
        elif found.state in "Tt":
            sight = "stopped" if found.state == "T" else "held"
        else:
            sight = "there"
        self.sight_s = self.sight_s + seconds if sight == self.sight else 0.0
        self.sight = sight

    def is_absent(self, wait: Wait) -> bool:
        """It has not come to this verb yet."""
        return self.report.num_verbs < wait.number

    @property
    def is_over(self) -> bool:
        """It has said its last word."""
        return self.report.fate != ""

    @property
    def is_outside(self) -> bool:
        """It is in no verb."""
        return self.report.kind != "verb"

    @property
    def may_take_long(self) -> bool:
        """It said so, or somebody debugs it."""
        return self.report.kind == "long" or self.report.in_debugger or self.sight == "held"

    @property
    def title(self) -> str:
        """Its name in a message."""
        if not self.report.beat:
            return f"rank {self.rank}"
        host = f"host {self.report.host}, " if self.report.host else ""
        return f"rank {self.rank} ({host}pid {self.report.pid})"

    @property
    def last(self) -> str:
        """The last that is known of it."""
        if not self.report.beat:
            return "it never reported"
        what = f"it last did: {self.report.what or 'nothing that was announced'}"
        if self.report.what and self.report.what_s >= 2:
            what += f" ({format_seconds(round(self.report.what_s))} ago)"
        place = {"": "", "verb": ", and is in ", "long": ", and may take long in "}[self.report.kind]
        return f"{what}{place}{self.report.name}"


class Peers:
    """All other processes, and for how long what is known of them has held. The caller holds a lock.

    Args:
        rank: Of this process.
        num_processes: With this one.
        patience: How long to wait.
        machine: Where this process can look up pids; see `find_machine`.
    """

    def __init__(self, rank: int, num_processes: int, patience: Patience, machine: str = "") -> None:
        self.rank = rank
        self.patience = patience
        self.all = [Peer(other) for other in range(num_processes) if other != rank]
        self.store_silent_s = 0.0
        self.store_error = ""
        self.wait: Wait | None = None
        self.waited_s = 0.0
        self.still_s = 0.0  # this process waits, and nobody outside a verb has moved
        self._machine = machine

    def hear(self, reports: dict[int, Report]) -> None:
        """The store answered with these."""
        self.store_silent_s = 0.0
        for peer in self.all:
            if peer.rank in reports:
                is_first = not peer.report.beat
                peer.hear(reports[peer.rank])
                if is_first:
                    peer.look(0.0, self._machine)  # seen once, it can be missed later

    def look(self, seconds: float = 0.0) -> None:
        """Look at the processes on this host, `seconds` after the last look."""
        for peer in self.all:
            peer.look(seconds, self._machine)

    def pass_time(self, seconds: float, wait: Wait | None) -> None:
        """`seconds` have passed in which this process ran; `wait` is where it waits now, the same object all along."""
        self.store_silent_s += seconds
        for peer in self.all:
            if self.store_answers:
                peer.silent_s += seconds
        if wait is None or wait is not self.wait:
            self.wait, self.waited_s, self.still_s = wait, 0.0, 0.0
            for peer in self.all:
                peer.absent_s = 0.0
            return
        self.waited_s += seconds
        self.look(seconds)
        for peer in self.all:
            peer.absent_s = peer.absent_s + seconds if peer.is_absent(wait) and not peer.may_take_long else 0.0
            if peer.sight == "there" and peer.silent_s > 2 * self.patience.interval_s:
                peer.activity = peer.activity or Activity(peer.report.pid)
                peer.activity.pass_time(seconds)
        self.still_s = 0.0 if any(self._moves(peer) for peer in self.all) else self.still_s + seconds

    @property
    def store_answers(self) -> bool:
        """It has answered lately."""
        return not self.store_error and self.store_silent_s <= 4 * self.patience.interval_s

    def is_fresh(self, peer: Peer) -> bool:
        """Its report can be taken for what it does now."""
        return self.store_answers and peer.report.beat > 0 and peer.silent_s <= 4 * self.patience.interval_s

    def idle_s(self, peer: Peer) -> float:
        """For how long it has surely done nothing."""
        if self.is_fresh(peer):
            return peer.report.idle_s
        return peer.activity.idle_s if peer.activity else 0.0

    def _moves(self, peer: Peer) -> bool:
        """It is outside any verb and at work, so that others may be waiting for it in ways that are not seen here."""
        if not peer.is_outside or peer.is_over:
            return False
        is_watched = self.is_fresh(peer) or peer.activity is not None
        return peer.may_take_long or (is_watched and self.idle_s(peer) < 1.5 * self.patience.interval_s)
