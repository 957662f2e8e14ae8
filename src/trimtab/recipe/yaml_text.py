"""YAML in and out: values together with the line that each was written on, and values as one line of YAML.

Read with the scalars of YAML 1.2, where `no`, `off` and `1:30` are text and 5e-5 is a number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from trimtab.errors import RecipeError

_TAG = "tag:yaml.org,2002:"
_MOST_VALUES = 100_000  # after every alias is replaced by what it names: a few lines of aliases can name billions
_MOST_DIGITS = 1000  # Python refuses to print or to read numbers of more than 4,300


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars as YAML 1.2 does; the merge key `<<` stays, because people use it with anchors."""

    yaml_implicit_resolvers = {}


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), _first)


@dataclass(frozen=True)
class Document:
    """What a YAML text holds.

    Args:
        values: The mapping.
        places: "FILE:LINE" of every dotted key.
        duplicates: Keys that came again: the dotted key, its place, and the line of the first.
    """

    values: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)
    duplicates: list[tuple[str, str, int]] = field(default_factory=list)


def read_yaml(text: str, name: str) -> Document:
    """Read one YAML mapping.

    Args:
        text: The YAML.
        name: What to call it in messages, mostly the path of the file.

    Raises:
        RecipeError: It is not YAML, is empty, or does not hold a mapping.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, name) from None
    except RecursionError:
        raise _too_deep(name) from None
    starter = "a recipe needs at least model and data.train; `trimtab init` writes one with every key explained"
    if node is None:
        raise RecipeError(f"{name} is empty", starter)
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(
            f"{name} does not hold keys with values, but a {_kind_of(node)}",
            f"{starter}; after each colon comes a space",
        )
    reader = _Reader(name)
    try:
        return Document(reader.value(node, "", ()), reader.places, reader.duplicates)
    except RecursionError:
        raise _too_deep(name) from None


def read_value(text: str) -> Any:
    """A value from the command line: lists, mappings and quoted text as YAML, everything else as one plain scalar.

    So globs, slices, colons and hashes need no quoting: `data.train=*.csv` is text.
    """
    text = text.strip()
    if text[:1] in {"[", "{", '"', "'"}:
        try:
            node = yaml.compose(text, Loader=_Loader)
            return _Reader("--set").value(node, "", ())
        except (yaml.YAMLError, RecipeError, RecursionError):
            return text  # a glob such as [ab].csv
    return _scalar(_tag_of(text, _Loader), text, "--set")


def as_yaml(value: Any) -> str:
    """A value as YAML on one line, readable alike by YAML 1.1 and 1.2."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_yaml(str(key))}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    return _quoted_if_needed(str(value))


class _Reader:
    """Turns nodes into values and notes where each key stands."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[str, str] = {}
        self.duplicates: list[tuple[str, str, int]] = []
        self._num_values = 0

    def value(self, node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> Any:
        if node in above:
            raise RecipeError(f"{self._place(node)}: {path or 'the value'} contains itself", "remove the alias")
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            raise RecipeError(
                f"{self._place(node)}: more than {_MOST_VALUES:,} values, counting what aliases (*name) repeat",
                "write fewer aliases of aliases",
            )
        above = (*above, node)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in {f"{_TAG}map", f"{_TAG}seq"}:
            raise _tag_error(node.tag, self._place(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, above)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, f"{path}.{index}", above) for index, item in enumerate(node.value)]
        return _scalar(node.tag, node.value, self._place(node))

    def mapping(self, node: yaml.MappingNode, path: str, above: tuple[yaml.Node, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        own: dict[str, yaml.Node] = {}
        merged = [source for key, source in node.value if key.tag == _TAG + "merge"]
        for source in merged:  # first, because the mapping's own keys win
            listed = source.value if isinstance(source, yaml.SequenceNode) else [source]
            for other in reversed(listed):
                inherited = self.value(other, path, above)
                if not isinstance(inherited, dict):
                    raise RecipeError(f"{self._place(source)}: << takes a mapping", "name an anchor: << : *name")
                values |= inherited
        for key, item in node.value:
            if key.tag == _TAG + "merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"{self._place(key)}: a key must be one word", "put the key in quotes")
            dotted = f"{path}.{key.value}" if path else key.value
            if key.value in own:
                self.duplicates.append((dotted, self._place(key), own[key.value].start_mark.line + 1))
                continue
            own[key.value] = key
            if key.value in values:  # what an anchor brought below this key is replaced as a whole
                for old in [place for place in self.places if place.startswith(f"{dotted}.")]:
                    del self.places[old]
            self.places[dotted] = self._place(key)
            values[key.value] = self.value(item, dotted, above)
        return values

    def _item(self, node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> Any:
        self.places[path] = self._place(node)
        return self.value(node, path, above)

    def _place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"


def _tag_of(text: str, loader: type[yaml.SafeLoader]) -> str:
    """What an unquoted scalar is to a loader."""
    candidates = loader.yaml_implicit_resolvers.get(text[:1], [])
    return next((tag for tag, pattern in candidates if pattern.match(text)), f"{_TAG}str")


def _scalar(tag: str, text: str, place: str = "") -> Any:
    kind = tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        if len(text) > _MOST_DIGITS:
            raise RecipeError(f"{place}: a number of {len(text):,} digits", "write it in quotes if it is meant as text")
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if kind == "float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    if kind in {"str", "merge"}:
        return text
    raise _tag_error(tag, place)


def _too_deep(name: str) -> RecipeError:
    return RecipeError(f"{name}: values inside of values, too many levels deep", "a recipe needs a few levels at most")


def _tag_error(tag: str, place: str) -> RecipeError:
    return RecipeError(f"{place}: the tag {tag} is not used in recipes", "write a plain value")


def _kind_of(node: yaml.Node) -> str:
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"


def _syntax_error(error: yaml.YAMLError, text: str, name: str) -> RecipeError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    if problem == "could not find expected ':'":  # noticed a line late: the context is the word that wants a colon
        mark = getattr(error, "context_mark", None) or mark
    if mark is None:
        return RecipeError(f"{name} is not valid YAML: {problem}", "save it as plain UTF-8 text")
    line = (text.splitlines() or [""])[min(mark.line, len(text.splitlines()) - 1)]
    place = f"{name}:{mark.line + 1}"
    if "\t" in line[: mark.column + 1]:
        return RecipeError(f"{place}: a tab in the indentation", "YAML is indented with spaces; replace the tab")
    return RecipeError(
        f"{place}: not valid YAML: {problem}, near {line.strip()!r}",
        "after each colon comes a space; keys of a section stand below each other; text with : or # wants quotes",
    )


def _float_text(value: float) -> str:
    text = repr(value)
    if text in {"inf", "-inf", "nan"}:
        return text.replace("inf", ".inf").replace("nan", ".nan")
    # YAML 1.1 wants a point in front of an exponent, or the number is text.
    return text if "." in text else text.replace("e", ".0e")


def _quoted_if_needed(text: str) -> str:
    simple = re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./@+%:-]*(?: [A-Za-z0-9_./%+-]+)*", text)
    if simple and ": " not in text and not text.endswith(":"):
        tags = {_tag_of(text, _Loader), _tag_of(text, yaml.SafeLoader)}
        if tags == {f"{_TAG}str"} and text.lower() not in {"y", "n"}:
            return text
    quoted: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=10**9)
    return quoted.removesuffix("\n").removesuffix("\n...")
