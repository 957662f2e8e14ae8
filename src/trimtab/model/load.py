"""From a name, a folder, a GGUF file or a config to a model with the head that a task needs.

What goes wrong in the first hour (no pad token, a head that is new or of another size, a tokenizer with more tokens
than the model) is mended here, and said in one line.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from contextlib import nullcontext
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from trimtab.data.tasks.decoder_start import generation_start, starts_with_last_token
from trimtab.errors import ModelError, RecipeError
from trimtab.log import say
from trimtab.model.hub import Source, as_source, explained, quiet_transformers, resolve_source
from trimtab.model.nf4 import (
    LoadedForm,
    Nf4,
    build_quantized,
    device_for,
    loading_arguments,
    quantizable,
    settle,
    skeleton,
    warning_of_little_quantized,
)
from trimtab.model.tokenizer import load_tokenizer, train_tokenizer

__all__ = [
    "check_config",
    "grown_rows",
    "load_config",
    "load_model",
    "load_skeleton",
    "load_tokenizer",
    "max_positions",
    "newly_initialised",
    "resolve_source",
    "train_tokenizer",
]

_AUTO_CLASSES = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
}
_LOAD_FAILURES = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, ArithmeticError),
    *(SafetensorError, UnpicklingError, EOFError),
)
# Their positions start behind the id of the pad token, so that many rows of the table are never used.
_POSITIONS_AFTER_PAD = {
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
# Settings that any model may have, although its config class does not list them.
_FOR_ANY_MODEL = {"decoder_start_token_id", "forced_eos_token_id", "tie_word_embeddings", "is_decoder"} | {
    f"{role}_token_id" for role in ("pad", "bos", "eos")
}
_COMPUTED_OR_TAKEN = re.compile(r'\bself\.(_?[a-z]\w*) = |\bkwargs\.(?:get|pop)\("(\w+)"')  # in a config class
_READ_BY_A_MODEL = re.compile(r'\bconfig\.([a-z]\w*)|attr\((?:self\.)?config, "(\w+)"')
# In every config.json, and no settings: where it came from.
_OF_THE_FILE = ("_name_or_path", "transformers_version")
_NEW_PARAMETERS = "_trimtab_new_parameters"
_DRAWN_ON_DEVICE = 500_000_000  # parameters from which on drawing them on the host takes longer than all the rest
_GROWN_ROWS = "_trimtab_grown_rows"


def load_model(
    source: str | Mapping[str, Any],
    kind: str,
    head: Mapping[str, Any],
    tokenizer: Any,
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    nf4: Nf4 | None = None,
    device: torch.device | str | None = None,
) -> torch.nn.Module:
    """Load a model for training, in eval mode, and say in one line what was loaded.

    Args:
        source: A run, a folder, a `.gguf` file or a hub name; or a config (with `model_type`) to start from scratch.
        kind: "sequence-classification", "causal-lm", "seq2seq-lm" or "masked-lm".
        head: Settings of the head: num_labels, id2label, label2id, problem_type. Empty keeps what the model has.
        tokenizer: The tokenizer that will feed it; the model is fitted to it.
        trust_remote_code: Whether Python code that lies beside the model may run.
        dtype: The format of its weights; half precision for a base that is frozen.
        nf4: Quantizes the linear modules of the base, which is frozen then; None does not.
        device: Where the model is put; None is the CPU, or, with nf4, the GPU if there is one.

    Raises:
        ModelError: If there is no such model, or it has no head of that kind.
        RecipeError: If nf4 is wanted and bitsandbytes is not installed.
    """
    import transformers

    if kind not in _AUTO_CLASSES:
        raise ModelError(f"a model of kind {kind!r} is not known", f"use one of {', '.join(_AUTO_CLASSES)}")
    auto_class = getattr(transformers, _AUTO_CLASSES[kind])
    form = LoadedForm(dtype, nf4, device_for(device, nf4))
    with quiet_transformers():
        model: Any
        if isinstance(source, str):
            name = source
            model, notes = _pretrained(source, auto_class, kind, head, trust_remote_code, form)
        else:
            name = f"a new {source.get('model_type', 'model')}"
            model, notes = _from_scratch(source, auto_class, kind, head, tokenizer, form), ["weights are random"]
        notes += _fit_to_tokenizer(model, tokenizer)
        model.to(form.device)
    say("; ".join([f"{name}: {type(model).__name__}, {form.describe(model)}", *notes]))
    warning = None if form.nf4 is None else warning_of_little_quantized(model)
    if warning is not None:
        say(warning)
    loaded: torch.nn.Module = model.eval()
    return loaded


def load_skeleton(
    source: str | Mapping[str, Any],
    kind: str,
    head: Mapping[str, Any],
    tokenizer: Any,
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.nn.Module:
    """The model that `load_model` would load, without its weights: what reads only its config and its shape."""
    import transformers

    auto_class = getattr(transformers, _AUTO_CLASSES[kind])
    with quiet_transformers():
        if isinstance(source, str):
            config = _read_config(source, as_source(source), trust_remote_code)
        else:
            config = _config_of(dict(source), tokenizer, "model.config")
        _set_head(config, head)
        try:
            model: torch.nn.Module = skeleton(auto_class, config, dtype)
        except _LOAD_FAILURES as error:
            name = source if isinstance(source, str) else "model.config"
            raise _no_head(name, config, kind, error) from error
        if tokenizer is not None:
            _fit_to_tokenizer(model, tokenizer)
    return model


def load_config(source: str, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of a run, a folder, a `.gguf` file or a hub name."""
    with quiet_transformers():
        return _read_config(source, as_source(source), trust_remote_code)


