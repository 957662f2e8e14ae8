"""What a process finds at startup: rank and rendezvous from the launcher's variables, devices and cores of its host.

torchrun (and so `trimtab launch`), SLURM's srun, and anything else that sets RANK and WORLD_SIZE are recognised.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.errors import RecipeError

_TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"
# Set in the steps of srun only: a batch script with SLURM_NTASKS=4 is itself one process.
_SRUN_MARK = "SLURM_STEP_NUM_TASKS"
_MPIRUN_MARK = "OMPI_COMM_WORLD_SIZE"
_SRUN_CURE = "start the processes with srun; or unset SLURM_STEP_NUM_TASKS to run one process"
_ALL_VARIABLES = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_RANKS_CURE = (
    f"start the processes with trimtab launch or torchrun, which set {_ALL_VARIABLES}; or unset RANK and WORLD_SIZE to "
    "run one process"
)
# Below the range from which systems assign ports to clients: these ports are rarely in use.
_FIRST_PORT, _NUM_PORTS = 15000, 15000
_LAST_PORT = 65535


@dataclass(frozen=True)
class RankInfo:
    """Rank and rendezvous of this process.

    Args:
        rank: Rank among all processes.
        num_processes: World size.
        local_rank: Rank among the processes of this host.
        local_world_size: Number of processes on this host.
        address: Host of the rendezvous; None if torch has to read it from the environment, or for one process.
        port: Port of the rendezvous.
        launcher: "none", "torchrun", "slurm" or "environment".
        attempt: How often the launcher has restarted this job.
        job: Id that all processes and all restarts of a job share, if the launcher provides one.
    """

    rank: int
    num_processes: int
    local_rank: int
    local_world_size: int
    address: str | None
    port: int | None
    launcher: str
    attempt: int = 0
    job: str | None = None

    @property
    def local_device(self) -> int | None:
        """Device index of this process on its host; None for one process, which chooses its device itself.

        SLURM may show each task only its own device, which then has index 0 in every task.
        """
        if self.num_processes == 1:
            return None
        return 0 if self.launcher == "slurm" and inspect_machine().num_devices == 1 else self.local_rank


SINGLE_PROCESS = RankInfo(0, 1, 0, 1, None, None, "none")


@dataclass(frozen=True)
class Machine:
    """The resources of this host for the processes that are started on it.

    Args:
        num_devices: GPUs or other accelerators that torch can use.
        num_cpus: Cores that this process may use.
    """

    num_devices: int
    num_cpus: int


def inspect_machine() -> Machine:
    """Count the devices and cores of this host, without initializing CUDA."""
    import torch

    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    has_devices = torch.accelerator.current_accelerator(check_available=True) is not None
    return Machine(torch.accelerator.device_count() if has_devices else 0, num_cpus)


def read_rank_info(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Read rank and rendezvous from the environment.

    Args:
        environ: The variables; None uses those of this process.

    Raises:
        RecipeError: A variable is invalid, or two contradict each other.
    """
    # An empty variable counts as unset: `export WORLD_SIZE=` is a way to clear one.
    given = {name: value.strip() for name, value in (os.environ if environ is None else environ).items() if value}
    if "RANK" in given or "WORLD_SIZE" in given:
        return _from_ranks(given)
    if _number(given, _MPIRUN_MARK, "start the processes with trimtab launch or torchrun", default=1) > 1:
        # SLURM's variables do not help: under mpirun they count its daemons, one per host.
        raise RecipeError(
            f"mpirun has started {given[_MPIRUN_MARK]} processes, and each would train alone",
            f"use trimtab launch, torchrun or srun; or set {_ALL_VARIABLES} for each process",
        )
    if _SRUN_MARK in given:
        return _from_srun(given)
    return SINGLE_PROCESS


def restarted_job_id() -> str | None:
    """Return the id of this job if the launcher has restarted it."""
    place = read_rank_info()
    return place.job if place.attempt > 0 else None


def _from_ranks(given: Mapping[str, str]) -> RankInfo:
    """Read the variables of torchrun, a Kubernetes operator, or a script that sets the same variables."""
    if "WORLD_SIZE" not in given:
        raise RecipeError(f"RANK={given['RANK']} is set, but WORLD_SIZE is not", _RANKS_CURE)
    num_processes = _number(given, "WORLD_SIZE", _RANKS_CURE, low=1)
    if "RANK" not in given and num_processes > 1:
        raise RecipeError(f"WORLD_SIZE={num_processes} is set, but RANK is not", _RANKS_CURE)
    rank = _number(given, "RANK", _RANKS_CURE, default=0)
    if rank >= num_processes:
        raise RecipeError(f"RANK={rank}, but WORLD_SIZE={num_processes}: ranks start at 0", _RANKS_CURE)
    job = given.get(_TORCHRUN_MARK)
    if num_processes == 1 and job is None:
        return SINGLE_PROCESS
    local = _read_local_rank(given, rank, num_processes)
    if job is None:
        return RankInfo(rank, num_processes, *local, *_read_rendezvous(given), "environment")
    attempt = _number(given, "TORCHELASTIC_RESTART_COUNT", _RANKS_CURE, default=0)
    # "none" is torchrun's default id; its process id is the same over all restarts.
    job = job if job != "none" else f"torchrun-{os.getppid()}"
    # No address: the store belongs to torchrun, and with one rank 0 would open a second store.
    return RankInfo(rank, num_processes, *local, None, None, "torchrun", attempt, job)


