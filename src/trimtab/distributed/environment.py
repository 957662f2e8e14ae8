"""Where this process stands among those that train together, read from the environment that launchers set.

torchrun (and so `trimtab launch`), SLURM's srun, and anything that sets RANK and WORLD_SIZE are recognised.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.errors import RecipeError

_TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"
# Only the steps of srun have it: a batch script with SLURM_NTASKS=4 is itself one process.
_SRUN_MARK = "SLURM_STEP_NUM_TASKS"
_MPIRUN_MARK = "OMPI_COMM_WORLD_SIZE"
_SRUN_CURE = "start the processes with srun; or unset SLURM_STEP_NUM_TASKS to run one process"
_RANKS_CURE = (
    "start the processes with trimtab launch or torchrun, which set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT; or unset RANK and WORLD_SIZE to run one process"
)
# Below the ports that systems hand out by themselves, so that the meeting point is rarely taken.
_FIRST_PORT, _NUM_PORTS = 15000, 15000
_LAST_PORT = 65535


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that train together.

    Args:
        rank: Of this process, among all.
        num_processes: All of them.
        local_rank: Of this process, among those of its host.
        num_local: Processes of this host.
        address: Host where all meet; None where torch has to read it from the environment, or where there is nobody.
        port: Of the meeting point.
        launcher: "none", "torchrun", "slurm" or "environment".
        attempt: How often the launcher has started this job again.
        job: An id that all processes and all restarts of one job share, if the launcher gives one.
    """

    rank: int
    num_processes: int
    local_rank: int
    num_local: int
    address: str | None
    port: int | None
    launcher: str
    attempt: int = 0
    job: str | None = None

    @property
    def local_device(self) -> int | None:
        """Which device of this host is this process's; None for one process, which looks by itself.

        SLURM may show each task its own device alone, which is then the first for every one of them.
        """
        if self.num_processes == 1:
            return None
        return 0 if self.launcher == "slurm" and _num_devices() == 1 else self.local_rank


def _num_devices() -> int:
    import torch

    return torch.accelerator.device_count()


ALONE = Place(0, 1, 0, 1, None, None, "none")


