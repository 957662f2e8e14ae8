"""Load a model with the head that a task needs, from a Hub name, a folder, a GGUF file or a config.

Common problems (no pad token, a head that is missing or of another size, a tokenizer with more tokens than the model)
are fixed here and logged in one line.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from trimtab.data.tasks.decoder_start import generation_start, starts_with_last_token
from trimtab.errors import ModelError, RecipeError, TrimtabError
from trimtab.log import say
from trimtab.model.block_init import build_in_host_memory, skeleton
from trimtab.model.config import (
    POSITIONS_AFTER_PAD,
    build_config,
    check_config,
    load_config,
    max_positions,
    num_token_ids,
    read_config,
)
from trimtab.model.hub import as_source, model_errors_explained, quiet_transformers, resolve_source, shards_of
from trimtab.model.limits import check_sizes
from trimtab.model.quantization import (
    LoadOptions,
    Quantization,
    build_quantized,
    device_for,
    finish_quantized,
    quantizable,
    warn_if_little_quantized,
)
from trimtab.model.tokenizer import load_tokenizer, train_tokenizer

__all__ = [
    "AUTO_CLASSES",
    "auto_class",
    "check_config",
    "grown_rows",
    "is_quantized_config",
    "is_quantized_model",
    "load_config",
    "load_model",
    "load_skeleton",
    "load_tokenizer",
    "max_positions",
    "newly_initialized",
    "resolve_source",
    "train_tokenizer",
]

AUTO_CLASSES = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
}
_NEW_PARAMETERS = "_trimtab_new_parameters"
_MIN_DRAWN_ON_DEVICE = 500_000_000  # number of parameters; initializing more of them on the host takes minutes
_GROWN_ROWS = "_trimtab_grown_rows"


def auto_class(kind: str) -> Any:
    """Return the auto class of transformers for a kind of model."""
    import transformers

    if kind not in AUTO_CLASSES:
        raise ModelError(f"unknown kind of model: {kind!r}", f"use one of {', '.join(AUTO_CLASSES)}")
    return getattr(transformers, AUTO_CLASSES[kind])


def load_model(
    source: str | Mapping[str, Any],
    kind: str,
    head: Mapping[str, Any],
    tokenizer: Any,
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = torch.float32,
    quantization: Quantization | None = None,
    device: torch.device | str | None = None,
    draws_on: torch.device | None = None,
) -> torch.nn.Module:
    """Load a model in eval mode, and log in one line what was loaded.

    Args:
        source: A run, a folder, a `.gguf` file or a Hub name; or a config (with `model_type`) to train from scratch.
        kind: "sequence-classification", "causal-lm", "seq2seq-lm" or "masked-lm".
        head: Settings of the head: num_labels, id2label, label2id, problem_type. Empty to keep those of the model.
        tokenizer: The tokenizer; embeddings and token ids of the model are adjusted to it.
        trust_remote_code: Whether Python code from the model's repository may be executed.
        dtype: Dtype of the weights; half precision for a frozen base model. None keeps the form in which a folder
            stores them, which may be quantized; such a model cannot be trained.
        quantization: How to quantize the linear modules of the (frozen) base model; None to not quantize.
        device: Device of the model; None for the CPU, or for a quantized base the GPU if there is one.
        draws_on: Device that draws the random weights of a large model that is in host memory; None for `device`.

    Raises:
        ModelError: The model does not exist, or has no head of that kind.
        RecipeError: The package that quantizes is not installed.
    """
    stored = {"as_stored": dtype is None}
    options = LoadOptions(
        dtype or torch.float32, quantization, device_for(device, quantization), draws_on=draws_on, **stored
    )
    name = source if isinstance(source, str) else f"a new {source.get('model_type', 'model')}"
    with quiet_transformers(), model_errors_explained(name):
        model: Any
        if isinstance(source, str):
            model, notes = _pretrained(source, auto_class(kind), kind, head, trust_remote_code, options)
        else:
            model, notes = _from_scratch(source, auto_class(kind), kind, head, tokenizer, options), ["random weights"]
        notes += _fit_to_tokenizer(model, tokenizer)
        if not is_quantized_model(model):  # loaded to its device
            model.to(options.device)
    say("; ".join([f"{name}: {type(model).__name__}, {options.describe(model)}", *notes]))
    if quantization is not None:
        warn_if_little_quantized(model, quantization)
    if kind == "causal-lm":
        _warn_if_not_causal(model)
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
    """Build the model that `load_model` would load on the meta device, without weights."""
    with quiet_transformers():
        if isinstance(source, str):
            config = read_config(source, as_source(source), trust_remote_code)
        else:
            config = build_config(dict(source), tokenizer, "model.config")
        check_sizes(source if isinstance(source, str) else "model.config", config)
        _set_head(config, head)
        with _missing_head_explained(source if isinstance(source, str) else "model.config", config, kind):
            model: torch.nn.Module = skeleton(auto_class(kind), config, dtype)
            if tokenizer is not None:
                _fit_to_tokenizer(model, tokenizer)
    return model


def is_quantized_config(config: Any) -> bool:
    """Whether a config describes a model whose stored weights are quantized."""
    return bool(getattr(config, "quantization_config", None))


def is_quantized_model(model: Any) -> bool:
    """Whether transformers loaded a model with quantized weights, which it does not move or convert."""
    return getattr(model, "hf_quantizer", None) is not None


def newly_initialized(model: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters that were not in the files of the model and are therefore randomly initialized.

    For a model from a config, in which everything is random, only those of a classification head.
    """
    return getattr(model, _NEW_PARAMETERS, frozenset())


