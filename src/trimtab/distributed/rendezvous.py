"""How this process joins the others: found in the environment, connected once, compared before anything runs."""

import atexit
import contextlib
import datetime
import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import trimtab
from trimtab.distributed.accelerate_state import tell_accelerate
from trimtab.distributed.consistency import require_same
from trimtab.distributed.ddp import DataParallelOptions
from trimtab.distributed.environment import Place
from trimtab.distributed.group import GroupWorld
from trimtab.distributed.health.monitor import Monitor, NoMonitor
from trimtab.distributed.world import SoloWorld, World
from trimtab.errors import RecipeError
from trimtab.log import speak_only_to_file

_PATIENCE_S = 600.0
_monitor: Monitor | None = None  # like torch's default process group, one for each process


def find_world(
    place: Place,
    device: torch.device,
    options: DataParallelOptions | None = None,
    timeout_s: float | None = None,
) -> World:
    """The processes that this one trains with; connects to them if it has not been done.

    Args:
        place: What `find_place` found in the environment.
        device: Where this process computes.
        options: How models are connected.
        timeout_s: How long to wait for a process that is busy with something else.
    """
    if place.num_processes == 1 and not dist.is_initialized():
        return SoloWorld()
    is_new = not dist.is_initialized()
    timeout_s = timeout_s or _PATIENCE_S
    if is_new:
        _connect(place, device, timeout_s)
    monitor = _shared_monitor(place, timeout_s) if dist.get_world_size() > 1 else NoMonitor()
    world = GroupWorld(device, place.local_rank, monitor, options or DataParallelOptions())
    if is_new:
        require_same(world, "versions", _versions())
    if device.type == "cpu" and world.num_processes > 1:
        tell_accelerate(place)
    return world


def _connect(place: Place, device: torch.device, timeout_s: float) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_device_backend(device)}"
    where: dict[str, Any] = {"timeout": datetime.timedelta(seconds=max(timeout_s * 2, 1800))}
    where |= {"rank": place.rank, "world_size": place.num_processes}
    try:
        if place.launcher == "torchrun":
            # torchrun keeps one store for all its attempts: without a prefix processes find addresses of dead ones
            store = c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            where["store"] = c10d.PrefixStore(f"trimtab/group/{place.attempt}", store)
        elif place.address is not None:
            where["init_method"] = f"tcp://{place.address}:{place.port}"
        dist.init_process_group(backend, **where)
    except (RuntimeError, ValueError, dist.DistError) as error:
        meeting = f"{place.address or os.environ.get('MASTER_ADDR')}:{place.port or os.environ.get('MASTER_PORT')}"
        raise RecipeError(
            f"process {place.rank} of {place.num_processes} cannot meet the others at {meeting}: {error}",
            "check that the port is free there, that every host reaches it, and that all processes were started",
        ) from error
    atexit.register(_leave)


def _device_backend(device: torch.device) -> str:
    known = {"cuda": "nccl", "xpu": "xccl"}
    if device.type not in known:
        raise RecipeError(f"several processes cannot share gradients on {device.type}", 'device="cpu", or one process')
    return known[device.type]


def _shared_monitor(place: Place, timeout_s: float) -> Monitor:
    global _monitor
    if _monitor is None:
        if dist.get_rank() > 0:
            speak_only_to_file(dist.get_rank())
        _monitor = Monitor(
            c10d.PrefixStore(f"trimtab/{place.attempt}", _own_connection(place)),
            dist.get_rank(),
            dist.get_world_size(),
            host=socket.gethostname(),
            timeout_s=timeout_s,
        )
        _monitor.start()
        _tell_of_failures(_monitor)
        atexit.register(_leave)
    return _monitor


def _own_connection(place: Place) -> c10d.Store:
    """A connection of the monitor's own to the meeting point: torch's may be held by a main thread that waits."""
    address = place.address or os.environ.get("MASTER_ADDR")
    port = place.port or os.environ.get("MASTER_PORT")
    if address and port:
        with contextlib.suppress(RuntimeError, ValueError, dist.DistError):
            return c10d.TCPStore(
                address, int(port), is_master=False, timeout=datetime.timedelta(seconds=10), wait_for_workers=False
            )
    store: c10d.Store = dist.distributed_c10d._get_default_store()
    return store


def _tell_of_failures(monitor: Monitor) -> None:
    """An exception that ends this process is known to the others before they miss it."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        monitor.failed(error)
        before(kind, error, trace)

    sys.excepthook = told


def _leave() -> None:
    global _monitor
    monitor, _monitor = _monitor, None
    if monitor is not None:
        monitor.stop()
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # at exit there is nobody left to tell
            dist.destroy_process_group()


def _versions() -> dict[str, str]:
    found = {"trimtab": trimtab.__version__, "torch": torch.__version__}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    for name in ("transformers", "peft", "datasets"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
