"""Configs of transformers: loaded with a model, or built from the settings in a recipe."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.data.tasks.decoder_start import starts_with_last_token
from trimtab.errors import RecipeError
from trimtab.model.gguf_rope import set_rope
from trimtab.model.hub import Source, as_source, check_text, model_errors_explained, quiet_transformers

# Models whose position ids start after the id of the pad token, so the first rows of the position table are unused.
POSITIONS_AFTER_PAD = {
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
# Settings that every model accepts, although its config class does not declare them.
_FOR_ANY_MODEL = {
    *("decoder_start_token_id", "forced_eos_token_id", "tie_word_embeddings", "is_decoder", "use_cache"),
    *("attn_implementation", *(f"{role}_token_id" for role in ("pad", "bos", "eos", "sep", "cls", "mask", "unk"))),
}
# Keys of older config.json files that transformers moves into `rope_parameters`, for models that have it.
_OLDER_ROPE = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
_SPECIAL_FLOAT = "__float__"  # transformers writes infinity to config.json as {"__float__": "Infinity"}
_SET_BY_CONFIG = re.compile(r'\bself\.(_?[a-z]\w*) = |\bkwargs\.(?:get|pop)\("(\w+)"')
_READ_BY_MODEL = re.compile(r'\bconfig\.([a-z]\w*)|attr\((?:self\.)?config, "(\w+)"')
_PROVENANCE = ("_name_or_path", "transformers_version")  # in every config.json, but not settings


def load_config(source: str, *, trust_remote_code: bool = False) -> Any:
    """Load the transformers config of a run, a folder, a `.gguf` file or a Hub name."""
    with quiet_transformers():
        return read_config(source, as_source(source), trust_remote_code)


def read_config(source: str, place: Source, trust_remote_code: bool) -> Any:
    """Load a transformers config from a resolved source; `source` is its name in errors."""
    from transformers import AutoConfig

    with model_errors_explained(source, "" if place.gguf_file else "config.json of ", folder=place.name):
        config = AutoConfig.from_pretrained(place.name, trust_remote_code=trust_remote_code, **place.arguments)
        if place.gguf_file is not None:
            set_rope(config, Path(place.name) / place.gguf_file)
        check_text(config.to_dict())
    return config


def check_config(settings: Mapping[str, Any]) -> None:
    """Check that a config can be built from settings, without building a model.

    Raises:
        RecipeError: A setting does not exist, or a value is invalid.
    """
    with quiet_transformers():
        build_config(dict(settings), None, "model.config")


def max_positions(model_or_config: Any) -> int | None:
    """The maximum sequence length of a model in tokens; None if it has no limit."""
    config = getattr(model_or_config, "config", model_or_config)
    parts = [getattr(config, name, None) for name in ("encoder", "decoder")]
    if all(hasattr(part, "model_type") for part in parts):
        limits = [limit for limit in map(max_positions, parts) if limit is not None]
        return min(limits, default=None)
    config = getattr(config, "text_config", None) or config
    of_both = [getattr(config, f"max_{part}_position_embeddings", None) for part in ("encoder", "decoder")]
    found = [limit for limit in [*of_both, getattr(config, "max_position_embeddings", None)] if limit]
    limit = min(found, default=0)
    if config.model_type in POSITIONS_AFTER_PAD and config.pad_token_id is not None:
        limit -= config.pad_token_id + 1
    return limit if limit > 0 else None


def build_config(settings: dict[str, Any], tokenizer: Any, key: str) -> Any:
    """Build a config from settings; sizes and token ids that they do not set are taken from the tokenizer.

    Args:
        settings: `model_type` and settings of its config class.
        tokenizer: The tokenizer, or None.
        key: Recipe key of the settings, for errors.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = settings.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        near = get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3)
        cure = f"did you mean {' or '.join(near)}?" if near else "for example bert, gpt2, llama, t5 or marian"
        raise RecipeError(f"{key}.model_type is {model_type!r}, which transformers does not know", cure)
    config_class: Any = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)}
    names = config_class.attribute_map  # aliases of fields, in both directions
    known = fields | set(names) | set(names.values()) | _FOR_ANY_MODEL
    known |= _OLDER_ROPE if "rope_parameters" in fields else set()
    settings = {name: _decoded(value) for name, value in settings.items() if name not in _PROVENANCE}
    for name in settings:
        if name not in known and name not in _undeclared_settings(config_class):
            near = get_close_matches(name, known | _undeclared_settings(config_class), n=3)
            cure = f"did you mean {' or '.join(near)}?" if near else f"{model_type} has {', '.join(sorted(known))}"
            raise RecipeError(f"{key}.{name}: {model_type} has no such setting", cure)
    for part in ("encoder", "decoder"):
        if isinstance(settings.get(part), Mapping):
            inner = dict(settings[part])
            if part == "decoder" and model_type.endswith("encoder-decoder"):  # this model type combines any two models
                inner |= {"is_decoder": True, "add_cross_attention": True}
            settings[part] = build_config(inner, tokenizer, f"{key}.{part}").to_dict()
    for name, value in _tokenizer_settings(tokenizer, model_type).items():
        if name in known and value is not None:
            settings.setdefault(name, value)
    try:
        return config_class(**settings)
    except Exception as error:  # config classes raise many types, always about a value
        problem = str(error).strip().splitlines()[-1].strip()
        raise RecipeError(f"{key} is not valid: {problem}", "fix the value named in the message") from error


def _decoded(value: Any) -> Any:
    """The Python values of settings, as transformers writes them to a config.json."""
    if isinstance(value, Mapping):
        if set(value) == {_SPECIAL_FLOAT}:
            return float(value[_SPECIAL_FLOAT])
        return {name: _decoded(inner) for name, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


@cache
def _undeclared_settings(config_class: type) -> frozenset[str]:
    """Settings that a model uses although its config class does not declare them.

    For example `position_buckets` of DeBERTa-v2 is read by the model only, and `intermediate_size` of FalconMamba is
    computed if it is not given. They are found by searching the source of both files.
    """
    from transformers import PreTrainedConfig

    folder = Path(inspect.getfile(config_class)).parent
    members = inspect.getmembers(config_class)
    names = {name for name, member in members if isinstance(member, property) and member.fset is not None}
    for files, pattern in (("configuration_*.py", _SET_BY_CONFIG), ("modeling_*.py", _READ_BY_MODEL)):
        for file in folder.glob(files):
            names.update("".join(found) for found in pattern.findall(file.read_text(encoding="utf-8")))
    return frozenset(name for name in names if not callable(getattr(PreTrainedConfig, name, None)))


def _tokenizer_settings(tokenizer: Any, model_type: str) -> dict[str, int | None]:
    if tokenizer is None:
        return {}
    # transformers masks pad tokens in the decoder of an encoder-decoder, so its first token cannot be the pad token
    starts_with_pad = model_type != "encoder-decoder" or tokenizer.bos_token_id is None
    start = tokenizer.pad_token_id if starts_with_pad else tokenizer.bos_token_id
    return {
        "vocab_size": num_token_ids(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "forced_eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": None if starts_with_last_token(model_type) else start,
    }


def num_token_ids(tokenizer: Any) -> int:
    """Number of embedding rows that a tokenizer needs; its ids may have gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1)
