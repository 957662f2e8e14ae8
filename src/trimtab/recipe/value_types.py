"""The kinds of values that a recipe holds: what may be written for each, and what it becomes.

Amounts with a unit stay words ("3h", "500 steps"), checked and in one spelling, so that a recipe reads as written.
"""

import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import AfterValidator, PlainSerializer, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic.fields import FieldInfo

from trimtab.addresses import has_credentials
from trimtab.errors import UserError
from trimtab.recipe.describe import Allowed, alternatives, choices_of, is_section
from trimtab.units import (
    BYTES_WORDS,
    EVERY_WORDS,
    SECONDS_WORDS,
    bytes_as_words,
    format_bytes,
    parse_bytes,
    parse_every,
    parse_seconds,
    parse_share,
    seconds_as_words,
)

# not those of Unity Catalog, which hold models alone, nor file:, which mlflow 3 refuses
_MLFLOW_STORES = ("http", "https", "sqlite", "databricks", "postgresql", "mysql", "mssql")
_SMALLEST_BUDGET = 2**20  # "8" for 8GiB is a slip of the pen


def _parsed(parse: Callable[[Any], Any]) -> PlainValidator:
    """A validator out of a parser; the parser's complaint becomes the complaint about the field.

    All validators here complain in words that may follow "found VALUE, which", and in none where there is nothing
    to add to what is allowed.
    """

    def validate(value: Any) -> Any:
        try:
            return parse(value)
        except UserError as error:
            raise ValueError(error.problem.removeprefix(f"{value!r} ")) from None

    return PlainValidator(validate)


def tidy(value: Any, field: FieldInfo) -> Any:
    """What people mean by the ways YAML, Python and habit have of saying "nothing" and of naming a file.

    An empty section has its defaults; `none` is null where null is allowed; off, no and false are `none` where that is
    a word of the field. A truth value is never taken for a number, although Python would.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    annotation = field.annotation
    if "none" in choices_of(annotation):
        return "none" if says_off(value) else value
    kinds = alternatives(annotation)
    if says_none(value) and type(None) in kinds:
        return None
    if says_none(value) and is_section(annotation):
        return {}
    if isinstance(value, bool) and bool not in kinds and {int, float} & set(kinds):
        raise ValueError
    return value


def says_none(value: Any) -> bool:
    """Whether a value is null, or a word for it."""
    return value is None or (isinstance(value, str) and value.strip().lower() in {"none", "null"})


def says_off(value: Any) -> bool:
    """Whether a value switches something off, in one of the ways people write that."""
    in_words = isinstance(value, str) and value.strip().lower() in {"off", "no", "false"}
    return value is False or in_words or says_none(value)


def _one_of(*types: str) -> WithJsonSchema:
    return WithJsonSchema({"type": list(types)})


def _interval(value: Any) -> str:
    return str(parse_every(value))


def _steps(value: Any) -> int:
    steps = parse_every(value).steps
    if steps is None:
        raise ValueError("does not count steps")
    return steps


def _positive_seconds(value: Any) -> str:
    seconds = parse_seconds(value)
    if not seconds:
        raise ValueError("is no time at all")
    return seconds_as_words(seconds)


def _budget(value: Any) -> str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    size = parse_bytes(value)
    if size < _SMALLEST_BUDGET:
        raise ValueError(f"is less than {format_bytes(_SMALLEST_BUDGET)}: a unit may be missing")
    return bytes_as_words(size)


def _share_below_one(value: Any) -> float:
    share = parse_share(value)
    if share == 1:
        raise ValueError("leaves nothing to train on")
    return share


def _count_or_share(value: Any) -> int | float:
    """Whole numbers count, numbers with a point and percents are shares. 1.0 is refused: it may be meant as either."""
    text = "" if isinstance(value, bool) else str(value).strip().lower()
    if count := re.fullmatch(r"([0-9]+)\s*(?:steps?|batches|batch)?", text):
        return int(count[1])
    share = parse_share(value)
    if share == 1:
        raise ValueError("may be one, or all")
    return share


def _positive_count_or_share(value: Any) -> int | float:
    amount = _count_or_share(value)
    if not amount:
        raise ValueError("leaves nothing")
    return amount


def _until(value: Any) -> str:
    if str(value).strip().lower() == "always":
        return "always"
    every = parse_every(value)
    if every.seconds is not None:
        raise ValueError("counts time, and no two runs take the same")
    return str(every)


def _fast_dev_run(value: Any) -> bool | int:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "0": False}
    text = str(value).strip().lower()
    if text in words:
        return words[text]
    if text.isdecimal():
        return int(text)
    raise ValueError


def _micro_batch(value: Any) -> str | int:
    text = "" if isinstance(value, bool) else str(value).strip().lower()
    if text == "auto" or (text.isdecimal() and int(text) > 0):
        return "auto" if text == "auto" else int(text)
    raise ValueError


def _recomputed(value: Any) -> str | dict[str, Any]:
    """Which blocks are computed again: a word, or a mapping with one of two keys."""
    if isinstance(value, Mapping):
        if set(value) == {"every"} and _is_whole(value["every"]) and value["every"] > 0:
            return {"every": value["every"]}
        layers = value.get("layers")
        if len(value) == 1 and isinstance(layers, list | tuple) and layers and all(map(_is_whole, layers)):
            return {"layers": list(layers)}
        raise ValueError
    word = str(value).strip().lower()
    words = {"true": "all", "yes": "all", "on": "all", "false": "none", "no": "none", "off": "none", "null": "none"}
    word = words.get(word, word)
    if word not in {"auto", "none", "all", "ops"}:
        raise ValueError
    return word


def _targets(value: Any) -> str | list[str]:
    if isinstance(value, str) and value.strip().lower().replace("_", "-") == "all-linear":
        return "all-linear"
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError
    return list(patterns)


def _block_range(value: Any) -> list[int]:
    """First and last block: [8, 15], or "8-15"."""
    if isinstance(value, str) and (words := re.fullmatch(r"\s*(-?[0-9]+)\s*(?:-|\.\.|to)\s*(-?[0-9]+)\s*", value)):
        value = [int(words[1]), int(words[2])]
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_whole, value)):
        raise ValueError
    first, last = value
    if (first < 0) == (last < 0) and first > last:
        raise ValueError("begins after its end")
    return [first, last]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _source(value: Any, info: ValidationInfo) -> Any:
    """Text everywhere; from Python also whatever can be iterated, which a file cannot hold."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("is empty")
        return value
    from_python = not (info.context or {}).get("from_text")
    if from_python and hasattr(value, "__iter__") and not isinstance(value, dict | bytes):
        return value
    raise ValueError


