"""The templates for clusters: each is run, or rendered, as its cluster would, and trimtab finds its place in it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import typer
import yaml

from trimtab.cli.main import app
from trimtab.distributed.environment import RankInfo, read_rank_info
from trimtab.distributed.launch.launch_file import KEYS, LaunchFile
from trimtab.distributed.launch.settings import Machine, resolve_settings

TEMPLATES = Path(__file__).parents[2] / "docs" / "templates"

# Does what srun does with a step, one task after the other.
FAKE_SRUN = """#!{python}
import os, subprocess, sys
nodes, tasks = int(os.environ["FAKE_NODES"]), int(os.environ["FAKE_TASKS"])
command = [word for word in sys.argv[1:] if not word.startswith("--cpus") and not word.startswith("--kill")]
for rank in range(nodes * tasks):
    step = {{
        "SLURM_PROCID": rank, "SLURM_LOCALID": rank % tasks, "SLURM_NODEID": rank // tasks, "SLURM_STEP_ID": 0,
        "SLURM_STEP_NUM_TASKS": nodes * tasks, "SLURM_STEP_TASKS_PER_NODE": f"{{tasks}}(x{{nodes}})",
        "SLURM_STEP_NODELIST": f"gpu[1-{{nodes}}]",
    }}
    done = subprocess.run(command, env=os.environ | {{name: str(value) for name, value in step.items()}})
    if done.returncode:
        sys.exit(done.returncode)
"""
FAKE_TRIMTAB = """#!{python}
import dataclasses, json, os, sys
from trimtab.distributed.environment import read_rank_info
threads, logs = os.environ["OMP_NUM_THREADS"], os.environ["TRIMTAB_LOG_DIR"]
print(json.dumps([dataclasses.asdict(read_rank_info()), sys.argv[1:], threads, logs]))
"""


def parsed(words):
    """The options of a command of trimtab, as the command line reads them; wrong ones raise."""
    assert words[0] == "trimtab"
    command = typer.main.get_command(app).commands[words[1]]
    return command.make_context(words[1], list(words[2:])).params


def test_every_template_is_tested_here():
    names = sorted(path.name for path in TEMPLATES.iterdir())
    assert names == ["kubernetes-job.yaml", "kubernetes-pytorchjob.yaml", "slurm.sbatch"]


def test_slurm(tmp_path):
    script = TEMPLATES / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    header = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script.read_text(), flags=re.MULTILINE))
    nodes, tasks = int(header["nodes"]), int(header["ntasks-per-node"])
    assert header["gpus-per-node"] == header["ntasks-per-node"]
    for name, text in (("srun", FAKE_SRUN), ("trimtab", FAKE_TRIMTAB)):
        (tmp_path / name).write_text(text.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "FAKE_NODES": str(nodes),
        "FAKE_TASKS": str(tasks),
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_CPUS_PER_TASK": header["cpus-per-task"],
    }
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == nodes * tasks == 8
    assert len({place["port"] for place, *_ in found}) == 1
    for rank, (place, arguments, threads, logs) in enumerate(found):
        expected = RankInfo(rank, 8, rank % 4, 4, "gpu1", place["port"], "slurm", job="slurm-4711.0")
        assert RankInfo(**place) == expected
        assert parsed(["trimtab", *arguments])["out"] == "runs/reviews/4711"
        assert (threads, logs) == ("8", "runs/logs/4711")


def test_kubernetes_job():
    service, job = yaml.safe_load_all((TEMPLATES / "kubernetes-job.yaml").read_text())
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    num_hosts = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == num_hosts
    (container,) = pod["containers"]
    num_gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    for index in range(num_hosts):
        arguments = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["args"]]
        options = parsed([*container["command"], *arguments])
        assert (options["target"], options["arguments"]) == ("/data/recipe.yaml", ["--out", "/data/runs/reviews"])
        given = {key: options[key] for key in KEYS if key != "hosts"}
        settings, problems = resolve_settings(given, LaunchFile(), Machine(num_gpus, 8), {})
        assert problems == []
        assert (settings.num_hosts, settings.host_index, settings.processes) == (num_hosts, index, num_gpus)
        assert (settings.address, settings.port) == (f"{name}-0.{service['metadata']['name']}", 29500)
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_kubernetes_pytorchjob():
    job = yaml.safe_load((TEMPLATES / "kubernetes-pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    num_pods = sum(kind["replicas"] for kind in replicas.values())
    for kind in replicas.values():
        (container,) = kind["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        options = parsed([*container["command"], *container["args"]])
        assert (str(options["recipe"]), options["out"]) == ("/data/recipe.yaml", "/data/runs/reviews")
        given = {variable["name"]: variable["value"] for variable in container["env"]}
        assert given == {"TRIMTAB_LOG_DIR": "/data/runs/logs"}
        for rank in range(num_pods):
            # What the operator adds.
            pod = {"RANK": str(rank), "WORLD_SIZE": str(num_pods), "MASTER_ADDR": "reviews-master-0"}
            place = read_rank_info({**given, **pod, "MASTER_PORT": "23456"})
            assert place == RankInfo(rank, num_pods, 0, 1, "reviews-master-0", 23456, "environment")
