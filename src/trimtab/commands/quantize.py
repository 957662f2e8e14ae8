"""`trimtab quantize`: store linear layers in fewer bits, all of them or the mix that meets a bound, and measure it.

The folder is in the format of torchao or bitsandbytes, which transformers loads. To meet a bound on quality or size,
the effect of each single layer on the outputs is measured, and the layers with the smallest effect per saved byte are
quantized first.
"""

import gc
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.checkpoint.export import FACTS, export_model
from trimtab.checkpoint.folder import atomic_folder
from trimtab.checkpoint.model_card import CARD, CardSubject, model_card
from trimtab.commands.held_out import held_out_of
from trimtab.commands.merge import DTYPES, merge_in_place
from trimtab.commands.model_files import open_files, save_settings
from trimtab.commands.quantize_mix import CALIBRATION_ROWS, Bound, MixEvaluator, choose_mix
from trimtab.commands.target_folder import check_target
from trimtab.compress.file_quantization import FileQuantization
from trimtab.compress.quantized_layers import QuantizedLayers
from trimtab.compress.weight_files import WeightShards
from trimtab.compress.weight_formats import FORMATS, WeightFormat
from trimtab.errors import ModelError, RecipeError, as_argument
from trimtab.hardware.inventory import find_device
from trimtab.inference.adapted import read_adapter_source, refuse_unmergeable
from trimtab.inference.held_out import HeldOut, tokenized
from trimtab.inference.load import LoadedModel, load, task_name_of
from trimtab.inference.model_measurement import ModelMeasurement, measure
from trimtab.inference.quality_loss import quality_loss
from trimtab.log import muted, say
from trimtab.model.adapters import adapter_of
from trimtab.model.hub import is_adapter, quiet_transformers
from trimtab.model.load import is_quantized_config, load_config, load_tokenizer, resolve_source
from trimtab.tracking.mlflow.registry import local_source

_ADAPTER_FACTS = ("base", "base_revision", "kind", "head", "adapter")  # facts that do not apply to a merged model


@dataclass(frozen=True)
class Quantized:
    """A quantized model that was written.

    Args:
        folder: Its folder.
        formats: Format of each quantized layer.
        num_left: Number of linear layers of the base that are not quantized.
        measurements: Measurements of the original model, then of the quantized one, loaded from its folder; empty
            without rows.
    """

    folder: Path
    formats: dict[str, str]
    num_left: int
    measurements: list[ModelMeasurement]


def quantize(
    source: str | Path,
    folder: str | Path,
    to: Sequence[str] = ("int8",),
    *,
    data: Any = None,
    num_rows: int = 512,
    bound: Bound | None = None,
    dtype: str = "auto",
    device: str | torch.device | None = None,
) -> Quantized:
    """Quantize a model and write it as a Hugging Face folder that `from_pretrained` loads.

    Args:
        source: A run, a folder, a Hub name or a model on a tracking server. A LoRA adapter is merged first.
        folder: Where to write: a new folder, or one that trimtab wrote, which is replaced.
        to: Formats, from `FORMATS`. Several torchao formats are mixed if there is a bound.
        data: Rows to evaluate the models on: file, folder, glob or Hub name, or rows; by default the held-out rows of
            the run. Up to 128 further rows, at most a quarter of all, are used for calibration.
        num_rows: Number of rows to evaluate on, chosen at random. 0 evaluates nothing: weights are read from the files
            of the model, quantized and written one at a time, for a model that is larger than memory. This works for
            one format without a bound, and for a folder of safetensors files, not for adapters, GGUF files and Hub
            names; nf4 is not calibrated. One weight, the temporaries of its rounding, and 1 GiB of output are in
            memory.
        bound: The bound that the result must meet; None quantizes every layer.
        dtype: dtype of the weights that are not quantized: "auto" (as in the original), "fp32", "bf16" or "fp16".
        device: The device to compute on; None chooses one.

    Raises:
        ModelError: If the model or this machine does not support the format, or the bound cannot be met.
    """
    target, where = Path(folder), find_device(device)
    formats = _known_formats(to, bound)
    for one in formats:
        one.check_device(where)
    origin = _check_places(source, target)
    if num_rows == 0:
        _check_no_rows(data, bound)
        return _quantize_files(origin, target, formats[0], dtype, where)
    loaded = _load_original(str(source), origin, where)
    rest = _rest_dtype(dtype, loaded.model.dtype, formats)
    for one in formats:
        one.check(where, rest)
    held_out, calibration = _rows(loaded, data, num_rows)
    comparison = held_out.compare_with(loaded)
    is_whole = Path(origin).exists() and not is_adapter(origin)
    original = measure("original", loaded, held_out, folder=origin if is_whole else None)
    loaded.model.to(rest)
    names, num_left = _quantize_layers(MixEvaluator(loaded, held_out, calibration, original.quality), formats, bound)
    with atomic_folder(target, marker=FACTS, what="model") as place:
        facts = {**loaded.facts, "task": loaded.task_name, "quantized": _about(names, num_left, rest)}
        export_model(place, loaded.model, loaded.tokenizer, card=facts)
        del loaded
        gc.collect()  # the original must be freed before the result is loaded
        with muted():  # the folder has a temporary name
            again = load(place, device=where)
        measurements = [original, measure(_words(names), again, held_out, folder=place, comparison=comparison)]
        _check_bound(bound, measurements, target)
    return Quantized(target, names, num_left, measurements)


