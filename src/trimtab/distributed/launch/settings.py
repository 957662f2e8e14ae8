"""The settings of a launch: command line, then launch file, then what is found, each with its origin.

Problems are collected, so that a user hears of all of them at once.
"""

import errno
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.distributed.environment import find_place
from trimtab.distributed.launch.file import DEFAULT_LOG_DIR, DEFAULT_PORT, KEYS, LaunchFile, check_value
from trimtab.errors import RecipeError

# What Kubernetes' operators set for torchrun. torchrun would read them too, but below the options that we give it.
_FOR_TORCHRUN = {
    "PET_NNODES": "num_hosts",
    "PET_NODE_RANK": "host_index",
    "PET_MASTER_ADDR": "address",
    "PET_MASTER_PORT": "port",
    "PET_NPROC_PER_NODE": "processes",
}


@dataclass(frozen=True)
class Machine:
    """What counts of this host when processes are started on it.

    Args:
        num_devices: GPUs, or what else torch can train on.
        num_cpus: Cores that this process may use.
    """

    num_devices: int
    num_cpus: int


@dataclass(frozen=True)
class Settings:
    """How processes are started.

    Args:
        processes: On this host.
        num_hosts: All of them.
        host_index: This one.
        address: Of the meeting point; None on one host, where torchrun sees to it.
        port: Of the meeting point; None for a free one.
        max_restarts: How often all is started again.
        log_dir: Folder of what the other ranks print.
        cpu: Whether GPUs are left alone.
        origins: Where each value came from: an option, "FILE:LINE", a variable, "found" or "default".
        job: An id that the scheduler gave all hosts.
    """

    processes: int
    num_hosts: int
    host_index: int
    address: str | None
    port: int | None
    max_restarts: int
    log_dir: str
    cpu: bool
    origins: Mapping[str, str]
    job: str | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and origin of each, for a table."""
        shown = {
            "processes": str(self.processes),
            "hosts": f"{self.num_hosts}" + (f", this is {self.host_index}" if self.num_hosts > 1 else ""),
            "address": self.address or "this host",
            "port": "a free one" if self.port is None else str(self.port),
            "max_restarts": str(self.max_restarts),
            "log_dir": self.log_dir,
            "cpu": "yes" if self.cpu else "no",
        }
        return [(name.replace("_", " "), value, self.origins[name]) for name, value in shown.items()]


def look_at_machine() -> Machine:
    """Devices and cores of this host."""
    import torch

    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    has_devices = torch.accelerator.current_accelerator(check_available=True) is not None
    return Machine(torch.accelerator.device_count() if has_devices else 0, num_cpus)


def option(name: str) -> str:
    """The option of a key."""
    return f"--{name.replace('_', '-')}"


def resolve_settings(
    given: Mapping[str, Any], file: LaunchFile, machine: Machine, environ: Mapping[str, str]
) -> tuple[Settings, list[str]]:
    """Lay the three sources over each other.

    Args:
        given: From the command line; None is an option that was not given.
        file: The launch file.
        machine: This host.
        environ: The environment.

    Returns:
        The settings, and what is wrong with them. With problems the settings are no good to start from.
    """
    problems = list(file.problems)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def put(name: str, value: Any, origin: str) -> None:
        """A value of a lower layer stays behind one that is there."""
        if value is not None and name not in values:
            values[name], origins[name] = value, origin

    for name, value in given.items():
        if problem := check_value(name, value):
            problems.append(f"{option(name)}: {problem}")
        else:
            put(name, value, option(name))
    for name, value in file.values.items():
        put(name, value, file.places[name])
    found, job, problem = _found_in(environ)
    problems += [problem] if problem else []
    for name, (value, origin) in found.items():
        # What a cluster says of its hosts is one whole: names that the user gave, or "this host alone", replace it.
        if name == "processes" or ("hosts" not in values and values.get("num_hosts") != 1):
            put(name, value, origin)

    put("cpu", False, "default")
    use_devices = machine.num_devices > 0 and not values["cpu"]
    put("processes", machine.num_devices if use_devices else 1, "found: " + _devices(machine, values["cpu"]))
    put("max_restarts", 0, "default")
    put("log_dir", DEFAULT_LOG_DIR, "default")
    problems += _settle_hosts(values, origins)
    if use_devices and values["processes"] > machine.num_devices:
        problems.append(
            f"processes: {values['processes']} ({origins['processes']}), but this host has {_devices(machine, False)}: "
            f"--processes {machine.num_devices}, or --cpu to train on the CPU"
        )
    problems += _log_dir_problems(values["log_dir"], origins["log_dir"])
    settings = Settings(
        processes=values["processes"],
        num_hosts=values["num_hosts"],
        host_index=values["host_index"],
        address=values.get("address"),
        port=values.get("port"),
        max_restarts=values["max_restarts"],
        log_dir=values["log_dir"],
        cpu=values["cpu"],
        origins={"address": "found", "port": "found", **origins},
        job=job,
    )
    return settings, problems + (_port_problems(settings) if not problems else [])


def _devices(machine: Machine, cpu: bool) -> str:
    if cpu:
        return "on the CPU"
    return f"{machine.num_devices} GPU{'s' if machine.num_devices != 1 else ''}" if machine.num_devices else "no GPU"


def _found_in(environ: Mapping[str, str]) -> tuple[dict[str, tuple[Any, str]], str | None, str]:
    """What a scheduler that has started one process on each host says of them; its job id; what is wrong with it."""
    found: dict[str, tuple[Any, str]] = {}
    for variable, name in _FOR_TORCHRUN.items():
        text = environ.get(variable, "").strip()
        if not text or text in ("auto", "gpu", "cpu"):
            continue
        value: Any = int(text) if KEYS[name].kind == "number" and re.fullmatch(r"[0-9]{1,9}", text) else text
        if problem := check_value(name, value):
            return {}, None, f"{variable} of the environment: {problem}"
        found[name] = (value, variable)
    try:
        place = find_place(environ)
    except RecipeError as error:
        return {}, None, f"the environment: {error.problem}; {error.cure}"
    if place.num_processes == 1:
        return found, None, ""
    each_host = re.fullmatch(r"1(\(x[0-9]+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if place.launcher == "torchrun" or place.num_local > 1 or not each_host:
        by = {"torchrun": "torchrun or trimtab launch", "slurm": "srun"}.get(place.launcher, "RANK and WORLD_SIZE")
        cure = "run the script, or `trimtab train`, itself"
        cure += "; or srun with --ntasks-per-node=1" if place.launcher == "slurm" else ""
        return {}, None, f"this process is already one of {place.num_processes}, by {by}: {cure}"
    mark = {"slurm": "SLURM", "environment": "WORLD_SIZE …"}[place.launcher]
    hosts = {"num_hosts": place.num_processes, "host_index": place.rank, "address": place.address, "port": place.port}
    return {**{name: (value, mark) for name, value in hosts.items()}, **found}, place.job, ""


def _settle_hosts(values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Fill in how many hosts there are, which one this is and where they meet; tell what does not go together."""
    problems: list[str] = []
    hosts: Sequence[str] = values.get("hosts") or ()
    if hosts:
        if values.get("num_hosts", len(hosts)) != len(hosts):
            problems.append(
                f"hosts: {len(hosts)} names ({origins['hosts']}), but num_hosts is {values['num_hosts']} "
                f"({origins['num_hosts']}): leave num_hosts out"
            )
        values["num_hosts"] = len(hosts)
        if "host_index" not in values:
            values["host_index"], problem = _index_of_this_host(hosts)
            problems += [problem] if problem else []
        if "address" not in values and len(hosts) > 1:
            values["address"], origins["address"] = hosts[0], "the first of hosts"
    origins["hosts"] = origins.get("hosts") or origins.get("num_hosts") or "default"
    values.setdefault("num_hosts", 1)
    num_hosts = values["num_hosts"]
    if num_hosts > 1:
        if "host_index" not in values:
            problems.append(f"host_index: needed with {num_hosts} hosts; --host-index 0 on the first, 1 on the next …")
        if "address" not in values:
            problems.append(f"address: needed with {num_hosts} hosts; --address and the name of the first")
        values.setdefault("port", DEFAULT_PORT)
        origins.setdefault("port", "default")
    if values.setdefault("host_index", 0) >= num_hosts:
        problems.append(
            f"host_index: {values['host_index']} ({origins.get('host_index', 'found')}), but there "
            f"{'is one host' if num_hosts == 1 else f'are {num_hosts} hosts'}: 0 to {num_hosts - 1}"
        )
    return problems


