"""The types of a recipe's values: how each is parsed, and the values that it allows.

Amounts with a unit stay text ("3h", "500 steps"), validated and in a uniform spelling, so that a recipe reads as it was
written.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import GroupedMetadata, MinLen
from pydantic import AfterValidator, PlainSerializer, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic.fields import FieldInfo

from trimtab.addresses import has_credentials, path_problem
from trimtab.errors import UserError
from trimtab.log import printable
from trimtab.recipe.schema_keys import Allowed, alternatives, choices_of, is_section
from trimtab.units import (
    BYTES_SYNTAX,
    EVERY_SYNTAX,
    SECONDS_SYNTAX,
    exact_bytes,
    exact_seconds,
    format_bytes,
    parse_bytes,
    parse_every,
    parse_seconds,
    parse_share,
)

# without Unity Catalog's schemes, which hold only models, and file:, which mlflow 3 refuses
_MLFLOW_STORES = ("http", "https", "sqlite", "databricks", "postgresql", "mysql", "mssql")
_MAX_PATH = 1024  # characters; longer text is not a path
_MIN_BUDGET_BYTES = 2**20  # smaller values probably lack a unit: "8" for 8GiB
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Parsed(Allowed, GroupedMetadata):
    """Annotation of a type with its own parser.

    The text of a ValueError completes the sentence "found VALUE, which …"; it is empty if the list of allowed values
    says enough.

    Args:
        words: The values that it allows, as text for messages.
        parse: Converts the written value, or raises ValueError or UserError.
        json_types: Its types in the JSON Schema, separated by spaces.
    """

    parse: Callable[[Any], Any]
    json_types: str

    def __iter__(self) -> Iterator[object]:
        yield PlainValidator(self._validate)
        yield WithJsonSchema({"type": self.json_types.split()})

    def _validate(self, value: Any) -> Any:
        try:
            return self.parse(value)
        except UserError as error:
            raise ValueError(error.problem.removeprefix(f"{value!r} ")) from None


def at_most(limit: float) -> Callable[[Any], Any]:
    """Return a validator that refuses larger values, with which tensors could not compute."""

    def check(value: Any) -> Any:
        if value > limit:
            raise ValueError(f"is more than {limit:g}")
        return value

    return check


def normalize(value: Any, field: FieldInfo) -> Any:
    """Normalize the spellings of null, off and paths before validation.

    An empty section gets its defaults; `none` is null if the field allows null; off, no and false are `none` if the
    field has that choice. A bool for a number is refused, although it is an int in Python.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    annotation = field.annotation
    if "none" in choices_of(annotation):
        return "none" if is_off_word(value) else value
    kinds = alternatives(annotation)
    if is_null_word(value) and type(None) in kinds:
        return None
    if is_null_word(value) and is_section(annotation):
        return {}
    if isinstance(value, bool) and bool not in kinds and {int, float} & set(kinds):
        raise ValueError
    return value


def is_null_word(value: Any) -> bool:
    """Whether a value is null or a word for it."""
    return value is None or (isinstance(value, str) and value.strip().lower() in {"none", "null"})


def is_off_word(value: Any) -> bool:
    """Whether a value means off: false, null, or a word for them."""
    return value is False or is_null_word(value) or (isinstance(value, str) and _BOOLS.get(_word(value)) is False)


def _word(value: Any) -> str:
    return str(value).strip().lower()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _steps(value: Any) -> int:
    steps = parse_every(value).steps
    if steps is None:
        raise ValueError("does not count steps")
    return steps


def _positive_seconds(value: Any) -> str:
    seconds = parse_seconds(value)
    if not seconds:
        raise ValueError("is zero")
    return exact_seconds(seconds)


def _budget(value: Any) -> str:
    if isinstance(value, str) and _word(value) == "auto":
        return "auto"
    size = parse_bytes(value)
    if size < _MIN_BUDGET_BYTES:
        raise ValueError(f"is less than {format_bytes(_MIN_BUDGET_BYTES)}: a unit may be missing")
    return exact_bytes(size)


def _share_below_one(value: Any) -> float:
    share = parse_share(value)
    if share == 1:
        raise ValueError("leaves no rows to train on")
    return share


def _count_or_share(value: Any) -> int | float:
    """Parse a count (a whole number) or a share (with a decimal point or %). 1.0 is refused: it could be either."""
    text = "" if isinstance(value, bool) else _word(value)
    if count := re.fullmatch(r"([0-9]+)\s*(?:steps?|batches|batch)?", text):
        return int(count[1])
    share = parse_share(value)
    if share == 1:
        raise ValueError("is ambiguous: 1, or 100%")
    return share


