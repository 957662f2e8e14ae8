"""The settings of a launch: from the command line, the launch file, the scheduler or the host, each with its origin.

Problems are collected, so that the user sees all of them together.
"""

import errno
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.distributed.environment import Machine, read_rank_info
from trimtab.distributed.launch.launch_file import DEFAULT_LOG_DIR, DEFAULT_PORT, LaunchFile, check_value
from trimtab.errors import RecipeError

# Set for torchrun by Kubernetes operators. torchrun itself would read them too, but the options we pass override them.
_TORCHRUN_VARIABLES = {
    "PET_NNODES": "num_hosts",
    "PET_NODE_RANK": "host_index",
    "PET_MASTER_ADDR": "address",
    "PET_MASTER_PORT": "port",
    "PET_NPROC_PER_NODE": "processes",
}


@dataclass(frozen=True)
class Settings:
    """How processes are started.

    Args:
        processes: Number of processes on this host.
        num_hosts: Number of hosts.
        host_index: Index of this host.
        address: Address of the rendezvous; None on one host, where torchrun provides it.
        port: Port of the rendezvous; None for a free one.
        max_restarts: How often all processes are restarted.
        log_dir: Folder for the output of ranks above 0.
        cpu: Whether to ignore GPUs.
        origins: Source of each value: an option, "FILE:LINE", a variable, "found" or "default".
        job: Id that the scheduler gave the job on all hosts.
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
        """Return name, value and origin of each setting, for a table."""
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


def option(name: str) -> str:
    """Return the command-line option of a key."""
    return f"--{name.replace('_', '-')}"


def resolve_settings(
    given: Mapping[str, Any], file: LaunchFile, machine: Machine, environ: Mapping[str, str]
) -> tuple[Settings, list[str]]:
    """Combine the sources of settings.

    Args:
        given: Options of the command line; None for an option that was not given.
        file: The launch file.
        machine: This host.
        environ: The environment.

    Returns:
        The settings and their problems; with problems the settings cannot be used.
    """
    problems = list(file.problems)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def put(name: str, value: Any, origin: str) -> None:
        """Set a value, unless a source of higher precedence has set it."""
        if value is not None and name not in values:
            values[name], origins[name] = value, origin

    for name, value in given.items():
        if problem := check_value(name, value):
            problems.append(f"{option(name)}: {problem}")
        else:
            put(name, value, option(name))
    for name, value in file.values.items():
        put(name, value, file.places[name])
    found, job, problem = _read_scheduler(environ)
    problems += [problem] if problem else []
    for name, (value, origin) in found.items():
        # A scheduler's hosts are used as a whole: hosts, or num_hosts: 1, given by the user replace all of them.
        if name == "processes" or ("hosts" not in values and values.get("num_hosts") != 1):
            put(name, value, origin)

    put("cpu", False, "default")
    use_devices = machine.num_devices > 0 and not values["cpu"]
    devices = "on the CPU" if values["cpu"] else _num_gpus(machine)
    put("processes", machine.num_devices if use_devices else 1, f"found: {devices}")
    put("max_restarts", 0, "default")
    put("log_dir", DEFAULT_LOG_DIR, "default")
    problems += _resolve_hosts(values, origins)
    if use_devices and values["processes"] > machine.num_devices:
        problems.append(
            f"processes: {values['processes']} ({origins['processes']}), but this host has {_num_gpus(machine)}: "
            f"--processes {machine.num_devices}, or --cpu to train on the CPU"
        )
    problems += _check_log_dir(values["log_dir"], origins["log_dir"])
    values.pop("hosts", None)
    origins = {"address": "found", "port": "found", **origins}
    settings = Settings(**{"address": None, "port": None, **values}, origins=origins, job=job)
    return settings, problems + (_check_port(settings) if not problems else [])


def _num_gpus(machine: Machine) -> str:
    return f"{machine.num_devices} GPU{'s' if machine.num_devices != 1 else ''}" if machine.num_devices else "no GPU"


def _read_scheduler(environ: Mapping[str, str]) -> tuple[dict[str, tuple[Any, str]], str | None, str]:
    """Read the hosts from a scheduler that has started one process on each.

    Returns:
        Values with their origins by key, the id of the job, and the problem, if any.
    """
    found: dict[str, tuple[Any, str]] = {}
    for variable, name in _TORCHRUN_VARIABLES.items():
        text = environ.get(variable, "").strip()
        if not text or text in ("auto", "gpu", "cpu"):
            continue
        value: Any = int(text) if name != "address" and re.fullmatch(r"[0-9]{1,9}", text) else text
        if problem := check_value(name, value):
            return {}, None, f"{variable} of the environment: {problem}"
        found[name] = (value, variable)
    try:
        place = read_rank_info(environ)
    except RecipeError as error:
        return {}, None, f"the environment: {error.problem}; {error.cure}"
    if place.num_processes == 1:
        return found, None, ""
    one_per_host = re.fullmatch(r"1(\(x[0-9]+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if place.launcher == "torchrun" or place.local_world_size > 1 or not one_per_host:
        by = {"torchrun": "torchrun or trimtab launch", "slurm": "srun"}.get(place.launcher, "RANK and WORLD_SIZE")
        cure = "run the script or `trimtab train` directly"
        cure += "; or srun with --ntasks-per-node=1" if place.launcher == "slurm" else ""
        return {}, None, f"this process is already one of {place.num_processes}, started by {by}: {cure}"
    origin = {"slurm": "SLURM", "environment": "WORLD_SIZE …"}[place.launcher]
    hosts = {"num_hosts": place.num_processes, "host_index": place.rank, "address": place.address, "port": place.port}
    return {**{name: (value, origin) for name, value in hosts.items()}, **found}, place.job, ""


def _resolve_hosts(values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Fill in num_hosts, host_index, address and port; return their problems."""
    problems: list[str] = []
    hosts: Sequence[str] = values.get("hosts") or ()
    if hosts:
        if values.get("num_hosts", len(hosts)) != len(hosts):
            problems.append(
                f"hosts: {len(hosts)} names ({origins['hosts']}), but num_hosts is {values['num_hosts']} "
                f"({origins['num_hosts']}): remove num_hosts"
            )
        values["num_hosts"] = len(hosts)
        if "host_index" not in values:
            values["host_index"], problem = _find_host_index(hosts)
            problems += [problem] if problem else []
        if "address" not in values and len(hosts) > 1:
            values["address"], origins["address"] = hosts[0], "the first of hosts"
    origins["hosts"] = origins.get("hosts") or origins.get("num_hosts") or "default"
    num_hosts = values.setdefault("num_hosts", 1)
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


