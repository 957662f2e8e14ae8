"""The launch file: number of processes and hosts. `trimtab config` writes it, `trimtab launch` reads it."""

import difflib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.distributed.environment import inspect_machine
from trimtab.errors import RecipeError
from trimtab.recipe.yaml_text import as_yaml, read_yaml

DEFAULT_FILE = Path("launch.yaml")  # read without --config if it is in the current folder
DEFAULT_LOG_DIR = "runs/logs"
DEFAULT_PORT = 29500  # for several hosts, which have to agree on one; on one host torchrun chooses a free port
QUESTIONS = ("processes", "hosts")  # keys that `trimtab config` asks for
Ask = Callable[[str, str, str], str]
_LAST_PORT = 65535
_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?|\[?[0-9a-fA-F:]*:[0-9a-fA-F:.]*\]?"


@dataclass(frozen=True)
class Key:
    """A setting of a launch.

    Args:
        allowed: Description of its values.
        is_valid: Whether a value is one of them.
        meaning: Comment in the launch file.
        example: Value in the launch file if it is commented out.
    """

    allowed: str
    is_valid: Callable[[Any], bool]
    meaning: str
    example: str


def _number(low: int, meaning: str, example: int, high: int = 10**6) -> Key:
    def is_valid(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    allowed = f"a port, {low} to {high}" if high == _LAST_PORT else f"a whole number, {low} or more"
    return Key(allowed, is_valid, meaning, str(example))


def _is_host(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(_HOST, value) is not None


def _are_hosts(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(_is_host(host) for host in value)


KEYS = {
    "processes": _number(1, "Processes on each host. Default: one per GPU, or one without a GPU.", 2),
    "hosts": Key(
        "names or addresses, such as [node1, node2]",
        _are_hosts,
        "Hosts of the run; run the same command on each. The first has rank 0, the rendezvous and the output files. "
        "Default: this host alone.",
        "[node1, node2]",
    ),
    "num_hosts": _number(1, "Number of hosts, if their names are not known. Each host needs --host-index.", 2),
    "host_index": _number(
        0, "Index of this host, from 0. Default: its position in hosts. Better given on the command line.", 0
    ),
    "address": Key(
        "a name or address that every host can reach",
        _is_host,
        "Address of the rendezvous: the host with index 0. Default: the first of hosts.",
        "node1",
    ),
    "port": _number(
        1,
        f"Port of the rendezvous. Default: a free one on one host, {DEFAULT_PORT} on several.",
        DEFAULT_PORT,
        _LAST_PORT,
    ),
    "max_restarts": _number(0, "Maximum number of restarts of all processes after a failure.", 0),
    "log_dir": Key(
        "a folder",
        lambda value: isinstance(value, str) and bool(value.strip()),
        "Rank 0 prints to the terminal; the output of the other ranks goes to files here.",
        DEFAULT_LOG_DIR,
    ),
    "cpu": Key(
        "true or false", lambda value: isinstance(value, bool), "Train on the CPU even if there are GPUs.", "false"
    ),
}
# Keys of Accelerate's config file and of other launchers. Each gets an answer and none is converted: num_processes, for
# example, counts all hosts, processes a single one.
_FOREIGN = {
    **dict.fromkeys(("nproc_per_node", "nprocs", "num_gpus", "gpus", "devices"), "use processes (on each host)"),
    "num_processes": "use processes (on each host; num_processes counts those of all hosts)",
    **dict.fromkeys(("num_machines", "nnodes", "num_nodes"), "use num_hosts, or the names as hosts"),
    **dict.fromkeys(("machine_rank", "node_rank"), "use host_index"),
    **dict.fromkeys(("main_process_ip", "master_addr", "rdzv_endpoint"), "use address"),
    **dict.fromkeys(("main_process_port", "master_port"), "use port"),
    **dict.fromkeys(("use_cpu", "no_cuda"), "use cpu: true"),
    "gpu_ids": "remove it, and choose GPUs with the environment variable CUDA_VISIBLE_DEVICES",
    **dict.fromkeys(
        ("mixed_precision", "precision"), "remove it; set train.precision in the recipe, or Engine(mixed_precision=…)"
    ),
    **dict.fromkeys(
        ("distributed_type", "compute_environment", "rdzv_backend", "main_training_function", "same_network"),
        "remove it: it is detected",
    ),
}


@dataclass(frozen=True)
class LaunchFile:
    """The content of a launch file.

    Args:
        values: Valid values by key.
        places: "FILE:LINE" of each key.
        problems: One line for each mistake.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_launch_file(path: Path | None) -> LaunchFile:
    """Read a launch file. Mistakes in it are collected, not raised: `plan_launch` reports all problems at once.

    Args:
        path: The file; None uses launch.yaml in the current folder, if it exists.

    Raises:
        RecipeError: The file does not exist, or is not YAML.
    """
    if path is None:
        if not DEFAULT_FILE.is_file():
            return LaunchFile()
        path = DEFAULT_FILE
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"there is no launch file {path}", "write one with `trimtab config`") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RecipeError(f"{path} cannot be read: {reason}", "write one with `trimtab config`") from None
    if not re.search(r"^\s*[^\s#]", text, flags=re.MULTILINE):
        return LaunchFile()  # only comments
    document = read_yaml(text, str(path), "write a mapping such as {processes: 2}, or use `trimtab config`")
    problems = [
        f"{place}: {key}: given twice, first on line {first}; keep one" for key, place, first in document.duplicates
    ]
    values = {}
    for name, value in document.values.items():
        problem = check_value(name, value) if name in KEYS else _describe_unknown(name)
        if problem:
            problems.append(f"{document.places[name]}: {name}: {problem}")
        elif value is not None:
            values[name] = value
    return LaunchFile(values, document.places, tuple(problems))


def check_value(name: str, value: Any) -> str:
    """Return what is wrong with a value, or "". None means that the value was not given."""
    key = KEYS[name]
    return "" if value is None or key.is_valid(value) else f"found {as_yaml(value)}; allowed: {key.allowed}"


def split_hosts(text: str) -> list[str]:
    """Split host names on commas and spaces."""
    return [name for name in re.split(r"[,\s]+", text.strip()) if name]


def nearest(word: str, candidates: Sequence[str]) -> str:
    """Return the most similar candidate, or ""."""
    near = difflib.get_close_matches(word.lower().replace("-", "_"), candidates, n=1, cutoff=0.6)
    return near[0] if near else ""


def _describe_unknown(name: str) -> str:
    if name in _FOREIGN:
        return f"no such key; {_FOREIGN[name]}"
    near = nearest(name, list(KEYS))
    return f"no such key; did you mean {near}?" if near else f"no such key; allowed: {', '.join(KEYS)}"


def write_launch_file(to: Path, questions: Sequence[str], ask: Ask) -> str:
    """Ask for what cannot be detected, and write a commented launch file.

    Args:
        to: Path of the file.
        questions: Keys to ask for; processes is not asked for if there is a GPU.
        ask: Called with the question, the default answer, and what was wrong with the previous answer.

    Returns:
        A line for the user.

    Raises:
        RecipeError: The file exists, or cannot be written.
    """
    if to.exists():
        raise RecipeError(f"{to} exists", "choose another path with --to, or remove it")
    num_devices = inspect_machine().num_devices
    values: dict[str, Any] = {}
    if "processes" in questions and not num_devices:
        values["processes"] = _ask_for(ask, "processes", "Processes on each host (no GPU was found)", "1")
    if "hosts" in questions:
        hosts = _ask_for(ask, "hosts", "Names of all hosts, separated by commas (empty: this host alone)", "")
        values |= {"hosts": hosts} if hosts else {}
    found = f"{num_devices} GPU{'s' if num_devices != 1 else ''}, so {num_devices}" if num_devices else "no GPU, so one"
    try:
        to.write_text(launch_file_text(values, {"processes": found}), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{to} cannot be written: {error.strerror}", "choose another path with --to") from error
    option = "" if to == DEFAULT_FILE else f"--config {to} "
    return f"{to} written; next: trimtab launch {option}SCRIPT.py, or a recipe"


def launch_file_text(values: Mapping[str, Any], found: Mapping[str, str]) -> str:
    """Format a commented launch file.

    Args:
        values: Values to set; the other keys are commented out.
        found: Note for a key: what `launch` detects on this host.
    """
    lines = [
        "# How `trimtab launch` starts processes. The command line overrides this file, which overrides detection.",
        "# Lines that start with # are examples: remove the # to set one.",
    ]
    for name, key in KEYS.items():
        meaning = key.meaning + (f" Here: {found[name]}." if name in found else "")
        comment = (f"# {line}" for line in textwrap.wrap(meaning, 100, break_on_hyphens=False))
        setting = f"{name}: {as_yaml(values[name])}" if name in values else f"# {name}: {key.example}"
        lines += ["", *comment, setting]
    return "\n".join(lines) + "\n"


def _ask_for(ask: Ask, key: str, question: str, default: str) -> Any:
    """Ask until the answer is valid; an empty answer for hosts gives None."""
    complaint = ""
    while True:
        answer = ask(question, default, complaint).strip()
        if key == "hosts":
            value: Any = split_hosts(answer) or None
        else:
            value = int(answer) if answer.isdecimal() else answer
        if not (complaint := check_value(key, value)):
            return value
