"""`trimtab launch`: settings, checks, the torchrun command and exit codes. Most scripts here do not import torch."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.run import parse_args

from trimtab.distributed.environment import Machine
from trimtab.distributed.launch import run as launch_run
from trimtab.distributed.launch.command import plan_launch
from trimtab.distributed.launch.launch_file import (
    QUESTIONS,
    LaunchFile,
    launch_file_text,
    read_launch_file,
    write_launch_file,
)
from trimtab.distributed.launch.run import start
from trimtab.distributed.launch.settings import free_port, resolve_settings
from trimtab.errors import RecipeError

CPU = Machine(num_devices=0, num_cpus=4)
GPUS = Machine(num_devices=4, num_cpus=16)
SCRIPT = [sys.executable, "-m", "trimtab", "launch"]

# A prefix for each attempt: torchrun keeps one store over all restarts.
TOGETHER = """
import os, sys, time
rank, size, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
if "--fail-once" in sys.argv and attempt == 0:  # before it takes the time to import torch
    if rank == size - 1:
        open("failed", "w").close()
        os._exit(9)
    while not os.path.exists("failed"):
        time.sleep(0.01)
    time.sleep(0.3)
    os._exit(1)
import torch, torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(f"attempt-{attempt}", store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(f"rank {rank} of {size}, attempt {attempt}, total {total.item()}, {os.environ['OMP_NUM_THREADS']} threads")
print("arguments", sys.argv[1:])
print("a word on stderr", file=sys.stderr)
dist.destroy_process_group()
"""
ENDS = """
import os, signal, sys, time
rank, attempt, how = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], sys.argv[1]
print("rank", rank, "attempt", attempt, flush=True)
if rank == "0":
    open(f"ready-{attempt}", "w").close()
else:
    while not os.path.exists(f"ready-{attempt}"):
        time.sleep(0.01)
    print("the last words of rank 1", file=sys.stderr, flush=True)
    if how == "raise":
        raise ValueError("no good")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))
