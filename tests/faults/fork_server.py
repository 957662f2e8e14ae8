"""A process that has imported everything and starts others by a fork, so that a killed run costs a second and not six.

It reads one order a line, and answers each with one line; `fault_stage.py` speaks to it. What a child does is a
function of `faulty_runs.py`; it ends as a script of its own would, with that script's exit code.
"""

import gc
import json
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress

import faulty_runs


def main() -> None:
    children: set[int] = set()
    gc.freeze()  # else each child would look through, and so copy, everything that was imported
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
    for pid in children:  # of a test that failed in the middle
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def be_child(function: str, arguments: dict, said: str, environment: dict[str, str]) -> None:
    log = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(environment)
    code: object = 0
    try:
        getattr(faulty_runs, function)(**arguments)
    except SystemExit as leaving:
        code = leaving.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What Python does at its end, but that it does not take everything apart, which takes as long as a whole run here.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
