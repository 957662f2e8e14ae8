"""`trimtab.launch`: call a function on several processes, from a notebook or a script, and return the results.

torchrun starts new processes and never forks, because CUDA and OpenMP may be in use here. The function is serialized
with dill, so it may be defined in a notebook cell; `notebook_worker` runs in the new processes.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import trimtab
from trimtab.distributed.environment import read_rank_info
from trimtab.distributed.launch.command import LaunchPlan, plan_launch
from trimtab.distributed.launch.launch_file import LaunchFile
from trimtab.distributed.launch.parent_death_signal import add_parent_death_signal
from trimtab.errors import MissingDependency, PeerError, RecipeError
from trimtab.log import say

CALL = "call.pkl"
RESULT = "result-{}.pkl"
ERROR = "error-{}.txt"
ENDING = "ending.txt"
WORKER = "trimtab.distributed.launch.notebook_worker"
_NUM_LAST_LINES = 20
_GRACE_S = 40.0  # torchrun gives its processes 30 s to end


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    processes: int = 2,
    *,
    cpu: bool = False,
    port: int | None = None,
    log_dir: str | None = None,
) -> list[Any]:
    """Call a function on several processes of this host.

    The output of rank 0 is shown here; the output of the other ranks is written to files.

    Args:
        fn: The function; it may be defined in a notebook cell or a script. It should create its own model, data and
            `Engine`: objects that it uses from outside are copied to each process.
        args: Its arguments.
        kwargs: Its keyword arguments.
        processes: Number of processes.
        cpu: Whether to ignore GPUs.
        port: Port of the rendezvous; None uses a free one.
        log_dir: Folder for the output of ranks above 0; runs/logs by default.

    Returns:
        The return value of each process, in rank order.

    Raises:
        PeerError: The function failed on a rank; the message contains its traceback.
        RecipeError: The processes cannot be started: too many processes, a port in use, or a function that cannot be
            copied.

    Example:
        results = launch(train, args=(3,), processes=2)
    """
    place = read_rank_info()
    if place.num_processes > 1:
        raise RecipeError(
            f"trimtab.launch was called on rank {place.rank} of {place.num_processes}, which is already launched",
            "call the function itself here, and trimtab.launch only in the process that you start yourself",
        )
    if not callable(fn):
        raise RecipeError(
            f"launch takes a function, found {fn!r}", "call trimtab.launch(train, args=(…,), processes=2)"
        )
    # num_hosts=1: ignore the hosts of a scheduler and launch files, which are not meant for this function.
    options = {"processes": processes, "num_hosts": 1, "port": port, "log_dir": log_dir, "cpu": cpu or None}
    with tempfile.TemporaryDirectory(prefix="trimtab-launch-") as name:
        folder = Path(name)
        plan_worker(folder, options)  # for its checks: only here can they raise
        (folder / CALL).write_bytes(_packed(fn, tuple(args), dict(kwargs or {})))
        code, last_lines = _run([sys.executable, "-m", WORKER, name, json.dumps(options)])
        return _results(folder, processes, code, last_lines)


def plan_worker(folder: Path, options: Mapping[str, Any]) -> LaunchPlan:
    """Plan the launch of the processes that execute the call stored in a folder."""
    return plan_launch(WORKER, [str(folder)], module=True, file=LaunchFile(), given=options)


def _packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        inner = _dill_bytes((fn, args, kwargs))
    except Exception as error:  # dill and the objects themselves may raise anything
        raise RecipeError(
            f"{getattr(fn, '__name__', fn)} or its arguments cannot be sent to other processes: "
            f"{type(error).__name__}: {error}",
            "create models, loaders, files and engines inside the function",
        ) from error
    # The worker needs the path before it can deserialize the call.
    return _dill_bytes({"path": sys.path, "call": inner})


def _dill_bytes(value: Any) -> bytes:
    try:
        import dill
    except ImportError as error:
        raise MissingDependency("trimtab.launch needs dill", "pip install dill") from error

    class Pickler(dill.Pickler):  # type: ignore[misc]
        """Pickles modules by name; dill would include the content of a module that is not installed."""

        dispatch = type(dill.Pickler.dispatch)(dill.Pickler.dispatch)

    def save_by_name(pickler: Any, module: ModuleType) -> None:
        pickler.save_reduce(import_module, (module.__name__,), obj=module)

    Pickler.dispatch[ModuleType] = save_by_name
    buffer = io.BytesIO()
    # recurse: include only the globals that the function uses, not the whole notebook.
    Pickler(buffer, recurse=True).dump(value)
    return buffer.getvalue()


def _run(command: list[str]) -> tuple[int, list[str]]:
    """Run the launcher and copy its output to sys.stdout: a child's own output would not appear in a notebook cell."""
    home = str(Path(trimtab.__file__).parents[1])  # the package may have been found through a changed sys.path
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}
    lines: list[str] = []
    process = subprocess.Popen(
        add_parent_death_signal(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                lines = [*lines[1 - _NUM_LAST_LINES :], line]
        return process.wait(), lines
    except BaseException:  # an interrupted cell must not leave processes behind
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            say(f"the launched processes do not end; killing their launcher, pid {process.pid}")
            process.kill()
            process.wait()
        raise


def _results(folder: Path, processes: int, code: int, last_lines: list[str]) -> list[Any]:
    import dill

    errors = [
        (path.stat().st_mtime_ns, rank) for rank in range(processes) if (path := folder / ERROR.format(rank)).exists()
    ]
    if errors:  # the first failure is the cause
        rank = min(errors)[1]
        raise PeerError(f"rank {rank} failed: {(folder / ERROR.format(rank)).read_text(encoding='utf-8')}")
    if code != 0:
        ending = folder / ENDING
        message = ending.read_text(encoding="utf-8") if ending.is_file() else "".join(last_lines)
        raise PeerError(message.removeprefix("error: ").rstrip() or f"launch ended with exit code {code}")
    found = []
    for rank in range(processes):
        path = folder / RESULT.format(rank)
        if not path.is_file():
            raise PeerError(f"rank {rank} ended without a result: it called exit, or was ended by a signal")
        found.append(dill.loads(path.read_bytes()))
    return found
