"""Build the error message of an invalid recipe: all mistakes together, one line each.

A line has the key, where it was written, the value found, what is allowed, and a suggestion.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from trimtab.addresses import HIDDEN, is_secret_name, redact
from trimtab.errors import RecipeError
from trimtab.recipe.foreign_keys import translate_key, translate_value
from trimtab.recipe.schema_keys import Key, choices_of, is_section, keys_of
from trimtab.recipe.yaml_text import as_yaml

_MAX_VALUE_CHARS = 60
_MISSING = object()
_PLACEHOLDER = "?"  # value of a required key while the rest of the recipe is checked
_REQUIRED = "required, but missing"
# Suggestions for a bare value that should be a mapping.
_MAPPING_FOR_VALUE = {
    "data": "data: {{train: {}}}",
    "train.freeze": "train.freeze: {{{}: always}}",
    "early_stopping": "early_stopping: {{patience: 3}}",
}


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong with a recipe.

    Args:
        path: Its place in the recipe, key by key.
        text: What is wrong, with the value found and the cure.
        others: Other dotted keys that it depends on.
        place: Where it was written, if that is not the place of its key.
    """

    path: tuple[str, ...]
    text: str
    others: tuple[str, ...] = ()
    place: str = ""

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)

    def depends_on(self, key: str) -> bool:
        """Whether the mistake concerns a key, or one above or below it."""
        return any(
            f"{own}.".startswith(f"{key}.") or f"{key}.".startswith(f"{own}.") for own in (self.key, *self.others)
        )


def raise_mistakes(mistakes: Sequence[Mistake], origins: Mapping[str, str]) -> NoReturn:
    """Raise one error with a line per mistake, in the order of the file; mistakes without a line number come last."""
    lines = []
    for mistake in mistakes:
        place = mistake.place or _origin(mistake.path, origins)
        line = re.search(r":([0-9]+)$", place)
        lines.append((int(line[1]) if line else 10**9, f"{place}: {mistake.key}: {mistake.text}".removeprefix(": ")))
    text = "\n".join(f"  {line}" for _, line in sorted(lines, key=lambda pair: pair[0]))
    raise RecipeError(f"the recipe has {len(lines)} problem{'s' if len(lines) != 1 else ''}:\n{text}")


def explain_errors(error: ValidationError, values: Any, model: type[BaseModel]) -> list[Mistake]:
    """Explain everything that pydantic found, once for each key."""
    keys = {key.dotted: key for key in keys_of(model)}
    found: dict[tuple[str, ...], tuple[str, Any, str]] = {}
    for detail in error.errors(include_url=False):
        path, value = _locate(detail["loc"], values, detail["type"] == "missing")
        reason = str(detail.get("ctx", {}).get("error", ""))
        if path not in found or reason:
            found[path] = (detail["type"], value, reason)
    mistakes: list[Mistake] = []
    for path, (kind, value, reason) in found.items():
        # For a union of text and section, pydantic reports errors of both. If there is an error inside the section, the
        # user meant the section, and the error about the whole is dropped.
        if any(other[: len(path)] == path and len(other) > len(path) for other in found):
            continue
        if value is _MISSING:
            mistakes += _missing(path, keys)
        elif kind in {"extra_forbidden", "invalid_key"}:
            mistakes += _unknown_key(path, value, _value_at(values, path[:-1]), keys)
        else:
            mistakes.append(Mistake(path, _wrong_value(path, value, kind, reason, keys)))
    return _without_echoes(mistakes)


def _without_echoes(mistakes: list[Mistake]) -> list[Mistake]:
    """Drop a missing key that another line already suggests: it was misspelt, or has another library's name."""
    suggested = [
        match[1] for mistake in mistakes for match in re.finditer(r"(?:write|did you mean) ([\w.]+)", mistake.text)
    ]
    return [
        mistake
        for mistake in mistakes
        if not (
            mistake.text.startswith(_REQUIRED) and any(f"{mistake.key}.".startswith(f"{key}.") for key in suggested)
        )
    ]


def drop_paths(values: Mapping[str, Any], paths: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Copy a recipe's values without those at some paths, with placeholders for the required keys."""
    rest = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for path in paths:
        holder: Any = rest
        for part in path[:-1]:
            if isinstance(holder.get(part), Mapping):
                holder[part] = dict(holder[part])
                holder = holder[part]
        holder.pop(path[-1], None)
    data = rest.get("data")
    return {
        **rest,
        "model": rest.get("model", _PLACEHOLDER),
        "data": {"train": _PLACEHOLDER, **(data if isinstance(data, Mapping) else {})},
    }


def unknown_keys(recipe: Any) -> list[str]:
    """Return the required keys of a recipe that have placeholders: nothing can be said about their values."""
    found = {"model": recipe.model, "data.train": recipe.data.train}
    return [key for key, value in found.items() if isinstance(value, str) and value == _PLACEHOLDER]


def shown(value: Any) -> str:
    """Format a value for a message: text in quotes, cut to a maximum length, credentials removed."""
    if isinstance(value, str):
        text = repr(redact(value))  # redacted before it is quoted: a quotation mark could be mistaken for part of a URL
    else:
        text = repr(value) if isinstance(value, float) else redact(as_yaml(value))
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 2]} …"


def _origin(path: tuple[str, ...], origins: Mapping[str, str]) -> str:
    """Find where a key was written; for a missing one, where its section was."""
    places = (origins.get(".".join(path[:end])) for end in range(len(path), 0, -1))
    return next((place for place in places if place is not None), "")