def grown_rows(model: torch.nn.Module) -> int:
    """Number of rows that `load_model` added to the embeddings for the tokenizer."""
    return getattr(model, _GROWN_ROWS, 0)


def _pretrained(
    source: str, auto_class: Any, kind: str, head: Mapping[str, Any], trust_remote_code: bool, options: LoadOptions
) -> tuple[Any, list[str]]:
    """Load a model from files; also return remarks for the log."""
    place = as_source(resolve_source(source))
    config = read_config(source, place, trust_remote_code)
    is_quantized = place.gguf_file is None and is_quantized_config(config)
    if is_quantized and not options.as_stored:
        raise ModelError(f"{source} is quantized: quantized weights cannot be trained", "use the original model")
    before = dict(getattr(config, "id2label", None) or {})
    _set_head(config, head)
    extra: dict[str, Any] = {}
    check_sizes(source, config, Path(place.name))
    shards_of(Path(place.name))  # refuses an index that names files elsewhere
    with _missing_head_explained(source, config, kind, place.name):
        if is_quantized:
            extra = {"device_map": {"": options.device}, "use_safetensors": True}  # nothing is unpickled
        elif options.quantization is not None and place.gguf_file is None:
            extra = options.quantization.loading_arguments(auto_class, config, options.device)
        model, info = auto_class.from_pretrained(
            place.name,
            config=config,
            dtype="auto" if options.as_stored else options.dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # only in the head; _check_weights refuses other mismatches
            **place.arguments,
            **extra,
        )
    notes = _check_weights(source, model, info)
    if not notes and kind == "sequence-classification" and head:
        notes = _kept_head(before, dict(model.config.id2label))
    if place.gguf_file is not None:
        model = _unquantized_copy(model, auto_class, options.dtype)
        model.config.name_or_path = source  # an adapter stores the file as its base model
    if options.quantization is not None:
        expected = [name for name in quantizable(model) if f"{name}.weight" not in newly_initialized(model)]
        finish_quantized(model.to(options.device), options.quantization, expected)
    return model, notes


