"""Every example runs, and becoming a trimtab loop takes at most five lines."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest
from launching import start_together

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_own_loop_is_five_lines_away_and_prints_the_same(fork_server):
    plain, ours = EXAMPLES / "own_loop.py", EXAMPLES / "own_loop_trimtab.py"
    lines = [path.read_text().splitlines() for path in (plain, ours)]
    added = [line for line in difflib.ndiff(*lines) if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(added) <= 5, added
    running = [fork_server.start_script(path, is_one_file=False) for path in (plain, ours)]
    for child in running:
        assert child.wait() == 0, child.err
    assert running[0].out == running[1].out
    assert "accuracy" in running[0].out


COMMAND = "trimtab launch --processes 2 examples/own_loop_trimtab.py"


def assert_learnt(said):
    lines = said.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"], "one voice"
    assert float(lines[-1].split()[-1]) > 0.9


@pytest.mark.slow
def test_it_runs_on_two_processes(fork_server):
    """Which the README starts with `trimtab launch`; how that starts scripts is seen in tests/distributed."""
    assert COMMAND in (EXAMPLES.parent / "README.md").read_text()
    path = str(EXAMPLES / "own_loop_trimtab.py")
    running = start_together(fork_server, "fork_server:run_script", 2, is_one_file=False, path=path, words=[])
    for child in running:
        assert child.wait() == 0, [child.err for child in running]
    assert_learnt(running[0].out)


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)  # logs of the processes are written to runs/ of the current folder
    program = Path(sys.executable).with_name("trimtab")
    done = subprocess.run(
        [str(program), *COMMAND.split()[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert_learnt(done.stdout)


@pytest.mark.slow
def test_images_within_a_budget(fork_server):
    child = fork_server.start_script(EXAMPLES / "own_loop_images.py", is_one_file=False)
    assert child.wait() == 0, child.err
    assert_learnt(child.out)


def test_no_example_is_forgotten():
    names = {"own_loop.py", "own_loop_trimtab.py", "own_loop_images.py"}
    assert {path.name for path in EXAMPLES.rglob("*.py")} == names
