"""Calls of the command line on hostile input, and values to damage files with; shared by the `test_hostile_*` files.

A call runs in a process with limited memory and time. It is clean if it ends with an exit code of `errors.py` and
without a traceback. The tests use fixed seeds; TRIMTAB_FUZZ_SEED and TRIMTAB_FUZZ_COUNT choose others by hand.
"""

import copy
import json
import os
import random
import resource
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY_BYTES = 6 * 2**30  # on top of what the process has mapped at its start
CPU_S = 60
CLEAN = {0, 1, 2, 3, 75}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 4_000_000_000, 10**30, 0.5, -0.0, 1e300),
    *(float("nan"), float("inf"), -float("inf"), "", "32", "x", "\0", "nan", "a" * 5000, "../../etc/passwd", "/"),
    *("\ud800", "\x1b]0;x\x07", "{{ 1 }}", "<b>", [], {}, [[]], [0, "a", None], {"a": {"b": []}}, [1e9] * 9),
]


@dataclass
class Call:
    """A call of `trimtab`.

    Args:
        name: What is hostile about it.
        words: Its arguments.
    """

    name: str
    words: list[str]
    child: Any = None

    def problem(self) -> str | None:
        """What is wrong with how the process ended; None if nothing is."""
        code = self.child.wait(CPU_S * 5)
        said = self.child.out + self.child.err
        if code not in CLEAN or "Traceback (most recent" in said or "PanicException" in said:
            return f"{self.name}: exit {code}: {' '.join(self.words)[:300]}\n{said[-1500:]}"
        if code and not said.strip():
            return f"{self.name}: exit {code} without a message"
        return None


def run_all(
    server: Any, calls: Iterator[Call], check: Callable[[Call], str | None] = lambda _: None, cwd: Path | None = None
) -> int:
    """Run calls, two at a time; return their number, and fail with every problem found."""
    problems: list[str] = []
    running: list[Call] = []
    count = 0

    def end_first() -> None:
        call = running.pop(0)
        found = call.problem() or check(call)
        if found:
            problems.append(found)

    for call in calls:
        call.child = server.start("hostile_input:run", words=call.words, is_one_file=False, cwd=cwd)
        running.append(call)
        count += 1
        if len(running) == 2:
            end_first()
    while running:
        end_first()
    assert not problems, f"{len(problems)} of {count} calls\n\n" + "\n\n".join(problems)
    return count


def run(words: list[str]) -> None:
    """Run the command line in this process, within the limits."""
    from fork_server import run_command

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        run_command(words)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def damage_json(value: Any, draw: random.Random) -> Any:
    """A copy of a JSON value with one part replaced, removed or added."""
    found = copy.deepcopy(value)
    parts = [(holder, key) for holder, key in _parts(found)]
    if not parts:
        return draw.choice(VALUES)
    holder, key = draw.choice(parts)
    what = draw.randrange(10)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = draw.choice([-holder[key], holder[key] * 1000, str(holder[key]), holder[key] + 0.5])
    elif what == 2:
        holder[key] = [holder[key]]
    else:
        holder[key] = draw.choice(VALUES)
    return found


def _parts(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Parts of a JSON value, of large containers only the first and the last."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys if len(keys) <= 40 else [*keys[:3], *keys[-3:]]:
        yield value, key
        if depth < 6:
            yield from _parts(value[key], depth + 1)


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes that were truncated, overwritten or replaced."""
    size = len(data)
    at = draw.randrange(size + 1)
    what = draw.randrange(7)
    if what == 0:
        return data[:at]
    if what == 1:
        return data[:at] + bytes(min(1000, size - at)) + data[at + 1000 :]
    if what == 2:
        return draw.randbytes(draw.choice([0, 1, 8, 100, 5000]))
    if what == 3:
        return data[:at] + draw.randbytes(8) + data[at + 8 :]
    if what == 4:  # the header of a binary file
        at = draw.randrange(min(200, size) or 1)
        return data[:at] + draw.choice([b"\xff" * 8, b"\x7f", b"\0" * 8]) + data[at + 8 :]
    if what == 5:
        return draw.choice([b"[", b'{"a":']) * 100_000
    return data + data[:at]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")