def _check_no_rows(data: Any, bound: Bound | None) -> None:
    if bound is not None:
        raise RecipeError(
            "--rows 0 evaluates nothing, but --max-loss and --size need an evaluation", "--rows 512, or no bound"
        )
    if data is not None:
        raise RecipeError("--rows 0 evaluates nothing, so --data has no effect", "--rows 512, or leave out --data")


def _quantize_files(source: str, target: Path, format: WeightFormat, dtype: str, device: torch.device) -> Quantized:
    """Quantize a model weight by weight, without loading it."""
    if is_adapter(source):
        raise ModelError(
            f"{source} is an adapter", f"trimtab merge {as_argument(source)} MERGED; trimtab quantize MERGED --rows 0"
        )
    _refuse_quantized(source, source)
    rest = _rest_dtype(dtype, _stored_dtype(source), [format])
    format.check(device, rest)
    files = open_files(source, rest)
    if files is None:
        raise ModelError(
            f"{source} has no safetensors files whose weights can be read one at a time",
            "pass a folder with such files (hf download NAME --local-dir DIR), or load the model: --rows 512",
        )
    work, tokenizer = FileQuantization(files.paths, files.skeleton, format, device), load_tokenizer(source)
    names = dict.fromkeys(work.names, format.name)
    with atomic_folder(target, marker=FACTS, what="model") as place, quiet_transformers():
        work.write_weights(WeightShards(place))
        facts = save_settings(source, work.describe(), tokenizer, place)
        facts |= {"task": facts.get("task", task_name_of(files.kind, files.skeleton.config, tokenizer))}
        facts |= {"trimtab": __version__, "quantized": _about(names, work.num_left, rest)}
        (place / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
        (place / CARD).write_text(model_card(facts, CardSubject(files.kind)), encoding="utf-8")
    return Quantized(target, names, work.num_left, [])


def _quantize_layers(
    evaluator: MixEvaluator, formats: Sequence[WeightFormat], bound: Bound | None
) -> tuple[dict[str, str], int]:
    """Choose and quantize layers; return the format of each, and the number of layers without one."""
    layers = QuantizedLayers(evaluator.loaded.model)
    mix = choose_mix(layers, formats, evaluator, bound)
    layers.finish(mix)
    return {layer: one.name for layer, one in mix.items()}, len(layers.names) - len(mix)


def _check_bound(bound: Bound | None, measurements: Sequence[ModelMeasurement], target: Path) -> None:
    """Check the bound on the loaded model; it was chosen in memory, where file sizes are estimates."""
    if bound is None:
        return
    before, after = measurements
    lost, kept = quality_loss(before.quality, after.quality), f"so {target} was not written"
    if bound.max_loss is not None and not lost <= bound.max_loss:
        raise ModelError(
            f"loaded from its files, the model loses {lost:.2%}, more than {bound.max_loss:.2%}, {kept}",
            "try a smaller --max-loss",
        )
    if bound.max_bytes is not None and (after.disk_bytes or 0) > bound.max_bytes:
        raise ModelError(
            f"the files have {after.disk_bytes:,} bytes, more than {bound.max_bytes:,}, {kept}", "try a smaller --size"
        )


def _known_formats(names: Sequence[str], bound: Bound | None) -> list[WeightFormat]:
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise RecipeError(f"--to {', '.join(unknown) or 'nothing'} is not valid", f"use one of {', '.join(FORMATS)}")
    formats = [FORMATS[name] for name in dict.fromkeys(names)]
    if len(formats) > 1 and bound is None:
        raise RecipeError(f"--to {','.join(names)}: several formats need a bound", "add --max-loss or --size")
    if len(formats) > 1 and any(one.package != "torchao" for one in formats):
        raise RecipeError(f"--to {','.join(names)}: transformers can only mix torchao formats", "pass one format")
    return formats


def _check_places(source: str | Path, target: Path) -> str:
    """Check that the result may be written, and return the resolved source."""
    origin = resolve_source(local_source(str(source)), adapters=True)
    check_target(origin, target)
    return origin


def _load_original(source: str, origin: str, device: torch.device) -> LoadedModel:
    """Load the model to quantize in the dtype of its files; an adapter is merged into its base."""
    if is_adapter(origin):
        refuse_unmergeable(origin)
        adapter = read_adapter_source(origin)
        if adapter.quantization is not None:
            raise ModelError(
                f"{source} is an adapter that was trained on a base in {adapter.quantization.name}",
                f"trimtab merge {as_argument(source)} MERGED --onto dequantized; trimtab quantize MERGED FOLDER",
            )
        loaded = load(source, device=device, dtype=torch.float32)
        attached = adapter_of(loaded.model)
        assert attached is not None
        merge_in_place(loaded.model, attached, _stored_dtype(adapter.base))
        facts = {key: value for key, value in loaded.facts.items() if key not in _ADAPTER_FACTS}
        return LoadedModel(loaded.model, loaded.tokenizer, loaded.task_name, facts)
    _refuse_quantized(source, origin)
    return load(source, device=device, dtype=_stored_dtype(origin))


def _refuse_quantized(source: str, origin: str) -> None:
    if not origin.endswith(".gguf") and is_quantized_config(load_config(origin)):
        raise ModelError(f"{source} is already quantized", "pass the original model")


def _stored_dtype(source: str) -> torch.dtype:
    own = getattr(load_config(source), "dtype", None)
    return own if isinstance(own, torch.dtype) and own in DTYPES.values() else torch.float32


def _rest_dtype(asked: str, own: torch.dtype, formats: Sequence[WeightFormat]) -> torch.dtype:
    if asked != "auto" and asked not in DTYPES:
        raise RecipeError(f"--dtype {asked} is not valid", f"use one of auto, {', '.join(DTYPES)}")
    if asked == "auto":
        return torch.bfloat16 if any(one.needs_bf16 for one in formats) else own
    return DTYPES[asked]


def _rows(loaded: LoadedModel, data: Any, num_rows: int) -> tuple[HeldOut, HeldOut]:
    """Return rows to evaluate the models on, and others to calibrate on, at most a quarter of all."""
    if num_rows < 1:
        raise RecipeError(f"--rows {num_rows} is not valid", "--rows 0 or more")
    found = held_out_of(loaded, data, num_rows + CALIBRATION_ROWS)
    num_calibration = min(CALIBRATION_ROWS, len(found.rows) // 4)
    if num_calibration == 0:
        return found, found
    order = torch.randperm(len(found.rows), generator=torch.Generator().manual_seed(0)).tolist()
    parts = sorted(order[num_calibration:]), sorted(order[:num_calibration])
    held_out, calibration = (tokenized(loaded, found.task, found.rows.select(part)) for part in parts)
    return held_out, calibration


def _about(formats: dict[str, str], num_left: int, rest_dtype: torch.dtype) -> dict[str, Any]:
    """Return the facts about the quantization for trimtab.json, and log them."""
    rest = str(rest_dtype).removeprefix("torch.")
    packages = sorted({FORMATS[name].package for name in formats.values()})
    say(f"quantized: {_words(formats)}; not quantized: {num_left} layers, embeddings, norms and heads, in {rest}")
    return {
        "formats": dict(Counter(formats.values())),
        "packages": {name: version(name) for name in packages},
        "layers": formats,
        "num_layers_left": num_left,
        "dtype_of_the_rest": rest,
    }


def _words(formats: dict[str, str]) -> str:
    """Return a text such as "int8" or "20 int8, 16 int4"."""
    counts = Counter(formats.values())
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{count} {name}" for name, count in counts.items())
