"""What `trimtab launch` will start: settings and a target become one torchrun command, after all checks.

`launch_run` runs it.
"""

import os
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trimtab.distributed.launch.file import KEYS, LaunchFile, nearest
from trimtab.distributed.launch.settings import Settings, free_port, look_at_machine, option, resolve_settings
from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.units import parse_seconds

_MOST_MAPPED = 10  # torchrun's --redirects takes local ranks of one digit


@dataclass(frozen=True)
class LaunchPlan:
    """What will be started.

    Args:
        settings: Resolved, with their origins.
        torchrun: The arguments of torchrun.
        environment: Variables that the processes get besides those that are there.
        log_folder: Of this launch, where the ranks that do not speak write.
    """

    settings: Settings
    torchrun: tuple[str, ...]
    environment: Mapping[str, str]
    log_folder: Path

    @property
    def command(self) -> str:
        """The command line that does the same without trimtab."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, "torchrun", *map(shlex.quote, self.torchrun)])


def plan_launch(
    target: str, arguments: Sequence[str], *, module: bool, file: LaunchFile, given: Mapping[str, Any]
) -> LaunchPlan:
    """Work out the torchrun command, after all checks.

    Args:
        target: A script, a recipe, or a module.
        arguments: What follows it.
        module: Whether it is a module.
        file: What the launch file says.
        given: The options of the command line by key; None where one was not given.

    Raises:
        RecipeError: With all problems, one line each.
    """
    machine = look_at_machine()
    settings, problems = resolve_settings(given, file, machine, os.environ)
    words, target_problems = _find_target(target, list(arguments), module)
    problems += target_problems
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise RecipeError(f"launch has {len(problems)} problem{'s' if len(problems) != 1 else ''}:\n{lines}")
    token = secrets.token_hex(4)  # two launches may begin in the same second
    name = f"{target.rpartition('.')[2] if module else Path(target).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{token}"
    several = settings.num_hosts > 1
    log_folder = Path(settings.log_dir) / (f"{name}-host{settings.host_index}" if several else name)
    environment = {}
    if settings.processes > 1 and not os.environ.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(machine.num_cpus // settings.processes, 1))
    if settings.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if "TRIMTAB_LOG_DIR" not in os.environ:
        environment["TRIMTAB_LOG_DIR"] = str(log_folder)
    torchrun = (*_meeting(settings, token), *_voices(settings), "--log-dir", str(log_folder), *words)
    return LaunchPlan(settings, torchrun, environment, log_folder)


def _find_target(target: str, arguments: list[str], module: bool) -> tuple[list[str], list[str]]:
    """What torchrun has to run, and what is wrong with it."""
    problems = []
    words = [_literal(argument) for argument in arguments]
    path = Path(target)
    is_recipe = not module and path.suffix.lower() in (".yaml", ".yml")
    late = [word for word in arguments if word.partition("=")[0] in {option(name) for name in KEYS}]
    if module:
        words = ["-m", target, *words]
        top = target.partition(".")[0]
        if not (Path(top).is_dir() or Path(f"{top}.py").is_file() or (top.isidentifier() and find_spec(top))):
            problems.append(f"-m {target}: there is no module {top}")
    elif is_recipe:
        words = ["-m", "trimtab", "train", target, *words]
        if late:
            problems.append(f"{late[0]} stands after the recipe: options of launch come before it")
    else:
        words = [target, *words]
        if late:
            say(f"{late[0]} stands after the script and is given to it; options of launch come before it")
    if not module and not path.exists():
        problems.append(_missing(target, arguments))
    elif not module and path.is_dir() and not (path / "__main__.py").is_file():
        problems.append(f"{target} is a folder: give a script in it, or a recipe")
    elif not module and not is_recipe and path.is_file() and path.suffix not in (".py", ""):
        problems.append(f"{target} is neither a Python script (.py) nor a recipe (.yaml)")
    return words, problems


def _missing(target: str, arguments: list[str]) -> str:
    if target == "train":
        return f"train is a command of trimtab, not a script: trimtab launch {' '.join(arguments) or 'recipe.yaml'}"
    folder = Path(target).parent
    names = [path.name for path in sorted(folder.glob("*")) if path.suffix in (".py", ".yaml", ".yml")]
    near = nearest(Path(target).name, names) if folder.is_dir() else ""
    return f"there is no {target}" + (f"; did you mean {folder / near}?" if near else "")


def _literal(argument: str) -> str:
    """An argument as the script will get it: torchrun reads $ as the beginning of a placeholder."""
    return argument.replace("$", "$$")


def _meeting(settings: Settings, job: str) -> list[str]:
    """How the processes find each other."""
    words = ["--nnodes", str(settings.num_hosts), "--nproc-per-node", str(settings.processes)]
    words += ["--max-restarts", str(settings.max_restarts)]
    if settings.num_hosts == 1 and settings.port is None and settings.address is None:
        # torchrun takes a free port itself. By its own name a host may not be reachable from itself, so: localhost.
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
        return [*words, *where, "--rdzv-id", job]
    # Static, because then rank 0 is on the first host: there lie the files that it writes.
    words += ["--rdzv-backend", "static", "--rdzv-id", settings.job or (job if settings.num_hosts == 1 else "none")]
    if "TRIMTAB_PATIENCE" in os.environ:
        words += ["--rdzv-conf", f"timeout={int(parse_seconds(os.environ['TRIMTAB_PATIENCE']))}"]
    words += ["--node-rank", str(settings.host_index), "--master-addr", settings.address or "localhost"]
    return [*words, "--master-port", str(settings.port or free_port())]


def _voices(settings: Settings) -> list[str]:
    """Rank 0 speaks on the terminal, the others to files."""
    if settings.host_index > 0:
        return ["--redirects", "3"]
    if settings.processes <= _MOST_MAPPED:
        files = ",".join(f"{rank}:3" for rank in range(1, settings.processes))
        return ["--redirects", files or "0"]
    return ["--role", "rank", "--redirects", "3", "--tee", "0:3", "--local-ranks-filter", "0"]
