"""A run and its mirror, and what a person who can write to the mirror may do: change values, recompute checksums."""

import json
import shutil
import socketserver
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tiny_runs import reviews, write_csv
from trimtab import Recipe, fit
from trimtab.checkpoint.store import MANIFEST, _signed, read_manifest
from trimtab.recipe.load import LoadedRecipe, render_resolved_yaml

CANARY = """
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification
Path({mark!r}).write_text("executed")
class CanaryConfig(BertConfig):
    model_type = "canary"
class Canary(BertForSequenceClassification):
    config_class = CanaryConfig
"""


def make_run(folder: Path, model: str, **changes: Any) -> Path:
    """Train a tiny run with a mirror; return the mirror."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model": model,
        "data": {"train": str(write_csv(folder / "reviews.csv", reviews(40)))},
        "train": {"max_steps": 2, "batch_size": 4},
        "evaluate": {"samples": 0},
        "checkpoint": {"mirror": str(folder / "drive"), "every": "1 steps"},
        "out": str(folder / "runs" / "reviews" / "here"),
        "track": "none",
    }
    fit(Recipe(**values | changes), progress="quiet", device="cpu")
    return folder / "drive" / "reviews" / "here"


def make_remote_code(folder: Path, model: str) -> tuple[Path, Path]:
    """A model whose Python code leaves a mark; return its folder and the mark, which does not exist yet."""
    shutil.copytree(model, folder)
    mark = folder.parent / f"{folder.name}.executed"
    (folder / "modeling_canary.py").write_text(CANARY.format(mark=str(mark)))
    path = folder / "config.json"
    names = {"AutoConfig": "CanaryConfig", "AutoModelForSequenceClassification": "Canary"}
    mapped = {"auto_map": {name: f"modeling_canary.{value}" for name, value in names.items()}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "canary"} | mapped))
    return folder, mark


def edit_recipe(mirror: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the recipe in every file that contains it, and make every checksum right again."""
    recipe = read_manifest(next(mirror.glob("checkpoints/step-*"))).facts["settings"]
    change(recipe)
    try:
        text = render_resolved_yaml(LoadedRecipe(Recipe(**recipe), {}))
    except Exception:  # of an invalid recipe
        text = yaml.safe_dump(recipe)
    (mirror / "recipe.yaml").write_text(text)
    checksum = f"crc32:{zlib.crc32((mirror / 'recipe.yaml').read_bytes()):08x}"
    edit_json(mirror / "run.json", lambda status: status.update(recipe_checksum=checksum))
    for folder in mirror.glob("checkpoints/step-*"):

        def change_facts(facts: dict[str, Any]) -> None:
            facts["settings"] = recipe
            facts["run"]["recipe_checksum"] = checksum

        edit_facts(folder, change_facts)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file of a mirror."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_facts(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the facts in a checkpoint's manifest, and sign it again."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.pop("checksum")
    change(manifest["facts"])
    (folder / MANIFEST).write_bytes(_signed(manifest))


class Listener:
    """A server on loopback that counts its connections, and keeps what was sent to it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        received = self.received

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(5)
                received.append(self.request.recv(65536))
                self.request.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
