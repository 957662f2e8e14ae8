"""The shape of the package: what an import brings, which way imports go, what is public."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab
from trimtab.accelerate import Accelerator

SOURCE = Path(trimtab.__file__).parent
LAYERS = [
    ["addresses", "checksums", "errors", "log", "units"],
    ["garbage_collection", "randomness"],
    ["hardware"],
    ["recipe"],
    ["distributed"],
    ["data"],
    ["model"],
    ["optim"],
    ["techniques"],
    ["checkpoint"],
    ["runs"],
    ["tracking"],
    ["engine"],
    ["accelerate"],
    ["training"],
    ["compress"],
    ["inference"],
    ["report"],
    ["build"],
    ["planner"],
    ["run"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}


def fresh_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "allowed"),
    [("trimtab", set()), ("trimtab.cli.main", {"typer", "click", "annotated_doc", "shellingham", "rich"})],
)
def test_import_is_light(module, allowed):
    """What takes the time is the packages that are imported: here Python's own, and for the command line typer."""
    code = (
        f"import sys; before = set(sys.modules); import {module}; "
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    assert set(fresh_python(code).split()) - sys.stdlib_module_names - allowed == {"trimtab"}


@pytest.mark.parametrize(
    ("variable", "torch_is_loaded", "expected"),
    [("", False, "1000"), ("GOMP_SPINCOUNT", False, "7"), ("OMP_WAIT_POLICY", False, "None"), ("", True, "None")],
)
def test_threads_do_not_spin_unless_the_user_says_so(variable, torch_is_loaded, expected):
    code = (
        "import os, sys, types\n"
        "for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'): os.environ.pop(name, None)\n"
        f"if {variable!r}: os.environ[{variable!r}] = '7'\n"
        f"if {torch_is_loaded}: sys.modules['torch'] = types.ModuleType('torch')\n"
        "import trimtab\n"
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    assert fresh_python(code).strip() == expected


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['trimtab', '--help']\n"
        "from trimtab.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft', 'mlflow', 'numpy', 'pandas', 'matplotlib', 'pydantic'}\n"
        "print('HEAVY', *sorted(heavy & set(sys.modules)))"
    )
    assert fresh_python(code).strip().splitlines()[-1] == "HEAVY"


def test_public_names_exist():
    assert set(trimtab._HOMES) | {"__version__"} == set(trimtab.__all__)
    assert {"TrimtabError", "Stopped"} <= set(trimtab.__all__)  # what callers of fit have to catch
    for name in trimtab.__all__:
        assert getattr(trimtab, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        _ = trimtab.Enigne


def test_help_shows_the_arguments_of_an_engine():
    for kind in (trimtab.Engine, Accelerator):
        assert list(inspect.signature(kind).parameters) == list(inspect.signature(kind.__init__).parameters)[1:]


def imports_of(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("trimtab."):
            yield node.module.removeprefix("trimtab.")
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("trimtab.") for alias in node.names if alias.name.startswith("trimtab.")
            )


def test_imports_go_down_the_layers():
    """The one exception is lazy: an engine with a memory budget finds the planner, which is built on the engine."""
    files = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem != "__init__"]
    assert len(files) > 10
    upward = set()
    for path in files:
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for target in imports_of(path):
            if HEIGHT[target.partition(".")[0]] > HEIGHT[own]:
                upward.add((str(path.relative_to(SOURCE)), target))
    assert upward == {("engine/memory_budget.py", "planner.own_loop")}


def test_no_junk_drawers():
    drawers = {"utils", "helpers", "common", "misc", "other"}
    assert not [path for path in SOURCE.rglob("*.py") if path.stem in drawers]