def _find_host_index(hosts: Sequence[str]) -> tuple[int, str]:
    """Return the index of this host, and the problem if it is not unique."""
    own = [index for index, host in enumerate(hosts) if _is_own_name(host)]
    own = own or [index for index, host in enumerate(hosts) if _is_own_address(host)]
    if len(own) == 1:
        return own[0], ""
    if own:
        both = " and ".join(hosts[index] for index in own)
        return own[0], f"hosts: {both} are both this host; name each host once, or set --host-index"
    return 0, (
        f"hosts: this host is {socket.gethostname()}, which is not among {', '.join(hosts)}; nothing is started on "
        "other hosts: run the command on each of them, or set --host-index"
    )


def _is_own_name(host: str) -> bool:
    own, name = socket.gethostname().lower(), host.lower()
    return name == own or name.partition(".")[0] == own or own.partition(".")[0] == name


def _is_own_address(host: str) -> bool:
    """Whether a name or address belongs to this host: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
            return True
        except OSError:
            continue
    return False


def _check_log_dir(folder: str, origin: str) -> list[str]:
    existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return []
    reason = "is not writable" if existing.is_dir() else "is not a folder"
    return [f"log_dir: {folder} ({origin}): {existing} {reason}: choose another with --log-dir"]


def _check_port(settings: Settings) -> list[str]:
    if settings.port is None or settings.host_index > 0:
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Like torch: a port that was closed a minute ago can be used again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", settings.port))
            probe.listen(1)
            return []
        except OSError as error:
            reasons = {errno.EADDRINUSE: "is taken on this host", errno.EACCES: "needs administrator rights"}
            reason = reasons.get(error.errno or 0)
    if reason is None:
        return []
    cure = f"--port {free_port()} is free" + (" here; give it on every host" if settings.num_hosts > 1 else "")
    cure += ", or remove it to get a free one" if settings.num_hosts == 1 else ""
    return [f"port: {settings.port} ({settings.origins['port']}) {reason}: {cure}"]


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