def _positive_count_or_share(value: Any) -> int | float:
    amount = _count_or_share(value)
    if not amount:
        raise ValueError("is zero")
    return amount


def _freeze_duration(value: Any) -> str:
    if _word(value) == "always":
        return "always"
    every = parse_every(value)
    if every.seconds is not None:
        raise ValueError("is a time, which is not reproducible")
    return str(every)


def _fast_dev_run(value: Any) -> bool | int:
    word = _word(value)
    if word in _BOOLS:
        return _BOOLS[word]
    if word.isdecimal():
        return int(word) or False
    raise ValueError


def _micro_batch(value: Any) -> str | int:
    word = _word(value)
    if word == "auto":
        return word
    if word.isdecimal() and int(word) > 0:
        return int(word)
    raise ValueError


def _gradient_checkpointing(value: Any) -> str | dict[str, Any]:
    """Parse the blocks to recompute: a word, or a mapping with one of `every`, `all_but_every` and `layers`."""
    if isinstance(value, Mapping):
        if set(value) == {"every"} and _is_int(value["every"]) and value["every"] > 0:
            return {"every": value["every"]}
        if set(value) == {"all_but_every"} and _is_int(value["all_but_every"]) and value["all_but_every"] > 1:
            return {"all_but_every": value["all_but_every"]}
        layers = value.get("layers")
        if len(value) == 1 and isinstance(layers, list | tuple) and layers and all(map(_is_int, layers)):
            return {"layers": list(layers)}
        raise ValueError
    word = "none" if is_off_word(value) else "all" if _BOOLS.get(_word(value)) else _word(value)
    if word not in {"auto", "none", "all", "ops"}:
        raise ValueError
    return word


def _offloaded(value: Any) -> str | dict[str, Any]:
    """Parse the blocks whose activations are offloaded: as those to recompute, except `ops`."""
    which = _gradient_checkpointing(value)
    if which == "ops":
        raise ValueError
    return which


def _tile(value: Any) -> str | int:
    """Parse the tokens of a tile: `auto`, `none` or a number."""
    return "none" if is_off_word(value) else _micro_batch(value)


def _names(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError
    return list(names)


def _targets(value: Any) -> str | list[str]:
    is_all = isinstance(value, str) and _word(value).replace("_", "-") == "all-linear"
    return "all-linear" if is_all else _names(value)


def _columns(value: Any) -> str | list[str]:
    names = _names(value)
    if len(set(names)) < len(names):
        raise ValueError("names a column twice")
    return value if isinstance(value, str) else names


def _column_or_pair(value: Any) -> str | list[str]:
    columns = _columns(value)
    if isinstance(columns, list) and len(columns) != 2:
        raise ValueError(f"has the wrong number of columns: {len(columns)}")
    return columns


def _block_range(value: Any) -> list[int]:
    """Parse the first and last block: [8, 15], or "8-15"."""
    if isinstance(value, str) and (words := re.fullmatch(r"\s*(-?[0-9]+)\s*(?:-|\.\.|to)\s*(-?[0-9]+)\s*", value)):
        value = [int(words[1]), int(words[2])]
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_int, value)):
        raise ValueError
    first, last = value
    if (first < 0) == (last < 0) and first > last:
        raise ValueError("starts after its end")
    return [first, last]


def _student(value: Any) -> dict[str, Any]:
    """Parse {layers: half}, {layers: 3} or {layers: [0, 2, 5]}, or the layers alone."""
    value = value if isinstance(value, Mapping) else {"layers": value}
    if set(value) != {"layers"}:
        raise ValueError
    layers = value["layers"]
    if isinstance(layers, str) and _word(layers) == "half":
        return {"layers": "half"}
    if _is_int(layers) and layers > 0:
        return {"layers": layers}
    if not isinstance(layers, list | tuple) or not layers or not all(_is_int(layer) and layer >= 0 for layer in layers):
        raise ValueError
    if list(layers) != sorted(set(layers)):
        raise ValueError("is not in ascending order, or names a layer twice")
    return {"layers": list(layers)}