def _warn_if_not_causal(model: torch.nn.Module) -> None:
    """Warn about an encoder with a causal head, such as BertLMHeadModel; transformers' own warning is suppressed here.

    Modules of such a model have `is_decoder`. Some decoders (GPT-NeoX) have it in their config only and ignore it.
    """
    if any(getattr(module, "is_decoder", None) is False for module in model.modules()):
        say(
            f"{type(model).__name__} attends to later tokens, so it sees each token that it should predict: use a "
            "decoder such as gpt2, or task: masked-lm, or set is_decoder: true in its config"
        )


def _set_head(config: Any, head: Mapping[str, Any]) -> None:
    if "num_labels" in head:
        config.num_labels = head["num_labels"]  # first, because it resets id2label if the number changes
    for key, value in head.items():
        if key == "id2label":
            value = {int(index): name for index, name in value.items()}
        if key != "num_labels":
            setattr(config, key, value)


@contextmanager
def _missing_head_explained(source: str, config: Any, kind: str, folder: str = "") -> Iterator[None]:
    """Turn errors into ModelErrors as `model_errors_explained` does; name a head that transformers does not have."""
    try:
        with model_errors_explained(source, folder=folder):
            yield
    except ModelError as error:
        if "Unrecognized configuration class" not in error.problem:
            raise
        raise ModelError(
            f"{source} is a {config.model_type}, which has no {kind} head in transformers",
            "choose a model for this task, or set `task` to one that the model supports",
        ) from error


def _check_weights(source: str, model: Any, info: Mapping[str, Any]) -> list[str]:
    """Refuse files that do not match their config, and return remarks about newly initialized parameters."""
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    in_base = {name for name, _ in model.named_parameters() if name.startswith(prefix)}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    missing, mismatched = set(info["missing_keys"]), sorted(info["mismatched_keys"], key=lambda found: str(found[0]))
    for name, found, wanted in mismatched:
        if name in in_base:
            raise ModelError(
                f"{source}: {name} is {list(found)} in the file but {list(wanted)} in its config.json",
                "its files do not match each other: download or save them again",
            )
    num_missing = sum(sizes.get(name, 0) for name in missing & in_base)
    if 2 * num_missing > sum(sizes[name] for name in in_base):
        raise ModelError(
            f"{source}: most weights of {type(model).__name__} are not in its files",
            "its files do not match each other: check model_type in its config.json",
        )
    new = missing | {name for name, *_ in mismatched}
    setattr(model, _NEW_PARAMETERS, frozenset(new & set(sizes)))
    notes = []
    if mismatched:
        old_size, new_size = mismatched[0][1][0], mismatched[0][2][0]
        notes.append(f"its head for {old_size} labels is replaced by a new one for {new_size}")
    if missing:
        notes.append(f"newly initialized: {_modules_of(missing)}")
    return notes


def _modules_of(names: set[str]) -> str:
    modules = sorted({name.rpartition(".")[0] or name for name in names})
    return ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")


def _kept_head(before: dict[int, str], now: dict[int, str]) -> list[str]:
    if before == now or all(name == f"LABEL_{index}" for index, name in before.items()):
        return ["its head is kept"]
    old, new = (", ".join(map(str, list(names.values())[:4])) for names in (before, now))
    return [f"its head is kept, but its labels were {old} and are now {new}"]


def _unquantized_copy(model: Any, auto_class: Any, dtype: torch.dtype) -> Any:
    """Copy a model loaded from GGUF, which transformers marks as quantized and refuses to save."""
    config = model.config
    del config.quantization_config
    fresh = auto_class.from_config(config, dtype=dtype)
    fresh.load_state_dict(model.state_dict())
    setattr(fresh, _NEW_PARAMETERS, newly_initialized(model))
    return fresh