time.sleep(600)
"""


def resolve(given=None, file=None, machine=CPU, environ=None):
    return resolve_settings(given or {}, file or LaunchFile(), machine, environ or {})


def problem_of(**kwargs):
    problems = resolve(**kwargs)[1]
    assert len(problems) == 1, problems
    return problems[0]


# ---------------------------------------------------------------------- settings


def test_command_line_then_file_then_found(own_folder):
    Path("launch.yaml").write_text("processes: 3\nmax_restarts: 2\nlog_dir: elsewhere\n")
    file = read_launch_file(None)
    settings, problems = resolve({"processes": 2, "port": None}, file, GPUS)
    assert problems == []
    assert (settings.processes, settings.max_restarts, settings.log_dir, settings.port) == (2, 2, "elsewhere", None)
    rows = {name: (value, origin) for name, value, origin in settings.rows()}
    assert rows == {
        "processes": ("2", "--processes"),
        "hosts": ("1", "default"),
        "address": ("this host", "found"),
        "port": ("a free one", "found"),
        "max restarts": ("2", "launch.yaml:2"),
        "log dir": ("elsewhere", "launch.yaml:3"),
        "cpu": ("no", "default"),
    }
    assert resolve({}, file, GPUS)[0].processes == 3
    found = resolve(machine=GPUS)[0]
    assert (found.processes, found.origins["processes"]) == (4, "found: 4 GPUs")
    assert resolve({"cpu": True}, machine=GPUS)[0].processes == 1
    assert resolve()[0].origins["processes"] == "found: no GPU"


def test_the_hosts_of_a_launch(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node2.cluster")
    settings, problems = resolve({"hosts": ["node1", "node2", "node3"]})
    assert problems == []
    assert (settings.num_hosts, settings.host_index, settings.address, settings.port) == (3, 1, "node1", 29500)
    assert settings.rows()[1] == ("hosts", "3, this is 1", "--hosts")
    chosen = {"hosts": ["node1", "node2"], "host_index": 1, "address": "10.0.0.1", "port": 4000}
    settings, problems = resolve(chosen)
    assert problems == []
    assert (settings.address, settings.port, settings.host_index) == ("10.0.0.1", 4000, 1)
    counted = resolve({"num_hosts": 2, "host_index": 1, "address": "head"})
    assert counted[1] == []
    assert counted[0].address == "head"
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    by_address = resolve({"hosts": ["198.51.100.7", "127.0.0.1"]})  # the first is kept for documentation
    assert by_address[0].host_index == 1


def test_a_scheduler_that_started_one_process_on_each_host():
    srun = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "gpu[3-4]",
        "SLURM_JOB_ID": "77",
    }
    settings, problems = resolve(machine=GPUS, environ=srun)
    assert problems == []
    assert (settings.num_hosts, settings.host_index, settings.address, settings.processes) == (2, 1, "gpu3", 4)
    assert settings.job == "slurm-77.0"
    assert settings.origins["address"] == "SLURM"
    pod = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
    settings, problems = resolve(machine=GPUS, environ=pod)
    assert problems == []
    assert (settings.num_hosts, settings.host_index, settings.address) == (3, 1, "train-master-0")
    operator = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a-0.a", "PET_MASTER_PORT": "29400"}
    settings, problems = resolve(machine=GPUS, environ=operator | {"PET_NPROC_PER_NODE": "auto"})
    assert problems == []
    assert (settings.num_hosts, settings.host_index, settings.address) == (2, 1, "a-0.a")
    assert (settings.processes, settings.port, settings.origins["port"]) == (4, 29400, "PET_MASTER_PORT")
    assert resolve({"num_hosts": 1}, machine=GPUS, environ=operator)[0].address is None
    assert 'PET_NNODES of the environment: found "1:4"' in problem_of(environ={"PET_NNODES": "1:4"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"processes": 0}, "--processes: found 0; allowed: a whole number, 1 or more"),
        ({"processes": 5}, "processes: 5 (--processes), but this host has 4 GPUs: --processes 4, or --cpu"),
        ({"hosts": []}, "--hosts: found []; allowed: names or addresses"),
        ({"hosts": ["a b"]}, "--hosts: found"),
        ({"hosts": ["node1", "node2"]}, "which is not among node1, node2; nothing is started on other hosts"),
        ({"hosts": ["localhost", "127.0.0.1"]}, "localhost and 127.0.0.1 are both this host"),
        ({"num_hosts": 2, "address": "a"}, "host_index: needed with 2 hosts; --host-index 0 on the first"),
        ({"num_hosts": 2, "host_index": 0}, "address: needed with 2 hosts"),
        ({"num_hosts": 2, "host_index": 2, "address": "a"}, "host_index: 2 (--host-index), but there are 2 hosts"),
        ({"host_index": 1}, "host_index: 1 (--host-index), but there is one host"),
        ({"hosts": ["a", "b"], "num_hosts": 3, "host_index": 0}, "hosts: 2 names (--hosts), but num_hosts is 3"),
        ({"port": 70000}, "--port: found 70000; allowed: a port, 1 to 65535"),
        ({"max_restarts": -1}, "--max-restarts: found -1"),
        ({"log_dir": " "}, "--log-dir: found"),
        ({"log_dir": f"{__file__}/logs"}, "test_launch.py is not a folder: choose another with --log-dir"),
    ],
)
def test_settings_that_contradict(given, words):
    assert words in problem_of(given=given, machine=GPUS)


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        alone = problem_of(given={"port": port})
        hosts = {"num_hosts": 2, "address": "localhost", "port": port}
        first = problem_of(given=hosts | {"host_index": 0})
        assert resolve(hosts | {"host_index": 1})[1] == []  # the port is one of the first host
    assert re.search(rf"port: {port} \(--port\) is taken on this host: --port \d+ is free, or remove it", alone)
    assert "is free here; give it on every host" in first
    assert resolve({"port": port})[1] == []


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            "already one of 2, started by torchrun or trimtab launch: run the script or `trimtab train` directly",
        ),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "a",
                "SLURM_JOB_ID": "1",
            },
            "already one of 2, started by srun: run the script or `trimtab train` directly; or srun with "
            "--ntasks-per-node=1",
        ),
        ({"RANK": "0"}, "the environment: RANK=0 is set, but WORLD_SIZE is not"),
    ],
)
def test_processes_are_not_launched_twice(environ, words):
    assert words in problem_of(environ=environ)


# ---------------------------------------------------------------------- the file


def test_the_file_that_config_writes(own_folder, monkeypatch):
    monkeypatch.setattr("trimtab.distributed.launch.launch_file.inspect_machine", lambda: CPU)
    asked = []

    def answers(*given):
        given = list(given)

        def ask(question, default, complaint):
            asked.append((question, complaint))
            return given.pop(0)

        return ask

    done = write_launch_file(Path("launch.yaml"), [], answers())
    assert done == "launch.yaml written; next: trimtab launch SCRIPT.py, or a recipe"
    assert asked == []
    assert read_launch_file(None) == LaunchFile()  # everything is found
    text = Path("launch.yaml").read_text()
    assert "Here: no GPU, so one." in " ".join(text.replace("# ", "").split())
    for key in ("processes", "hosts", "num_hosts", "host_index", "address", "port", "max_restarts", "log_dir", "cpu"):
        assert f"\n# {key}: " in text

    write_launch_file(Path("mine.yaml"), QUESTIONS, answers("two", "2", "node1, node2"))
    assert [complaint for _, complaint in asked] == ["", "found two; allowed: a whole number, 1 or more", ""]
    assert read_launch_file(Path("mine.yaml")).values == {"processes": 2, "hosts": ["node1", "node2"]}
    with pytest.raises(RecipeError, match="mine.yaml exists"):
        write_launch_file(Path("mine.yaml"), [], answers())

    monkeypatch.setattr("trimtab.distributed.launch.launch_file.inspect_machine", lambda: GPUS)
    asked.clear()
    write_launch_file(Path("gpus.yaml"), QUESTIONS, answers(""))
    assert [question for question, _ in asked] == ["Names of all hosts, separated by commas (empty: this host alone)"]
    assert read_launch_file(Path("gpus.yaml")).values == {}

    examples = launch_file_text({}, {}).replace("\n# processes", "\nprocesses").replace("\n# port", "\nport")
    Path("examples.yaml").write_text(examples)
    assert read_launch_file(Path("examples.yaml")).values == {"processes": 2, "port": 29500}


def test_mistakes_in_the_file_are_reported_at_once(own_folder):
    Path("launch.yaml").write_text(
        "proceses: 2\nnum_processes: 4\nmachine_rank: 0\nmixed_precision: fp16\nport: high\ncpu: maybe\nport: 4\nx: 1\n"
        "hosts: node1\n"
    )
    assert list(read_launch_file(None).problems) == [
        "launch.yaml:7: port: given twice, first on line 5; keep one",
        "launch.yaml:1: proceses: no such key; did you mean processes?",
        "launch.yaml:2: num_processes: no such key; use processes (on each host; num_processes counts those of all "
        "hosts)",
        "launch.yaml:3: machine_rank: no such key; use host_index",
        "launch.yaml:4: mixed_precision: no such key; remove it; set train.precision in the recipe, or "
        "Engine(mixed_precision=…)",
        "launch.yaml:5: port: found high; allowed: a port, 1 to 65535",
        "launch.yaml:6: cpu: found maybe; allowed: true or false",
        "launch.yaml:8: x: no such key; allowed: processes, hosts, num_hosts, host_index, address, port, max_restarts, "
        "log_dir, cpu",
        "launch.yaml:9: hosts: found node1; allowed: names or addresses, such as [node1, node2]",
    ]
    with pytest.raises(RecipeError, match="there is no launch file nowhere.yaml"):
        read_launch_file(Path("nowhere.yaml"))


# ---------------------------------------------------------------------- the command


def planned(target, *arguments, module=False, **given):
    return plan_launch(target, arguments, module=module, file=LaunchFile(), given=given)


def test_the_torchrun_command(own_folder, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("trimtab.distributed.launch.command.inspect_machine", lambda: GPUS)
    Path("train.py").touch()
    Path("recipe.yaml").touch()
    plan = planned("train.py", "--lr", "1e-3", "--processes", "x", "$HOME $$", processes=3)
    words = shlex.split(plan.command)
    assert words[:3] == ["OMP_NUM_THREADS=5", f"TRIMTAB_LOG_DIR={plan.log_folder}", "torchrun"]
    assert tuple(words[3:]) == plan.torchrun
    options = parse_args(words[3:])
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("1", "3", 0)
    assert (options.rdzv_backend, options.rdzv_endpoint, options.local_addr) == ("c10d", "localhost:0", "localhost")
    assert (options.redirects, options.log_dir) == ("1:3,2:3", str(plan.log_folder))
    assert (options.module, options.training_script) == (False, "train.py")
    assert options.training_script_args == ["--lr", "1e-3", "--processes", "x", "$$HOME $$$$"]
    assert plan.log_folder.parent == Path("runs/logs")
    assert planned("train.py", processes=3).log_folder != plan.log_folder

    port = free_port()
    options = parse_args(planned("recipe.yaml", "--set", "train.lr=1", processes=2, port=port, cpu=True).torchrun)
    assert (options.module, options.training_script) == (True, "trimtab")
    assert options.training_script_args == ["train", "recipe.yaml", "--set", "train.lr=1"]
    assert (options.rdzv_backend, options.master_addr, options.master_port) == ("static", "localhost", port)
    assert planned("recipe.yaml", cpu=True).environment["CUDA_VISIBLE_DEVICES"] == ""

    hosts = {"num_hosts": 2, "address": "localhost", "port": free_port()}
    options = parse_args(planned("json.tool", "x", module=True, host_index=1, processes=2, **hosts).torchrun)
    assert (options.nnodes, options.node_rank, options.redirects) == ("2", 1, "3")
    assert (options.module, options.training_script, options.training_script_args) == (True, "json.tool", ["x"])
    monkeypatch.setattr("trimtab.distributed.launch.command.inspect_machine", lambda: Machine(16, 32))
    options = parse_args(planned("train.py", processes=16).torchrun)
    assert (options.redirects, options.tee, options.local_ranks_filter) == ("3", "0:3", "0")


@pytest.mark.parametrize(
    ("target", "arguments", "module", "words"),
    [
        ("trian.py", (), False, "there is no trian.py; did you mean train.py?"),
        ("no/such.py", (), False, "there is no no/such.py; pass a script (.py) or a recipe (.yaml)"),
        ("train", ("recipe.yaml",), False, "train is a command of trimtab, not a script: trimtab launch recipe.yaml"),
        ("recipe.yaml", ("--processes", "2"), False, "--processes comes after the recipe"),
        ("recipe.yaml", ("--config", "other.yaml"), False, "--config comes after the recipe"),
        ("folder", (), False, "folder is a folder"),
        ("start.sh", (), False, "start.sh is neither a Python script (.py) nor a recipe (.yaml)"),
        ("no_such_module.x", (), True, "-m no_such_module.x: there is no module no_such_module"),
    ],
)
def test_targets_that_cannot_be_started(own_folder, target, arguments, module, words):
    Path("folder").mkdir()
    for name in ("train.py", "recipe.yaml", "start.sh"):
        Path(name).touch()
    with pytest.raises(RecipeError, match="launch has 2 problems:") as error:
        planned(target, *arguments, module=module, processes=0)
    assert words in str(error.value)
    assert "--processes: found 0" in str(error.value)


# ---------------------------------------------------------------------- running


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ({0: (1, 10), 1: (-9, 10)}, 1),  # killed from outside; rank 0 missed it
        ({0: (1, 10), 1: (2, 11), 2: (-15, 11)}, 1),  # a mistake found by one rank; its interpreter was slower to end
        ({0: (1, 10), 1: (75, 11)}, 0),  # rank 1 answers torchrun's SIGTERM
        ({0: (1, 10), 1: (-9, 41)}, 0),  # torchrun's own SIGKILL, after its patience
        ({0: (-15, 10), 1: (1, 10)}, 1),
        ({0: (75, 10), 1: (75, 10)}, 0),
        ({1: (2, 10), 0: (2, 10)}, 0),  # a mistake found by both, which rank 0 has printed
    ],
)
def test_the_first_failure(codes, first):
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=when) for rank, (code, when) in codes.items()}
    assert launch_run._first_failure(failures)[0] == first


@pytest.mark.parametrize(
    ("how", "code", "num_attempts", "words"),
    [
        pytest.param("raise", 1, 2, "error: rank 1 ended with exit code 1\n", marks=pytest.mark.slow),
        pytest.param(
            *("kill", 137, 2, "error: rank 1 was killed by SIGKILL (often: out of memory)\n"), marks=pytest.mark.slow
        ),
        ("2", 2, 1, "error: rank 1 ended with exit code 2\n"),
        pytest.param("75", 75, 1, "stopped by a time limit or a signal (exit code 75)", marks=pytest.mark.slow),
    ],
)
def test_how_a_launch_ends(own_folder, capfd, how, code, num_attempts, words):
    """The exit code is that of the process that failed; there is no restart after a mistake of the user."""
    Path("ends.py").write_text(ENDS)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    plan = planned("ends.py", how, processes=2, max_restarts=1)
    ending = start(plan)
    assert ending.code == code
    assert ending.message.startswith(words)
    if code != 75:
        assert "attempt_1" in ending.message or num_attempts == 1
        assert "    the last words of rank 1" in ending.message
        assert ("    ValueError: no good" in ending.message) == (how == "raise")
    out, err = capfd.readouterr()
    assert out.splitlines() == [f"rank 0 attempt {attempt}" for attempt in range(num_attempts)]
    assert "torch" not in err
    assert "Traceback" not in err
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    logs = sorted(str(path.relative_to(plan.log_folder)).split("/", 1)[1] for path in plan.log_folder.rglob("*.log"))
    assert len(logs) == 2 * num_attempts
    assert logs[-2:] == [f"attempt_{num_attempts - 1}/1/{name}.log" for name in ("stderr", "stdout")]


@pytest.mark.slow
def test_restart_and_output(own_folder):
    """One rank fails once, and all are restarted. Rank 0 prints to the terminal, rank 1 to files."""
    Path("together.py").write_text(TOGETHER)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*SCRIPT, "--processes", "2", "--max-restarts", "1", "together.py", "--fail-once", "--port", "$1"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    num_threads = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert done.stdout.splitlines() == [
        f"rank 0 of 2, attempt 1, total 3.0, {num_threads} threads",
        "arguments ['--fail-once', '--port', '$1']",
    ]
    assert "--port comes after the script and is passed to it" in done.stderr
    assert "rank 1 ended with exit code 9; restarting all processes, attempt 1" in done.stderr
    assert "a word on stderr\n" in done.stderr
    assert "torch/distributed" not in done.stderr
    written = {path.parts[-3] + "/" + path.name: path.read_text() for path in Path("runs/logs").rglob("1/*.log")}
    assert written["attempt_1/stdout.log"].startswith("rank 1 of 2, attempt 1, total 3.0")
    assert written["attempt_1/stderr.log"] == "a word on stderr\n"


@pytest.mark.slow
def test_two_hosts(own_folder):
    """Two launches on this machine act as two hosts, with two processes and one; both are restarted together."""
    Path("together.py").write_text(TOGETHER)
    port = free_port()
    command = [*SCRIPT, "--quiet", "--num-hosts", "2", "--address", "localhost", "--port", str(port)]
    command += ["--max-restarts", "1"]
    running = [
        subprocess.Popen(
            [*command, "--host-index", str(index), "--processes", str(2 - index), "together.py", "--fail-once"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PET_STANDALONE": "1", "PET_RDZV_ENDPOINT": "localhost:1"},  # to be ignored
        )
        for index in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=400) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    assert said[0][0].startswith("rank 0 of 3, attempt 1, total 6.0")
    assert said[1][0] == ""
    (log,) = Path("runs/logs").glob("*-host1/*/attempt_1/0/stdout.log")
    assert log.read_text().startswith("rank 2 of 3, attempt 1, total 6.0")


@pytest.mark.slow
def test_an_interrupt_ends_all_processes(own_folder):
    Path("wait.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    launch = subprocess.Popen(
        [*SCRIPT, "--quiet", "--processes", "2", "wait.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        pids = [int(launch.stdout.readline())]
        while not (logs := [path for path in Path("runs/logs").rglob("1/stdout.log") if path.read_text().strip()]):
            time.sleep(0.05)
        pids.append(int(logs[0].read_text()))
        launch.send_signal(signal.SIGTERM)
        _, err = launch.communicate(timeout=400)
    finally:
        launch.kill()
    assert (launch.returncode, err) == (143, "stopped by SIGTERM\n")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_hosts_that_do_not_join(own_folder, monkeypatch, capfd):
    Path("train.py").touch()
    monkeypatch.setenv("TRIMTAB_PATIENCE", "1s")
    ending = start(planned("train.py", num_hosts=2, host_index=0, address="localhost", port=free_port(), processes=1))
    assert ending.code == 1
    assert "error: the rendezvous of 2 hosts at localhost:" in ending.message
    assert "1/2 clients joined" in ending.message
    monkeypatch.setattr(launch_run, "_NAME_TIMEOUT_S", 0.1)
    unknown = planned("train.py", num_hosts=2, host_index=1, address="no-such-host.invalid", processes=1)
    ending = start(unknown)
    assert ending.code == 2
    assert "the address no-such-host.invalid cannot be resolved on this host" in ending.message
