"""The keys of the recipe, derived from the schema: dotted names, documentation, and the values that each allows."""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_BOUNDS = {Gt: ("above", "gt"), Ge: ("from", "ge"), Lt: ("below", "lt"), Le: ("", "le")}
_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


@dataclass(frozen=True)
class Allowed:
    """Annotation of a type: the values it allows, as text for messages and documentation."""

    words: str


@dataclass(frozen=True)
class Key:
    """One key of the recipe: a section, or a leaf that holds a value."""

    dotted: str
    field: FieldInfo
    section: type[BaseModel] | None

    @property
    def name(self) -> str:
        """The last part of the dotted key."""
        return self.dotted.rpartition(".")[2]

    @property
    def allowed(self) -> str:
        """The values that it allows, as text."""
        return allowed_words(self.field.annotation, self.field.metadata)

    @property
    def allowed_inside(self) -> str:
        """The values that an entry allows, if the key is a mapping with keys chosen by the user."""
        mappings = [kind for kind in alternatives(self.field.annotation) if get_origin(kind) is dict]
        return allowed_words(get_args(mappings[0])[1]) if mappings else self.allowed


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield every key of a model in order of declaration, a section before the keys in it."""
    for name, field in model.model_fields.items():
        key = Key(f"{prefix}{name}", field, section_of(field.annotation))
        yield key
        if key.section is not None:
            yield from keys_of(key.section, f"{key.dotted}.")


def alternatives(annotation: Any) -> list[Any]:
    """List the types of a union, each without its annotations."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        return [kind for part in get_args(annotation) for kind in alternatives(part)]
    return [annotation]


def is_section(annotation: Any) -> bool:
    """Whether a field always holds a section."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field may hold, if any."""
    return next((kind for kind in alternatives(annotation) if is_section(kind)), None)


def choices_of(annotation: Any) -> list[str]:
    """List the literal values that a field allows."""
    kinds = alternatives(annotation)
    return [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]


def allowed_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values of a type as text."""
    for mark in metadata:
        if isinstance(mark, Allowed):
            return mark.words
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed_words(inner[0], [*inner[1:], *metadata])
    if origin in {Union, types.UnionType}:
        return ", or ".join(allowed_words(part, metadata) for part in inner)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin is tuple:
        return f"a list of {len(inner)}, each {allowed_words(inner[0])}"
    if origin is dict:
        return f"a mapping; each value {allowed_words(inner[1])}" if inner[1] is not Any else "a mapping"
    if is_section(annotation):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    if annotation not in {int, float}:  # bounds of a union do not apply to null
        return _PLAIN[annotation]
    bounds = [
        f"{word} {getattr(mark, attribute):g}".strip()
        for mark in metadata
        for kind, (word, attribute) in _BOUNDS.items()
        if isinstance(mark, kind)
    ]
    return " ".join([_PLAIN[annotation], " to ".join(bounds)]).strip()