def _layer_term(value: Any) -> dict[str, Any]:
    """Parse a weight, or {weight: 1.0, layers: {0: 1, 1: 3}}."""
    given = dict(value) if isinstance(value, Mapping) else {"weight": value}
    if not {"weight"} <= set(given) <= {"weight", "layers"}:
        raise ValueError
    weight, layers = given["weight"], given.get("layers", "auto")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ValueError("has no weight of 0 or more")
    if not isinstance(layers, Mapping):
        if layers != "auto":
            raise ValueError("has no valid layers: write auto, or {layer of the student: layer of the teacher}")
        return {"weight": float(weight), "layers": "auto"}
    pairs = {int(student): teacher for student, teacher in layers.items()}  # JSON keys are always text
    if not pairs or not all(_is_int(layer) and layer >= 0 for pair in pairs.items() for layer in pair):
        raise ValueError("has layers that are not whole numbers from 0 up")
    return {"weight": float(weight), "layers": pairs}


def _class_weights(value: Any) -> str | dict[str, float]:
    """Parse `balanced`, or {label: weight}; labels are text, as in the data."""
    if not isinstance(value, Mapping):
        if _word(value) != "balanced":
            raise ValueError
        return "balanced"
    weights = {str(label).lower() if isinstance(label, bool) else str(label): each for label, each in value.items()}
    for label, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"has no weight above 0 for {label!r}")
    if not weights:
        raise ValueError("is empty")
    return {label: float(weight) for label, weight in weights.items()}


