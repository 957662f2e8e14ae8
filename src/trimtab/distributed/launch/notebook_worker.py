"""The script that `trimtab.launch` runs: once as the launcher, then on each rank to call the function.

A rank deserializes the function, calls it, and writes the result or the error to a file.
"""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from trimtab.distributed.launch.notebook import CALL, ENDING, ERROR, RESULT, plan_worker
from trimtab.distributed.launch.run import start
from trimtab.distributed.process_exit import end_finished_rank
from trimtab.errors import RecipeError


def launch_all(folder: Path, options: dict[str, Any]) -> int:
    """Launch the ranks and return the exit code.

    Args:
        folder: Folder of the call and the results.
        options: Settings of the launch by key.
    """
    ending = start(plan_worker(folder, options))
    _write(folder / ENDING, ending.message.encode())
    return ending.code


def call(folder: Path, rank: int) -> None:
    """Call the function on one rank and write its result, or its error.

    Args:
        folder: Folder of the call and the results.
        rank: Rank of this process.
    """
    import dill

    try:
        packed = dill.loads((folder / CALL).read_bytes())
        sys.path[:] = packed["path"]  # before the call is deserialized, which may import modules of the caller
        fn, args, kwargs = dill.loads(packed["call"])
        _add_to_main(fn)
        written = _packed(fn(*args, **kwargs))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        _write(folder / ERROR.format(rank), text.encode(errors="replace"))
        raise
    _write(folder / RESULT.format(rank), written)


def _add_to_main(fn: Any) -> None:
    """Add classes of the caller's `__main__` to this one, for results that the caller unpickles as its own classes."""
    home = sys.modules["__main__"].__dict__
    todo, seen = [fn], set()
    while todo:
        for name, value in getattr(todo.pop(), "__globals__", {}).items():
            if getattr(value, "__module__", None) == "__main__" and id(value) not in seen:
                seen.add(id(value))
                home.setdefault(name, value)
                todo.append(value)


def _packed(value: Any) -> bytes:
    import dill

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dill warns about each class that it cannot pickle by name
        try:
            return bytes(dill.dumps(value, byref=True))
        except Exception:  # a class that is not importable: pickle its definition too
            pass
        try:
            return bytes(dill.dumps(value, recurse=True))
        except Exception as error:
            raise RecipeError(
                f"the return value of the function cannot be pickled: {type(error).__name__}: {error}",
                "return numbers, strings, tensors, or lists and dicts of them",
            ) from error


def _write(path: Path, content: bytes) -> None:
    """Write atomically, because the process may be ended in the middle."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(launch_all(Path(sys.argv[1]), json.loads(sys.argv[2])))
    call(Path(sys.argv[1]), int(os.environ["RANK"]))
    end_finished_rank()
