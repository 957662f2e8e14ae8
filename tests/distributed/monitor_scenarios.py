"""Ranks that are lost in each way, or only slow, each with a monitor whose timeouts are seconds."""

import ctypes
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trimtab.distributed.health.monitor import PeerMonitor
from trimtab.distributed.health.peers import Timeouts
from trimtab.errors import PeerError

TIMEOUTS = Timeouts(lost_s=2.0, idle_s=3.0, busy_s=60.0)


def until(condition, seconds=100.0):
    """Wait; the time only guards against waiting for good."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass
class Role:
    """One process of a scenario."""

    name: str
    rank: int
    monitor: PeerMonitor
    store: dist.Store
    folder: Path
    num_processes: int

    def report(self):
        """Wait until the progress has been reported, and give the other ranks time to read it."""
        self.monitor._exchange.report_now(100)
        time.sleep(2.5 * self.monitor._interval_s)

    def lose(self, number, rank=1):
        """Send a signal to one rank, after its progress was reported."""
        if self.rank == rank:
            self.report()
            os.kill(os.getpid(), number)

    def gather(self):
        """A collective whose error is explained, as in `GroupWorld`."""
        try:
            with self.monitor.waiting("gather"):
                dist.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            raise self.monitor.explain(error) from error

    def stuck(self):
        """A collective that never raises, as on a GPU."""
        with self.monitor.waiting("gather"):
            time.sleep(100)

    def two_steps(self):
        where = {"rank": self.rank, "world_size": self.num_processes}
        dist.init_process_group("gloo", store=dist.PrefixStore("gloo", self.store), **where)
        for step in (1, 2):
            self.monitor.did(f"step {step}: forward")
            self.gather()
        self.monitor.did("step 3: forward")

    def all_well(self):
        """End quickly; `busy` and `exits` test the end of the interpreter."""
        self.monitor.meet("end")
        self.monitor.stop()
        if self.name != "busy":
            os._exit(0)
        dist.destroy_process_group()


def killed(role):
    role.two_steps()
    role.lose(signal.SIGKILL)
    role.gather()


def killed_without_error(role):
    role.monitor.did("step 3: forward")
    role.monitor.meet("begin")
    role.lose(signal.SIGKILL)
    role.stuck()


def stopped(role):
    role.two_steps()
    role.lose(signal.SIGSTOP)
    role.gather()


def raises_without_error(role):
    role.monitor.meet("begin")
    if role.rank == 1:
        raise ValueError("no such label")
    role.stuck()


def ends(role):
    role.two_steps()
    if role.rank == 1:
        return
    role.gather()


def store_stopped(role):
    """Rank 0 holds the store, as without torchrun; every call to it blocks."""
    role.monitor.meet("begin")
    role.lose(signal.SIGSTOP, rank=0)
    if role.rank == 1:
        role.monitor.meet("save_state")  # in a call to the store, where nothing can be raised
    time.sleep(3)  # rank 2 exits, although a thread of it is in the store


def store_killed(role):
    role.monitor.did("step 3: forward")
    role.monitor.meet("begin")
    role.lose(signal.SIGKILL, rank=0)
    if role.rank == 1:
        role.stuck()
    time.sleep(3)


def compute(seconds):
    """Compute in Python, which releases the GIL, and for a fifth of the time, for the sake of other scenarios."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        sum(range(500_000))
        time.sleep(0.04)


def busy(role):
    role.two_steps()
    if role.rank == 1:
        compute(5)
    role.gather()
    role.all_well()


def holds_the_lock(role):
    role.two_steps()
    if role.rank == 1:
        began_s = time.monotonic()
        sum(range(5_000_000))
        num_rounds = 5_000_000 * 6 / (time.monotonic() - began_s)
        sum(range(int(num_rounds)))  # one call of about 6 s, in which no other thread runs
    role.gather()
    role.all_well()


def waits_for_child(role):
    role.two_steps()
    if role.rank == 1:
        child = os.fork()
        if child == 0:
            compute(5)
            os._exit(0)
        os.waitpid(child, 0)
    role.gather()
    role.all_well()


def long(role):
    role.two_steps()
    if role.rank == 1:
        with role.monitor.long("tokenizing"):
            time.sleep(3)
            ctypes.PyDLL(None).sleep(4)
    role.gather()
    role.all_well()


def steps_with_pauses(role):
    """Little work, but progress."""
    role.two_steps()
    if role.rank == 1:
        for step in range(6):
            role.monitor.did(f"step {step}")
            time.sleep(1)
    role.gather()
    role.all_well()


def suspended(role):
    """All ranks are stopped for longer than any timeout, and wake one after the other."""
    role.two_steps()
    (role.folder / f"suspended-{role.rank}.ready").touch()
    if role.rank == 1:
        compute(3)
    role.gather()
    role.all_well()


def exits(role):
    """Rank 1 exits; its exit handler sends the last report."""
    role.monitor.meet("begin")
    if role.rank == 1:
        (role.folder / "exits.gone").touch()
        return
    until(lambda: (role.folder / "exits.gone").exists())
    try:
        role.monitor.meet("again")
    except PeerError as error:
        print(error)


def open_stores(name, rank, folder):
    """Open two connections, over TCP only for scenarios about the store: a TCPStore resolves names at each connection,
    and is blocked for seconds if a packet to the name server is lost.
    """
    if not name.startswith("store_"):
        return dist.FileStore(str(folder / f"{name}.store"), -1), dist.FileStore(str(folder / f"{name}.store"), -1)
    place = folder / f"{name}.port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port))
        place.with_suffix(".new").rename(place)
    else:
        until(place.exists)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), is_master=False, wait_for_workers=False)
    return store, store


QUICKLY_SEEN = [killed, raises_without_error, exits]
FAULTS = [killed_without_error, stopped, ends, store_stopped, store_killed]
FALSE_ALARMS = [busy, holds_the_lock, waits_for_child, long, steps_with_pauses, suspended]
NUM_PROCESSES = {"killed": 3, "stopped": 3, "store_stopped": 3, "store_killed": 3}
NEVER_ENDS = {("stopped", 1), ("store_stopped", 0)}


def main(name: str, rank: int, folder: str) -> None:
    """One rank of a scenario."""
    num_processes = NUM_PROCESSES.get(name, 2)
    own, gloo = open_stores(name, rank, Path(folder))
    monitor = PeerMonitor(dist.PrefixStore("monitor", own), rank, num_processes, TIMEOUTS)
    monitor.start()

    def report(kind, error, trace):
        monitor.failed(error)
        traceback.print_exception(kind, error, trace)

    sys.excepthook = report
    globals()[name](Role(name, rank, monitor, gloo, Path(folder), num_processes))
