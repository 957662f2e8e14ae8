"""`trimtab shrink`: write a model in every smaller form, measure each, and recommend one."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.build.data import build_data
from trimtab.checkpoint.export import as_json, export_model
from trimtab.checkpoint.folder import refuse_unwritable
from trimtab.commands.cluster import cluster
from trimtab.commands.export import export
from trimtab.commands.held_out import held_out_of
from trimtab.commands.quantize import quantize
from trimtab.commands.tracked_results import Results, track_results
from trimtab.compress.clustering import ClusterSettings
from trimtab.data.rows import Rows
from trimtab.errors import DataError, RecipeError, TrimtabError
from trimtab.hardware.inventory import find_device
from trimtab.inference.held_out import HeldOut
from trimtab.inference.load import LoadedModel, load
from trimtab.inference.model_measurement import ModelMeasurement, measure
from trimtab.log import muted, say
from trimtab.model.hub import is_adapter
from trimtab.model.load import resolve_source
from trimtab.recipe.schema import Recipe
from trimtab.report.frontier import draw_frontier, frontier_table, recommended
from trimtab.report.measurements_table import measurements_table
from trimtab.report.tables import markdown_table
from trimtab.tracking.mlflow.registry import local_source
from trimtab.training.work_progress import tracked
from trimtab.units import format_seconds

# Writes one form of the model into a new folder.
WriteForm = Callable[[Path], object]

_CLUSTER_BITS = (6, 4, 3)
_NUM_FEW = 8
_NUM_NF4 = 384  # rows to evaluate nf4 on; a third as many are calibrated on


@dataclass(frozen=True)
class Shrunk:
    """The forms of a model.

    Args:
        measurements: One for each form; the first is the original.
        best: The smallest form that meets the bound.
        folder: Folder of that form; None if it is the original.
        max_loss: The bound.
        failed: Why a form could not be written, by name.
        source: The model, as the user named it.
        facts: The contents of its trimtab.json.
    """

    measurements: list[ModelMeasurement]
    best: ModelMeasurement
    folder: Path | None
    max_loss: float
    failed: dict[str, str]
    source: str
    facts: Mapping[str, Any]


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
        source: Run, folder, Hub name or tracked model.
        folder: New folder: one folder for each form, and the frontier as frontier.json, frontier.md and frontier.png.
        data: Labelled rows; by default the held-out rows of the run.
        max_loss: The largest accepted decrease of the main metric: 0.01 is one point of accuracy, or 1% more loss.
        num_rows: Use at most this number of rows.
        forms: The functions that write each form, by name; by default those of `forms_of`.
        device: The device to compute on.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(f"{target} is not empty", "pass a new folder")
    refuse_unwritable(target, is_replaced=False)
    where = find_device(device)
    place = resolve_source(local_source(source), adapters=True)
    target.mkdir(parents=True, exist_ok=True)
    if is_adapter(place):  # all forms also have the weights of the base
        export(place, target / "merged", to="merged", data=data)
        place = str(target / "merged")
    original = load(place, device=where)
    held_out = held_out_of(original, data, num_rows)
    comparison = held_out.compare_with(original)
    measurements = [measure("original", original, held_out, folder=place if Path(place).exists() else None)]
    say(f"original: {_in_words(measurements[0])}")
    ways = forms_of(original, place, held_out, where) if forms is None else forms
    failed: dict[str, str] = {}
    for number, (name, write) in enumerate(tracked(ways.items(), "forms"), 1):
        say(f"{name}: form {number} of {len(ways)}")
        started = time.perf_counter()
        try:
            write(target / name)
            with muted():  # log lines about a model were shown when it was written
                smaller = load(target / name, device=where)
                measurements.append(measure(name, smaller, held_out, folder=target / name, comparison=comparison))
        except Exception as error:  # exceptions of any type: other packages write and run these forms
            failed[name] = str(error) if isinstance(error, TrimtabError) else f"{type(error).__name__}: {error}"
            say(f"{name}: failed: {failed[name]}")
        else:
            say(f"{name}: {_in_words(measurements[-1])}; took {format_seconds(time.perf_counter() - started)}")
    best = recommended(measurements, max_loss)
    chosen = None if best is measurements[0] else target / best.name
    found = Shrunk(measurements, best, chosen, max_loss, failed, source, original.facts)
    _write_frontier(found, target)
    return found


def track_forms(found: Shrunk, folder: Path) -> str:
    """Log the forms to MLflow, each as a nested run of one parent, and return a line that says where they are.

    Args:
        found: The forms.
        folder: The folder with the frontier.
    """
    parts = [Results(one.name, {"form": one.name}, _tracked_metrics(one)) for one in found.measurements]
    params = {"model": found.source, "recommended": found.best.name, "max_loss": f"{found.max_loss:g}"}
    files = [folder / name for name in ("frontier.json", "frontier.md", "frontier.png")]
    results = Results(f"shrink {Path(found.source).name}", params, _tracked_metrics(found.best), files, parts)
    return track_results(found.source, found.facts, results)


def _tracked_metrics(one: ModelMeasurement) -> dict[str, float]:
    values = {**one.quality, "memory_bytes": one.memory_bytes, "rows_per_s": one.rows_per_s}
    values |= {"latency_1_s": one.latency_1_s, "latency_32_s": one.latency_32_s}
    if one.disk_bytes is not None:
        values["disk_bytes"] = one.disk_bytes
    if one.divergence is not None:
        values |= {"kl": one.divergence.kl_mean, "same_answer": one.divergence.agreement}
    return values


def forms_of(original: LoadedModel, source: str, held_out: HeldOut, device: torch.device) -> dict[str, WriteForm]:
    """Return the functions that write each form of a model, cheapest first.

    Args:
        original: The model.
        source: The source that it was loaded from.
        held_out: Rows to evaluate forms on; a form that measures itself uses a few of them.
        device: The device to compute on.
    """
    few = held_out.rows.select(list(range(min(_NUM_FEW, len(held_out.rows)))))
    forms: dict[str, WriteForm] = {"fp16": lambda folder: _write_half(original, source, folder)}
    calibration = _training_rows(original)
    for name in ("int8-dynamic", "int8"):
        forms[name] = partial(quantize, source, to=(name,), data=few, device=device)
    # its rounding depends on activations: with as few rows as the others, it would overfit these rows
    rows = held_out.rows if calibration is None else calibration
    forms["nf4"] = partial(quantize, source, to=("nf4",), data=rows, num_rows=_NUM_NF4, device=device)
    if original.task_name in ("classify", "regress"):
        forms["onnx-int8"] = partial(export, source, to="onnx-int8")
    for bits in _CLUSTER_BITS:
        settings = ClusterSettings(
            bits=bits,
            per="rows",
            importance="none" if calibration is None else "activations",
            compensate=calibration is not None,
            rest_dtype=torch.float16,
        )
        forms[f"cluster-{bits}"] = partial(
            cluster, source, settings=settings, data=few, calibration=calibration, device=device
        )
    return forms


def _training_rows(original: LoadedModel) -> Rows | None:
    """Return the rows that the model was trained on, without held-out rows; None if they are unavailable."""
    recipe = original.facts.get("recipe")
    if not isinstance(recipe, Mapping):
        return None
    try:
        return build_data(Recipe(**recipe)).train
    except (DataError, RecipeError) as error:
        say(f"palettes are not calibrated: {error.problem}")
        return None


def _write_half(original: LoadedModel, source: str, folder: Path) -> None:
    model = load(source, device="cpu", dtype=torch.float16).model
    export_model(
        folder, model, original.tokenizer, card={**original.facts, "task": original.task_name, "half_precision": "fp16"}
    )


def _in_words(one: ModelMeasurement) -> str:
    header, rows = measurements_table([one])
    return ", ".join(f"{name} {cell}" for name, cell in zip(header[1:], rows[0][1:], strict=True) if cell)


def _write_frontier(found: Shrunk, folder: Path) -> None:
    facts = {
        "recommended": found.best.name,
        "max_loss": found.max_loss,
        "forms": [asdict(one) for one in found.measurements],
        "failed": found.failed,
    }
    (folder / "frontier.json").write_text(json.dumps(as_json(facts), indent=1), encoding="utf-8")
    lines = [markdown_table(*frontier_table(found.measurements, found.max_loss)), *(_failures(found))]
    (folder / "frontier.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    draw_frontier(found.measurements, found.max_loss, folder / "frontier.png")


def _failures(found: Shrunk) -> list[str]:
    return [f"{name} failed: {reason}" for name, reason in found.failed.items()]
