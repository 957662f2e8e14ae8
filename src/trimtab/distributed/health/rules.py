"""The rules by which a rank that waits in a collective concludes that another rank is lost, and the messages.

A false alarm ends a run, so each rule relies on evidence that has no other explanation:

- Clocks of two hosts are never compared. Durations are measured where they happen, without the time in which this
  process did not run (stopped, swapped out, a suspended machine): no rank counts as lost right after a wake-up.
- A silent rank may be alive: a C function that holds the GIL silences it for as long as it runs. On this host its
  process is looked up. On another host silence counts only after `_REMOTE` times as long.
- A report may be a second old. A rank in another collective counts as lost only after several consecutive reports from
  there, and if it has entered as many collectives as this rank: with fewer it may be finishing one that this rank has
  left.
- A rank that has entered and left this collective is not the missing one, even if it has exited since.
- An idle rank may wait for a third rank that is working, in ways that are not visible here. It hangs only if all are
  idle.
"""

from collections.abc import Callable, Sequence

from trimtab.distributed.health.peers import Peer, Peers, Wait
from trimtab.units import format_seconds

PATIENCE_VARIABLE = "TRIMTAB_PATIENCE"
DEADLOCK = (
    ": a deadlock. Every process has to make the same calls; save_state and similar calls write on rank 0 by themselves"
)
_CURE = f"\n  cure: if it only needs more time, set {PATIENCE_VARIABLE}=1h for every process"
# In multiples of `Timeouts.lost_s`.
_GRACE = 0.3  # time after a rank is lost, for a collective that is about to end or to raise by itself
_MISMATCH = 0.5  # for two ranks in different collectives
_REMOTE = 2.5  # for the silence of a rank on another host, or of the store
_NUM_REPORTS = 3  # reports from the same operation, before it counts as lasting
_NUM_NAMED = 4  # ranks in one message


def find_fault(peers: Peers, *, can_raise: bool = False) -> str | None:
    """Return why the wait of this rank cannot end, or None as long as it still may.

    Args:
        peers: What is known about the other ranks.
        can_raise: Whether an exception can end this wait. If not, a certain fault is held back for a moment: an error
            raised by the collective itself is better than the end of the process.
    """
    wait, lost_s = peers.wait, peers.timeouts.lost_s
    if wait is None:
        return None
    grace_s = _GRACE * lost_s
    found = find_departed(peers, wait) if can_raise or peers.waited_s >= grace_s else None
    rules = (_stopped, _silent, _in_other_collective, _hanging, _late)
    found = found or next((text for rule in rules if (text := rule(peers, wait))), None)
    if found is None and peers.waited_s >= 2 * grace_s:
        found = find_secondary_failure(peers)  # later than the rules above, which name the cause
    return found or _store_lost(peers, wait, grace_s if can_raise else lost_s)


def find_departed(peers: Peers, wait: Wait | None, *, count_exited: bool = True) -> str | None:
    """Name the ranks that failed, disappeared or exited.

    Args:
        peers: What is known about the other ranks.
        wait: The collective in which they are missing; None after a collective has failed, which is proof enough.
        count_exited: Whether to include ranks that exited without an error.
    """
    failed = [peer for peer in peers.all if peer.report.end == "failed" and not peer.report.by_peer]
    if failed:
        return _each(failed, lambda peer: f"rank {peer.rank} failed: {peer.report.reason}; {peer.last}")
    # The last report of a lost rank may still be in transit, or stuck in a store that does not answer: then the store
    # is the cause.
    grace_s = (_GRACE if peers.store_answers or peers.store_error else _REMOTE) * peers.timeouts.lost_s
    grace_s = 0.0 if wait is None else grace_s
    gone = [peer for peer in peers.all if peer.liveness == "gone" and not peer.has_ended and peer.liveness_s >= grace_s]
    if gone:
        return _each(gone, lambda peer: f"{peer.title} is gone: killed, or exited without a report; {peer.last}")
    if not count_exited:
        return None
    exited = [p for p in peers.all if p.report.end == "exited" and (wait is None or p.has_not_entered(wait))]
    where = f"; rank {peers.rank} waits for it in {wait.operation}" if wait else ""
    return _each(exited, lambda peer: f"rank {peer.rank} has exited{where}; {peer.last}")


def find_absent(peers: Peers, wait: Wait) -> bool:
    """Return whether a rank waits for this one in another collective than `wait`, or has ended, or hangs."""
    limit_s = peers.timeouts.busy_s
    return any(
        peer.has_ended
        or peer.liveness == "gone"
        or max(peer.silent_s, peer.report.idle_s) >= limit_s
        or (peer.in_collective and peer.report.number >= wait.number and peer.report.operation != wait.operation)
        for peer in peers.all
    )


def find_secondary_failure(peers: Peers) -> str | None:
    """Repeat the reason of a rank that failed because of another one."""
    failed = [peer for peer in peers.all if peer.report.end == "failed"]
    return _each(failed[:1], lambda peer: f"rank {peer.rank} has stopped: {peer.report.reason}")


def find_silent(peers: Peers, seconds: float) -> str | None:
    """Name the ranks without a report for this long, or the store if it does not answer."""
    if not peers.store_answers:
        return _store_text(peers)
    return _each([peer for peer in peers.all if peer.silent_s >= seconds and not peer.has_ended], _silent_text)


