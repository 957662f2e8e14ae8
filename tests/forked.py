"""Subprocesses for tests, forked from a process that has imported everything; see the fixture `fork_server`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Child:
    """A process."""

    server: "ForkServer"
    pid: int
    out_file: Path
    err_file: Path
    code: int | None = None

    @property
    def out(self) -> str:
        return self.out_file.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.err_file.read_text(errors="replace")

    @property
    def said(self) -> str:
        """The output of a process whose stdout and stderr go to one file."""
        assert self.out_file == self.err_file
        return self.out if self.out_file.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless the process has ended and its id may be reused."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.server.ask({"do": "poll", "pid": self.pid})
        return self.code

    def wait(self, timeout: float = 400) -> int:
        """Wait for the exit code (negative: the signal that ended it); the timeout only guards against hangs."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"process {self.pid} does not end: {self._end_of_output()}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def wait_until(self, happened: Callable[[], Any], timeout: float = 400) -> None:
        """Wait until a condition holds; fail if the process ends before."""
        end = time.monotonic() + timeout
        while not happened():
            assert self.poll() is None, self._end_of_output()
            assert time.monotonic() < end, self._end_of_output()
            time.sleep(0.002)

    def _end_of_output(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in {self.out_file, self.err_file})


class ForkServer:
    """The process that forks the others.

    Args:
        folder: For the output of its children.
    """

    PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT  # it can replace the module `subprocess`: see `run`

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_children = 0
        search = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
        with (folder / "server.err").open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "fork_server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        assert self._answer() == "ready"

    def start(
        self,
        function: str,
        *,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
        is_one_file: bool = True,
        **arguments: Any,
    ) -> Child:
        """Start a process with the environment and the import path of this one.

        Args:
            function: The function it runs, as MODULE:NAME.
            environment: Changes of its environment.
            cwd: Its working directory; by default that of this process.
            is_one_file: Whether stdout and stderr go to one file.
            arguments: Of the function, as JSON values.
        """
        self._num_children += 1
        out = self._folder / f"said-{self._num_children}"
        err = out if is_one_file else out.with_suffix(".err")
        child = {
            "function": function,
            "arguments": arguments,
            "out": str(out),
            "err": str(err),
            "cwd": str(cwd or Path.cwd()),
            "environment": os.environ | (environment or {}),
            "search": [path for path in sys.path if Path(path).is_relative_to(HERE)],
        }
        return Child(self, self.ask({"do": "start", "child": child}), out, err)

    def start_script(self, path: Path, *words: str, **options: Any) -> Child:
        """Start `python PATH WORDS…`."""
        return self.start("fork_server:run_script", path=str(path), words=words, **options)

    def start_command(self, *words: str, **options: Any) -> Child:
        """Start `trimtab WORDS…`."""
        return self.start("fork_server:run_command", words=words, is_one_file=False, **options)

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Replace `subprocess.run` for `python -m MODULE WORDS…` with stdout and stderr in one text."""
        assert options == {"stdout": self.PIPE, "stderr": self.STDOUT, "text": True}
        assert command[:2] == [sys.executable, "-m"]
        child = self.start("fork_server:run_module", module=command[2], words=command[3:])
        return subprocess.CompletedProcess(command, child.wait(), child.said)

    def ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (self._folder / "server.err").read_text()[-4000:]
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0, (self._folder / "server.err").read_text()[-4000:]
        self._process.stdout.close()
