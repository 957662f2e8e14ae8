"""A recipe from a file and the command line, with the origin of every value; and recipes as text.

Later wins: defaults, file, plain flags, --set.
"""

import difflib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.recipe.describe import Key, choices_of, is_section, keys_of
from trimtab.recipe.mistakes import Mistake, shown
from trimtab.recipe.schema import Recipe, Section
from trimtab.recipe.value_types import says_none, says_off
from trimtab.recipe.yaml_text import as_yaml, read_value, read_yaml

_KEYS = {key.dotted: key for key in keys_of(Recipe)}
# Flags whose name is not the last part of their key.
_FLAGS = {
    "data.train": "--data",
    "memory.budget": "--memory",
    "limits.train": "--limit-train",
    "limits.eval": "--limit-eval",
}
# A single word for one of these keys is short for a mapping with this key in it.
_SHORT_FOR = {"model": "name", "adapter": "kind", "track": "uri"}
_WIDTH = 100


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, and where each of its values came from: "default", "FILE:LINE", "--flag" or "--set"."""

    recipe: Recipe
    origins: dict[str, str]


def load_recipe(
    path: Path | None,
    overrides: Mapping[str, Any],
    sets: Sequence[str],
    changes: Sequence[str] = (),
    *,
    further: Callable[[Recipe], Iterable[Mistake]] = lambda recipe: (),
) -> LoadedRecipe:
    """Read a recipe and lay the command line over it.

    The file, the command line (flags and --set) and the changes are three layers: a later one replaces what an earlier
    one says, but within one layer no setting is dropped for the sake of another.

    Args:
        path: A YAML file, or None where the command line says everything.
        overrides: Values of plain flags by dotted key; None is a flag that was not given.
        sets: Further values as "train.lr=3e-5".
        changes: Values in the same form that replace those of the command line, such as the variants of a comparison.
        further: Finds more mistakes in a recipe whose values are valid; those in other keys are reported together.

    Raises:
        RecipeError: With every mistake, wherever it was written.
    """
    layers = _Layers()
    if path is not None:
        layers.add_file(Path(path))
    for key, value in overrides.items():
        if value is not None:
            layers.put(key, value, _flag(key))
    for text in sets:
        layers.add_set(text)
    layers.begin_layer()
    return _loaded(layers, changes, further)


def load_to_resume(
    source: Path | Mapping[str, Any],
    origin: str,
    folder: Path,
    sets: Sequence[str],
    overrides: Mapping[str, Any] | None = None,
) -> LoadedRecipe:
    """Read the recipe of a run that resumes; the run's folder takes the place of `out` and of `name`.

    Args:
        source: The run's YAML file, or its settings as plain values.
        origin: Where plain values come from.
        folder: The run's folder.
        sets: Changes, as "train.epochs=5".
        overrides: Changes by dotted key, over which those of `sets` count.

    Raises:
        RecipeError: With every mistake, wherever it was written; or because a change names another folder.
    """
    layers = _Layers()
    if isinstance(source, Path):
        layers.add_file(source)
    else:
        for key, value in source.items():
            layers.put(key, value, origin)
    layers.values.pop("name", None)
    layers.origins.pop("name", None)
    layers.begin_layer()
    for key, value in {"out": str(folder), **(overrides or {})}.items():
        layers.put(key, value, _flag(key) if key in _FLAGS else "resume")
    loaded = _loaded(layers, sets)
    if loaded.recipe.out != str(folder):
        raise RecipeError(f"out is {loaded.recipe.out!r}, but the run resumes in {folder}", "leave it out")
    return loaded


def _loaded(
    layers: "_Layers",
    changes: Sequence[str],
    further: Callable[[Recipe], Iterable[Mistake]] = lambda recipe: (),
) -> LoadedRecipe:
    """Lay the last changes over the layers, validate the whole, and note where each value came from."""
    for text in changes:
        layers.add_set(text)
    layers.refuse_settings_without_adapter()
    context = {"origins": layers.origins, "mistakes": layers.mistakes, "from_text": True, "further": further}
    recipe = Recipe.model_validate(layers.values, context=context)
    origins = {dotted: layers.origins.get(dotted, "default") for dotted, _ in _leaves(recipe)}
    return LoadedRecipe(recipe, origins)


def resolved_yaml(loaded: LoadedRecipe) -> str:
    """The whole recipe as YAML, each value with its origin; reading it again gives the same recipe."""
    lines: list[tuple[str, str]] = []
    section = ""
    for dotted, value in _leaves(loaded.recipe):
        outer, _, name = dotted.rpartition(".")
        if outer != section and outer:
            lines.append((f"{outer}:", ""))
        section = outer
        origin = loaded.origins.get(dotted) or _origin_in_python(loaded.recipe, dotted)
        lines.append((f"{'  ' if outer else ''}{name}: {as_yaml(value)}", origin))
    width = max(len(line) for line, _ in lines if len(line) <= _WIDTH // 2)
    return "".join(f"{line:<{width}}  # {origin}\n" if origin else f"{line}\n" for line, origin in lines)


def commented_yaml(overrides: Mapping[str, Any]) -> str:
    """A recipe to start from: every key with its documentation, those given set, the others commented out.

    Args:
        overrides: Values by dotted key; None is one that was not given.

    Raises:
        RecipeError: A value given is not valid.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    needed = {key for key in ("model", "data.train") if not any(f"{name}.".startswith(f"{key}.") for name in given)}
    loaded = load_recipe(None, given | dict.fromkeys(needed, "?"), ())
    values = dict(_leaves(loaded.recipe))
    lines = ["# A recipe of trimtab. Lines that begin with # show defaults: take the # away to change one."]
    for key in _KEYS.values():
        outer = key.dotted.rpartition(".")[0]
        section = getattr(loaded.recipe, outer) if outer else loaded.recipe
        if isinstance(section, str):
            continue  # the model is a name: what else it may be stands in the documentation of `model`
        is_header = key.section is not None and not isinstance(getattr(section, key.name), str)
        if key.dotted in needed:
            line = f"{key.name}: null  # needed"
        elif is_header:
            line = f"{key.name}:"
        else:
            is_set = loaded.origins.get(key.dotted, "default") != "default"
            line = f"{'' if is_set else '# '}{key.name}: {as_yaml(values.get(key.dotted, key.field.default))}"
        # A section that is null by default is commented out as a block.
        is_asleep = section is None or (is_header and getattr(section, key.name) is None)
        block = [*_documentation(key), line if not is_asleep else line.removeprefix("# ")]
        indent = ("# " if is_asleep else "") + ("  " if outer else "")
        lines += [*([] if outer else [""]), *(f"{indent}{part}" for part in block)]
    return "\n".join(lines) + "\n"


