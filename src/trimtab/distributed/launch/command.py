"""Plan a launch: turn settings and a target into one torchrun command, after all checks. `run` executes it."""

import os
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trimtab.distributed.environment import inspect_machine
from trimtab.distributed.launch.launch_file import KEYS, LaunchFile, nearest
from trimtab.distributed.launch.settings import Settings, free_port, option, resolve_settings
from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.units import parse_seconds

_MAX_MAPPED_RANKS = 10  # torchrun's --redirects accepts local ranks of one digit only


@dataclass(frozen=True)
class LaunchPlan:
    """The processes to start.

    Args:
        settings: The resolved settings, with their origins.
        torchrun: Arguments of torchrun.
        environment: Variables to add to the environment of the processes.
        log_folder: Folder of this launch for the output of ranks above 0.
    """

    settings: Settings
    torchrun: tuple[str, ...]
    environment: Mapping[str, str]
    log_folder: Path

    @property
    def command(self) -> str:
        """The equivalent command line without trimtab."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, "torchrun", *map(shlex.quote, self.torchrun)])


def plan_launch(
    target: str, arguments: Sequence[str], *, module: bool, file: LaunchFile, given: Mapping[str, Any]
) -> LaunchPlan:
    """Check everything and build the torchrun command.

    Args:
        target: A script, a recipe, or a module.
        arguments: Arguments of the target.
        module: Whether the target is a module.
        file: The launch file.
        given: Options of the command line by key; None for an option that was not given.

    Raises:
        RecipeError: Lists all problems, one per line.
    """
    machine = inspect_machine()
    settings, problems = resolve_settings(given, file, machine, os.environ)
    words, target_problems = _resolve_target(target, list(arguments), module)
    problems += target_problems
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise RecipeError(f"launch has {len(problems)} problem{'s' if len(problems) != 1 else ''}:\n{lines}")
    token = secrets.token_hex(4)  # two launches may start in the same second
    name = f"{target.rpartition('.')[2] if module else Path(target).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{token}"
    name += f"-host{settings.host_index}" if settings.num_hosts > 1 else ""
    log_folder = Path(settings.log_dir) / name
    environment = {}
    if settings.processes > 1 and not os.environ.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(machine.num_cpus // settings.processes, 1))
    if settings.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if "TRIMTAB_LOG_DIR" not in os.environ:
        environment["TRIMTAB_LOG_DIR"] = str(log_folder)
    options = [*_rendezvous_options(settings, token), *_output_options(settings), "--log-dir", str(log_folder)]
    return LaunchPlan(settings, (*options, *words), environment, log_folder)


def _resolve_target(target: str, arguments: list[str], module: bool) -> tuple[list[str], list[str]]:
    """Return the arguments of torchrun that name the target, and the problem with it, if any."""
    problems = []
    words = [argument.replace("$", "$$") for argument in arguments]  # torchrun reads $ as the start of a placeholder
    path = Path(target)
    is_recipe = not module and path.suffix.lower() in (".yaml", ".yml")
    late = [word for word in arguments if word.partition("=")[0] in {option(name) for name in KEYS} | {"--config"}]
    if module:
        words = ["-m", target, *words]
        top = target.partition(".")[0]
        if not (Path(top).is_dir() or Path(f"{top}.py").is_file() or (top.isidentifier() and find_spec(top))):
            problems.append(f"-m {target}: there is no module {top}")
    elif is_recipe:
        words = ["-m", "trimtab", "train", target, *words]
        if late:
            problems.append(f"{late[0]} comes after the recipe: put options of launch before it")
    else:
        words = [target, *words]
        if late:
            say(f"{late[0]} comes after the script and is passed to it; put options of launch before the script")
    if not module and not path.exists():
        problems.append(_describe_missing(target, arguments))
    elif not module and path.is_dir() and not (path / "__main__.py").is_file():
        problems.append(f"{target} is a folder: give a script in it, or a recipe")
    elif not module and not is_recipe and path.is_file() and path.suffix not in (".py", ""):
        problems.append(f"{target} is neither a Python script (.py) nor a recipe (.yaml)")
    return words, problems


def _describe_missing(target: str, arguments: list[str]) -> str:
    if target == "train":
        return f"train is a command of trimtab, not a script: trimtab launch {' '.join(arguments) or 'recipe.yaml'}"
    folder = Path(target).parent
    names = [path.name for path in sorted(folder.glob("*")) if path.suffix in (".py", ".yaml", ".yml")]
    near = nearest(Path(target).name, names) if folder.is_dir() else ""
    cure = f"did you mean {folder / near}?" if near else "pass a script (.py) or a recipe (.yaml)"
    return f"there is no {target}; {cure}"


def _rendezvous_options(settings: Settings, token: str) -> list[str]:
    options = ["--nnodes", str(settings.num_hosts), "--nproc-per-node", str(settings.processes)]
    options += ["--max-restarts", str(settings.max_restarts)]
    if settings.num_hosts == 1 and settings.port is None and settings.address is None:
        # Port 0: torchrun chooses a free one. localhost, because a host may not be able to resolve its own name.
        endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
        return [*options, *endpoint, "--rdzv-id", token]
    # The static backend puts rank 0 on the first host, where the user expects its files.
    job = settings.job or (token if settings.num_hosts == 1 else "none")
    options += ["--rdzv-backend", "static", "--rdzv-id", job]
    if "TRIMTAB_PATIENCE" in os.environ:
        options += ["--rdzv-conf", f"timeout={int(parse_seconds(os.environ['TRIMTAB_PATIENCE']))}"]
    options += ["--node-rank", str(settings.host_index), "--master-addr", settings.address or "localhost"]
    return [*options, "--master-port", str(settings.port or free_port())]


def _output_options(settings: Settings) -> list[str]:
    """Let rank 0 print to the terminal, and the other ranks to files (3: stdout and stderr)."""
    if settings.host_index > 0:
        return ["--redirects", "3"]
    if settings.processes <= _MAX_MAPPED_RANKS:
        return ["--redirects", ",".join(f"{rank}:3" for rank in range(1, settings.processes)) or "0"]
    return ["--role", "rank", "--redirects", "3", "--tee", "0:3", "--local-ranks-filter", "0"]
