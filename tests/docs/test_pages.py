"""Every command and every Python block of the README and of docs/ runs, in a folder where the names they use exist."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from tiny_models import config_of, tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALONE = [*(ROOT / "docs" / "tutorials").glob("*.md"), ROOT / "docs" / "start.md"]  # test_tutorials.py runs these


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in (page for page in PAGES if page not in ALONE):
        matches = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += [(page.name, text) for text in matches]
    return found


@pytest.fixture
def folder_of_a_reader(tmp_path, monkeypatch):
    """A folder with a file of reviews, and tiny models under the names of the hub."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    config = AutoConfig.for_model(**config_of("bert"), vocab_size=len(tokenizer()))
    AutoModelForMaskedLM.from_config(config).save_pretrained("bert-base-uncased")
    tokenizer().save_pretrained("bert-base-uncased")
    with open("reviews.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows([("what a great film it was", "good"), ("the worst film that I ever saw", "bad")] * 12)
    config = "base_model: bert-base-uncased\ndatasets: [{path: reviews.csv, type: completion}]\nlearning_rate: 1e-4\n"
    (tmp_path / "axolotl.yml").write_text(config)
    return tmp_path


def commands_of_the_pages() -> list[str]:
    lines = [line.partition("#")[0].strip() for _, block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def run_here(command: str) -> None:
    from trimtab.cli.main import app

    words = shlex.split(command)
    assert words[0] == "trimtab", command
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception}"


def test_the_first_command_of_the_readme_runs(folder_of_a_reader):
    command = commands_of_the_pages()[0]
    assert command.startswith("trimtab train --model")
    run_here(command)
    assert list(folder_of_a_reader.glob("runs/*/*/best/model.safetensors"))


@pytest.mark.slow
def test_every_command_runs(folder_of_a_reader, fork_server, monkeypatch):
    """In this process; what starts others really does, but for `check --resume`, which needs three of them."""
    monkeypatch.setattr("trimtab.commands.verify_resume.subprocess", fork_server)
    commands = commands_of_the_pages()
    assert len(commands) >= 9
    for command in commands:
        run_here(command)
    assert (folder_of_a_reader / "predicted.csv").read_text().count("\n") == 25


LADDER = r"^```\n(trimtab plan [^`]*?)^```\n```text\n(.*?)^```"  # a command, and what a page shows that it prints


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/planner.md"])
def test_the_first_ladder_of_a_page_is_what_its_command_prints(page, monkeypatch):
    """Plans and memory; how many tokens a second depends on constants that are measured anew now and then."""
    from trimtab.cli.main import app

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "190")
    found = re.search(LADDER, (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    done = CliRunner().invoke(app, shlex.split(found[1].replace("\\\n", " "))[1:])
    assert done.exit_code == 0, done.output
    rows, printed = rungs_of(found[2]), dict(rungs_of(done.output))
    assert len(rows) > 5
    order = list(printed) if "…" not in found[2] else [name for name in printed if name in dict(rows)]
    assert [name for name, _ in rows] == order
    assert dict(rows) == pytest.approx({name: printed[name] for name in order}, rel=0.01)


def rungs_of(text: str) -> list[tuple[str, float]]:
    """The plan and the GiB of every line of a ladder."""
    found = re.findall(r"^[→ ]+([\d.]+) .*? [a-z]\S*\|\S*  +(\S.*?) *$", text, flags=re.MULTILINE)
    return [(name, float(number)) for number, name in found]


def parts_of_a_loop():
    from transformers import AutoConfig, AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config_of("bert"), vocab_size=50))
    rows = [{"input_ids": torch.randint(5, 50, (6,)), "labels": torch.tensor(i % 2)} for i in range(10)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": DataLoader(rows, batch_size=2)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of HF Trainer, in the script of a page that replaces it
def test_every_python_block_runs(folder_of_a_reader):
    found = blocks("python")
    assert len(found) >= 3
    for page, block in found:
        names = {"__name__": page, **parts_of_a_loop()}
        exec(compile(block, page, "exec"), names)
    assert (folder_of_a_reader / "state").is_dir()


def anchors_of(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)]+)\)", page.read_text())]
    assert len(links) >= 4
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}"
