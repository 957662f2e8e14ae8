"""Every example runs, and becoming a trimtab loop takes at most five lines."""

import difflib
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(path: Path) -> str:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_loop_is_five_lines_away_and_prints_the_same():
    plain, ours = EXAMPLES / "own_loop.py", EXAMPLES / "own_loop_trimtab.py"
    lines = [path.read_text().splitlines() for path in (plain, ours)]
    added = [line for line in difflib.ndiff(*lines) if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(added) <= 5, added
    first, second = run(plain), run(ours)
    assert first == second
    assert "accuracy" in first


def test_the_readme_runs_it_on_two_processes():
    command = "trimtab launch --processes 2 examples/own_loop_trimtab.py"
    assert command in (EXAMPLES.parent / "README.md").read_text()
    program = Path(sys.executable).with_name("trimtab")
    done = subprocess.run(
        [str(program), *command.split()[1:]], cwd=EXAMPLES.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"], "one voice"
    assert float(lines[-1].split()[-1]) > 0.9


def test_no_example_is_forgotten():
    assert {path.name for path in EXAMPLES.rglob("*.py")} == {"own_loop.py", "own_loop_trimtab.py"}
