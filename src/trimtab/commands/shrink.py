"""`trimtab shrink`: write a model in every smaller form, measure each, and recommend one."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.export import export_model
from trimtab.commands.held_out import held_out_of
from trimtab.errors import RecipeError, TrimtabError
from trimtab.hardware.inventory import find_device
from trimtab.inference.figures import ModelFigures, measure
from trimtab.inference.load import LoadedModel, load
from trimtab.log import say
from trimtab.model.load import resolve_source
from trimtab.report.figures_table import figures_table
from trimtab.report.frontier import draw_frontier, frontier_table, recommended
from trimtab.report.tables import markdown_table
from trimtab.tracking.mlflow.registry import local_source

# Writes one form of the model into a new folder.
WriteForm = Callable[[Path], object]


@dataclass(frozen=True)
class Shrunk:
    """The forms of a model.

    Args:
        figures: Their figures; the first is the original.
        best: The smallest form that holds the bound.
        folder: Folder of that form; None if it is the original.
        max_loss: The bound.
        failed: Why a form could not be made, by name.
    """

    figures: list[ModelFigures]
    best: ModelFigures
    folder: Path | None
    max_loss: float
    failed: dict[str, str]


def shrink(
    source: str,
    folder: str | Path,
    *,
    data: str | None = None,
    max_loss: float = 0.01,
    num_rows: int = 1000,
    forms: Mapping[str, WriteForm] | None = None,
    device: str | None = None,
) -> Shrunk:
    """Write a model in every smaller form, in order of their cost, and measure each on held-out rows.

    Args:
        source: Run, folder, hub name or tracked model.
        folder: New folder: one folder for each form, and the frontier as frontier.json, frontier.md and frontier.png.
        data: Labelled rows; by default the held-out rows of the run.
        max_loss: The most that the main metric may lose: 0.01 is one point of accuracy, or 1% more loss.
        num_rows: Use at most this number of rows.
        forms: What writes each form, by name; by default those of `forms_of`.
        device: Where to compute.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(f"{target} is not empty", "pass a new folder")
    where = find_device(device)
    place = resolve_source(local_source(source), adapters=True)
    original = load(place, device=where)
    held_out = held_out_of(original, data, num_rows)
    comparison = held_out.compare_with(original)
    figures = [measure("original", original, held_out, folder=place if Path(place).exists() else None)]
    say(f"original: {_in_words(figures[0])}")
    ways = forms_of(original, place) if forms is None else forms
    target.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    for name, write in ways.items():
        try:
            write(target / name)
            smaller = load(target / name, device=where)
            figures.append(measure(name, smaller, held_out, folder=target / name, comparison=comparison))
        except (TrimtabError, ImportError, NotImplementedError) as error:
            failed[name] = str(error)
            say(f"{name}: not made, {error}")
        else:
            say(f"{name}: {_in_words(figures[-1])}")
    best = recommended(figures, max_loss)
    found = Shrunk(figures, best, None if best is figures[0] else target / best.name, max_loss, failed)
    _write_frontier(found, target)
    return found


def forms_of(original: LoadedModel, place: str) -> dict[str, WriteForm]:
    """Return what writes each form of a model, the cheapest first."""

    def half(folder: Path) -> None:
        model = load(place, device="cpu", dtype=torch.float16).model
        export_model(folder, model, original.tokenizer, card={**original.facts, "form": "fp16"})

    return {"fp16": half}


def _in_words(one: ModelFigures) -> str:
    header, rows = figures_table([one])
    return ", ".join(f"{name} {cell}" for name, cell in zip(header[1:], rows[0][1:], strict=True) if cell)


def _write_frontier(found: Shrunk, folder: Path) -> None:
    facts: dict[str, Any] = {
        "recommended": found.best.name,
        "max_loss": found.max_loss,
        "forms": [asdict(one) for one in found.figures],
        "failed": found.failed,
    }
    (folder / "frontier.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    lines = [markdown_table(*frontier_table(found.figures, found.max_loss)), *(_failures(found))]
    (folder / "frontier.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    draw_frontier(found.figures, found.max_loss, folder / "frontier.png")


def _failures(found: Shrunk) -> list[str]:
    return [f"{name} was not made: {reason}" for name, reason in found.failed.items()]