def _source_as_words(value: Any) -> str:
    return value if isinstance(value, str) else f"<{type(value).__name__} given in Python>"


def _columns(value: Any) -> str | list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError
    if len(set(names)) < len(names):
        raise ValueError("names a column twice")
    return value if isinstance(value, str) else list(names)


def _pair_at_most(value: str | list[str]) -> str | list[str]:
    if isinstance(value, list) and len(value) != 2:
        raise ValueError(f"has {len(value)}")
    return value


def _folder_name(value: str) -> str:
    if "/" in value or "\\" in value or value.strip() in {"", ".", ".."}:
        raise ValueError("cannot name a folder")
    return value


def _bare_metric(value: str) -> str:
    bare = value.removeprefix("eval_").removeprefix("eval/").removeprefix("val_").removeprefix("val/")
    if bare != value:
        raise ValueError(f"is {bare} here: no prefix")
    return value


def _tracking_uri(value: Any) -> str:
    text = str(value).strip()
    if value is None or value is False or text.lower() in {"none", "off", "no", "false", "null"}:
        return "none"
    if text.lower() in {"local", "databricks"}:
        return text.lower()
    found = re.fullmatch(r"([a-z][a-z0-9.\-]*)(?:\+\w+)?:/{2,4}[^\s/].*", text)
    if found is None:
        raise ValueError
    if found[1] not in {*_MLFLOW_STORES, *(plugin.name for plugin in entry_points(group="mlflow.tracking_store"))}:
        near = get_close_matches(found[1], _MLFLOW_STORES, n=1)
        raise ValueError(f"is no address that MLflow knows{f': {near[0]}:// is' if near else ''}")
    if text.startswith("sqlite:") and not text.startswith("sqlite:///"):
        raise ValueError("has too few slashes: sqlite:///runs/mlflow.db")
    if has_credentials(text):
        raise ValueError(
            "has credentials, which would be written into files: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_URI with uri: local"
        )
    return text


