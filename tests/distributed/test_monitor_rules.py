"""When a waiting rank concludes that another one is lost, hangs, is in another collective or only slow."""

from trimtab.distributed.health import peers, process_activity
from trimtab.distributed.health.peers import Peers, Report, Timeouts, Wait
from trimtab.distributed.health.process_activity import Process
from trimtab.distributed.health.rules import (
    DEADLOCK,
    find_departed,
    find_fault,
    find_secondary_failure,
    find_silent,
)

WAIT = Wait("gather", 5)


class Ranks:
    """What rank 0 knows of the other ranks, second by second."""

    def __init__(self, num_processes=2, pid_namespace=""):
        self.peers = Peers(0, num_processes, Timeouts(lost_s=10, idle_s=18, busy_s=600), pid_namespace)
        self.beat = 0

    def lose_store(self, seconds):
        """Pass time without an answer of the store; return the first fault."""
        for _ in range(seconds):
            self.peers.pass_time(1.0, WAIT)
            if fault := find_fault(self.peers):
                return fault
        return None

    def pass_time(self, seconds, wait=WAIT, can_raise=False, **reports):
        """Pass time, with the same report `r1={...}` of rank 1 in each second; return the first fault."""
        for _ in range(seconds):
            self.beat += 1
            heard = {int(name[1:]): Report(**{"beat": self.beat, **report}) for name, report in reports.items()}
            self.peers.receive(heard)
            self.peers.pass_time(1.0, wait)
            fault = find_fault(self.peers, can_raise=can_raise)
            if fault:
                return fault
        return None


BUSY = {"num_collectives": 4, "progress": "step 14: forward", "pid": 11, "host": "b"}
IDLE = {**BUSY, "idle_s": 99.0, "stack": "a.py:1 in f"}
HERE = {"kind": "collective", "operation": "gather", "number": 5, "num_collectives": 5, "idle_s": 99.0}


def in_collective(name, number, **more):
    return {"kind": "collective", "operation": name, "number": number, "num_collectives": number, **more}


def test_a_busy_peer_is_waited_for_until_the_timeout():
    ranks = Ranks()
    assert ranks.pass_time(599, r1=BUSY) is None
    fault = ranks.pass_time(3, r1=BUSY)
    assert fault.startswith("rank 1 (host b, pid 11) has not entered gather in 10 min; rank 0 waits there")
    assert "last progress: step 14: forward" in fault
    assert "TRIMTAB_PATIENCE" in fault


def test_timeouts_start_at_the_end_of_a_long_operation():
    ranks = Ranks()
    assert ranks.pass_time(5000, r1={**IDLE, "kind": "long", "operation": "tokenizing"}) is None
    assert ranks.pass_time(590, r1=BUSY) is None
    assert "has not entered" in ranks.pass_time(30, r1=BUSY)
    debugged = Ranks()
    assert debugged.pass_time(5000, r1={**IDLE, "in_debugger": True}) is None


def test_no_fault_outside_a_collective_and_each_wait_starts_at_zero():
    ranks = Ranks()
    assert ranks.pass_time(5000, wait=None, r1={**BUSY, "end": "failed"}) is None
    for _ in range(20):
        assert ranks.pass_time(17, wait=Wait("gather", 5), r1=IDLE) is None


def test_an_idle_peer_hangs():
    ranks = Ranks()
    assert ranks.pass_time(18, r1=IDLE) is None
    fault = ranks.pass_time(4, r1=IDLE)
    assert "rank 1 (host b, pid 11) hangs: idle for 1 min 39 s" in fault
    assert "last progress: step 14: forward; its main thread is at a.py:1 in f" in fault
    slow = Ranks()
    assert slow.pass_time(500, r1={**BUSY, "idle_s": 17.0}) is None


def test_an_idle_peer_may_wait_for_a_busy_one():
    ranks = Ranks(3)
    assert ranks.pass_time(300, r1=IDLE, r2=BUSY) is None
    assert ranks.pass_time(17, r1=IDLE, r2=HERE) is None, "rank 1 gets its time after rank 2 has come"
    fault = ranks.pass_time(5, r1=IDLE, r2=HERE)
    assert "rank 1 (host b, pid 11) hangs" in fault
    assert "rank 2" not in fault
    both = Ranks(3).pass_time(30, r1=IDLE, r2=IDLE)
    assert "rank 1 " in both
    assert "rank 2 " in both


