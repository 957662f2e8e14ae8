"""`trimtab export`: write a model in a form that other programs run, check it against the original, measure both.

The folder is written only if the check succeeds; an older export in it stays intact until then. An adapter is merged
into its base first.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.checkpoint.export import FACTS, export_model, kind_of
from trimtab.checkpoint.folder import atomic_folder, folder_beside
from trimtab.checkpoint.model_card import CARD, CardSubject, model_card
from trimtab.commands.held_out import held_out_of
from trimtab.commands.merge import DTYPES, merge
from trimtab.commands.push import HubRepository
from trimtab.commands.target_folder import check_target
from trimtab.compress.gguf_file import TYPES, check_gguf, write_gguf
from trimtab.compress.onnx_file import quantize_onnx, require_onnx, write_onnx
from trimtab.errors import DataError, ModelError, RecipeError
from trimtab.hardware.extras import require_extra
from trimtab.inference.held_out import HeldOut
from trimtab.inference.load import LoadedModel, load
from trimtab.inference.model_measurement import ModelMeasurement, measure
from trimtab.inference.onnx_check import OnnxCheck, compare_onnx, require_close
from trimtab.inference.onnx_generator import load_onnx_model
from trimtab.inference.onnx_model import OnnxModel
from trimtab.log import muted, say
from trimtab.model.hub import is_adapter, quiet_transformers
from trimtab.model.load import is_quantized_model, load_config, resolve_source
from trimtab.tracking.mlflow.registry import local_source

FORMS = ("onnx", "onnx-int8", "gguf", "merged")


@dataclass(frozen=True)
class Exported:
    """A model that was written.

    Args:
        folder: Its folder.
        to: Its form, one of FORMS.
        notes: How it was checked, one sentence each.
        measurements: Measurements of the original and the exported model; empty if there are no rows to measure them
            on.
        address: The address that it was uploaded to; None if it was not.
    """

    folder: Path
    to: str
    notes: tuple[str, ...]
    measurements: tuple[ModelMeasurement, ...]
    address: str | None = None


@dataclass(frozen=True)
class _Whole:
    """A model without an adapter, in fp32; the dtype of its files; the base that an adapter was merged into."""

    loaded: LoadedModel
    dtype: torch.dtype
    base: str | None = None


@dataclass(frozen=True)
class _Written:
    """The files that the writer of a form has written."""

    loaded: LoadedModel
    subject: CardSubject


def export(
    model: str | Path,
    folder: str | Path,
    *,
    to: str,
    data: str | Path | None = None,
    num_rows: int | None = 1000,
    dtype: str | None = None,
    push: str | None = None,
    force: bool = False,
) -> Exported:
    """Write a model in another form.

    Args:
        model: A run, a folder, a `.gguf` file, a Hub name, or a model on a tracking server; an adapter is merged.
        folder: Where to write; an older export in it is replaced.
        to: "onnx" or "onnx-int8" (decoders with a key-value cache, encoder-decoders as two files), "gguf" or "merged"
            (a plain Hugging Face folder).
        data: Labelled rows to measure both models on; by default the held-out rows of the run.
        num_rows: Use at most this number of rows, chosen at random.
        dtype: The dtype of a GGUF file: "f32", "f16" (the default) or "q8_0".
        push: The repository on the Hub to upload the folder to, USER/NAME; a new one is private.
        force: Whether to merge an adapter even if the merged model differs from it, or cannot be compared.

    Raises:
        ModelError: The model cannot be written in this form, or its outputs differ. Nothing is written.
        MissingDependency: A package that the form needs is not installed.
    """
    _check_arguments(to, dtype)
    repository = None if push is None else HubRepository(push)  # before the work: it fails without a connection
    target = Path(folder)
    source = resolve_source(local_source(str(model)), adapters=True)  # a server is queried once
    check_target(source, target)
    original = load(source, device="cpu")
    _refuse_final_forms(original, source)
    held_out = _held_out(original, data, num_rows)
    merged_dtype = "auto" if to == "merged" else "fp32"
    with (
        _whole(source, original, target, dtype=merged_dtype, force=force) as whole,
        atomic_folder(target, marker=FACTS, what="model") as place,
    ):
        with muted():  # for models that are read back from folders with temporary names
            written = _write(to, whole, place, dtype)
        measurements = _measure(source, original, written, held_out, place, to)
        _write_card(written, measurements, place)
    address = None if repository is None else repository.upload(target)
    return Exported(target, to, written.subject.notes, measurements, address)


def _check_arguments(to: str, dtype: str | None) -> None:
    if to not in FORMS:
        raise RecipeError(f"--to {to} is not valid", f"use one of {', '.join(FORMS)}")
    if dtype is not None and to != "gguf":
        raise RecipeError(f"--dtype {dtype} is for GGUF files, not for {to}", "remove it, or use --to gguf")
    if dtype is not None and dtype not in TYPES:
        raise RecipeError(f"--dtype {dtype} is not valid for GGUF", f"use one of {', '.join(TYPES)}")
    if to == "gguf":
        require_extra("gguf", "--to gguf")
    elif to != "merged":
        require_onnx()


def _refuse_final_forms(original: LoadedModel, source: str) -> None:
    if isinstance(original.model, OnnxModel) or (is_quantized_model(original.model) and not is_adapter(source)):
        what = "an ONNX file" if isinstance(original.model, OnnxModel) else "a quantized model"
        raise ModelError(f"{source} is {what}, which cannot be exported", "export the original model")


def _held_out(original: LoadedModel, data: str | Path | None, num_rows: int | None) -> HeldOut | None:
    try:
        return held_out_of(original, data, num_rows)
    except (RecipeError, DataError) as error:
        if data is not None:
            raise
        say(f"the models are not measured: {error.problem}")
        return None


@contextmanager
def _whole(source: str, original: LoadedModel, target: Path, **options: Any) -> Iterator[_Whole]:
    """Yield the model itself or, if it is an adapter, the adapter merged into its base."""
    if not is_adapter(source):
        yield _Whole(original, _stored_dtype(source), _name_of(source, original))
        return
    onto = "dequantized" if _is_on_quantized_base(original) else "original"
    with folder_beside(target, "merged") as temporary:
        folder = temporary / "merged"
        merge(source, folder, onto=onto, device="cpu", **options)
        merged = load(folder, device="cpu")
        yield _Whole(merged, _stored_dtype(str(folder)), original.facts.get("base"))


def _name_of(source: str, original: LoadedModel) -> str | None:
    """Return the name of a model that was not trained here; the recipe of others names their base."""
    if "recipe" in original.facts:
        return None
    return str(Path(source).absolute()) if Path(source).exists() else source


def _stored_dtype(source: str) -> torch.dtype:
    dtype = getattr(load_config(source), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype in DTYPES.values() else torch.float32


def _is_on_quantized_base(original: LoadedModel) -> bool:
    about = original.facts.get("adapter") or {}
    return bool(about.get("nf4") or about.get("fp8"))


def _write_onnx(whole: _Whole, place: Path) -> _Written:
    model, tokenizer = whole.loaded.model, whole.loaded.tokenizer
    files = write_onnx(model, tokenizer, place)
    _save_settings(whole, place)
    exported = load_onnx_model(place)
    check = compare_onnx(exported, model, tokenizer)
    require_close(check)
    return _finish_onnx(whole, exported, files, "ONNX in fp32", check)


def _write_onnx_int8(whole: _Whole, place: Path) -> _Written:
    model, tokenizer = whole.loaded.model, whole.loaded.tokenizer
    _save_settings(whole, place)
    with tempfile.TemporaryDirectory(prefix=".exact-", dir=place) as temporary:
        exact = Path(temporary)
        files = write_onnx(model, tokenizer, exact)
        _save_settings(whole, exact)
        require_close(compare_onnx(load_onnx_model(exact), model, tokenizer))
        for file in files:
            quantize_onnx(exact / file, place / file)
    exported = load_onnx_model(place)
    check = compare_onnx(exported, model, tokenizer)
    if not math.isfinite(check.max_difference):
        raise ModelError("the ONNX file with 8-bit weights gives NaN outputs", "--to onnx")
    return _finish_onnx(whole, exported, files, "ONNX with 8-bit weights and activations", check)


def _save_settings(whole: _Whole, place: Path) -> None:
    model = whole.loaded.model
    model.config.architectures = model.config.architectures or [type(model).__name__]
    with quiet_transformers():
        model.config.save_pretrained(place)
        whole.loaded.tokenizer.save_pretrained(place)
        if model.can_generate():
            model.generation_config.save_pretrained(place)


def _finish_onnx(whole: _Whole, exported: OnnxModel, files: list[str], what: str, check: OnnxCheck) -> _Written:
    note = (
        f"{what}: on random tokens of {check.num_shapes} shapes its logits differ from those of the original by at "
        f"most {check.max_difference:.2g} (the largest logit is {check.max_logit:.3g})."
    )
    file = files[0] if type(exported) is OnnxModel else ""  # a file that generates needs a cache too
    subject = CardSubject(kind_of(whole.loaded.model), "onnx", whole.base, file, (note,))
    return _Written(replace(whole.loaded, model=exported), subject)


def _write_gguf(whole: _Whole, place: Path, dtype: str) -> _Written:
    loaded, path = whole.loaded, place / "model.gguf"
    write_gguf(loaded.model, loaded.tokenizer, path, dtype)
    check = check_gguf(path, loaded.model, loaded.tokenizer, dtype)
    note = (
        f"GGUF in {dtype}: read back, {check.num_tensors} tensors have the values that were written, sample texts have "
        f"the same tokens, and logits differ from those of the original by at most {check.max_difference:.2g} (the "
        f"largest logit is {check.max_logit:.3g})."
    )
    subject = CardSubject(kind_of(loaded.model), "gguf", whole.base, path.name, (note,))
    return _Written(replace(loaded, model=check.model), subject)


def _write_merged(whole: _Whole, place: Path) -> _Written:
    loaded = whole.loaded
    export_model(place, loaded.model.to(whole.dtype), loaded.tokenizer, card=loaded.facts)
    loaded.model.float()
    subject = CardSubject(kind_of(loaded.model), "transformers", whole.base)
    return _Written(load(place, device="cpu"), subject)


def _write(to: str, whole: _Whole, place: Path, dtype: str | None) -> _Written:
    if to == "gguf":
        return _write_gguf(whole, place, dtype or "f16")
    return {"onnx": _write_onnx, "onnx-int8": _write_onnx_int8, "merged": _write_merged}[to](whole, place)


def _measure(
    source: str, original: LoadedModel, written: _Written, held_out: HeldOut | None, place: Path, to: str
) -> tuple[ModelMeasurement, ...]:
    if held_out is None:
        return ()
    # an adapter also has the weights of its base, and a Hub name has no folder
    has_own_weights = Path(source).exists() and not is_adapter(source)
    first = measure("original", original, held_out, folder=source if has_own_weights else None)
    second = measure(to, written.loaded, held_out, folder=place, comparison=held_out.compare_with(original))
    return first, second


def _write_card(written: _Written, measurements: tuple[ModelMeasurement, ...], place: Path) -> None:
    facts: dict[str, Any] = {**written.loaded.facts, "trimtab": __version__}
    notes = [*written.subject.notes]
    if measurements and (of := measurements[1].divergence) is not None:
        notes.append(
            f"On {of.num_rows:,} rows ({of.num_answers:,} answers): mean KL divergence from the original "
            f"{of.kl_mean:.2g}, the same prediction in {of.agreement:.2%}."
        )
        before, after = (one.quality for one in measurements)
        values = [f"{name} {after[name]:.4f} (original {before[name]:.4f})" for name in sorted(after)]
        notes.append(f"Measured: {', '.join(values)}.")
    facts["exported"] = {"form": written.subject.form, "notes": notes}
    (place / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
    card = model_card(facts, replace(written.subject, notes=tuple(notes)))
    (place / CARD).write_text(card, encoding="utf-8")
