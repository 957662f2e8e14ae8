"""Rank and rendezvous from the variables of each launcher, and errors for variables that contradict each other."""

import os

import pytest

from trimtab.distributed.environment import SINGLE_PROCESS, RankInfo, read_rank_info
from trimtab.errors import RecipeError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "reviews-1",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPERATOR = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
# As srun sets them on the second of three hosts, which have 2, 2 and 1 tasks.
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-008,011]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "5",
}


def without(variables, *names, **changes):
    return {name: value for name, value in variables.items() if name not in names} | changes


def test_torchrun():
    assert read_rank_info(TORCHRUN) == RankInfo(3, 4, 1, 2, None, None, "torchrun", attempt=2, job="reviews-1")
    # The agent's own process in an srun step has SLURM's variables as well; torchrun's come first.
    assert read_rank_info(SRUN | TORCHRUN).launcher == "torchrun"
    alone = read_rank_info(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert alone == RankInfo(0, 1, 0, 1, None, None, "torchrun", attempt=2, job="reviews-1")
    nameless = read_rank_info(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"})  # torchrun itself is the same in all attempts
    assert nameless.job == f"torchrun-{os.getppid()}"


def test_ranks_without_torchrun():
    assert read_rank_info(OPERATOR) == RankInfo(1, 3, 0, 1, "train-master-0", 23456, "environment")
    on_one_host = OPERATOR | {"LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    assert read_rank_info(on_one_host) == RankInfo(1, 3, 1, 3, "localhost", 23456, "environment")
    assert read_rank_info(OPERATOR | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}).local_world_size == 2


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "", "RANK": ""},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a batch script
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},  # a shell that srun --pty opened
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_process(variables):
    assert read_rank_info(variables) is SINGLE_PROCESS


def test_the_environment_of_this_process_is_the_default(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_rank_info() == read_rank_info(TORCHRUN)


def test_srun():
    place = read_rank_info(SRUN)
    assert place == RankInfo(3, 5, 1, 2, "gpu007", place.port, "slurm", job="slurm-123456.2")
    last = SRUN | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_RESTART_COUNT": "3"}
    assert read_rank_info(last) == RankInfo(4, 5, 0, 1, "gpu007", place.port, "slurm", attempt=3, job="slurm-123456.2")
    ports = {read_rank_info(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"}).port for job in range(400)}
    assert len(ports) == 400  # jobs that share a host rarely share a port
    assert all(1024 < port < 32768 for port in ports)
    by_hand = read_rank_info(SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    assert (by_hand.address, by_hand.port) == ("head", 4000)
    one_host = without(SRUN, "SLURM_NODEID", "SLURM_STEP_ID", SLURM_STEP_TASKS_PER_NODE="5")
    assert read_rank_info(one_host).local_world_size == 5


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,07]", "node01"),
        ("a1,b2", "a1"),
        ("cn7", "cn7"),
        ("rack[2,4]-n[10-12],login", "rack2-n10"),
        ("gpu[9].cluster.local", "gpu9.cluster.local"),
    ],
)
def test_the_first_host_of_a_step(nodes, first):
    assert read_rank_info(SRUN | {"SLURM_STEP_NODELIST": nodes}).address == first


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "RANK=3 is set, but WORLD_SIZE is not"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE=4 is set, but RANK is not"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4, but WORLD_SIZE=4: ranks start at 0"),
        (TORCHRUN | {"RANK": "first"}, "RANK='first' is not a whole number of 0 or more"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number of 1 or more"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 contradict RANK=3"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 contradict"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "set LOCAL_WORLD_SIZE to the number of processes on this host"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_WORLD_SIZE=2, but LOCAL_RANK is not set"),
        (without(OPERATOR, "MASTER_ADDR"), "set MASTER_ADDR to the name of the host of rank 0"),
        (without(OPERATOR, "MASTER_PORT"), "MASTER_PORT is not"),
        (OPERATOR | {"MASTER_PORT": "99999"}, "MASTER_PORT='99999' is not a whole number of 1 to 65535"),
        (SRUN | {"SLURM_PROCID": "5"}, "SLURM_PROCID=5, but SLURM_STEP_NUM_TASKS=5"),
        (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID is not set"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (without(SRUN, "SLURM_NODEID"), "SLURM_NODEID is not set"),
        (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set"),
        (SRUN | {"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 and SLURM_NODEID=1 contradict"),
        (SRUN | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3 contradict"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "does not add up to SLURM_STEP_NUM_TASKS=5"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE='many'"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "set MASTER_ADDR to the host of rank 0"),
        (SRUN | {"SLURM_STEP_NODELIST": "node[a-b]"}, "does not start with a host name"),
        (SRUN | {"SLURM_STEP_NODELIST": "node[01"}, "does not start with a host name"),
        (SRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun has started 4 processes, and each would train alone"),
    ],
)
def test_contradictions_are_errors_with_a_cure(variables, words):
    with pytest.raises(RecipeError, match="cure: ") as error:
        read_rank_info(variables)
    assert words in str(error.value)