def find_place(environ: Mapping[str, str] | None = None) -> Place:
    """The place of this process.

    Args:
        environ: The environment; that of this process if left out.

    Raises:
        RecipeError: The variables contradict each other, or one of them is not what it should be.
    """
    # A variable that is set to nothing counts as not set: `export WORLD_SIZE=` is how people clear one.
    given = {name: value.strip() for name, value in (os.environ if environ is None else environ).items() if value}
    if "RANK" in given or "WORLD_SIZE" in given:
        return _by_ranks(given)
    if _number(given, _MPIRUN_MARK, "start the processes with trimtab launch or torchrun", default=1) > 1:
        # Not from SLURM's variables: below mpirun they count the daemons that it has started, one a host.
        raise RecipeError(
            f"mpirun has started {given[_MPIRUN_MARK]} processes, and each would train alone",
            "use trimtab launch, torchrun or srun; or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT for each process",
        )
    if _SRUN_MARK in given:
        return _by_srun(given)
    return ALONE


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is one of several."""
    return find_place(environ).num_processes > 1


def _by_ranks(given: Mapping[str, str]) -> Place:
    """torchrun, or an operator of Kubernetes, or a script that sets the same variables."""
    if "WORLD_SIZE" not in given:
        raise RecipeError(f"RANK={given['RANK']} is set, but WORLD_SIZE is not", _RANKS_CURE)
    num_processes = _number(given, "WORLD_SIZE", _RANKS_CURE, low=1)
    if "RANK" not in given and num_processes > 1:
        raise RecipeError(f"WORLD_SIZE={num_processes} is set, but RANK is not", _RANKS_CURE)
    rank = _number(given, "RANK", _RANKS_CURE, default=0)
    if rank >= num_processes:
        raise RecipeError(f"RANK={rank}, but WORLD_SIZE={num_processes}: ranks begin at 0", _RANKS_CURE)
    by_torchrun = _TORCHRUN_MARK in given
    if num_processes == 1 and not by_torchrun:
        return ALONE
    local_rank, num_local = _local_by_ranks(given, rank, num_processes)
    if not by_torchrun:
        return Place(rank, num_processes, local_rank, num_local, *_meeting_point(given), "environment")
    return Place(
        rank,
        num_processes,
        local_rank,
        num_local,
        None,  # the store belongs to torchrun: torch must find it by itself, or rank 0 would open a second one
        None,
        "torchrun",
        attempt=_number(given, "TORCHELASTIC_RESTART_COUNT", _RANKS_CURE, default=0),
        # "none" is torchrun's word for no id; its process is the same in all attempts
        job=given[_TORCHRUN_MARK] if given[_TORCHRUN_MARK] != "none" else f"torchrun-{os.getppid()}",
    )


def _local_by_ranks(given: Mapping[str, str], rank: int, num_processes: int) -> tuple[int, int]:
    if "LOCAL_RANK" not in given:
        if _number(given, "LOCAL_WORLD_SIZE", _RANKS_CURE, default=1, low=1) > 1:
            raise RecipeError(f"LOCAL_WORLD_SIZE={given['LOCAL_WORLD_SIZE']}, but LOCAL_RANK is not set", _RANKS_CURE)
        return 0, 1  # Kubernetes' PyTorchJob: one process a host
    local_rank = _number(given, "LOCAL_RANK", _RANKS_CURE)
    if "LOCAL_WORLD_SIZE" not in given and given.get("MASTER_ADDR") not in ("localhost", "127.0.0.1", "::1"):
        raise RecipeError(
            f"LOCAL_RANK={local_rank} is set, but LOCAL_WORLD_SIZE is not",
            "set LOCAL_WORLD_SIZE to the number of processes on this host",
        )
    num_local = _number(given, "LOCAL_WORLD_SIZE", _RANKS_CURE, default=num_processes, low=1)
    if local_rank >= num_local or local_rank > rank or num_local > num_processes:
        raise RecipeError(
            f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={num_local} cannot be RANK={rank} of "
            f"WORLD_SIZE={num_processes}",
            _RANKS_CURE,
        )
    return local_rank, num_local


def _by_srun(given: Mapping[str, str]) -> Place:
    num_processes = _number(given, _SRUN_MARK, _SRUN_CURE, low=1)
    if num_processes == 1:
        return ALONE
    rank = _number(given, "SLURM_PROCID", _SRUN_CURE)
    if rank >= num_processes:
        raise RecipeError(f"SLURM_PROCID={rank}, but SLURM_STEP_NUM_TASKS={num_processes}", _SRUN_CURE)
    counts = _tasks_of_hosts(given, num_processes)
    host = _number(given, "SLURM_NODEID", _SRUN_CURE, default=0 if len(counts) == 1 else None)
    local_rank = _number(given, "SLURM_LOCALID", _SRUN_CURE)
    if host >= len(counts) or local_rank >= counts[host]:
        raise RecipeError(
            f"SLURM_LOCALID={local_rank} on SLURM_NODEID={host} does not go with "
            f"SLURM_STEP_TASKS_PER_NODE={given['SLURM_STEP_TASKS_PER_NODE']}",
            _SRUN_CURE,
        )
    job = _number(given, "SLURM_JOB_ID", _SRUN_CURE)
    step = _number(given, "SLURM_STEP_ID", _SRUN_CURE, default=0)
    # What a batch script exports by hand comes first.
    address, port = _meeting_point(
        {
            **given,
            "MASTER_ADDR": given.get("MASTER_ADDR") or _first_host(given),
            "MASTER_PORT": given.get("MASTER_PORT") or str(_FIRST_PORT + (31 * job + step) % _NUM_PORTS),
        }
    )
    attempt = _number(given, "SLURM_RESTART_COUNT", _SRUN_CURE, default=0)
    return Place(rank, num_processes, local_rank, counts[host], address, port, "slurm", attempt, f"slurm-{job}.{step}")


def _tasks_of_hosts(given: Mapping[str, str], num_processes: int) -> list[int]:
    """SLURM's short form, such as "2(x3),1", as one number a host."""
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


def _first_host(given: Mapping[str, str]) -> str:
    """The host of rank 0, from SLURM's short form: node[01-03,07] begins with node01."""
    text = given.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])*(?=,|$)", text)
    host = re.sub(r"\[([0-9]+)(?:[-,][0-9,-]*)?\]", r"\1", first[0] if first else "")
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?", host):
        raise RecipeError(
            f"SLURM_STEP_NODELIST={text!r} does not begin with a host", "set MASTER_ADDR to the host of rank 0"
        )
    return host


def _meeting_point(given: Mapping[str, str]) -> tuple[str, int]:
    for name, example in (("MASTER_ADDR", "the name of the host of rank 0"), ("MASTER_PORT", "a free port of it")):
        if name not in given:
            raise RecipeError(f"WORLD_SIZE={given['WORLD_SIZE']} is set, but {name} is not", f"set {name} to {example}")
    cure = f"set MASTER_PORT to a free port of the host of rank 0, 1024 to {_LAST_PORT}"
    return given["MASTER_ADDR"], _number(given, "MASTER_PORT", cure, low=1, high=_LAST_PORT)


def _number(
    given: Mapping[str, str],
    name: str,
    cure: str,
    *,
    default: int | None = None,
    low: int = 0,
    high: int = 2**62,
) -> int:
    """A variable as a whole number within its bounds."""
    if name not in given:
        if default is None:
            raise RecipeError(f"{name} is not set", cure)
        return default
    if not re.fullmatch(r"[0-9]{1,18}", given[name]) or not low <= int(given[name]) <= high:
        upper = f" to {high}" if high < 2**62 else " or more"
        raise RecipeError(f"{name}={given[name]!r} is no whole number, {low}{upper}", cure)
    return int(given[name])


def started_again() -> str | None:
    """The id of this job, if the launcher has started it before and starts it again."""
    place = find_place()
    return place.job if place.attempt > 0 else None