def _index_of_this_host(hosts: Sequence[str]) -> tuple[int, str]:
    """Which of the hosts this is, and what is wrong if it cannot be told."""
    own = [index for index, host in enumerate(hosts) if _is_own_name(host)]
    own = own or [index for index, host in enumerate(hosts) if is_own_address(host)]
    if len(own) == 1:
        return own[0], ""
    if own:
        both = " and ".join(hosts[index] for index in own)
        return own[0], f"hosts: {both} are both this host; name each once, or say which one it is with --host-index"
    return 0, (
        f"hosts: this host is {socket.gethostname()}, which is not among {', '.join(hosts)}; nothing is started on "
        "other hosts: run the command on each of them, or say which one this is with --host-index"
    )


def _is_own_name(host: str) -> bool:
    own, name = socket.gethostname().lower(), host.lower()
    return name == own or name.partition(".")[0] == own or own.partition(".")[0] == name


def is_own_address(host: str) -> bool:
    """Whether a name or address belongs to this machine: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
            return True
        except OSError:
            continue
    return False


def _log_dir_problems(folder: str, origin: str) -> list[str]:
    there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        return []
    reason = "cannot be written to" if there.is_dir() else "is no folder"
    return [f"log_dir: {folder} ({origin}): {there} {reason}: --log-dir and another one"]


def _port_problems(settings: Settings) -> list[str]:
    if settings.port is None or settings.host_index > 0 or (reason := why_not_free(settings.port)) is None:
        return []
    cure = f"--port {free_port()} is free" + (" here; give it on every host" if settings.num_hosts > 1 else "")
    if settings.num_hosts == 1:
        cure += ", or leave it out to get a free one"
    return [f"port: {settings.port} ({settings.origins['port']}) {reason}: {cure}"]


def why_not_free(port: int) -> str | None:
    """Why nothing can listen on a port of this host; None if something can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch does: a port that was used a minute ago is free again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            known = {errno.EADDRINUSE: "is taken on this host", errno.EACCES: "needs the rights of an administrator"}
            return known.get(error.errno or 0)
    return None


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