def check_config(settings: Mapping[str, Any]) -> None:
    """See that a model can be made from a config; no weights are made.

    Raises:
        RecipeError: If it has a setting that there is not, or a value that is not valid.
    """
    with quiet_transformers():
        _config_of(dict(settings), None, "model.config")


def newly_initialised(model: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters that `load_model` did not find in the checkpoint and that are therefore random.

    Of a model from a config, all of which is random, they are those of a task head.
    """
    return getattr(model, _NEW_PARAMETERS, frozenset())


def grown_rows(model: torch.nn.Module) -> int:
    """How many rows `load_model` added to the embeddings for the tokenizer."""
    return getattr(model, _GROWN_ROWS, 0)


def max_positions(model_or_config: Any) -> int | None:
    """The longest sequence, in tokens, that a model can take; None where its positions have no end."""
    config = getattr(model_or_config, "config", model_or_config)
    parts = [getattr(config, name, None) for name in ("encoder", "decoder")]
    if all(hasattr(part, "model_type") for part in parts):
        limits = [limit for limit in map(max_positions, parts) if limit is not None]
        return min(limits, default=None)
    config = getattr(config, "text_config", None) or config
    of_both = [getattr(config, f"max_{part}_position_embeddings", None) for part in ("encoder", "decoder")]
    found = [limit for limit in [*of_both, getattr(config, "max_position_embeddings", None)] if limit]
    limit = min(found, default=0)
    if config.model_type in _POSITIONS_AFTER_PAD and config.pad_token_id is not None:
        limit -= config.pad_token_id + 1
    return limit if limit > 0 else None


def _read_config(source: str, place: Source, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place.name, trust_remote_code=trust_remote_code, **place.arguments)
    except _LOAD_FAILURES as error:
        raise explained(source, error) from error


def _pretrained(
    source: str, auto_class: Any, kind: str, head: Mapping[str, Any], trust_remote_code: bool, form: LoadedForm
) -> tuple[Any, list[str]]:
    place = as_source(source)
    config = _read_config(source, place, trust_remote_code)
    if getattr(config, "quantization_config", None) and place.gguf_file is None:
        raise ModelError(f"{source} is quantized, and quantized weights cannot be trained", "name the original model")
    before = dict(getattr(config, "id2label", None) or {})
    _set_head(config, head)
    extra: dict[str, Any] = {}
    try:
        if form.nf4 is not None and place.gguf_file is None:
            extra = loading_arguments(auto_class, config, form.nf4, form.device)
        model, info = auto_class.from_pretrained(
            place.name,
            config=config,
            dtype=form.dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # of the head only; any other mismatch is refused below
            **place.arguments,
            **extra,
        )
    except _LOAD_FAILURES as error:
        raise _no_head(source, config, kind, error) from error
    notes = _check_weights(source, model, info)
    if not notes and kind == "sequence-classification" and head:
        notes = _kept_head(before, dict(model.config.id2label))
    if place.gguf_file is not None:
        model = _plain_copy(model, auto_class, form.dtype)
        model.config.name_or_path = source  # so that an adapter names the file as its base
    if form.nf4 is not None:
        settle(model.to(form.device), form.nf4, quantizable(model))
    return model, notes


def _set_head(config: Any, head: Mapping[str, Any]) -> None:
    if "num_labels" in head:
        config.num_labels = head["num_labels"]  # first: it resets the names where the number changes
    for key, value in head.items():
        if key == "id2label":
            value = {int(index): name for index, name in value.items()}
        if key != "num_labels":
            setattr(config, key, value)


def _no_head(source: str, config: Any, kind: str, error: Exception) -> Exception:
    if "Unrecognized configuration class" in str(error):
        return ModelError(
            f"{source} is a {config.model_type}, which has no {kind} head in transformers",
            "choose a model for this task, or set `task` to what the model can do",
        )
    return explained(source, error)


def _check_weights(source: str, model: Any, info: Mapping[str, Any]) -> list[str]:
    """Refuse a checkpoint that does not belong to its config; say which part of the model is new."""
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    in_base = {name for name, _ in model.named_parameters() if name.startswith(prefix)}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    missing, mismatched = set(info["missing_keys"]), sorted(info["mismatched_keys"], key=lambda found: str(found[0]))
    for name, found, wanted in mismatched:
        if name in in_base:
            raise ModelError(
                f"{source}: {name} is {list(found)} in the file but {list(wanted)} by its config.json",
                "its files do not belong together: fetch or write them again",
            )
    num_missing = sum(sizes.get(name, 0) for name in missing & in_base)
    if 2 * num_missing > sum(sizes[name] for name in in_base):
        raise ModelError(
            f"{source}: most weights of {type(model).__name__} are not in its files",
            "its files do not belong together: check model_type in its config.json",
        )
    new = missing | {name for name, *_ in mismatched}
    setattr(model, _NEW_PARAMETERS, frozenset(new & set(sizes)))
    notes = []
    if mismatched:
        old_size, new_size = mismatched[0][1][0], mismatched[0][2][0]
        notes.append(f"its head for {old_size} labels is replaced by a new one for {new_size}")
    if missing:
        notes.append(f"newly initialised: {_modules_of(missing)}")
    return notes


def _modules_of(names: set[str]) -> str:
    modules = sorted({name.rpartition(".")[0] or name for name in names})
    return ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")


def _kept_head(before: dict[int, str], now: dict[int, str]) -> list[str]:
    if before == now or all(name == f"LABEL_{index}" for index, name in before.items()):
        return ["its head is kept"]
    old, new = (", ".join(map(str, list(names.values())[:4])) for names in (before, now))
    return [f"its head is kept, but its labels were {old} and are now {new}"]


def _plain_copy(model: Any, auto_class: Any, dtype: torch.dtype) -> Any:
    """A model read from GGUF counts as quantized and cannot be saved; a fresh one with its weights can."""
    config = model.config
    del config.quantization_config
    fresh = auto_class.from_config(config, dtype=dtype)
    fresh.load_state_dict(model.state_dict())
    setattr(fresh, _NEW_PARAMETERS, newly_initialised(model))
    return fresh


def _from_scratch(
    settings: Mapping[str, Any], auto_class: Any, kind: str, head: Mapping[str, Any], tokenizer: Any, form: LoadedForm
) -> Any:
    config = _config_of(dict(settings), tokenizer, "model.config")
    _set_head(config, head)
    try:
        if form.nf4 is not None:
            model = build_quantized(auto_class, config, form.dtype, form.nf4, form.device)
        else:
            with _place_of_birth(auto_class, config, form):
                model = auto_class.from_config(config, dtype=form.dtype)
    except _LOAD_FAILURES as error:
        if "Unrecognized configuration class" in str(error):
            raise _no_head("model.config", config, kind, error) from error
        raise RecipeError(f"model.config cannot be built: {error}", "mend the value that it names") from error
    if kind == "sequence-classification":
        base = {id(parameter) for parameter in model.base_model.parameters()}
        head_names = [name for name, parameter in model.named_parameters() if id(parameter) not in base]
        setattr(model, _NEW_PARAMETERS, frozenset(head_names))  # all is random, but a random head cannot stay frozen
    return model


def _place_of_birth(auto_class: Any, config: Any, form: LoadedForm) -> Any:
    """Where random weights are drawn: on the host, so that they are the same everywhere, unless that takes minutes."""
    if form.device.type == "cpu":
        return nullcontext()
    size = sum(parameter.numel() for parameter in skeleton(auto_class, config, form.dtype).parameters())
    return form.device if size >= _DRAWN_ON_DEVICE else nullcontext()


def _config_of(settings: dict[str, Any], tokenizer: Any, key: str) -> Any:
    """A config from plain settings, with the sizes and ids of the tokenizer wherever the settings leave them open."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = settings.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        near = get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3)
        cure = f"did you mean {' or '.join(near)}?" if near else "for example bert, gpt2, llama, t5 or marian"
        raise RecipeError(f"{key}.model_type is {model_type!r}, which transformers does not know", cure)
    config_class: Any = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)}
    names = config_class.attribute_map  # other names of the fields, in both directions
    known = fields | set(names) | set(names.values()) | _FOR_ANY_MODEL
    settings = {name: value for name, value in settings.items() if name not in _OF_THE_FILE}
    for name in settings:
        if name not in known and name not in _undeclared_settings(config_class):
            near = get_close_matches(name, known | _undeclared_settings(config_class), n=3)
            cure = f"did you mean {' or '.join(near)}?" if near else f"{model_type} knows {', '.join(sorted(known))}"
            raise RecipeError(f"{key}.{name}: {model_type} has no such setting", cure)
    for part in ("encoder", "decoder"):
        if isinstance(settings.get(part), Mapping):
            inner = dict(settings[part])
            if part == "decoder" and model_type.endswith("encoder-decoder"):  # made of any two models
                inner |= {"is_decoder": True, "add_cross_attention": True}
            settings[part] = _config_of(inner, tokenizer, f"{key}.{part}").to_dict()
    for name, value in _of_tokenizer(tokenizer, model_type).items():
        if name in known and value is not None:
            settings.setdefault(name, value)
    try:
        return config_class(**settings)
    except Exception as error:  # of many kinds, and all of them about a value of the user
        problem = str(error).strip().splitlines()[-1].strip()
        raise RecipeError(f"{key} is not valid: {problem}", "mend the value that it names") from error


