"""`trimtab cluster`: cluster the weights of a model to palettes, write them, and compare both models."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.checkpoint.export import FACTS, kind_of, read_facts, weight_checksums
from trimtab.checkpoint.folder import atomic_folder
from trimtab.checkpoint.model_card import CARD, CardSubject, model_card
from trimtab.commands.held_out import held_out_of
from trimtab.commands.model_files import open_files, save_settings
from trimtab.commands.target_folder import check_target
from trimtab.compress.block_clustering import Weights, cluster_files, cluster_model
from trimtab.compress.calibration import Batch
from trimtab.compress.clustered_file import ClusteredWriter, is_clustered
from trimtab.compress.clustered_model import clustered_weights
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.clustering import ClusterSettings, storable
from trimtab.compress.palette_training import train_palettes, use_clustered
from trimtab.errors import ModelError, RecipeError, as_argument
from trimtab.hardware.inventory import find_device
from trimtab.inference.adapted import refuse_unmergeable
from trimtab.inference.held_out import HeldOut, read_held_out
from trimtab.inference.load import LoadedModel, load
from trimtab.inference.model_measurement import ModelMeasurement, measure, weight_bytes
from trimtab.log import say
from trimtab.model.hub import is_adapter, quiet_transformers
from trimtab.model.load import is_quantized_config, load_config, load_tokenizer, resolve_source
from trimtab.model.losses import build_loss
from trimtab.tracking.mlflow.registry import local_source

_BATCH_SIZE = 8  # small, because the squared gradient is that of the mean over a batch


@dataclass(frozen=True)
class Clustered:
    """A clustered model that was written.

    Args:
        folder: Its folder.
        bits: Mean size of a clustered weight in bits, including its share of the palettes.
        measurements: The original and the clustered model; empty without rows to evaluate them on.
    """

    folder: Path
    bits: float
    measurements: list[ModelMeasurement]


def cluster(
    model: str | Path,
    folder: str | Path,
    settings: ClusterSettings,
    *,
    data: Any = None,
    num_rows: int | None = None,
    calibration: Any = None,
    calibration_rows: int = 256,
    train_steps: int = 0,
    device: str | torch.device | None = None,
) -> Clustered:
    """Cluster the weights of a model and write a folder that `trimtab.load` reads.

    Args:
        model: A run, a folder, a Hub name or a model on a tracking server.
        folder: Where to write: a new or empty folder, or a clustered model, which is replaced.
        settings: How to cluster.
        data: Labelled rows to evaluate the original and the result on; by default the held-out rows of the run. A model
            without a run is written without a comparison, weight by weight.
        num_rows: Number of rows to evaluate on, chosen at random; None uses all. 0 evaluates nothing: weights are read
            from the files of the model, clustered and written one at a time, for a model that is larger than memory.
            This works for a folder of safetensors files, without calibration.
        calibration: Rows from which importance and compensation are computed; not those of `data`.
        calibration_rows: Number of calibration rows to use.
        train_steps: Steps to train the palettes, on the calibration rows, to reproduce the outputs of the original;
            indices do not change.
        device: The device to compute on; None chooses one.

    Raises:
        ModelError: `model` is an adapter, is already clustered, or cannot be loaded.
    """
    source = resolve_source(local_source(str(model)), adapters=True)
    check_target(source, Path(folder))
    _check(source, settings, calibration, train_steps)
    if num_rows == 0:
        _check_no_rows(data, calibration)
    streamed = open_files(source) if calibration is None else None
    if num_rows == 0 and streamed is None:
        raise ModelError(
            f"{source} has no safetensors files whose weights can be read one at a time",
            "pass a folder with such files (hf download NAME --local-dir DIR), or load the model: remove --rows 0",
        )
    compares = num_rows != 0 and (data is not None or _knows_rows(source))
    if num_rows and not compares:
        raise RecipeError(f"--rows {num_rows} has no effect: {source} has no run with rows", "--data FILE")
    original = None if streamed is not None and not compares else load(model, device=find_device(device))
    held_out = held_out_of(original, data, num_rows) if compares and original is not None else None
    evaluator = _Evaluator(original, held_out)
    if streamed is not None:
        bare, tokenizer = streamed.skeleton, load_tokenizer(source)
        weights = cluster_files(streamed.paths, bare, settings)
    else:
        assert original is not None
        rows = _Calibration(original, calibration, calibration_rows)
        weights = cluster_model(original.model, settings, rows.batches, rows.loss_of)
        if train_steps:
            teacher = load(model, device=original.device)
            weights = rows.trained(weights, teacher.model, train_steps, settings)
        bare, tokenizer = original.model, original.tokenizer
    bits = _write(Path(folder), weights, _Origin(source, bare, tokenizer), settings)
    return Clustered(Path(folder), bits, evaluator.compare(Path(folder), source, device))


@dataclass(frozen=True)
class _Origin:
    """The model that is clustered; `model` can be a skeleton on the meta device."""

    source: str
    model: Any
    tokenizer: Any


class _Evaluator:
    """Measure the original before it is clustered, and the result afterwards."""

    def __init__(self, original: LoadedModel | None, held_out: HeldOut | None) -> None:
        self._held_out = held_out
        self._measurements: list[ModelMeasurement] = []
        if original is not None and held_out is not None:
            self._comparison = held_out.compare_with(original, len(held_out))
            self._measurements.append(measure("original", original, held_out))

    def compare(self, folder: Path, source: str, device: str | torch.device | None) -> list[ModelMeasurement]:
        """Return the measurements of the original and of the clustered model, decoded once and on use."""
        if self._held_out is None:
            return []
        where = find_device(device)
        if Path(source).is_dir():
            self._measurements[0] = dataclasses.replace(self._measurements[0], disk_bytes=weight_bytes(source))
        for name, decode in (("clustered", "once"), ("clustered, decoded on use", "on-use")):
            loaded = load(folder, device=where, decode=decode)
            options: dict[str, Any] = {"folder": folder, "comparison": self._comparison}
            self._measurements.append(measure(name, loaded, self._held_out, **options))
        return self._measurements


def _check(source: str, settings: ClusterSettings, calibration: str | Path | None, train_steps: int) -> None:
    if is_adapter(source):
        refuse_unmergeable(source)
        raise ModelError(
            f"{source} is an adapter: only whole models can be clustered", f"trimtab merge {as_argument(source)} DIR"
        )
    if Path(source).is_dir() and is_clustered(source):
        raise ModelError(f"{source} is already clustered", "pass the original model")
    if not source.endswith(".gguf") and is_quantized_config(load_config(source)):
        raise ModelError(f"{source} is already quantized", "pass the original model")
    if train_steps < 0:
        raise RecipeError(f"--train-steps {train_steps} is not valid", "--train-steps 0 or more")
    if settings.needs_calibration and calibration is None:
        what = "--compensate" if settings.compensate else f"--importance {settings.importance}"
        raise RecipeError(f"{what} needs data", "--calibration FILE, such as the training rows")
    if train_steps and calibration is None:
        raise RecipeError("--train-steps needs data", "--calibration FILE, such as the training rows")


def _check_no_rows(data: Any, calibration: Any) -> None:
    if data is not None:
        raise RecipeError("--rows 0 evaluates nothing, so --data has no effect", "leave out --rows 0, or --data")
    if calibration is not None:
        raise RecipeError(
            "--rows 0 reads one weight at a time, but --calibration needs the whole model in memory",
            "leave out --rows 0, or --calibration",
        )


def _knows_rows(source: str) -> bool:
    return Path(source).is_dir() and read_facts(source).get("recipe") is not None


class _Calibration:
    """Calibration rows of a model; empty if there is no file with them."""

    def __init__(self, loaded: LoadedModel, source: Any, num_rows: int) -> None:
        self._model = loaded.model
        self._rows = None if source is None else read_held_out(loaded, source, num_rows=num_rows)
        self.batches: list[Batch] = []
        if self._rows is not None:
            self._loss = build_loss(self._rows.task.loss_kind, shifts_labels=self._rows.task.shifts_labels)
            self.batches = [batch for _, batch in self._rows.batches(_BATCH_SIZE)]
            say(f"calibrating on {len(self._rows)} rows of {self._rows.rows.origin}")

    def loss_of(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return the loss of the task."""
        return self._loss(model, batch).value

    def trained(self, weights: Weights, teacher: Any, num_steps: int, settings: ClusterSettings) -> Weights:
        """Yield weights with trained palettes."""
        assert self._rows is not None
        every = dict(weights)
        clustered = {name: weight for name, weight in every.items() if isinstance(weight, ClusteredWeight)}
        use_clustered(self._model, clustered)
        task = self._rows.task
        options: dict[str, Any] = {"kind": task.loss_kind, "num_steps": num_steps}
        train_palettes(self._model, teacher, self._rows.tokens, task.collate, **options)
        for name, now in clustered_weights(self._model).items():
            every[name] = clustered[name].with_palettes(storable(now.palettes_GK, settings.palette_dtype))
        yield from ((name, weight) for name, weight in every.items())


