"""The launch file: how many processes, on which hosts. `trimtab config` writes one, `trimtab launch` reads it."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.errors import RecipeError
from trimtab.recipe.yaml_text import as_yaml, read_yaml

DEFAULT_FILE = Path("launch.yaml")  # read by itself where it lies in the current folder
DEFAULT_LOG_DIR = "runs/logs"
DEFAULT_PORT = 29500  # of several hosts, which have to agree; on one host torchrun takes a free one
_LAST_PORT = 65535
_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?|\[?[0-9a-fA-F:]*:[0-9a-fA-F:.]*\]?"


@dataclass(frozen=True)
class Key:
    """A setting of a launch.

    Args:
        kind: "number", "flag", "host", "hosts" or "folder".
        allowed: What may be written, in words.
        meaning: For the launch file.
        low: Of a number.
        high: Of a number.
        example: Shown where the file does not set it.
    """

    kind: str
    allowed: str
    meaning: str
    low: int = 0
    high: int = 10**6
    example: str = ""


KEYS = {
    "processes": Key(
        "number",
        "a whole number, 1 or more",
        "Processes on each host. Left out: one for each GPU, or one where there is none.",
        low=1,
        example="2",
    ),
    "hosts": Key(
        "hosts",
        "names or addresses, such as [node1, node2]",
        "Hosts that train together; the same command is run on each. The first holds rank 0, the meeting point and "
        "what is written. Left out: this host alone.",
        example="[node1, node2]",
    ),
    "num_hosts": Key(
        "number",
        "a whole number, 1 or more",
        "Instead of hosts, where their names are not known: how many there are. Each needs --host-index.",
        low=1,
        example="2",
    ),
    "host_index": Key(
        "number",
        "a whole number, 0 or more",
        "Which host this is, from 0. Found from its name where hosts are given; better on the command line.",
        example="0",
    ),
    "address": Key(
        "host",
        "a name or an address that every host can reach",
        "Where all meet: the host with index 0. Left out: the first of hosts.",
        example="node1",
    ),
    "port": Key(
        "number",
        f"a port, 1 to {_LAST_PORT}",
        f"Of the meeting point. Left out: a free one on one host, {DEFAULT_PORT} on several.",
        low=1,
        high=_LAST_PORT,
        example=str(DEFAULT_PORT),
    ),
    "max_restarts": Key(
        "number",
        "a whole number, 0 or more",
        "How often all processes are started again after one has failed.",
        example="0",
    ),
    "log_dir": Key(
        "folder",
        "a folder",
        "Rank 0 speaks on the terminal; what the others print goes to files here.",
        example=DEFAULT_LOG_DIR,
    ),
    "cpu": Key("flag", "true or false", "Train on the CPU although there are GPUs.", example="false"),
}
# What other launchers call it. Answered, never obeyed: a number of all processes is not one of each host.
_FOREIGN = {
    **dict.fromkeys(("nproc_per_node", "nprocs", "num_gpus", "gpus", "devices"), "processes (on each host)"),
    "num_processes": "processes (on each host; num_processes counts those of all)",
    **dict.fromkeys(("num_machines", "nnodes", "num_nodes"), "num_hosts, or the names as hosts"),
    **dict.fromkeys(("machine_rank", "node_rank"), "host_index"),
    **dict.fromkeys(("main_process_ip", "master_addr", "rdzv_endpoint"), "address"),
    **dict.fromkeys(("main_process_port", "master_port"), "port"),
    **dict.fromkeys(("use_cpu", "no_cuda"), "cpu: true"),
    "gpu_ids": "nothing here: choose GPUs with the environment's CUDA_VISIBLE_DEVICES",
    **dict.fromkeys(
        ("mixed_precision", "precision"), "nothing here: precision is the recipe's (train.precision) or the Engine's"
    ),
    **dict.fromkeys(
        ("distributed_type", "compute_environment", "rdzv_backend", "main_training_function", "same_network"),
        "nothing here: it is found",
    ),
}


@dataclass(frozen=True)
class LaunchFile:
    """What a launch file says.

    Args:
        values: By key; only valid ones.
        places: "FILE:LINE" of each.
        problems: What is wrong, one line each.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_launch_file(path: Path | None) -> LaunchFile:
    """Read a launch file; what is wrong in it is collected, not raised, so that all problems can be told at once.

    Args:
        path: The file; if left out, launch.yaml of the current folder, where there is one.

    Raises:
        RecipeError: There is no such file, or it is no YAML.
    """
    if path is None:
        if not DEFAULT_FILE.is_file():
            return LaunchFile()
        path = DEFAULT_FILE
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"there is no launch file {path}", "`trimtab config` writes one; options will do") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RecipeError(f"{path} cannot be read: {reason}", "`trimtab config` writes one") from None
    if not re.search(r"^\s*[^\s#]", text, flags=re.MULTILINE):
        return LaunchFile()  # every line is a comment: everything is found
    document = read_yaml(text, str(path))
    problems = [
        f"{place}: {key}: given twice, first in line {first}; keep one" for key, place, first in document.duplicates
    ]
    values = {}
    for name, value in document.values.items():
        problem = check_value(name, value) if name in KEYS else _unknown(name)
        if problem:
            problems.append(f"{document.places[name]}: {name}: {problem}")
        elif value is not None:
            values[name] = value
    return LaunchFile(values, document.places, tuple(problems))


def check_value(name: str, value: Any) -> str:
    """What is wrong with a value, or nothing. None is a value that was not given."""
    key = KEYS[name]
    is_right = {
        "number": isinstance(value, int) and not isinstance(value, bool) and key.low <= value <= key.high,
        "flag": isinstance(value, bool),
        "host": _is_host(value),
        "hosts": isinstance(value, list | tuple) and len(value) > 0 and all(_is_host(host) for host in value),
        "folder": isinstance(value, str) and bool(value.strip()),
    }[key.kind]
    return "" if value is None or is_right else f"found {as_yaml(value)}; allowed: {key.allowed}"


def split_hosts(text: str) -> list[str]:
    """Hosts as one writes them on a command line: with commas, spaces or both."""
    return [name for name in re.split(r"[,\s]+", text.strip()) if name]


def launch_file_text(values: Mapping[str, Any], found: Mapping[str, str]) -> str:
    """A commented launch file.

    Args:
        values: Those to set; the others are commented out.
        found: A note for a key, on what `launch` would find here by itself.
    """
    lines = [
        "# How `trimtab launch` starts processes. Command line, then this file, then what is found: the first counts.",
        "# Lines that begin with # show examples: take the # away to set one.",
    ]
    for name, key in KEYS.items():
        note = f" Here: {found[name]}." if name in found else ""
        setting = f"{name}: {as_yaml(values[name])}" if name in values else f"# {name}: {key.example}"
        lines += ["", *_wrapped(f"{key.meaning}{note}"), setting]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return [f"# {line}" for line in textwrap.wrap(text, 100, break_on_hyphens=False)]


def _is_host(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(_HOST, value) is not None


def _unknown(name: str) -> str:
    if name in _FOREIGN:
        return f"no such key; write {_FOREIGN[name]}"
    near = nearest(name, list(KEYS))
    return f"no such key; did you mean {near}?" if near else f"no such key; allowed: {', '.join(KEYS)}"


def nearest(word: str, candidates: Sequence[str]) -> str:
    """The candidate that was probably meant, or nothing."""
    near = difflib.get_close_matches(word.lower().replace("-", "_"), candidates, n=1, cutoff=0.6)
    return near[0] if near else ""
