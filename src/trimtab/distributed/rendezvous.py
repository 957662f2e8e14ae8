"""Connect this process to the other ranks: process group, monitor, and a comparison of versions."""

import atexit
import contextlib
import datetime
import faulthandler
import functools
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import trimtab
from trimtab.distributed.accelerate_state import make_partial_state
from trimtab.distributed.consistency import require_same
from trimtab.distributed.ddp import DataParallelOptions
from trimtab.distributed.environment import RankInfo
from trimtab.distributed.gloo_threads import wait_for_idle_gloo
from trimtab.distributed.group import GroupWorld
from trimtab.distributed.health.monitor import Monitor, PeerMonitor
from trimtab.distributed.health.peers import Timeouts
from trimtab.distributed.world import World
from trimtab.errors import RecipeError
from trimtab.log import log_to_file_only

_monitor: PeerMonitor | None = None  # one per process, like torch's default process group


def init_world(
    place: RankInfo,
    device: torch.device,
    options: DataParallelOptions | None = None,
    timeout_s: float | None = None,
) -> World:
    """Return the ranks of this run; initialize the process group if that has not been done.

    Args:
        place: Rank and rendezvous of this process.
        device: Device of this rank.
        options: Passed to DistributedDataParallel.
        timeout_s: How long to wait for a rank that is busy with something else.
    """
    if place.num_processes == 1 and not dist.is_initialized():
        return World()
    is_new = not dist.is_initialized()
    _leave_at_exit()
    timeout_s = timeout_s or Timeouts().busy_s
    if is_new:
        _connect(place, device, timeout_s)
    monitor = _shared_monitor(place, timeout_s) if dist.get_world_size() > 1 else Monitor()
    world = GroupWorld(device, place.local_rank, monitor, options or DataParallelOptions())
    if is_new:
        require_same(world, "versions", _versions())
    if device.type == "cpu" and world.num_processes > 1:
        make_partial_state(place)
    return world


def _connect(place: RankInfo, device: torch.device, timeout_s: float) -> None:
    if not faulthandler.is_enabled() and sys.stderr is not None:
        faulthandler.enable()  # a rank that is ended by native code then shows where it was
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_device_backend(device)}"
    where: dict[str, Any] = {"timeout": datetime.timedelta(seconds=max(timeout_s * 2, 1800))}
    where |= {"rank": place.rank, "world_size": place.num_processes}
    try:
        if place.launcher == "torchrun":
            # torchrun keeps one store over restarts: without a prefix, ranks would read addresses of dead processes.
            store = c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            where["store"] = c10d.PrefixStore(f"trimtab/group/{place.attempt}", store)
        elif place.address is not None:
            where["init_method"] = f"tcp://{place.address}:{place.port}"
        dist.init_process_group(backend, **where)
    except (RuntimeError, ValueError, dist.DistError) as error:
        endpoint = f"{place.address or os.environ.get('MASTER_ADDR')}:{place.port or os.environ.get('MASTER_PORT')}"
        raise RecipeError(
            f"rank {place.rank} of {place.num_processes}: the rendezvous at {endpoint} failed: {error}",
            "check that the port is free there, that every host reaches it, and that all processes were started",
        ) from error


def _device_backend(device: torch.device) -> str:
    known = {"cuda": "nccl", "xpu": "xccl"}
    if device.type not in known:
        raise RecipeError(f"{device.type} has no backend for several processes", 'set device="cpu", or run one process')
    return known[device.type]


def _shared_monitor(place: RankInfo, timeout_s: float) -> PeerMonitor:
    global _monitor
    if _monitor is None:
        if dist.get_rank() > 0:
            log_to_file_only(dist.get_rank())
        store = c10d.PrefixStore(f"trimtab/{place.attempt}", _open_store(place))
        _monitor = PeerMonitor(store, dist.get_rank(), dist.get_world_size(), Timeouts(busy_s=timeout_s))
        _monitor.start()
        _report_exceptions(_monitor)
    return _monitor


def _open_store(place: RankInfo) -> c10d.Store:
    """Open a second connection to the store, for the monitor: a waiting main thread may hold torch's own."""
    address = place.address or os.environ.get("MASTER_ADDR")
    port = place.port or os.environ.get("MASTER_PORT")
    if address and port:
        with contextlib.suppress(RuntimeError, ValueError, dist.DistError):
            return c10d.TCPStore(
                address, int(port), is_master=False, timeout=datetime.timedelta(seconds=10), wait_for_workers=False
            )
    store: c10d.Store = dist.distributed_c10d._get_default_store()
    return store


def _report_exceptions(monitor: PeerMonitor) -> None:
    """Report an uncaught exception to the other ranks before it ends this process."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        monitor.failed(error)
        before(kind, error, trace)

    sys.excepthook = report


@functools.cache  # once, however many engines there are
def _leave_at_exit() -> None:
    atexit.register(_leave)


def _leave() -> None:
    global _monitor
    monitor, _monitor = _monitor, None
    if monitor is not None:
        monitor.stop()
    wait_for_idle_gloo()
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # an error here must not change the exit code
            dist.destroy_process_group()


def _versions() -> dict[str, str]:
    found = {"trimtab": trimtab.__version__, "torch": torch.__version__}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    for name in ("transformers", "peft", "datasets"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