def _from_scratch(
    settings: Mapping[str, Any],
    auto_class: Any,
    kind: str,
    head: Mapping[str, Any],
    tokenizer: Any,
    options: LoadOptions,
) -> Any:
    config = build_config(dict(settings), tokenizer, "model.config")
    check_sizes("model.config", config)
    _set_head(config, head)
    try:
        with _missing_head_explained("model.config", config, kind):
            if options.quantization is not None:
                model = build_quantized(auto_class, config, options.dtype, options.quantization, options.device)
            elif options.device.type == "cpu" and _draws_on_device(auto_class, config, options):
                model = build_in_host_memory(auto_class, config, options.dtype, options.draws_on or options.device)
            else:
                with options.device if _draws_on_device(auto_class, config, options) else nullcontext():
                    model = auto_class.from_config(config, dtype=options.dtype)
    except ModelError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, TrimtabError):
            raise
        raise RecipeError(f"model.config is not valid: {cause}", "fix the value named in the message") from cause
    if kind == "sequence-classification":
        base = {id(parameter) for parameter in model.base_model.parameters()}
        head_names = [name for name, parameter in model.named_parameters() if id(parameter) not in base]
        setattr(model, _NEW_PARAMETERS, frozenset(head_names))  # the head's random weights must not be frozen
    return model


def _draws_on_device(auto_class: Any, config: Any, options: LoadOptions) -> bool:
    """Whether random weights are drawn on a device; else on the host, which gives the same weights on every device."""
    if (options.draws_on or options.device).type == "cpu":
        return False
    size: int = sum(parameter.numel() for parameter in skeleton(auto_class, config, options.dtype).parameters())
    return size >= _MIN_DRAWN_ON_DEVICE


def _fit_to_tokenizer(model: Any, tokenizer: Any) -> list[str]:
    if tokenizer is None:
        return []
    notes = []
    num_rows, num_ids = _num_embeddings(model), num_token_ids(tokenizer)
    if num_rows is not None and num_ids > num_rows:
        try:
            model.resize_token_embeddings(num_ids, mean_resizing=False)
        except NotImplementedError as error:
            raise ModelError(
                f"the tokenizer has {num_ids} tokens, {type(model).__name__} has {num_rows} and cannot be resized",
                "use the tokenizer that belongs to the model",
            ) from error
        _fill_new_rows(model, num_rows)
        setattr(model, _GROWN_ROWS, num_ids - num_rows)
        notes.append(f"embeddings grown from {num_rows:,} to {num_ids:,} rows for the tokenizer")
    _set_token_ids(model, tokenizer)
    return notes


def _num_embeddings(model: Any) -> int | None:
    """Number of rows of the token embeddings; None for models without such a table, such as CANINE and Perceiver."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        return None


@torch.no_grad()
def _fill_new_rows(model: Any, num_rows: int) -> None:
    """Set new rows to the mean of the others: deterministic, so loading the base of an adapter gives the same rows."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = getattr(module, "weight", None)
        if weight is not None and len(weight) > num_rows:
            weight[num_rows:] = weight[:num_rows].float().mean(0).to(weight.dtype)


def _set_token_ids(model: Any, tokenizer: Any) -> None:
    config, pad = model.config, tokenizer.pad_token_id
    generation = getattr(model, "generation_config", None)
    current = getattr(config, "pad_token_id", None)
    if pad is not None and (current is None or config.model_type not in POSITIONS_AFTER_PAD):
        config.pad_token_id = pad
        if generation is not None:
            generation.pad_token_id = pad
    text_config = config.get_text_config()
    if pad is not None and getattr(text_config, "pad_token_id", None) is None:  # a classifier reads the inner one
        text_config.pad_token_id = pad
    if starts_with_last_token(config.model_type):
        if generation is not None and generation.decoder_start_token_id is None:
            generation.update(**generation_start(tokenizer, config.model_type))
    elif getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = pad
        if generation is not None and generation.decoder_start_token_id is None:
            generation.decoder_start_token_id = pad
    # padding_idx gets no gradient. If the pad token is also the end token, its embedding has to be trained.
    for module in model.modules():
        if (
            isinstance(module, torch.nn.Embedding)
            and pad is not None
            and pad == tokenizer.eos_token_id == module.padding_idx
        ):
            module.padding_idx = None