def _source(value: Any, info: ValidationInfo) -> Any:
    """Accept text or a list of files, and from Python also any iterable of rows or a dict of datasets."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("is empty")
        return value
    from_python = not (info.context or {}).get("from_text")
    if _are_files(value, from_python):
        return [Path(item) for item in value]
    is_dict = isinstance(value, dict) and type(value).__module__.partition(".")[0] != "datasets"
    if from_python and hasattr(value, "__iter__") and not is_dict and not isinstance(value, bytes):
        return value
    raise ValueError


def _are_files(value: Any, from_python: bool) -> bool:
    """Whether a list names files; strings in Python may be texts, unless all are existing files."""
    if not isinstance(value, list | tuple) or not value:
        return False
    if all(isinstance(item, os.PathLike) for item in value):
        return True
    are_strings = all(isinstance(item, str) and item.strip() for item in value)
    return are_strings and (not from_python or all(len(item) < _MAX_PATH and Path(item).is_file() for item in value))


def _source_as_words(value: Any) -> str | list[str]:
    if isinstance(value, list) and value and all(isinstance(item, Path) for item in value):
        return [str(item) for item in value]
    return value if isinstance(value, str) else f"<{type(value).__name__} given in Python>"


def _path(value: str) -> str:
    if problem := path_problem(value):
        raise ValueError(problem)
    return value


def _folder_name(value: str) -> str:
    if problem := path_problem(value):
        raise ValueError(problem)
    if "/" in value or "\\" in value or value.strip() in {"", ".", ".."}:
        raise ValueError("cannot be a folder name")
    if printable(value) != value:
        raise ValueError("contains line breaks or other control characters")
    return value


def _experiment_name(value: str) -> str:
    folder, slash, name = value.rpartition("/")
    if slash and not folder.startswith("/"):
        raise ValueError("is neither a name nor a path from the root")
    _folder_name(name)
    return value


def _metric_name(value: str) -> str:
    name = value.removeprefix("eval_").removeprefix("eval/").removeprefix("val_").removeprefix("val/")
    if name != value:
        raise ValueError(f"has a prefix: write {name}")
    return value


def _tracking_uri(value: Any) -> str:
    text = str(value).strip()
    if is_off_word(value):
        return "none"
    if text.lower() in {"local", "databricks"}:
        return text.lower()
    found = re.fullmatch(r"([a-z][a-z0-9.\-]*)(?:\+\w+)?:/{2,4}[^\s/].*", text)
    if found is None:
        raise ValueError
    if found[1] not in {*_MLFLOW_STORES, *(plugin.name for plugin in entry_points(group="mlflow.tracking_store"))}:
        near = get_close_matches(found[1], _MLFLOW_STORES, n=1)
        raise ValueError(f"MLflow does not support{f' (did you mean {near[0]}://?)' if near else ''}")
    if text.startswith("sqlite:") and not text.startswith("sqlite:///"):
        raise ValueError("needs three slashes: sqlite:///runs/mlflow.db")
    if has_credentials(text):
        raise ValueError(
            "contains credentials that would be written to files: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_URI with uri: local instead"
        )
    return text


_STRING_OR_LIST = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})

Interval = Annotated[str, Parsed(EVERY_SYNTAX, lambda value: str(parse_every(value)), "string integer")]
Steps = Annotated[int, Parsed("a number of steps, such as 10", _steps, "integer string")]
FreezeDuration = Annotated[str, Parsed("always, or a duration such as 200 steps", _freeze_duration, "string integer")]
Duration = Annotated[str, Parsed(SECONDS_SYNTAX, _positive_seconds, "string number")]
Budget = Annotated[str, Parsed(f"auto, or {BYTES_SYNTAX}", _budget, "string integer")]
Share = Annotated[float, Parsed("a share from 0 to below 1, such as 0.1 or 10%", _share_below_one, "number string")]
Warmup = Annotated[
    int | float,
    Parsed("a number of steps such as 500, or a share of the run such as 6%", _count_or_share, "number string"),
]
BatchLimit = Annotated[
    int | float,
    Parsed("a number of batches such as 100, or a share such as 10%", _positive_count_or_share, "number string"),
]
Source = Annotated[
    Any,
    PlainValidator(_source),
    PlainSerializer(_source_as_words),
    WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}}),
    Allowed("a file, folder, glob or Hub name, as text, or a list of files (in Python also a dataset or rows)"),
]
Texts = Annotated[str | list[str], Parsed("a column, or a list of two columns", _column_or_pair, ""), _STRING_OR_LIST]
Labels = Annotated[str | list[str], Parsed("a column, or a list of columns", _columns, ""), _STRING_OR_LIST]
MicroBatch = Annotated[str | int, Parsed("auto, or a whole number from 1", _micro_batch, "string integer")]
_RECOMPUTE = "auto | none | all | ops, or {every: 2}, or {all_but_every: 4}, or {layers: [0, 1, -1]}"
GradientCheckpointing = Annotated[Any, Parsed(_RECOMPUTE, _gradient_checkpointing, "string object boolean")]
_OFFLOADED = "auto | none | all, or {every: 2}, or {all_but_every: 4}, or {layers: [0, 1, -1]}"
OffloadedBlocks = Annotated[Any, Parsed(_OFFLOADED, _offloaded, "string object boolean")]
TileTokens = Annotated[
    str | int, Parsed("auto, none, or a whole number of tokens from 1", _tile, "string integer boolean")
]
Allowances = Annotated[list[Literal["8bit"]], Allowed("a list; only [8bit] in this version")]
Targets = Annotated[
    str | list[str],
    Parsed("all-linear, or a list of patterns of module names such as [q_proj, v_proj]", _targets, ""),
    _STRING_OR_LIST,
]
Patterns = Annotated[list[str], Allowed("a list of patterns of module names, such as [embed_tokens]")]
BlockRange = Annotated[
    list[int],
    Parsed("first and last block, such as [8, 15]; -1 is the last one", _block_range, ""),
    WithJsonSchema({"type": ["array", "string"], "items": {"type": "integer"}}),
]
_LAYERS = "{layers: half}, {layers: 3}, or {layers: [0, 2, 5]}"
StudentLayers = Annotated[Any, Parsed(_LAYERS, _student, "object")]
_TERM = "a weight from 0, or {weight: 1.0, layers: {0: 1, 1: 3}}"
LayerTerm = Annotated[Any, Parsed(_TERM, _layer_term, "number object")]
_WEIGHTS = "balanced, or a weight above 0 for each label: {spam: 3, ham: 1}"
ClassWeights = Annotated[Any, Parsed(_WEIGHTS, _class_weights, "string object")]
FastDevRun = Annotated[bool | int, Parsed("true, false, or a number of steps", _fast_dev_run, "boolean integer")]
ExperimentName = Annotated[
    str,
    AfterValidator(_experiment_name),
    Allowed("one line of text without slashes, or a path such as /Users/me@example.com/reviews"),
]
Folder = Annotated[str, MinLen(1), AfterValidator(_path), Allowed("the path of a folder")]
FolderName = Annotated[str, AfterValidator(_folder_name), Allowed("one line of text without slashes")]
_URI = "local | none | databricks, or an address such as http://host:5000 or sqlite:///runs/mlflow.db"
TrackingUri = Annotated[str, Parsed(_URI, _tracking_uri, "string boolean null")]
Metric = Annotated[str, AfterValidator(_metric_name), Allowed("the name of a metric, such as accuracy, f1 or loss")]
Column = Annotated[str, MinLen(1), Allowed("the name of a column")]
Text = Annotated[str, MinLen(1), Allowed("text")]
ModelName = Annotated[str, MinLen(1), Allowed("a Hub name, a folder or a run, as text")]
