"""From what is wrong with a recipe to the lines that a user reads: one line a mistake, all of them at once.

A line has the key, the value found and where it was written, what is allowed, and what was probably meant.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from trimtab.addresses import redact
from trimtab.errors import RecipeError
from trimtab.recipe.describe import Key, Later, choices_of, is_section, keys_of
from trimtab.recipe.foreign_keys import translate_key, translate_value
from trimtab.recipe.yaml_text import as_yaml

_LONGEST_VALUE = 60
_NOTHING = object()
_NEEDED = "needed, found nothing"
_MEANT_BY_SHAPE = {
    "data": "data: {{train: {}}}",
    "train.freeze": "train.freeze: {{{}: always}}",
    "early_stopping": "early_stopping: {{patience: 3}}",
}


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong.

    Args:
        path: Where in the recipe, key by key.
        text: What is wrong, with the value found and the cure.
        others: Further dotted keys that it depends on.
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

    def touches(self, key: str) -> bool:
        """Whether the mistake depends on a key, on one above it or on one below it."""
        return any(
            f"{own}.".startswith(f"{key}.") or f"{key}.".startswith(f"{own}.") for own in (self.key, *self.others)
        )


def refuse(mistakes: Sequence[Mistake], origins: Mapping[str, str]) -> NoReturn:
    """Raise one error with a line for each mistake, in the order of the file."""
    lines = []
    for mistake in mistakes:
        place = mistake.place or _origin(mistake.path, origins)
        line = re.search(r":([0-9]+)$", place)
        lines.append((int(line[1]) if line else 10**9, f"{place}: {mistake.key}: {mistake.text}".removeprefix(": ")))
    text = "\n".join(f"  {line}" for _, line in sorted(lines, key=lambda pair: pair[0]))
    raise RecipeError(f"the recipe has {len(lines)} problem{'s' if len(lines) != 1 else ''}:\n{text}")


def mistakes_of(error: ValidationError, values: Any, model: type[BaseModel]) -> list[Mistake]:
    """Everything that pydantic found, once for each key."""
    keys = {key.dotted: key for key in keys_of(model)}
    found: dict[tuple[str, ...], tuple[str, Any, str]] = {}
    for detail in error.errors(include_url=False):
        path, value = _locate(detail["loc"], values, detail["type"] == "missing")
        reason = str(detail.get("ctx", {}).get("error", ""))
        if path not in found or reason:
            found[path] = (detail["type"], value, reason)
    mistakes: list[Mistake] = []
    for path, (kind, value, reason) in found.items():
        # Of a choice between text and a section, only the complaints about the one that was begun are of use.
        if any(other[: len(path)] == path and len(other) > len(path) for other in found):
            continue
        if value is _NOTHING:
            mistakes += _missing(path, keys)
        elif kind in {"extra_forbidden", "invalid_key"}:
            mistakes += _unknown_key(path, value, _inside(values, path[:-1]), keys)
        else:
            mistakes.append(Mistake(path, _wrong_value(path, value, kind, reason, keys)))
    return _without_echoes(mistakes)


def _without_echoes(mistakes: list[Mistake]) -> list[Mistake]:
    """A key that is missing because it was misspelt, or written in the word of another library, is one mistake."""
    meant = [
        match[1] for mistake in mistakes for match in re.finditer(r"(?:write|did you mean) ([\w.]+)", mistake.text)
    ]
    return [
        mistake
        for mistake in mistakes
        if not (mistake.text.startswith(_NEEDED) and any(f"{mistake.key}.".startswith(f"{key}.") for key in meant))
    ]


def without(values: Mapping[str, Any], paths: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """A copy without the values at some paths, with stand-ins for what every recipe needs."""
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
        "model": rest.get("model", "?"),
        "data": {"train": "?", **(data if isinstance(data, Mapping) else {})},
    }


def shown(value: Any) -> str:
    """A value as it may stand in a message: text in quotes, never too long, without credentials."""
    if isinstance(value, str):
        text = repr(redact(value))  # before it has quotes, which could be part of an address
    else:
        text = repr(value) if isinstance(value, float) else redact(as_yaml(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 2]} …"


def _origin(path: tuple[str, ...], origins: Mapping[str, str]) -> str:
    """Where a key was written; for one that is missing, where the section around it was."""
    for end in range(len(path), 0, -1):
        if (place := origins.get(".".join(path[:end]))) is not None:
            return place
    return ""


def _locate(loc: tuple[int | str, ...], values: Any, missing: bool) -> tuple[tuple[str, ...], Any]:
    """The path of a key and its value. What pydantic adds to name the branch of a union is not in the values."""
    path: list[str] = []
    for index, part in enumerate(loc):
        if isinstance(values, Mapping) and part in values:
            path.append(str(part))
            values = values[part]
        elif missing and index == len(loc) - 1 and isinstance(values, Mapping):
            path.append(str(part))
            values = _NOTHING
    return tuple(path), values


def _inside(values: Any, path: tuple[str, ...]) -> Mapping[str, Any]:
    for part in path:
        values = values[part]
    return values if isinstance(values, Mapping) else {}


def _missing(path: tuple[str, ...], keys: Mapping[str, Key]) -> Iterator[Mistake]:
    """The key that is missing; of a section, the keys in it that are needed."""
    missing = ".".join(path)
    for key in keys.values():
        is_it = key.dotted == missing and (key.section is None or not is_section(key.field.annotation))
        if is_it or (key.dotted.startswith(f"{missing}.") and key.field.is_required()):
            yield Mistake(tuple(key.dotted.split(".")), f"{_NEEDED}; allowed: {key.allowed}")


def _wrong_value(path: tuple[str, ...], value: Any, kind: str, reason: str, keys: Mapping[str, Key]) -> str:
    dotted = next(".".join(path[:end]) for end in range(len(path), -1, -1) if ".".join(path[:end]) in keys or end == 0)
    if not dotted:
        return f"found {shown(value)}; a recipe is a mapping of keys, such as model and data"
    key = keys[dotted]
    if value is None and key.field.is_required():
        return f"needed, found null; allowed: {key.allowed}"
    found = f"found {shown(value)}" + (f", which {reason}" if reason else "")
    if any(isinstance(mark, Later) for mark in key.field.metadata):
        return f"{found}; not supported yet in this version; allowed: {key.allowed}"
    if dotted != ".".join(path):
        return f"{found}; allowed: {key.allowed_inside}"
    hint = translate_value(dotted, value) or _meant(key, value, kind)
    return f"{found}; allowed: {key.allowed}" + (f"; {hint}" if hint else "")


def _meant(key: Key, value: Any, kind: str) -> str:
    choices = choices_of(key.field.annotation)
    if choices and (near := _nearest(str(value), choices)):
        return f"did you mean {near}?"
    if key.dotted in _MEANT_BY_SHAPE and isinstance(value, str | int):
        return f"did you mean {_MEANT_BY_SHAPE[key.dotted].format(as_yaml(value))}?"
    if kind == "string_type" and not choices and isinstance(value, bool | int | float):
        return f"put text in quotes: '{as_yaml(value)}'"
    return ""


def _unknown_key(
    path: tuple[str, ...], value: Any, beside: Mapping[str, Any], keys: Mapping[str, Key]
) -> Iterator[Mistake]:
    name, section = _snake(path[-1]), ".".join(path[:-1])
    here = [key.name for key in keys.values() if key.dotted.rpartition(".")[0] == section]
    homes = [key.dotted for key in keys.values() if key.name == name and key.section is None]
    near = _nearest(name, here)
    if answer := translate_key(name, value, beside):
        text = answer
    elif path[-1] in keys:
        outer, _, inner = path[-1].rpartition(".")
        text = f"no such key; write it in its section, {outer}: {{{inner}: {as_yaml(value)}}}"
    elif homes and name not in here:
        text = f"no such key here; write {' or '.join(f'{home}: {as_yaml(value)}' for home in homes)}"
    elif near:
        text = f"no such key; did you mean {'.'.join((*path[:-1], near))}?"
    elif far := _nearest(name, [key.name for key in keys.values()]):
        homes = [key.dotted for key in keys.values() if key.name == far]
        text = f"no such key; did you mean {' or '.join(homes)}?"
    else:
        text = f"no such key; allowed{f' in {section}' if section else ''}: {', '.join(here)}"
    yield Mistake(path, f"found {shown(value)}; {text}")
    if isinstance(value, Mapping):
        # A whole block of another library, such as `trainer:`; each of its words has an answer of its own.
        for inner_name, inner_value in value.items():
            meant, word = f"{near}.{inner_name}", _snake(str(inner_name))
            known = translate_value(meant, inner_value) if meant in keys else translate_key(word, inner_value, value)
            if known:
                yield Mistake((*path, str(inner_name)), f"found {shown(inner_value)}; {known}")


def _snake(name: str) -> str:
    """batchSize, batch-size and BATCH_SIZE are one word."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def _nearest(word: str, candidates: Sequence[str]) -> str:
    plain = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=0.65)
    return plain[near[0]] if near else ""
