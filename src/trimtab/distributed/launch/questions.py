"""What `trimtab config` does: ask the few things that cannot be found out, and write a commented launch file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.distributed.launch.file import check_value, launch_file_text, split_hosts
from trimtab.distributed.launch.settings import Machine, look_at_machine
from trimtab.errors import RecipeError

Ask = Callable[[str, str, str], str]
QUESTIONS = ("processes", "hosts")


def write_launch_file(to: Path, questions: Sequence[str], ask: Ask) -> str:
    """Ask, and write the file.

    Args:
        to: Where to write it.
        questions: Keys to ask for; one that is found on this machine is not asked.
        ask: Called with the question, the answer that is taken for an empty one, and what was wrong before.

    Returns:
        A line that says what was done.

    Raises:
        RecipeError: The file exists, or cannot be written.
    """
    if to.exists():
        raise RecipeError(f"{to} exists", "choose another with --to, or remove it")
    machine = look_at_machine()
    values: dict[str, Any] = {}
    if "processes" in questions and not machine.num_devices:
        values["processes"] = _asked(ask, "processes", "Processes on each host (no GPU was found)", "1")
    if "hosts" in questions:
        hosts = _asked(ask, "hosts", "Names of all hosts, with commas (empty: this one alone)", "")
        values |= {"hosts": hosts} if hosts else {}
    try:
        to.write_text(launch_file_text(values, {"processes": _found(machine)}), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{to} cannot be written: {error.strerror}", "choose another with --to") from error
    option = "" if to == Path("launch.yaml") else f"--config {to} "
    return f"{to} written; next: trimtab launch {option}SCRIPT.py, or a recipe"


def _found(machine: Machine) -> str:
    if not machine.num_devices:
        return "no GPU, so one"
    return f"{machine.num_devices} GPU{'s' if machine.num_devices != 1 else ''}, so {machine.num_devices}"


def _asked(ask: Ask, key: str, question: str, default: str) -> Any:
    """Ask until the answer is one that the key takes; nothing at all for an empty list of hosts."""
    complaint = ""
    while True:
        answer = ask(question, default, complaint).strip()
        if key == "hosts":
            value: Any = split_hosts(answer) or None
        else:
            value = int(answer) if answer.isdecimal() else answer
        if not (complaint := check_value(key, value)):
            return value
