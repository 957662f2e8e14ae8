"""Every tutorial and the start page run in an empty folder, with small models and data under the names they use.

Commands are processes, forked from one that has imported everything; Python blocks share a namespace, as in the
notebook that is made of the page. One notebook runs in a real kernel.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from notebooks import TUTORIALS, blocks_of, commands_of, notebook_of
from tiny_runs import reviews
from trimtab.cli.main import app
from trimtab.runs.contents import CONTENTS

PAGES = {path.stem: path for path in sorted(TUTORIALS.glob("*.md")) if path.name != "index.md"}
START = TUTORIALS.parent / "start.md"
IN_A_KERNEL = "from-scratch"
MODELS = {"bert-base-uncased": "bert", "distilbert-base-uncased": "distilbert"}
CHAT_MODELS = ("Qwen/Qwen2.5-7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")
IMDB = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})


@pytest.fixture
def stand_ins(own_folder, tiny):
    """Small models and datasets in the current folder, where they take precedence over the Hub."""
    for name, family in MODELS.items():
        layers = {"num_hidden_layers": 2} if family == "bert" else {}  # a student has half of them
        Path(name).symlink_to(tiny.folder(family, **layers))
    for name in CHAT_MODELS:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(tiny.folder("llama", chat=True))
    DatasetDict({"train": films(128, 0), "test": films(32, 500)}).save_to_disk("imdb")
    DatasetDict({"train": chats(32, 0), "test": chats(8, 100)}).save_to_disk("HuggingFaceH4/no_robots")
    return own_folder


def films(num_rows, first):
    rows = reviews(num_rows, first)
    labels = [int(row["label"] == "good") for row in rows]
    return Dataset.from_dict({"text": [row["text"] for row in rows], "label": labels}, features=IMDB)


def chats(num_rows, first):
    rows = reviews(num_rows, first)
    roles = ("user", "assistant")
    messages = [
        [{"role": role, "content": text} for role, text in zip(roles, row.values(), strict=True)] for row in rows
    ]
    return Dataset.from_dict({"messages": messages})


def run(fork_server, command):
    """Run one command, and return its output. A comment "exit code N" says how it has to end."""
    line, _, comment = command.partition("#")
    program, *words = shlex.split(line)
    assert program in ("trimtab", "python"), command
    is_ours = program == "trimtab"
    if torch.cuda.is_available():  # which does not work in forks of a process that has used it
        done = subprocess.run([sys.executable, *["-m", "trimtab"] * is_ours, *words], capture_output=True, text=True)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        start = fork_server.start_command if is_ours else partial(fork_server.start_script, is_one_file=False)
        child = start(*words)
        code, out, err = child.wait(), child.out, child.err
    code = 128 - code if code < 0 else code  # as a shell reports signals
    expected = re.search(r"exit code (\d+)", comment)
    assert code == (int(expected[1]) if expected else 0), f"{command}: {code}\n{out}\n{err}"
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start", *(name for name in PAGES if name != IN_A_KERNEL)])
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow calls what SQLAlchemy deprecates
def test_it_runs(name, fork_server, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    if name == "mlflow":
        monkeypatch.delenv("TRIMTAB_TRACK")
    names, out = {"__name__": "__main__"}, ""
    blocks = list(blocks_of((PAGES | {"start": START})[name].read_text()))
    for block in blocks:
        if block.kind == "file":
            Path(block.name).write_text(block.text + "\n")
        elif block.kind == "sh":
            out += "".join(run(fork_server, command) for command in commands_of(block.text))
        elif block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as written:
                exec(compile(block.text, f"{name}.md", "exec"), names)
            out += written.getvalue()
        else:
            check_shown(block.text, out)
    assert sum(block.kind in ("sh", "python") for block in blocks) >= 4
    if name == "killed":  # what a run has left is what the reference lists
        left = {path.name + "/" * path.is_dir() for path in Path("runs/long/killed").iterdir()}
        assert {"recipe.yaml", "plan.json", "metrics.jsonl", "run.json", "checkpoints/", "best/"} <= left
        assert left <= {re.sub(r"(?<=/).+", "", path) for path in CONTENTS}
    if name == "own-loop":
        plain, ours, twice = (text for text in out.split("epoch 0") if text)
        assert plain == ours
        assert "epoch 2" in twice


def check_shown(text, out):
    """Output that a page shows with "GiB" in it is what came out, figures to 1%; the others are only examples."""
    for shown in re.findall(r"^```text\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        lines = [line for line in shown.splitlines() if " GiB " in line or re.search(r"\|·+ ", line)]
        for line in lines:
            assert any(is_alike(line, other) for other in out.splitlines()), f"{line}\nis not in\n{out}"


def is_alike(one, other):
    number = r"[\d,]*\.?\d+"
    if re.sub(number, "#", one).split() != re.sub(number, "#", other).split():
        return False
    pairs = zip(re.findall(number, one), re.findall(number, other), strict=True)
    return all(
        float(a.replace(",", "")) == pytest.approx(float(b.replace(",", "")), rel=0.01, abs=0.01) for a, b in pairs
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("stand_ins")
def test_the_comparison_that_is_shown_for_a_gpu(fork_server):
    """With a small model and one repeat; the page does not run it, because some precisions need a GPU."""
    text = PAGES["precision-compared"].read_text()
    for block in blocks_of(text):
        if block.kind == "file":
            Path(block.name).write_text(block.text + "\n")
    commands = shown_commands(text)
    assert commands
    for command in commands:
        run(fork_server, command.replace("--repeats 3", "--repeats 1"))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("own_folder")
def test_training_from_scratch_on_a_gpu(fork_server):
    """The page of the notebook that runs in a kernel below."""
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as written:
        for block in blocks_of(PAGES[IN_A_KERNEL].read_text()):
            if block.kind == "file":
                Path(block.name).write_text(block.text + "\n")
            elif block.kind == "sh":
                for command in commands_of(block.text):
                    run(fork_server, command)
            elif block.kind == "python":
                exec(compile(block.text, f"{IN_A_KERNEL}.md", "exec"), names)
    assert "ninety one → 9 1" in written.getvalue()


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_a_notebook_in_a_kernel(monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(PAGES[IN_A_KERNEL].with_suffix(".ipynb"), as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(Path.cwd())}})
    client.execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "ninety one → 9 1" in said


def shown_commands(text):
    """Commands of a page that nothing runs there."""
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip().startswith("trimtab ")]


def test_commands_that_are_only_shown_are_valid():
    """Those that run until they are stopped, or take a GPU and hours: their options exist."""
    lines = [line for path in (START, *PAGES.values()) for line in shown_commands(path.read_text())]
    assert len(lines) >= 4
    for line in lines:
        name, *words = shlex.split(line)[1:]
        typer.main.get_command(app).commands[name].make_context(name, words)


def test_own_loop_is_the_example():
    files = {
        block.name: block.text + "\n" for block in blocks_of(PAGES["own-loop"].read_text()) if block.kind == "file"
    }
    examples = TUTORIALS.parents[1] / "examples"
    assert len(files) == 2
    assert files == {name: (examples / name).read_text() for name in files}


@pytest.mark.parametrize("name", PAGES)
def test_the_notebook_is_the_page(name):
    path = PAGES[name].with_suffix(".ipynb")
    assert path.read_text() == notebook_of(PAGES[name].read_text()), "run: python docs/site/notebooks.py"
    notebook = json.loads(path.read_text())
    assert not [cell for cell in notebook["cells"] if cell.get("outputs")]
    assert f"]({name}.ipynb)" in PAGES[name].read_text()


def test_notebooks_are_valid():
    nbformat = pytest.importorskip("nbformat")
    assert len(PAGES) == 8
    for path in PAGES.values():
        nbformat.validate(nbformat.read(path.with_suffix(".ipynb"), as_version=4))


def test_blocks_become_cells():
    page = '# A\n\n```text\nx\n```\n\n```sh\ntrimtab a \\\n  b  # c\ntrimtab d\n```\n```py title="f.py"\n1\n```\nend\n'
    cells = json.loads(notebook_of(page))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "code", "markdown"]
    texts = ["".join(cell["source"]) for cell in cells]
    assert texts == ["# A\n\n```text\nx\n```", "!trimtab a b  # c\n!trimtab d", "%%writefile f.py\n1", "end"]
