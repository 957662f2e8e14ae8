"""`trimtab.launch`: a function on several processes, from a notebook or a script, and back what each returned.

The processes are fresh ones that torchrun starts, never forks: CUDA and OpenMP may be in use here. The function travels
as bytes (dill), so it may stand in a notebook's cell; `notebook_worker` is the other end.
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
from trimtab.distributed.environment import find_place
from trimtab.distributed.launch.command import LaunchPlan, plan_launch
from trimtab.distributed.launch.end_with_parent import ending_with_parent
from trimtab.distributed.launch.file import LaunchFile
from trimtab.errors import MissingDependency, PeerError, RecipeError
from trimtab.log import say

CALL = "call.pkl"
RESULT = "result-{}.pkl"
ERROR = "error-{}.txt"
ENDING = "ending.txt"
WORKER = "trimtab.distributed.launch.notebook_worker"
_LAST_LINES = 20
_GRACE_S = 40.0  # torchrun gives its processes 30 s to end by themselves


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

    What rank 0 prints is shown here; what the others print goes to files.

    Args:
        fn: May be defined in a notebook's cell or in a script. It should make its own model, data and `Engine`: what it
            takes from outside is copied to each process.
        args: Its arguments.
        kwargs: Its keyword arguments.
        processes: How many.
        cpu: Whether GPUs are left alone.
        port: Where the processes meet; a free one if left out.
        log_dir: Folder of what the other ranks print; runs/logs if left out.

    Returns:
        What each process returned, in the order of ranks.

    Raises:
        PeerError: The function failed in one process; with its rank and traceback.
        RecipeError: It cannot be started: too many processes, a port that is taken, a function that cannot be copied.
    """
    place = find_place()
    if place.num_processes > 1:
        raise RecipeError(
            f"trimtab.launch was called in process {place.rank} of {place.num_processes}, which was launched already",
            "call the function itself here; launch belongs into the process that you start by hand",
        )
    if not callable(fn):
        raise RecipeError(f"launch takes a function, found {fn!r}", "trimtab.launch(train, args=(…,), processes=2)")
    # A launch file, or what a cluster says of its hosts, is not meant for a function that is called here.
    options = {"processes": processes, "num_hosts": 1, "port": port, "log_dir": log_dir, "cpu": cpu or None}
    with tempfile.TemporaryDirectory(prefix="trimtab-launch-") as name:
        folder = Path(name)
        plan_worker(folder, options)  # all checks happen here already, where an exception can be raised
        (folder / CALL).write_bytes(_packed(fn, tuple(args), dict(kwargs or {})))
        code, last_words = _run([sys.executable, "-m", WORKER, name, json.dumps(options)])
        return _results(folder, processes, code, last_words)


def plan_worker(folder: Path, options: Mapping[str, Any]) -> LaunchPlan:
    """The launch of the processes that call what lies in a folder."""
    return plan_launch(WORKER, [str(folder)], module=True, file=LaunchFile(), given=options)


def _packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        inner = _dill_bytes((fn, args, kwargs))
    except Exception as error:  # dill and the objects themselves raise what they like
        raise RecipeError(
            f"{getattr(fn, '__name__', fn)} or its arguments cannot be sent to other processes: "
            f"{type(error).__name__}: {error}",
            "make models, loaders, files and engines inside the function",
        ) from error
    # The path comes first in the other process: what is inside may need it to be unpacked.
    return _dill_bytes({"path": sys.path, "call": inner})


def _dill_bytes(value: Any) -> bytes:
    try:
        import dill
    except ImportError as error:
        raise MissingDependency("trimtab.launch needs dill", "pip install dill") from error

    class Pickler(dill.Pickler):  # type: ignore[misc]
        """Modules travel by name. dill would send along all that stands in one that is not installed."""

        dispatch = type(dill.Pickler.dispatch)(dill.Pickler.dispatch)

    def save_by_name(pickler: Any, module: ModuleType) -> None:
        pickler.save_reduce(import_module, (module.__name__,), obj=module)

    Pickler.dispatch[ModuleType] = save_by_name
    buffer = io.BytesIO()
    # recurse: only those globals travel that the function uses, not the whole notebook.
    Pickler(buffer, recurse=True).dump(value)
    return buffer.getvalue()


def _run(command: list[str]) -> tuple[int, list[str]]:
    """Run the launch and show its output here; in a notebook that is the cell, which a child's own output misses."""
    home = str(Path(trimtab.__file__).parents[1])  # this package may have been found by a change of sys.path
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}
    lines: list[str] = []
    process = subprocess.Popen(
        ending_with_parent(command),
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
                lines = [*lines[1 - _LAST_LINES :], line]
        return process.wait(), lines
    except BaseException:  # an interrupt of the cell must not leave processes behind
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            say(f"the launched processes do not end; killing their launcher, process {process.pid}")
            process.kill()
            process.wait()
        raise


def _results(folder: Path, processes: int, code: int, last_words: list[str]) -> list[Any]:
    import dill

    errors = [
        (path.stat().st_mtime_ns, rank) for rank in range(processes) if (path := folder / ERROR.format(rank)).exists()
    ]
    if errors:  # the others failed because of the first
        rank = min(errors)[1]
        raise PeerError(f"rank {rank} failed: {(folder / ERROR.format(rank)).read_text(encoding='utf-8')}")
    if code != 0:
        said = (folder / ENDING).read_text(encoding="utf-8") if (folder / ENDING).is_file() else "".join(last_words)
        raise PeerError(said.removeprefix("error: ").rstrip() or f"launch ended with exit code {code}")
    found = []
    for rank in range(processes):
        path = folder / RESULT.format(rank)
        if not path.is_file():
            raise PeerError(f"rank {rank} ended without a result: it called exit, or was ended from outside")
        found.append(dill.loads(path.read_bytes()))
    return found
