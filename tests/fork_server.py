"""A process that has imported everything and forks others, which makes a start cost a tenth of a second.

It reads one request per line and answers each with one line; `forked.py` is its client. A child runs a function of a
test module and ends as a script would, with that script's exit code.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import transformers.models.bert.modeling_bert  # noqa: F401  what follows is imported once, before the forks
import transformers.models.bert.tokenization_bert  # noqa: F401

import product_order
import trimtab.cli.main
import trimtab.inference.load
from tiny_runs import TinyModels
from trimtab.model.load import load_model


def main() -> None:
    children: set[int] = set()
    prepare()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "start":
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                be_child(**order["child"])
            children.add(pid)
            answer = pid
        else:
            done, status = os.waitpid(order["pid"], os.WNOHANG)
            children.discard(done)
            answer = os.waitstatus_to_exitcode(status) if done else None
        print(json.dumps(answer), flush=True)
    for pid in children:  # children of a test that failed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def prepare() -> None:
    """Do once what every child would repeat: transformers builds its tables when the first model is loaded."""
    product_order.change()
    with tempfile.TemporaryDirectory() as folder:
        load_model(TinyModels(Path(folder)).folder("bert"), "masked-lm", {}, None)
    gc.collect()
    gc.freeze()  # otherwise the collector of each child would touch, and so copy, all imported objects


def be_child(
    function: str, arguments: dict, out: str, err: str, cwd: str, environment: dict[str, str], search: list[str]
) -> None:
    sys.stdout.flush()
    written = {path: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in (out, err)}
    os.dup2(written[out], 1)
    os.dup2(written[err], 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = search
    code: object = 0
    try:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(**arguments)
    except SystemExit as leaving:
        code = leaving.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # Do what the interpreter does at exit, except for its teardown, which takes as long as a whole run here.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def run_script(path: str, words: list[str]) -> None:
    """Run a script as `python PATH WORDS…` does."""
    sys.argv[:] = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_module(module: str, words: list[str]) -> None:
    """Run a module as `python -m MODULE WORDS…` does."""
    sys.argv[:] = [module, *words]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_command(words: list[str]) -> None:
    """Run the command line as `trimtab WORDS…` does."""
    sys.argv[:] = ["trimtab", *words]
    trimtab.cli.main.main()


if __name__ == "__main__":
    sys.modules["fork_server"] = sys.modules["__main__"]
    main()