_COLUMN_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})

Interval = Annotated[str, _parsed(_interval), _one_of("string", "integer"), Allowed(EVERY_WORDS)]
Steps = Annotated[int, _parsed(_steps), _one_of("integer", "string"), Allowed("a number of steps, such as 10")]
Until = Annotated[
    str, _parsed(_until), _one_of("string", "integer"), Allowed("always, or how long, such as 200 steps or 1 epoch")
]
Duration = Annotated[str, _parsed(_positive_seconds), _one_of("string", "number"), Allowed(SECONDS_WORDS)]
Budget = Annotated[str, _parsed(_budget), _one_of("string", "integer"), Allowed(f"auto, or {BYTES_WORDS}")]
Share = Annotated[
    float,
    _parsed(_share_below_one),
    _one_of("number", "string"),
    Allowed("a share from 0 to below 1, such as 0.1 or 10%"),
]
Warmup = Annotated[
    int | float,
    _parsed(_count_or_share),
    _one_of("number", "string"),
    Allowed("a whole number of steps such as 500, or a share of the run such as 0.06 or 6%"),
]
BatchLimit = Annotated[
    int | float,
    _parsed(_positive_count_or_share),
    _one_of("number", "string"),
    Allowed("a whole number of batches such as 100, or a share of them such as 0.1 or 10%"),
]
Source = Annotated[
    Any,
    PlainValidator(_source),
    PlainSerializer(_source_as_words),
    _one_of("string"),
    Allowed("a file, folder, glob or hub name, as text (in Python also a dataset or rows)"),
]
Texts = Annotated[
    str | list[str],
    _parsed(_columns),
    AfterValidator(_pair_at_most),
    _COLUMN_SCHEMA,
    Allowed("a column, or a list of two columns for pairs"),
]
Labels = Annotated[str | list[str], _parsed(_columns), _COLUMN_SCHEMA, Allowed("a column, or a list of columns")]
MicroBatch = Annotated[
    str | int, _parsed(_micro_batch), _one_of("string", "integer"), Allowed("auto, or a whole number from 1")
]
Recomputed = Annotated[
    Any,
    _parsed(_recomputed),
    _one_of("string", "object", "boolean"),
    Allowed("auto | none | all | ops, or {every: 2}, or {layers: [0, 1, -1]}"),
]
Allowances = Annotated[list[Literal["8bit"]], Allowed("a list; so far of 8bit alone: [8bit]")]
Targets = Annotated[
    str | list[str],
    _parsed(_targets),
    _COLUMN_SCHEMA,
    Allowed("all-linear, or a list of patterns of module names such as [q_proj, v_proj]"),
]
Patterns = Annotated[list[str], Allowed("a list of patterns of module names, such as [embed_tokens]")]
BlockRange = Annotated[
    list[int],
    _parsed(_block_range),
    WithJsonSchema({"type": ["array", "string"], "items": {"type": "integer"}}),
    Allowed("first and last block, such as [8, 15]; -1 is the last one"),
]
FastDevRun = Annotated[
    bool | int, _parsed(_fast_dev_run), _one_of("boolean", "integer"), Allowed("true, false, or a number of steps")
]
FolderName = Annotated[str, AfterValidator(_folder_name), Allowed("text without slashes")]
TrackingUri = Annotated[
    str,
    _parsed(_tracking_uri),
    _one_of("string", "boolean", "null"),
    Allowed("local | none | databricks, or an address such as http://host:5000 or sqlite:///runs/mlflow.db"),
]
Metric = Annotated[str, AfterValidator(_bare_metric), Allowed("the name of a metric, such as accuracy, f1 or loss")]
Column = Annotated[str, MinLen(1), Allowed("the name of a column")]
Text = Annotated[str, MinLen(1), Allowed("text")]
ModelName = Annotated[str, MinLen(1), Allowed("a hub name, a folder or a run, as text")]