def _locate(loc: tuple[int | str, ...], values: Any, missing: bool) -> tuple[tuple[str, ...], Any]:
    """Return the path of a key and its value, without the parts of `loc` that name a branch of a union."""
    path: list[str] = []
    for index, part in enumerate(loc):
        if isinstance(values, Mapping) and part in values:
            path.append(str(part))
            values = values[part]
        elif missing and index == len(loc) - 1 and isinstance(values, Mapping):
            path.append(str(part))
            values = _MISSING
    return tuple(path), values


def _value_at(values: Any, path: tuple[str, ...]) -> Mapping[str, Any]:
    for part in path:
        values = values[part]
    return values if isinstance(values, Mapping) else {}


def _missing(path: tuple[str, ...], keys: Mapping[str, Key]) -> Iterator[Mistake]:
    """Report a missing key; for a missing section, the required keys in it."""
    missing = ".".join(path)
    for key in keys.values():
        is_it = key.dotted == missing and (key.section is None or not is_section(key.field.annotation))
        if is_it or (key.dotted.startswith(f"{missing}.") and key.field.is_required()):
            yield Mistake(tuple(key.dotted.split(".")), f"{_REQUIRED}; allowed: {key.allowed}")


def _wrong_value(path: tuple[str, ...], value: Any, kind: str, reason: str, keys: Mapping[str, Key]) -> str:
    dotted = next(".".join(path[:end]) for end in range(len(path), -1, -1) if ".".join(path[:end]) in keys or end == 0)
    if not dotted:
        return f"found {shown(value)}; a recipe is a mapping of keys, such as model and data"
    key = keys[dotted]
    if value is None and key.field.is_required():
        return f"required, but null; allowed: {key.allowed}"
    found = f"found {shown(value)}" + (f", which {reason}" if reason else "")
    if dotted != ".".join(path):
        return f"{found}; allowed: {key.allowed_inside}"
    hint = translate_value(dotted, value) or _suggestion(key, value, kind)
    return f"{found}; allowed: {key.allowed}" + (f"; {hint}" if hint else "")


def _suggestion(key: Key, value: Any, kind: str) -> str:
    if key.dotted == "model" and hasattr(value, "parameters"):  # a torch module
        return (
            "name the model here, and pass an object of transformers to fit(recipe, model=…); train other modules in "
            "your own loop: trimtab.Engine"
        )
    choices = choices_of(key.field.annotation)
    if choices and (near := _nearest(str(value), choices)):
        return f"did you mean {near}?"
    if key.dotted in _MAPPING_FOR_VALUE and isinstance(value, str | int):
        return f"did you mean {_MAPPING_FOR_VALUE[key.dotted].format(as_yaml(value))}?"
    if kind == "string_type" and not choices and isinstance(value, bool | int | float):
        return f"put text in quotes: '{as_yaml(value)}'"
    return ""


def _unknown_key(
    path: tuple[str, ...], value: Any, siblings: Mapping[str, Any], keys: Mapping[str, Key]
) -> Iterator[Mistake]:
    name, section = _snake(path[-1]), ".".join(path[:-1])
    here = [key.name for key in keys.values() if key.dotted.rpartition(".")[0] == section]
    elsewhere = [key.dotted for key in keys.values() if key.name == name and key.section is None]
    near = _nearest(name, here)
    if answer := translate_key(name, value, siblings):
        text = answer
    elif path[-1] in keys:
        outer, _, inner = path[-1].rpartition(".")
        text = f"no such key; write it in its section, {outer}: {{{inner}: {as_yaml(value)}}}"
    elif elsewhere and name not in here:
        text = f"no such key here; write {' or '.join(f'{key}: {as_yaml(value)}' for key in elsewhere)}"
    elif near:
        text = f"no such key; did you mean {'.'.join((*path[:-1], near))}?"
    elif far := _nearest(name, [key.name for key in keys.values()]):
        text = f"no such key; did you mean {' or '.join(key.dotted for key in keys.values() if key.name == far)}?"
    else:
        text = f"no such key; allowed{f' in {section}' if section else ''}: {', '.join(here)}"
    yield Mistake(path, f"found {_shown_unless_secret(name, value)}; {text}")
    if isinstance(value, Mapping):
        # A whole section of another library, such as `trainer:`: each of its keys has its own translation.
        for inner_name, inner_value in value.items():
            dotted, inner = f"{near}.{inner_name}", _snake(str(inner_name))
            known = translate_value(dotted, inner_value) if dotted in keys else translate_key(inner, inner_value, value)
            if known:
                yield Mistake((*path, str(inner_name)), f"found {_shown_unless_secret(inner, inner_value)}; {known}")


def _shown_unless_secret(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = {key: HIDDEN if is_secret_name(str(key)) else inner for key, inner in value.items()}
    return HIDDEN if is_secret_name(name) and isinstance(value, str) else shown(value)


def _snake(name: str) -> str:
    """Write batchSize, batch-size and BATCH_SIZE in the same way."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def _nearest(word: str, candidates: Sequence[str]) -> str:
    plain = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    wanted = word.lower().replace("-", "_")
    near = difflib.get_close_matches(wanted, plain, cutoff=0.65)
    near.sort(key=lambda name: not wanted.startswith(name))  # `tracking` means track, not train
    return plain[near[0]] if near else ""
