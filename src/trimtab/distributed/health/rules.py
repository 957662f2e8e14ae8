"""The rules by which a process that waits decides that the others cannot come any more, and the words for it.

A false alarm ends somebody's run, so each rule rests on what cannot be explained otherwise:

- Clocks of two hosts are never compared. Durations are measured where they happen, and the time in which this process
  did not run (stopped, swapped out, a suspended machine) does not count, so nobody is lost at the moment of waking up.
- A silent peer need not be a dead one: a C function that holds the interpreter's lock silences it as long as it runs.
  On this host its process is looked at. On another host silence counts only after `far_s`.
- What was read may be a second old. A peer in another verb counts only where several of its reports in a row say so,
  and where it has entered as many verbs as this process: with fewer it may be finishing what this one has left.
- A peer that has come to this verb and left it is not the one that is waited for, even if it has ended since.
- A peer that does nothing may wait for a third one that works, by means not seen here. It hangs only if nobody moves.
"""

from collections.abc import Callable, Sequence

from trimtab.distributed.health.peers import Peer, Peers, Wait
from trimtab.units import format_seconds

PATIENCE_VARIABLE = "TRIMTAB_PATIENCE"
CURE = f"\n  cure: if it only needs longer, set {PATIENCE_VARIABLE}=1h for every process"
DEADLOCK = (
    ", and they wait for each other for good: every process has to make the same calls; "
    "save_state and its like write once by themselves"
)
NUM_SAME_REPORTS = 3  # before a peer's place is taken for lasting
NUM_NAMED = 4  # peers in one message


def find_fault(peers: Peers, *, can_raise: bool = False) -> str | None:
    """Why this process waits in vain, or None while it may not.

    Args:
        peers: What is known of the others.
        can_raise: The wait is one that an exception can end. Else one that is certain is held back for a moment, in
            which the collective may raise by itself: that is the better end.
    """
    wait, patience = peers.wait, peers.patience
    if wait is None:
        return None
    found = find_departed(peers, wait) if can_raise or peers.waited_s >= patience.grace_s else None
    rules = (_stopped, _unheard, _elsewhere, _hung, _late)
    found = found or next((text for rule in rules if (text := rule(peers, wait))), None)
    if found is None and peers.waited_s >= 2 * patience.grace_s:
        found = find_stopped_by_peer(peers)  # later than the others: better to have seen the cause
    return found or _store_gone(peers, wait, patience.grace_s if can_raise else patience.lost_s)


def find_departed(peers: Peers, wait: Wait | None, *, count_ended: bool = True) -> str | None:
    """Processes that failed, vanished or ended.

    Args:
        peers: What is known of the others.
        wait: Where they are missed. None: a collective has failed already, so those who are gone need no more proof.
        count_ended: Also those that ended in good order.
    """
    failed = [peer for peer in peers.all if peer.report.fate == "failed" and not peer.report.by_peer]
    if failed:
        return _each(failed, lambda peer: f"rank {peer.rank} failed: {peer.report.reason}; {peer.last}")
    # The last word of one that vanished may still be on its way here, or stuck together with the store: then that is
    # the cause.
    grace_s = peers.patience.grace_s if peers.store_answers or peers.store_error else peers.patience.far_s
    grace_s = 0.0 if wait is None else grace_s
    vanished = [peer for peer in peers.all if peer.sight == "gone" and not peer.is_over and peer.sight_s >= grace_s]
    if vanished:
        return _each(vanished, lambda peer: f"{peer.title} is gone: killed, or ended without a word; {peer.last}")
    if not count_ended:
        return None
    ended = [peer for peer in peers.all if peer.report.fate == "ended" and (wait is None or peer.is_absent(wait))]
    where = f"; rank {peers.rank} waits for it in {wait.verb}" if wait else ""
    return _each(ended, lambda peer: f"rank {peer.rank} has ended{where}; {peer.last}")


def find_stopped_by_peer(peers: Peers) -> str | None:
    """What a process said that stopped because of another one."""
    stopped = [peer for peer in peers.all if peer.report.fate == "failed"]
    return _each(stopped[:1], lambda peer: f"rank {peer.rank} has stopped: {peer.report.reason}")


def find_silent_since(peers: Peers, beats: dict[int, int]) -> str | None:
    """Processes of which nothing was heard after these reports, if the store answers; else the store."""
    if not peers.store_answers:
        return _store_text(peers)
    silent = [peer for peer in peers.all if peer.report.beat == beats[peer.rank] and not peer.is_over]
    return _each(silent, _unheard_text)