def test_a_rank_that_has_left_the_collective_is_not_missing():
    passed = {**IDLE, "num_collectives": 5}
    assert Ranks(3).pass_time(300, r1=passed, r2=BUSY) is None
    assert Ranks().pass_time(300, r1={**passed, "end": "exited"}) is None
    fault = Ranks().pass_time(5, r1={**BUSY, "end": "exited"})
    assert fault.startswith("rank 1 has exited; rank 0 waits for it in gather")


def test_a_failed_peer_is_named_after_a_moment_or_at_once_where_an_exception_can_be_raised():
    failed = {**BUSY, "end": "failed", "reason": "ValueError: no"}
    ranks = Ranks()
    assert ranks.pass_time(3, r1=failed) is None, "the collective may raise by itself"
    fault = ranks.pass_time(3, r1=failed)
    assert fault == "rank 1 failed: ValueError: no; last progress: step 14: forward"
    assert Ranks().pass_time(1, can_raise=True, r1=failed) == fault


def test_the_cause_is_named_and_not_its_consequence():
    by_peer = {**BUSY, "end": "failed", "by_peer": True, "reason": "rank 2 hangs"}
    failed = {**BUSY, "end": "failed", "reason": "ValueError: no"}
    fault = Ranks(3).pass_time(9, r1=by_peer, r2=failed)
    assert fault.startswith("rank 2 failed: ValueError")
    assert Ranks(3).pass_time(9, r1=by_peer, r2=BUSY) == "rank 1 has stopped: rank 2 hangs"


def test_deadlock_needs_the_same_count_and_several_reports():
    other = in_collective("save_state", 5, progress="step 14")
    ranks = Ranks()
    assert ranks.pass_time(5, r1=other) is None
    fault = ranks.pass_time(2, r1=other)
    assert fault == "rank 0 is in gather, rank 1 in save_state (step 14)" + DEADLOCK
    # One that moves on all the time is never in one place for long.
    moving = Ranks()
    for number in range(5, 40):
        assert moving.pass_time(4, wait=Wait("gather", number), r1=in_collective("save_state", number)) is None
    # One that is behind finishes what this process has left: a broadcast that ends at its source first.
    assert Ranks().pass_time(500, r1=in_collective("broadcast", 4, idle_s=1.0)) is None
    assert "Every process has to make the same calls" in Ranks().pass_time(
        30, r1=in_collective("broadcast", 4, idle_s=99.0)
    )
    third_works = Ranks(3)
    assert third_works.pass_time(500, r1=in_collective("broadcast", 4, idle_s=99.0), r2=BUSY) is None


def test_deadlock_is_not_seen_in_an_old_report():
    ranks = Ranks()
    assert ranks.pass_time(4, r1=in_collective("save_state", 5)) is None
    assert ranks.pass_time(20) is None, "silent since: it may be anywhere"


def test_all_in_one_collective_and_idle():
    ranks = Ranks(3)
    assert ranks.pass_time(599, r1=HERE | {"idle_s": 700.0}, r2=HERE | {"idle_s": 700.0}) is None
    fault = ranks.pass_time(3, r1=HERE | {"idle_s": 700.0}, r2=HERE | {"idle_s": 700.0})
    assert "every rank has been in gather for 10 min" in fault
    assert Ranks().pass_time(2000, r1=HERE | {"idle_s": 1.0}) is None


def test_silence_on_another_host():
    ranks = Ranks(3)
    ranks.pass_time(1, r1=BUSY, r2=HERE)
    assert ranks.pass_time(23, r2=HERE) is None, "a C function may hold the GIL for long"
    fault = ranks.pass_time(3, r2=HERE)
    assert fault == "rank 1 (host b, pid 11) has not reported for 25 s; last progress: step 14: forward"
    long = Ranks()
    long.pass_time(1, r1={**BUSY, "kind": "long", "operation": "loading"})
    assert long.pass_time(598) is None
    assert "has not reported for 10 min; last progress: step 14: forward, now in the long operation loading" in (
        long.pass_time(5)
    )
    never = Ranks().pass_time(30)
    assert never == "rank 1 has not reported for 25 s; it never reported"


class SeenProcess:
    """Replaces /proc: one process, whose state the test sets."""

    def __init__(self, monkeypatch):
        self.process = Process("S", 1.0, 0, 77)
        for module in (peers, process_activity):
            monkeypatch.setattr(module, "find_process", lambda pid: self.process)

    def becomes(self, state, cpu_s=None):
        self.process = self.process._replace(state=state, cpu_s=self.process.cpu_s if cpu_s is None else cpu_s)


ON_THIS_HOST = {**BUSY, "pid_namespace": "m", "started": 77}


