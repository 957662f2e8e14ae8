"""Hostile data files: each ends in a message that names the file, or trains; bad rows are never dropped in silence."""

import gzip
import json
import os
import random
import re

import pytest
from hostile_input import VALUES, Call, damage_bytes, damage_json, run_all, write_json

from tiny_runs import reviews, write_csv, write_jsonl

SEED = int(os.environ.get("TRIMTAB_FUZZ_SEED", "0"))
COUNT = int(os.environ.get("TRIMTAB_FUZZ_COUNT", "50"))
CELLS = [
    '"',
    '""',
    "a,b",
    "\r\n",
    "\0",
    "\ufeff",
    "=1+1",
    "'",
    "\\",
    "x" * 200_000,
    "\x1b[2J",
    "NaN",
    "\u202e",
    "é",
    "\t",
]
TURNS = [{"role": "user", "content": "the film"}, {"role": "assistant", "content": "was long"}]


@pytest.fixture
def originals(tmp_path):
    """Files of every format, by the task that reads them."""
    import pyarrow
    import pyarrow.parquet

    rows = reviews(24)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_csv(tmp_path / "a.csv", rows)
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": TURNS}] * 12)
    write_json(tmp_path / "a.json", rows)
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows))
    (tmp_path / "a.txt").write_text("\n\n".join(row["text"] for row in rows))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    return sorted(path for path in tmp_path.iterdir() if path.is_file())


def damaged(data: bytes, name: str, draw: random.Random) -> bytes:
    """Bytes of a file with something wrong in them, most often one value."""
    if name.endswith((".parquet", ".gz", ".txt")) or draw.random() < 0.3:
        return damage_bytes(data, draw)
    if name.endswith(".json"):
        return json.dumps(damage_json(json.loads(data), draw)).encode()
    lines = data.decode().splitlines()
    at = draw.randrange(len(lines))
    if name.endswith(".jsonl"):
        value = draw.choice(
            [*VALUES, damage_json(json.loads(lines[at]), draw), damage_json(json.loads(lines[at]), draw)]
        )
        lines[at] = json.dumps(value)
    else:
        cut = draw.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:cut] + draw.choice(CELLS) + lines[at][cut:]
    return "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


@pytest.mark.slow
def test_data_files(tiny, originals, fork_server, tmp_path):
    draw = random.Random(SEED)
    models = {"chat": tiny.folder("gpt2", chat=True), "": tiny.folder("bert")}

    def calls():
        for number in range(COUNT):
            original = draw.choice(originals)
            folder = tmp_path / str(number)
            folder.mkdir()
            path = folder / original.name
            path.write_bytes(damaged(original.read_bytes(), original.name, draw))
            model = models["chat" if original.name == "chat.jsonl" else ""]
            task = {"chat.jsonl": "chat", "a.txt": "masked-lm"}.get(original.name, "classify")
            words = ["train", "--model", model, "--data", str(path), "--task", task, "--max-steps", "1"]
            words += ["--out", str(folder / "run")]
            if number % 3 == 0:
                recipe = folder / "recipe.yaml"
                write_json(recipe, {"model": model, "task": task, "data": {"train": str(path)}})
                words = ["data", "show", str(recipe)]
            yield Call(f"{number} {original.name}", words)

    def names_the_file(call: Call) -> str | None:
        """A data error names the file that it is in."""
        said = call.child.err
        if call.child.code == 2 and not re.search(r"/\d+/(a|chat)\.|recipe has|rows? ", said):
            return f"{call.name}: {said}"
        return None

    assert run_all(fork_server, calls(), names_the_file) == COUNT