def _stopped(peers: Peers, wait: Wait) -> str | None:
    stopped = [peer for peer in peers.all if peer.liveness == "stopped" and peer.liveness_s >= peers.timeouts.lost_s]
    return _each(stopped, lambda peer: f"{_silent_text(peer)}; its process is stopped (SIGSTOP or SIGTSTP)")


def _silent(peers: Peers, wait: Wait) -> str | None:
    """Name silent ranks on other hosts, whose processes cannot be looked up."""
    timeouts = peers.timeouts

    def is_lost(peer: Peer) -> bool:
        limit_s = timeouts.busy_s if peer.may_take_long else _REMOTE * timeouts.lost_s
        return peer.liveness == "unknown" and not peer.has_ended and peer.silent_s >= limit_s

    return _each([peer for peer in peers.all if is_lost(peer)], _silent_text) if peers.store_answers else None


def _in_other_collective(peers: Peers, wait: Wait) -> str | None:
    """Name ranks that wait for this one in another collective."""
    all_wait = all(peer.in_collective for peer in peers.all)

    def is_elsewhere(peer: Peer) -> bool:
        report = peer.report
        if not peer.in_collective or report.operation == wait.operation:
            return False
        if peer.has_ended:  # it found the mismatch first
            return report.end == "failed" and report.number == wait.number
        if not peers.is_fresh(peer):
            return False
        lasted_s = min(peers.waited_s, peer.unchanged_s if peer.num_unchanged >= _NUM_REPORTS else 0.0)
        if report.number == wait.number:
            return lasted_s >= _MISMATCH * peers.timeouts.lost_s
        return all_wait and min(lasted_s, report.idle_s) >= peers.timeouts.idle_s

    elsewhere = [peer for peer in peers.all if is_elsewhere(peer)][:_NUM_NAMED]
    if not elsewhere:
        return None
    named = (f"rank {peer.rank} in {peer.report.operation} ({peer.report.progress or 'no step'})" for peer in elsewhere)
    return f"rank {peers.rank} is in {wait.operation}, {', '.join(named)}{DEADLOCK}"


def _hanging(peers: Peers, wait: Wait) -> str | None:
    def text(peer: Peer) -> str:
        idle = f"idle for {format_seconds(round(peers.idle_s(peer)))}"
        missing = f"has not entered {wait.operation}, in which rank {peers.rank} waits"
        stack = f"; its main thread is at {peer.report.stack}" if peer.report.stack else ""
        return f"{peer.title} hangs: {idle}, {missing}; {peer.last}{stack}"

    limit_s = peers.timeouts.idle_s
    if min(peers.waited_s, peers.all_idle_s) < limit_s:
        return None
    missing = [p for p in peers.all if p.has_not_entered(wait) and not p.in_collective and not p.has_ended]
    hanging = [peer for peer in missing if not peer.may_take_long and peers.idle_s(peer) >= limit_s]
    return f"{_each(hanging, text)}{_CURE}" if hanging else None


def _late(peers: Peers, wait: Wait) -> str | None:
    limit_s = peers.timeouts.busy_s
    late = [peer for peer in peers.all if peer.missing_s >= limit_s and not peer.has_ended]
    if late:
        missing = f"has not entered {wait.operation} in {format_seconds(limit_s)}; rank {peers.rank} waits there"
        return f"{_each(late, lambda peer: f'{peer.title} {missing}; {peer.last}')}{_CURE}"
    if peers.waited_s >= limit_s and all(peers.idle_s(peer) >= limit_s for peer in peers.all):
        return f"every rank has been in {wait.operation} for {format_seconds(limit_s)}, and all are idle{_CURE}"
    return None


def _store_lost(peers: Peers, wait: Wait, limit_s: float) -> str | None:
    """Report a lost store. It closes with rank 0, even if rank 0 exits normally; without an error it may be slow."""
    limit_s = limit_s if peers.store_error else max(limit_s, _REMOTE * peers.timeouts.lost_s)
    if min(peers.store_silent_s, peers.waited_s) < limit_s:
        return None
    in_order = any(p.rank == 0 and p.report.end == "exited" and not p.has_not_entered(wait) for p in peers.all)
    return None if in_order else _store_text(peers)


def _store_text(peers: Peers) -> str:
    silent = format_seconds(round(peers.store_silent_s))
    owner = next((f", maybe {peer.title}; {peer.last}" for peer in peers.all if peer.rank == 0), "")
    return f"the rendezvous store has not answered for {silent}: its process is gone or stopped{owner}"


def _silent_text(peer: Peer) -> str:
    silent_s = max(peer.silent_s, peer.liveness_s if peer.liveness == "stopped" else 0.0)
    return f"{peer.title} has not reported for {format_seconds(round(silent_s))}; {peer.last}"


def _each(peers: Sequence[Peer], text: Callable[[Peer], str]) -> str | None:
    """Return one line per rank, or None without any."""
    more = f"; and {len(peers) - _NUM_NAMED} more" if len(peers) > _NUM_NAMED else ""
    return "\n".join(text(peer) for peer in peers[:_NUM_NAMED]) + more if peers else None