def _stopped(peers: Peers, wait: Wait) -> str | None:
    stopped = [peer for peer in peers.all if peer.sight == "stopped" and peer.sight_s >= peers.patience.lost_s]
    return _each(stopped, lambda peer: f"{_unheard_text(peer)}; its process is stopped (SIGSTOP or SIGTSTP)")


def _unheard(peers: Peers, wait: Wait) -> str | None:
    def limit(peer: Peer) -> float:
        return peers.patience.timeout_s if peer.may_take_long else peers.patience.far_s

    if not peers.store_answers:
        return None
    lost = [peer for peer in peers.all if peer.sight == "unknown" and not peer.is_over and peer.silent_s >= limit(peer)]
    return _each(lost, _unheard_text)


def _elsewhere(peers: Peers, wait: Wait) -> str | None:
    """Peers in another verb, where they need this process as it needs them."""
    everybody_waits = not any(peer.is_outside for peer in peers.all)

    def is_elsewhere(peer: Peer) -> bool:
        report = peer.report
        if peer.is_outside or report.name == wait.verb:
            return False
        if peer.is_over:  # it has noticed first, and stays there for good
            return report.fate == "failed" and report.number == wait.number
        if not peers.is_fresh(peer):
            return False
        same_s = min(peers.waited_s, peer.same_s if peer.num_same >= NUM_SAME_REPORTS else 0.0)
        if report.number == wait.number:
            return same_s >= peers.patience.agree_s
        return everybody_waits and min(same_s, report.idle_s) >= peers.patience.idle_s

    elsewhere = [peer for peer in peers.all if is_elsewhere(peer)][:NUM_NAMED]
    if not elsewhere:
        return None
    places = (f"rank {peer.rank} in {peer.report.name} ({peer.report.what or 'no step'})" for peer in elsewhere)
    return f"rank {peers.rank} is in {wait.verb}, {', '.join(places)}{DEADLOCK}"


def _hung(peers: Peers, wait: Wait) -> str | None:
    def text(peer: Peer) -> str:
        idle = f"it has done nothing for {format_seconds(round(peers.idle_s(peer)))}"
        missed = f"and does not come to {wait.verb}, where rank {peers.rank} waits"
        stack = f"; its main thread stands at {peer.report.stack}" if peer.report.stack else ""
        return f"{peer.title} hangs: {idle} {missed}; {peer.last}{stack}"

    limit = peers.patience.idle_s
    if min(peers.waited_s, peers.still_s) < limit:
        return None
    absent = [peer for peer in peers.all if peer.is_absent(wait) and peer.is_outside and not peer.is_over]
    hung = [peer for peer in absent if not peer.may_take_long and peers.idle_s(peer) >= limit]
    return f"{_each(hung, text)}{CURE}" if hung else None


def _late(peers: Peers, wait: Wait) -> str | None:
    limit = peers.patience.timeout_s
    late = [peer for peer in peers.all if peer.absent_s >= limit and not peer.is_over]
    if late:
        missed = f"has not come to {wait.verb}, where rank {peers.rank} has waited for {format_seconds(limit)}"
        return f"{_each(late, lambda peer: f'{peer.title} {missed}; {peer.last}')}{CURE}"
    if peers.waited_s >= limit and all(peers.idle_s(peer) >= limit for peer in peers.all):
        return f"every process has been in {wait.verb} for {format_seconds(limit)}, and nothing moves{CURE}"
    return None


def _store_gone(peers: Peers, wait: Wait, seconds: float) -> str | None:
    """Without an error it may only be slow, which takes longer. Rank 0 may take it along when it ends in good order."""
    limit = seconds if peers.store_error else max(seconds, peers.patience.far_s)
    if min(peers.store_silent_s, peers.waited_s) < limit:
        return None
    in_order = any(peer.rank == 0 and peer.report.fate == "ended" and not peer.is_absent(wait) for peer in peers.all)
    return None if in_order else _store_text(peers)


def _store_text(peers: Peers) -> str:
    silence = f"the store where the processes meet has not answered for {format_seconds(round(peers.store_silent_s))}"
    holder = next((f"; it may be {peer.title}: {peer.last}" for peer in peers.all if peer.rank == 0), "")
    return f"{silence}: who holds it is gone or stopped{holder}"


def _unheard_text(peer: Peer) -> str:
    silent_s = max(peer.silent_s, peer.sight_s if peer.sight == "stopped" else 0.0)
    return f"{peer.title} has not been heard of for {format_seconds(round(silent_s))}; {peer.last}"


def _each(peers: Sequence[Peer], text: Callable[[Peer], str]) -> str | None:
    """The text of each peer, or None without peers."""
    more = f"; and {len(peers) - NUM_NAMED} more" if len(peers) > NUM_NAMED else ""
    return "\n".join(text(peer) for peer in peers[:NUM_NAMED]) + more if peers else None