def test_a_silent_process_on_this_host_that_works(monkeypatch):
    seen = SeenProcess(monkeypatch)
    monkeypatch.setattr(process_activity, "_find_descendants", lambda pid: [])
    ranks = Ranks(pid_namespace="m")
    ranks.pass_time(1, r1=ON_THIS_HOST)
    for second in range(300):  # it holds the GIL
        seen.becomes("R", cpu_s=float(second))
        assert ranks.pass_time(1) is None
    assert ranks.pass_time(18) is None
    assert "hangs: idle for 19 s" in ranks.pass_time(5)


def test_a_silent_process_on_this_host_that_is_stopped(monkeypatch):
    seen = SeenProcess(monkeypatch)
    ranks = Ranks(pid_namespace="m")
    ranks.pass_time(1, r1=ON_THIS_HOST)
    seen.becomes("T")
    assert ranks.pass_time(10) is None
    fault = ranks.pass_time(3)
    assert fault.startswith("rank 1 (host b, pid 11) has not reported for 12 s; last progress: step 14: forward; its")
    seen.becomes("t")
    held = Ranks(pid_namespace="m")
    held.pass_time(1, r1=ON_THIS_HOST)
    assert held.pass_time(500) is None, "a debugger holds it"


def test_a_process_that_vanished_on_this_host(monkeypatch):
    seen = SeenProcess(monkeypatch)
    ranks = Ranks(pid_namespace="m")
    ranks.pass_time(2, r1=ON_THIS_HOST)
    seen.process = None
    assert ranks.pass_time(3) is None, "its last report may be on its way"
    fault = ranks.pass_time(3)
    assert fault == (
        "rank 1 (host b, pid 11) is gone: killed, or exited without a report; last progress: step 14: forward"
    )
    other = Process("S", 1.0, 0, 78)  # the pid was given to another process
    seen.process = Process("S", 1.0, 0, 77)
    reused = Ranks(pid_namespace="m")
    reused.pass_time(2, r1=ON_THIS_HOST)
    seen.process = other
    assert "is gone" in reused.pass_time(9)
    for process in (other, None):  # it was never seen, so nothing follows from not seeing it
        seen.process = process
        assert Ranks(pid_namespace="m").pass_time(50, r1=ON_THIS_HOST) is None
    seen.process = Process("Z", 1.0, 0, 77)
    assert "is gone" in Ranks(pid_namespace="m").pass_time(9, r1=ON_THIS_HOST)


def test_the_store_is_gone():
    """It belongs to rank 0."""

    def rank_1(**report):
        ranks = Ranks()
        ranks.peers.rank, ranks.peers.all[0].rank = 1, 0
        ranks.pass_time(1, r0={**BUSY, **report})
        return ranks

    slow = rank_1()
    assert slow.lose_store(24) is None, "without an error it may be slow"
    fault = slow.lose_store(2)
    assert fault.startswith("the rendezvous store has not answered for")
    assert "maybe rank 0 (host b, pid 11); last progress: step 14: forward" in fault
    broken = rank_1()
    broken.peers.store_error = "DistNetworkError: Broken pipe"
    assert broken.lose_store(9) is None
    assert broken.lose_store(1).startswith("the rendezvous store")
    assert find_silent(broken.peers, 1.0).startswith("the rendezvous store")
    in_order = rank_1(num_collectives=5, end="exited")
    in_order.peers.store_error = "closed"
    assert in_order.lose_store(100) is None, "rank 0 was the last to need it"


def test_many_lost_ranks_make_one_short_message():
    fault = Ranks(20).pass_time(30)
    assert fault.count("has not reported") == 4
    assert fault.endswith("; and 15 more")


def test_reports_of_another_version_can_be_read():
    report = Report(3, progress="step 1 ü", idle_s=2.5, end="failed")
    assert Report.from_json(report.to_json()) == report
    assert Report.from_json('{"beat": 4, "new": 1}') == Report(4)


def test_messages_after_a_failed_collective():
    ranks = Ranks(3)
    ranks.pass_time(1, wait=None, r1=BUSY, r2=BUSY)
    assert find_departed(ranks.peers, None) is None
    assert find_secondary_failure(ranks.peers) is None
    ranks.pass_time(1, wait=None, r2=BUSY)
    assert find_silent(ranks.peers, 1.0).startswith("rank 1 (host b, pid 11) has not reported")
    ranks.pass_time(1, wait=None, r1={**BUSY, "end": "exited", "num_collectives": 9})
    assert find_departed(ranks.peers, None, count_exited=False) is None
    assert find_departed(ranks.peers, None).startswith("rank 1 has exited")