def _write(folder: Path, weights: Weights, origin: _Origin, settings: ClusterSettings) -> float:
    """Write a clustered model; return the bits of a clustered weight."""
    num_entries = num_bytes = 0
    with atomic_folder(folder, marker=FACTS, what="model") as place, quiet_transformers():
        writer = ClusteredWriter(place)
        for name, weight in weights:
            writer.add(name, weight)
            if isinstance(weight, ClusteredWeight):
                num_entries += weight.shape[0] * weight.shape[1]
                num_bytes += weight.num_bytes
        writer.flush()
        if not num_entries:
            raise ModelError(f"{origin.source} has no weight to cluster", "choose a model with linear modules")
        about = {name: value for name, value in vars(settings).items() if not isinstance(value, torch.dtype)}
        about |= {"files": weight_checksums(place), "bits_per_weight": 8 * num_bytes / num_entries}
        facts = {
            "trimtab": __version__,
            **save_settings(origin.source, origin.model.config, origin.tokenizer, place),
            "clustered": about,
        }
        (place / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
        (place / CARD).write_text(model_card(facts, _card_subject(origin, about)), encoding="utf-8")
    return 8 * num_bytes / num_entries


def _card_subject(origin: _Origin, about: dict[str, Any]) -> CardSubject:
    note = (
        f"Weights are indices of {about['bits']} bits into palettes of values, {about['bits_per_weight']:.2f} bits a "
        "weight with palettes and scales. `from_pretrained` does not read this format."
    )
    return CardSubject(kind_of(origin.model), "clustered", notes=(note,))