def _read_local_rank(given: Mapping[str, str], rank: int, num_processes: int) -> tuple[int, int]:
    if "LOCAL_RANK" not in given:
        if _number(given, "LOCAL_WORLD_SIZE", _RANKS_CURE, default=1, low=1) > 1:
            raise RecipeError(f"LOCAL_WORLD_SIZE={given['LOCAL_WORLD_SIZE']}, but LOCAL_RANK is not set", _RANKS_CURE)
        return 0, 1  # a PyTorchJob of Kubernetes: one process per host
    local_rank = _number(given, "LOCAL_RANK", _RANKS_CURE)
    if "LOCAL_WORLD_SIZE" not in given and given.get("MASTER_ADDR") not in ("localhost", "127.0.0.1", "::1"):
        raise RecipeError(
            f"LOCAL_RANK={local_rank} is set, but LOCAL_WORLD_SIZE is not",
            "set LOCAL_WORLD_SIZE to the number of processes on this host",
        )
    local_world_size = _number(given, "LOCAL_WORLD_SIZE", _RANKS_CURE, default=num_processes, low=1)
    if local_rank >= local_world_size or local_rank > rank or local_world_size > num_processes:
        local = f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world_size}"
        raise RecipeError(f"{local} contradict RANK={rank} and WORLD_SIZE={num_processes}", _RANKS_CURE)
    return local_rank, local_world_size


def _from_srun(given: Mapping[str, str]) -> RankInfo:
    num_processes = _number(given, _SRUN_MARK, _SRUN_CURE, low=1)
    if num_processes == 1:
        return SINGLE_PROCESS
    rank = _number(given, "SLURM_PROCID", _SRUN_CURE)
    if rank >= num_processes:
        raise RecipeError(f"SLURM_PROCID={rank}, but SLURM_STEP_NUM_TASKS={num_processes}", _SRUN_CURE)
    counts = _tasks_per_node(given, num_processes)
    node = _number(given, "SLURM_NODEID", _SRUN_CURE, default=0 if len(counts) == 1 else None)
    local_rank = _number(given, "SLURM_LOCALID", _SRUN_CURE)
    if node >= len(counts) or local_rank >= counts[node]:
        raise RecipeError(
            f"SLURM_LOCALID={local_rank} and SLURM_NODEID={node} contradict "
            f"SLURM_STEP_TASKS_PER_NODE={given['SLURM_STEP_TASKS_PER_NODE']}",
            _SRUN_CURE,
        )
    job = _number(given, "SLURM_JOB_ID", _SRUN_CURE)
    step = _number(given, "SLURM_STEP_ID", _SRUN_CURE, default=0)
    # MASTER_ADDR and MASTER_PORT that a batch script exports take precedence.
    address, port = _read_rendezvous(
        {
            **given,
            "MASTER_ADDR": given.get("MASTER_ADDR") or _first_node(given),
            "MASTER_PORT": given.get("MASTER_PORT") or str(_FIRST_PORT + (31 * job + step) % _NUM_PORTS),
        }
    )
    attempt = _number(given, "SLURM_RESTART_COUNT", _SRUN_CURE, default=0)
    return RankInfo(
        rank, num_processes, local_rank, counts[node], address, port, "slurm", attempt, f"slurm-{job}.{step}"
    )


def _tasks_per_node(given: Mapping[str, str], num_processes: int) -> list[int]:
    """Expand SLURM's notation, such as "2(x3),1", to one number per node."""
    text = given.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        counts += [int(match[1])] * int(match[2] or 1) if match else [0]
    if 0 in counts or sum(counts) != num_processes:
        raise RecipeError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} does not add up to SLURM_STEP_NUM_TASKS={num_processes}", _SRUN_CURE
        )
    return counts


def _first_node(given: Mapping[str, str]) -> str:
    """Return the host of rank 0 from SLURM's notation: node[01-03,07] starts with node01."""
    text = given.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])*(?=,|$)", text)
    host = re.sub(r"\[([0-9]+)(?:[-,][0-9,-]*)?\]", r"\1", first[0] if first else "")
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?", host):
        raise RecipeError(
            f"SLURM_STEP_NODELIST={text!r} does not start with a host name", "set MASTER_ADDR to the host of rank 0"
        )
    return host


def _read_rendezvous(given: Mapping[str, str]) -> tuple[str, int]:
    for name, example in (("MASTER_ADDR", "the name of the host of rank 0"), ("MASTER_PORT", "a free port on it")):
        if name not in given:
            raise RecipeError(f"WORLD_SIZE={given['WORLD_SIZE']} is set, but {name} is not", f"set {name} to {example}")
    cure = f"set MASTER_PORT to a free port on the host of rank 0, 1024 to {_LAST_PORT}"
    return given["MASTER_ADDR"], _number(given, "MASTER_PORT", cure, low=1, high=_LAST_PORT)


def _number(
    given: Mapping[str, str], name: str, cure: str, *, default: int | None = None, low: int = 0, high: int = 2**62
) -> int:
    """Read a variable as a whole number within bounds."""
    if name not in given:
        if default is None:
            raise RecipeError(f"{name} is not set", cure)
        return default
    if not re.fullmatch(r"[0-9]{1,18}", given[name]) or not low <= int(given[name]) <= high:
        upper = f" to {high}" if high < 2**62 else " or more"
        raise RecipeError(f"{name}={given[name]!r} is not a whole number of {low}{upper}", cure)
    return int(given[name])
