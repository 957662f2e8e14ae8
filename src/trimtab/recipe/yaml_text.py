"""Read YAML with the line number of every key, and write values as one line of YAML.

Scalars follow YAML 1.2: `no`, `off` and `1:30` are text, and 5e-5 is a number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from trimtab.errors import RecipeError

_TAG = "tag:yaml.org,2002:"
_MAX_VALUES = 100_000  # with all aliases expanded: a few lines of nested aliases can expand to billions
_MAX_DIGITS = 1000  # digits of an integer; Python refuses to parse or print more than 4,300
_RECIPE = "a recipe needs at least model and data.train; `trimtab init` writes one with every key documented"


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars as YAML 1.2 does, and keeps the merge key `<<` of YAML 1.1, which many files use."""

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
    """A YAML mapping.

    Args:
        values: The mapping.
        places: "FILE:LINE" of every dotted key.
        duplicates: Repeated keys: the dotted key, its place, and the line of the first one.
    """

    values: dict[str, Any]
    places: dict[str, str]
    duplicates: list[tuple[str, str, int]]


def read_yaml(text: str, name: str, expected: str = _RECIPE) -> Document:
    """Read one YAML mapping.

    Args:
        text: The YAML.
        name: Its name in messages, usually the path of the file.
        expected: What the text should contain; the cure if it is empty or not a mapping.

    Raises:
        RecipeError: The text is not valid YAML, is empty, or is not a mapping.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            raise RecipeError(f"{name} is empty", expected)
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            raise RecipeError(f"{name} is {kind}, not a mapping", f"{expected}; write a space after each colon")
        reader = _Reader(name)
        return Document(reader.value(node, "", ()), reader.places, reader.duplicates)
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, name) from None
    except RecursionError:
        raise RecipeError(f"{name}: values are nested too deeply", "use fewer levels") from None


def read_value(text: str) -> Any:
    """Parse a value from the command line: lists, mappings and quoted text as YAML, all else as a plain scalar.

    Globs, slices, colons and hashes need no quotes this way: `data.train=*.csv` is text.
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
    """Write a value as one line of YAML that YAML 1.1 and 1.2 read in the same way."""
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
    """Converts YAML nodes into values and records the place of each key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[str, str] = {}
        self.duplicates: list[tuple[str, str, int]] = []
        self._num_values = 0

    def value(self, node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> Any:
        if node in above:
            raise RecipeError(f"{self._place(node)}: {path or 'the value'} contains itself", "remove the alias")
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise RecipeError(
                f"{self._place(node)}: more than {_MAX_VALUES:,} values after expanding aliases (*name)",
                "remove nested aliases",
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
        for source in merged:  # first: the mapping's own keys override the merged ones
            listed = source.value if isinstance(source, yaml.SequenceNode) else [source]
            for other in reversed(listed):
                inherited = self.value(other, path, above)
                if not isinstance(inherited, dict):
                    raise RecipeError(f"{self._place(source)}: << takes a mapping", "write <<: *ANCHOR")
                values |= inherited
        for key, item in node.value:
            if key.tag == _TAG + "merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"{self._place(key)}: a key must be a single value", "put the key in quotes")
            dotted = f"{path}.{key.value}" if path else key.value
            if key.value in own:
                self.duplicates.append((dotted, self._place(key), own[key.value].start_mark.line + 1))
                continue
            own[key.value] = key
            if key.value in values:  # this key replaces the merged value: forget the places of the keys below it
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
    """Return the tag that a loader gives an unquoted scalar."""
    candidates = loader.yaml_implicit_resolvers.get(text[:1], [])
    return next((tag for tag, pattern in candidates if pattern.match(text)), f"{_TAG}str")


def _scalar(tag: str, text: str, place: str = "") -> Any:
    kind = tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        if len(text) > _MAX_DIGITS:
            raise RecipeError(f"{place}: an integer of {len(text):,} digits", "put it in quotes if it is text")
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if kind == "float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    if kind in {"str", "merge"}:
        return text
    raise _tag_error(tag, place)


def _tag_error(tag: str, place: str) -> RecipeError:
    return RecipeError(f"{place}: the tag {tag} is not supported", "write a plain value")


def _syntax_error(error: yaml.YAMLError, text: str, name: str) -> RecipeError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    if problem == "could not find expected ':'":  # reported one line late; the context is the word without a colon
        mark = getattr(error, "context_mark", None) or mark
    if mark is None:
        return RecipeError(f"{name} is not valid YAML: {problem}", "save it as plain UTF-8 text")
    line = (text.splitlines() or [""])[min(mark.line, len(text.splitlines()) - 1)]
    place = f"{name}:{mark.line + 1}"
    if "\t" in line[: mark.column + 1]:
        return RecipeError(f"{place}: a tab in the indentation", "indent YAML with spaces")
    return RecipeError(
        f"{place}: not valid YAML: {problem}, near {line.strip()!r}",
        "write a space after each colon, align the keys of a section, and quote text that contains : or #",
    )


def _float_text(value: float) -> str:
    text = repr(value)
    if text in {"inf", "-inf", "nan"}:
        return text.replace("inf", ".inf").replace("nan", ".nan")
    # Without a decimal point before the exponent, YAML 1.1 reads the number as text.
    return text if "." in text else text.replace("e", ".0e")


def _quoted_if_needed(text: str) -> str:
    simple = re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./@+%:-]*(?: [A-Za-z0-9_./%+-]+)*", text)
    if simple and ": " not in text and not text.endswith(":"):
        tags = {_tag_of(text, _Loader), _tag_of(text, yaml.SafeLoader)}
        if tags == {f"{_TAG}str"} and text.lower() not in {"y", "n"}:
            return text
    quoted: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=10**9)
    return quoted.removesuffix("\n").removesuffix("\n...")