@cache
def _undeclared_settings(config_class: type) -> frozenset[str]:
    """Settings that a model's code uses although its config class does not declare them.

    `position_buckets` of DeBERTa-v2 is read by the model alone, `intermediate_size` of FalconMamba is computed where it
    is not given: the source of both files is searched for such names.
    """
    from transformers import PreTrainedConfig

    folder = Path(inspect.getfile(config_class)).parent
    members = inspect.getmembers(config_class)
    names = {name for name, member in members if isinstance(member, property) and member.fset is not None}
    for files, pattern in (("configuration_*.py", _COMPUTED_OR_TAKEN), ("modeling_*.py", _READ_BY_A_MODEL)):
        for file in folder.glob(files):
            names.update("".join(found) for found in pattern.findall(file.read_text(encoding="utf-8")))
    return frozenset(name for name in names if not callable(getattr(PreTrainedConfig, name, None)))


def _of_tokenizer(tokenizer: Any, model_type: str) -> dict[str, int | None]:
    if tokenizer is None:
        return {}
    # transformers hides pad tokens from the decoder of this kind, so that one cannot stand at the start.
    starts_with_pad = model_type != "encoder-decoder" or tokenizer.bos_token_id is None
    start = tokenizer.pad_token_id if starts_with_pad else tokenizer.bos_token_id
    return {
        "vocab_size": _num_ids(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "forced_eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": None if starts_with_last_token(model_type) else start,
    }


def _num_ids(tokenizer: Any) -> int:
    """How many rows the embedding needs: a vocabulary may have holes."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1)


def _fit_to_tokenizer(model: Any, tokenizer: Any) -> list[str]:
    if tokenizer is None:
        return []
    notes = []
    num_rows, num_ids = model.get_input_embeddings().weight.shape[0], _num_ids(tokenizer)
    if num_ids > num_rows:
        try:
            model.resize_token_embeddings(num_ids, mean_resizing=False)
        except NotImplementedError as error:
            raise ModelError(
                f"the tokenizer has {num_ids} tokens, {type(model).__name__} has {num_rows} and cannot be resized",
                "use the tokenizer that belongs to the model",
            ) from error
        _fill_new_rows(model, num_rows)
        setattr(model, _GROWN_ROWS, num_ids - num_rows)
        notes.append(f"embeddings grown from {num_rows:,} to {num_ids:,} rows, which the tokenizer needs")
    _set_token_ids(model, tokenizer)
    return notes


@torch.no_grad()
def _fill_new_rows(model: Any, num_rows: int) -> None:
    """New rows are the mean of the others: whoever loads the model again (an adapter's base) gets the same ones."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = getattr(module, "weight", None)
        if weight is not None and len(weight) > num_rows:
            weight[num_rows:] = weight[:num_rows].float().mean(0).to(weight.dtype)


def _set_token_ids(model: Any, tokenizer: Any) -> None:
    config, pad = model.config, tokenizer.pad_token_id
    generation = getattr(model, "generation_config", None)
    current = getattr(config, "pad_token_id", None)
    if pad is not None and (current is None or config.model_type not in _POSITIONS_AFTER_PAD):
        config.pad_token_id = pad
        if generation is not None:
            generation.pad_token_id = pad
    if starts_with_last_token(config.model_type):
        if generation is not None and generation.decoder_start_token_id is None:
            generation.update(**generation_start(tokenizer, config.model_type))
    elif getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = pad
        if generation is not None and generation.decoder_start_token_id is None:
            generation.decoder_start_token_id = pad
    # A token that pads gets no gradient in its embedding. One that also ends texts has to learn.
    for module in model.modules():
        if (
            isinstance(module, torch.nn.Embedding)
            and pad is not None
            and pad == tokenizer.eos_token_id == module.padding_idx
        ):
            module.padding_idx = None
