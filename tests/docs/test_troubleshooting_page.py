"""docs/troubleshooting.md: every message of trimtab that it quotes is in the source."""

import ast
import re
from pathlib import Path

import pytest

import trimtab

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
OURS, _, THEIRS = PAGE.partition("## Messages of torch and transformers")
MESSAGES = re.findall(r"^### `([^`]+)`$", OURS, flags=re.MULTILINE)
FROM_THE_SYSTEM = {"No space left on device"}


def template(node: ast.expr) -> str:
    """The text of a string in the source, with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    return "…"


def templates() -> str:
    found = []
    for path in Path(trimtab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                found.append(template(node))
    return re.sub(r"…+", "…", "\n".join(found))


def test_every_message_is_in_the_source():
    assert len(MESSAGES) > 50
    text = templates()
    assert [message for message in MESSAGES if message not in text and message not in FROM_THE_SYSTEM] == []


@pytest.mark.parametrize("part", [OURS, THEIRS])
def test_every_message_has_a_cure(part):
    sections = re.split(r"^### ", part, flags=re.MULTILINE)[1:]
    assert all(len(section.partition("\n")[2].partition("\n## ")[0].strip()) > 20 for section in sections)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "nowhere.yaml"), "there is no recipe"),
        (("train", "--model", "MODEL", "--data", "gone.csv"), "does not exist"),
        (("train", "--model", "MODEL", "--data", "reviews.csv", "--set", "data.label=stars"), "has no column"),
        (
            ("train", "--model", "MODEL", "--data", "reviews.csv[:1]", "--task", "classify"),
            "classification needs at least two",
        ),
        (
            ("train", "--model", "MODEL", "--data", "reviews.csv", "--resume", "--fresh"),
            "--resume and --fresh were both given",
        ),
        (("check", "--set", "model=a", "--set", "data.train=b", "--set", "trian.lr=1"), "no such key; did you mean"),
    ],
)
def test_some_as_the_command_prints_them(arguments, message, own_folder, tiny, trimtab_command):
    (own_folder / "reviews.csv").write_text("text,label\n" + "a good film,good\na bad film,bad\n" * 6)
    code, out, err = trimtab_command(*(tiny.folder("bert") if word == "MODEL" else word for word in arguments))
    assert code == 2
    assert message in err.replace("…", "")
