"""The processes of `trimtab.launch`: first the one that launches, then, in each that it starts, the function itself.

A rank unpacks the function, calls it, and leaves its result, or its error, in a file.
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
from trimtab.errors import RecipeError


def launch_all(folder: Path, options: dict[str, Any]) -> int:
    """Start the ranks.

    Args:
        folder: Where the call lies and results go.
        options: Of the launch.

    Returns:
        The exit code.
    """
    ending = start(plan_worker(folder, options))
    _write(folder / ENDING, ending.message.encode())
    return ending.code


def call(folder: Path, rank: int) -> None:
    """Do the work of one rank.

    Args:
        folder: Where the call lies and results go.
        rank: Of this process.
    """
    import dill

    try:
        packed = dill.loads((folder / CALL).read_bytes())
        sys.path[:] = packed["path"]  # what the caller can import can be imported here
        fn, args, kwargs = dill.loads(packed["call"])
        _lend_to_main(fn)
        written = _packed(fn(*args, **kwargs))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        _write(folder / ERROR.format(rank), text.encode(errors="replace"))
        raise
    _write(folder / RESULT.format(rank), written)


def _lend_to_main(fn: Any) -> None:
    """Classes of the caller's `__main__` get their place in ours, so that what is returned is of the caller's class."""
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
        warnings.simplefilter("ignore")  # dill warns of each class that it cannot name
        try:
            return bytes(dill.dumps(value, byref=True))
        except Exception:  # a class that has no name of its own travels whole
            pass
        try:
            return bytes(dill.dumps(value, recurse=True))
        except Exception as error:
            raise RecipeError(
                f"what the function returned cannot be sent back: {type(error).__name__}: {error}",
                "return numbers, text, tensors, or lists and dicts of them",
            ) from error


def _write(path: Path, content: bytes) -> None:
    """Appear whole: the process may be ended while it writes."""
    beside = path.with_suffix(".part")
    beside.write_bytes(content)
    beside.replace(path)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(launch_all(Path(sys.argv[1]), json.loads(sys.argv[2])))
    call(Path(sys.argv[1]), int(os.environ["RANK"]))