def recipe_json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors."""
    schema = Recipe.model_json_schema()
    for name, field in Recipe.model_fields.items():
        if is_section(field.annotation):  # an empty section is one whose keys are all commented out
            reference = {"$ref": schema["properties"][name]["$ref"]}
            words = [{"type": ["string", "boolean"]}] if name == "track" else []  # `track: none`
            kinds = [reference, {"type": "null"}, *words]
            schema["properties"][name] = {"description": field.description, "anyOf": kinds}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "trimtab recipe"}


class _Layers:
    """The values of a recipe while they are laid over each other, with their origins and what is wrong so far."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.mistakes: list[Mistake] = []
        self._layer: set[str] = set()  # keys that the current layer has set

    def begin_layer(self) -> None:
        """What follows may replace anything that is there."""
        self._layer = set()

    def add_file(self, path: Path) -> None:
        document = read_yaml(_text_of(path), str(path))
        self.values, self.origins = document.values, document.places
        word = self.values.get("track")
        if word is not None and not isinstance(word, Mapping):  # `track: none`, or an address
            self.values["track"] = {"uri": word}
            self.origins["track.uri"] = self.origins.get("track", "default")
        for dotted, place, first_line in document.duplicates:
            text = f"given twice, first in line {first_line}; keep one of them"
            self.mistakes.append(Mistake(tuple(dotted.split(".")), text, place=place))

    def add_set(self, text: str) -> None:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            cure = "write --set KEY=VALUE, such as --set train.lr=3e-5"
            self.mistakes.append(
                Mistake((key.strip() or "--set",), f"found {text!r} without a value; {cure}", place="--set")
            )
        else:
            self.put(key.strip(), read_value(value), "--set")

    def put(self, dotted: str, value: Any, origin: str) -> None:
        """Set one key. A mapping for a section sets the keys in it and leaves the others; all else is replaced."""
        key = _KEYS.get(dotted)
        is_mapping = isinstance(value, Mapping)
        if key is not None and is_mapping and (is_section(key.field.annotation) or self._merges(key, value)):
            for name, inner in value.items():
                self.put(f"{dotted}.{name}", inner, origin)
            return
        if not is_mapping and self._is_short_for_a_key(dotted, value):
            self.put(f"{dotted}.{_SHORT_FOR[dotted]}", value, origin)
            return
        if below := sorted(name for name in self._layer if name.startswith(f"{dotted}.")):
            self._refuse_both(dotted, value, origin, below[0], self._value_at(below[0]))
            return
        holder, name = self._holder(dotted, value, origin)
        if holder is None:
            return
        if dotted == "model":
            self._say_what_is_replaced(origin)
        holder[name] = value
        self.origins = {old: place for old, place in self.origins.items() if not f"{old}.".startswith(f"{dotted}.")}
        self.origins[dotted] = origin
        self._layer.add(dotted)
        leaf = dotted.removesuffix(f".{name}")
        if leaf in _KEYS and _KEYS[leaf].section is None:  # an entry of train.freeze changes the whole
            self.origins[leaf] = origin

    def refuse_settings_without_adapter(self) -> None:
        """`adapter: none` leaves nothing that a rank could be the rank of."""
        adapter = self.values.get("adapter")
        if not isinstance(adapter, Mapping) or len(adapter) == 1 or not says_off(adapter.get("kind", "lora")):
            return
        place = self.origins.get("adapter.kind", "default")
        for name in adapter.keys() - {"kind"}:
            text = f"found {shown(adapter[name])}; adapter is none ({place}); leave it out, or set adapter.kind: lora"
            self.mistakes.append(Mistake(("adapter", name), text))
        self.values["adapter"] = "none"

    def _merges(self, key: Key, value: Mapping[str, Any]) -> bool:
        """Whether a mapping changes single keys of a section that may be a word or null as well.

        A model is replaced whole: a name and a config exclude each other.
        """
        return key.section is not None and bool(value) and key.dotted != "model"

    def _is_short_for_a_key(self, dotted: str, word: Any) -> bool:
        """Whether a word sets one key of a mapping and leaves the others, instead of replacing all of it."""
        if dotted == "adapter":
            return isinstance(self.values.get("adapter"), Mapping) and not says_off(word)
        if dotted == "model":
            return any(name.startswith("model.") for name in self._layer)
        return dotted == "track" and word is not None

    def _holder(self, dotted: str, value: Any, origin: str) -> tuple[dict[str, Any] | None, str]:
        """The mapping that a key stands in, made where it is missing, and the key's name in it.

        None where a word stands in its place that no mapping can take: that is a mistake, and reported.
        """
        holder, parts, path = self.values, dotted.split("."), ""
        while len(parts) > 1:
            path = f"{path}.{parts[0]}".removeprefix(".")
            inner = holder.get(parts[0])
            if not isinstance(inner, Mapping) and path in self.origins:
                inner = self._as_mapping(path, inner, dotted, value, origin)
                if inner is None:
                    return None, ""
            holder[parts[0]] = dict(inner or {})  # copied: an anchor may have put one mapping in two places
            holder = holder[parts.pop(0)]
            if path in _KEYS and _KEYS[path].section is None:
                return holder, ".".join(parts)  # patterns of train.freeze have dots of their own
        return holder, parts[0]

    def _as_mapping(self, path: str, word: Any, dotted: str, value: Any, origin: str) -> dict[str, Any] | None:
        """What a word, or null, becomes when a key below it is set."""
        key = _KEYS.get(path)
        if path in _SHORT_FOR and (word is not None or path == "adapter"):
            inner = f"{path}.{_SHORT_FOR[path]}"
            self.origins[inner] = self.origins.get(path, "default")
            if path in self._layer:
                self._layer.add(inner)
                self._layer.discard(path)
            return {_SHORT_FOR[path]: word}
        if key is None or (key.section is not None and not says_none(word)):
            return None  # an unknown key, or a word for a section: refused when the recipe is validated
        if path in self._layer and not is_section(key.field.annotation):
            self._refuse_both(dotted, value, origin, path, word)
            return None
        return {}  # an earlier layer said so; one that takes no mapping is refused when the recipe is validated

    def _refuse_both(self, dotted: str, value: Any, origin: str, other: str, other_value: Any) -> None:
        place = self.origins.get(other, origin)
        text = f"found {shown(value)}, and {other}: {shown(other_value)} ({place}); leave one of them out"
        self.mistakes.append(Mistake(tuple(dotted.split(".")), text, place=origin))

    def _value_at(self, dotted: str) -> Any:
        holder: Any = self.values
        while isinstance(holder, Mapping) and dotted not in holder:
            first, _, dotted = dotted.partition(".")
            holder = holder.get(first)
        return holder[dotted] if isinstance(holder, Mapping) else None

    def _say_what_is_replaced(self, origin: str) -> None:
        before = self.values.get("model")
        kept = {name: inner for name, inner in before.items() if name != "name"} if isinstance(before, Mapping) else {}
        if kept:
            others = ", ".join(f"{name}: {shown(inner)}" for name, inner in kept.items())
            say(f"{origin} replaces the whole of model in the recipe, also {others}")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path()
        names = [file.name for pattern in ("*.yaml", "*.yml") for file in sorted(folder.glob(pattern))]
        near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
        cure = f"did you mean {folder / near[0]}?" if near else "`trimtab init` writes one; flags alone will do as well"
        raise RecipeError(f"there is no recipe {path}", cure) from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text", "save the recipe as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}", "give the path of a YAML file") from None


def _flag(key: str) -> str:
    return _FLAGS.get(key, f"--{key.rpartition('.')[2].replace('_', '-')}")


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a recipe that holds a value, with the value as it would be written."""
    written = section.model_dump()  # not as JSON, which has no infinity
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", written[name]


def _origin_in_python(recipe: Recipe, dotted: str) -> str:
    section: Any = recipe
    *outer, name = dotted.split(".")
    for part in outer:
        section = getattr(section, part)
    return "Python" if name in section.model_fields_set else "default"


def _documentation(key: Key) -> list[str]:
    choices = f" Allowed: {key.allowed}." if len(choices_of(key.field.annotation)) > 1 else ""
    return [f"# {line}" for line in textwrap.wrap(f"{key.field.description}{choices}", _WIDTH, break_on_hyphens=False)]
