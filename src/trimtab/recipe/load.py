"""Load a recipe from a file and the command line, with the origin of every value, and write recipes as text.

Later values take precedence: defaults, file, plain flags, --set.
"""

import difflib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.errors import RecipeError, as_argument
from trimtab.log import say
from trimtab.recipe.mistakes import Mistake, shown
from trimtab.recipe.schema import Recipe, Section
from trimtab.recipe.schema_keys import Key, choices_of, is_section, keys_of
from trimtab.recipe.value_types import is_null_word, is_off_word
from trimtab.recipe.yaml_text import as_yaml, read_value, read_yaml

_KEYS = {key.dotted: key for key in keys_of(Recipe)}
# Flags that are not named after the last part of their key.
_FLAGS = {
    "data.train": "--data",
    "memory.budget": "--memory",
    "limits.train": "--limit-train",
    "limits.eval": "--limit-eval",
}
# Each of these keys replaces the other one of an earlier layer: both say how long a run is.
_REPLACED_BY = {"train.max_steps": "train.epochs", "train.epochs": "train.max_steps"}
# For each of these keys, a single word is short for a mapping with only this key.
_SHORT_FOR = {"model": "name", "adapter": "kind", "track": "uri"}
_WIDTH = 100
_MAX_LISTED = 3  # number of files listed in a message
_DATA_SUFFIXES = {".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"}


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and the origin of each value: "default", "FILE:LINE", "--flag" or "--set".

    Attributes:
        recipe: The recipe.
        origins: The origin of each value, by dotted key.
        changed: The keys of a resumed run that the user set, and not the run's files.
    """

    recipe: Recipe
    origins: dict[str, str]
    changed: frozenset[str] = frozenset()


def as_loaded(recipe: Any) -> LoadedRecipe:
    """Return a recipe with the origins of its values; a recipe made in Python has none, a path is read.

    Raises:
        RecipeError: It is neither a `Recipe` nor a `LoadedRecipe` nor the path of a valid recipe.
    """
    if isinstance(recipe, LoadedRecipe):
        return recipe
    if isinstance(recipe, Recipe):
        return LoadedRecipe(recipe, {})
    if isinstance(recipe, str | Path):
        return load_recipe(Path(recipe), {}, [])
    cure = "pass Recipe(**settings)" if isinstance(recipe, Mapping) else "pass Recipe(model=…, data={'train': …})"
    raise RecipeError(f"a Recipe is expected, found the {type(recipe).__name__} {shown(recipe)}", cure)


def load_recipe(
    path: Path | None,
    overrides: Mapping[str, Any],
    sets: Sequence[str],
    changes: Sequence[str] = (),
    *,
    changes_origin: str = "--set",
    extra_check: Callable[[Recipe], Iterable[Mistake]] = lambda recipe: (),
) -> LoadedRecipe:
    """Load a recipe and apply the command line to it.

    The file, the command line (flags and --set) and the changes are three layers. A later layer replaces values of an
    earlier one; two settings of the same layer that exclude each other are an error.

    Args:
        path: A YAML file, or None if the command line gives every value.
        overrides: Values of plain flags by dotted key; None means that the flag was not given.
        sets: Further values in the form "train.lr=3e-5".
        changes: Values in the same form that replace those of the command line, such as a variant of a comparison.
        changes_origin: Where the changes were written, such as "--vary".
        extra_check: Finds more mistakes in a valid recipe. They are reported together with all others, except those
            about keys that are already known to be wrong.

    Raises:
        RecipeError: The recipe is invalid; the message lists every mistake of all sources.
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
    return _load(layers, changes, changes_origin, extra_check)


def load_to_resume(
    source: Path | Mapping[str, Any],
    origin: str,
    folder: Path,
    sets: Sequence[str],
    overrides: Mapping[str, Any] | None = None,
) -> LoadedRecipe:
    """Load the recipe of a run to resume; the run's folder replaces `out` and `name`.

    Args:
        source: The run's YAML file, or its settings as a mapping.
        origin: Origin of the values of a mapping.
        folder: The run's folder.
        sets: Changes in the form "train.epochs=5".
        overrides: Changes by dotted key; `sets` takes precedence over them.

    Raises:
        RecipeError: The recipe is invalid; the message lists every mistake of all sources. Or a change names another
            folder.
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
    loaded = _load(layers, sets, "--set")
    if loaded.recipe.out != str(folder):
        raise RecipeError(f"out is {loaded.recipe.out!r}, but the run resumes in {folder}", "leave it out")
    # before the origins in the file's comments replace these
    changed = frozenset(key for key, origin in loaded.origins.items() if origin in ("--set", "resume"))
    origins = _first_origins(loaded.origins, source) if isinstance(source, Path) else loaded.origins
    return replace(loaded, origins=origins, changed=changed)


def _first_origins(origins: Mapping[str, str], path: Path) -> dict[str, str]:
    """Replace "FILE:LINE" by the origin in the comment of that line, which `render_resolved_yaml` wrote."""
    comments = [line.rpartition("  # ")[2] if "  # " in line else "" for line in _read_text(path).splitlines()]
    written = {f"{path}:{number}": comment for number, comment in enumerate(comments, 1) if comment}
    return {key: written.get(origin, origin) for key, origin in origins.items()}


def _load(
    layers: "_Layers",
    changes: Sequence[str],
    changes_origin: str,
    extra_check: Callable[[Recipe], Iterable[Mistake]] = lambda recipe: (),
) -> LoadedRecipe:
    """Apply the last changes, validate the result, and record the origin of each value."""
    for text in changes:
        layers.add_set(text, changes_origin)
    layers.refuse_settings_without_adapter()
    context = {"origins": layers.origins, "mistakes": layers.mistakes, "from_text": True, "extra_check": extra_check}
    recipe = Recipe.model_validate(layers.values, context=context)
    origins = {dotted: layers.origins.get(dotted, "default") for dotted, _ in _leaves(recipe)}
    return LoadedRecipe(recipe, origins)


def render_resolved_yaml(loaded: LoadedRecipe) -> str:
    """Write all values of a recipe as YAML, each with its origin; loading the text gives the same recipe."""
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


def render_commented_yaml(overrides: Mapping[str, Any]) -> str:
    """Write a recipe to start from: every key with its documentation; keys without a given value are commented out.

    Args:
        overrides: Values by dotted key; None means that the value was not given.

    Raises:
        RecipeError: A value is not valid.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    required = {key for key in ("model", "data.train") if not any(f"{name}.".startswith(f"{key}.") for name in given)}
    loaded = load_recipe(None, given | dict.fromkeys(required, "?"), ())
    values = dict(_leaves(loaded.recipe))
    lines = ["# A trimtab recipe. Keys that are commented out show their defaults; remove the # to change one."]
    for key in _KEYS.values():
        outer = key.dotted.rpartition(".")[0]
        section = getattr(loaded.recipe, outer) if outer else loaded.recipe
        if isinstance(section, str):
            continue  # the section is given as one word; the documentation of its key explains the mapping
        is_header = key.section is not None and not isinstance(getattr(section, key.name), str)
        if key.dotted in required:
            line = f"{key.name}: null  # required"
        elif is_header:
            line = f"{key.name}:"
        elif key.field.is_required() and key.dotted not in values:  # a key of a section that is null
            line = f"{key.name}: '?'  # required"
        else:
            is_set = loaded.origins.get(key.dotted, "default") != "default"
            line = f"{'' if is_set else '# '}{key.name}: {as_yaml(values.get(key.dotted, key.field.default))}"
        # A section that is null by default is commented out as a whole.
        is_unused = section is None or (is_header and getattr(section, key.name) is None)
        block = [*_documentation(key), line if not is_unused else line.removeprefix("# ")]
        indent = ("# " if is_unused else "") + ("  " if outer else "")
        lines += [*([] if outer else [""]), *(f"{indent}{part}" for part in block)]
    return "\n".join(lines) + "\n"


def build_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe, for editors."""
    schema = Recipe.model_json_schema()
    for section in (schema, *schema["$defs"].values()):  # whose keys are described one by one
        section["description"] = section["description"].partition("\n\nKeys:")[0]
    for name, field in Recipe.model_fields.items():
        if is_section(field.annotation):  # also null, for a section whose keys are all commented out
            reference = {"$ref": schema["properties"][name]["$ref"]}
            words = [{"type": ["string", "boolean"]}] if name == "track" else []  # `track: none`
            kinds = [reference, {"type": "null"}, *words]
            schema["properties"][name] = {"description": field.description, "anyOf": kinds}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "trimtab recipe"}


class _Layers:
    """The values of a recipe while its layers are merged, with their origins and the mistakes found so far."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.mistakes: list[Mistake] = []
        self._layer: set[str] = set()  # keys that the current layer has set

    def begin_layer(self) -> None:
        """Start a layer: values put from now on may replace any earlier one."""
        self._layer = set()

    def add_file(self, path: Path) -> None:
        if path.suffix.lower() in _DATA_SUFFIXES and path.is_file():
            cure = f"pass data with --data: trimtab train --model NAME --data {as_argument(path)}"
            raise RecipeError(f"{path} is a data file, not a recipe", cure)
        document = read_yaml(_read_text(path), str(path))
        self.values, self.origins = document.values, document.places
        word = self.values.get("track")
        if word is not None and not isinstance(word, Mapping):  # `track: none`, or the address of a server
            self.values["track"] = {"uri": word}
            self.origins["track.uri"] = self.origins.get("track", "default")
        for dotted, place, first_line in document.duplicates:
            self._add_mistake(dotted, f"given twice, first on line {first_line}; keep one of them", place)

    def add_set(self, text: str, origin: str = "--set") -> None:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            problem = "without a key" if equals else "without a value"
            cure = "write --set KEY=VALUE, such as --set train.lr=3e-5"
            self._add_mistake(text.strip(), f"found {text!r} {problem}; {cure}", "--set")
        else:
            self.put(key.strip(), read_value(value), origin)

    def put(self, dotted: str, value: Any, origin: str) -> None:
        """Set one key. A mapping for a section sets only the keys it contains; any other value replaces the old one."""
        key = _KEYS.get(dotted)
        if isinstance(value, Mapping):
            # A mapping for `model` replaces it: a name and a config exclude each other.
            is_merged = key is not None and key.section is not None and dotted != "model"
            if key is not None and is_merged and (value or is_section(key.field.annotation)):
                for name, inner in value.items():
                    self.put(f"{dotted}.{name}", inner, origin)
                return
        elif self._is_short_form(dotted, value):
            self.put(f"{dotted}.{_SHORT_FOR[dotted]}", value, origin)
            return
        if below := sorted(name for name in self._layer if name.startswith(f"{dotted}.")):
            self._refuse_both(dotted, value, origin, below[0], self._value_at(below[0]))
            return
        holder, name = self._holder(dotted, value, origin)
        if holder is None:
            return
        if dotted == "model":
            self._report_replaced_model(origin)
        replaced = self._remove_replaced(dotted, value)
        holder[name] = value
        self.origins = {old: place for old, place in self.origins.items() if not f"{old}.".startswith(f"{dotted}.")}
        self.origins[dotted] = f"{origin}; replaces {replaced}" if replaced else origin
        self._layer.add(dotted)
        leaf = dotted.removesuffix(f".{name}")
        if leaf in _KEYS and _KEYS[leaf].section is None:  # an entry of train.freeze changes the whole mapping
            self.origins[leaf] = origin

    def refuse_settings_without_adapter(self) -> None:
        """Refuse settings of an adapter, such as its rank, next to `adapter: none`."""
        adapter = self.values.get("adapter")
        if not isinstance(adapter, Mapping) or len(adapter) == 1 or not is_off_word(adapter.get("kind", "lora")):
            return
        place = self.origins.get("adapter.kind", "default")
        for name in adapter.keys() - {"kind"}:
            text = f"found {shown(adapter[name])}; adapter is none ({place}); leave it out, or set adapter.kind: lora"
            self._add_mistake(f"adapter.{name}", text)
        self.values["adapter"] = "none"

    def _is_short_form(self, dotted: str, word: Any) -> bool:
        """Whether a word sets one key of a mapping, instead of replacing the mapping."""
        if dotted == "adapter":
            return isinstance(self.values.get("adapter"), Mapping) and not is_off_word(word)
        if dotted == "model":
            return any(name.startswith("model.") for name in self._layer)
        return dotted == "track" and word is not None

    def _holder(self, dotted: str, value: Any, origin: str) -> tuple[dict[str, Any] | None, str]:
        """Return the mapping that holds a key, created if necessary, and the key's name in it.

        The mapping is None if another value is there that it cannot replace; the mistake is recorded.
        """
        holder, parts, path = self.values, dotted.split("."), ""
        while len(parts) > 1:
            path = f"{path}.{parts[0]}".removeprefix(".")
            inner = holder.get(parts[0])
            if not isinstance(inner, Mapping) and path in self.origins:
                inner = self._as_mapping(path, inner, dotted, value, origin)
                if inner is None:
                    return None, ""
            holder[parts[0]] = dict(inner or {})  # a copy, because YAML anchors may share one mapping between two keys
            holder = holder[parts.pop(0)]
            if path in _KEYS and _KEYS[path].section is None:
                return holder, ".".join(parts)  # the rest is one name: patterns in train.freeze contain dots
        return holder, parts[0]

    def _as_mapping(self, path: str, word: Any, dotted: str, value: Any, origin: str) -> dict[str, Any] | None:
        """Convert a word or null into a mapping, because a key below it is set."""
        key = _KEYS.get(path)
        if path in _SHORT_FOR and (word is not None or path == "adapter"):
            inner = f"{path}.{_SHORT_FOR[path]}"
            self.origins[inner] = self.origins.get(path, "default")
            if path in self._layer:
                self._layer.add(inner)
                self._layer.discard(path)
            return {_SHORT_FOR[path]: word}
        if key is None or (key.section is not None and not is_null_word(word)):
            return None  # an unknown key, or a word for a section: validation refuses it
        if path in self._layer and not is_section(key.field.annotation):
            self._refuse_both(dotted, value, origin, path, word)
            return None
        return {}  # a value of an earlier layer; validation refuses a mapping where none is allowed

    def _remove_replaced(self, dotted: str, value: Any) -> str:
        """Set the key that a value replaces to null, if an earlier layer gave it; return that key, else nothing."""
        other = _REPLACED_BY.get(dotted, "")
        is_used = other == "train.max_steps" or is_null_word(self._value_at("train.max_steps"))
        if not other or other in self._layer or not is_used:
            return ""
        if is_null_word(value) or is_null_word(self._value_at(other)):
            return ""
        self.values["train"][other.removeprefix("train.")] = None
        self.origins[other] = f"replaced by {dotted}"
        return other

    def _refuse_both(self, dotted: str, value: Any, origin: str, other: str, other_value: Any) -> None:
        place = self.origins.get(other, origin)
        text = f"found {shown(value)}, and {other}: {shown(other_value)} ({place}); leave one of them out"
        self._add_mistake(dotted, text, origin)

    def _add_mistake(self, dotted: str, text: str, place: str = "") -> None:
        self.mistakes.append(Mistake(tuple(dotted.split(".")), text, place=place))

    def _value_at(self, dotted: str) -> Any:
        holder: Any = self.values
        while isinstance(holder, Mapping) and dotted not in holder:
            first, _, dotted = dotted.partition(".")
            holder = holder.get(first)
        return holder[dotted] if isinstance(holder, Mapping) else None

    def _report_replaced_model(self, origin: str) -> None:
        before = self.values.get("model")
        kept = {name: inner for name, inner in before.items() if name != "name"} if isinstance(before, Mapping) else {}
        if kept:
            others = ", ".join(f"{name}: {shown(inner)}" for name, inner in kept.items())
            say(f"{origin} replaces all of model in the recipe, including {others}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe {path}", _cure_of_missing(path)) from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text", "save the recipe as UTF-8") from None
    except OSError as error:
        is_run = (path / "recipe.yaml").is_file()
        of_run = f"pass {path / 'recipe.yaml'}; or trimtab resume {as_argument(path)}"
        cure = of_run if is_run else "pass the path of a YAML file"
        raise RecipeError(f"{path} cannot be read: {error.strerror}", cure) from None


def _cure_of_missing(path: Path) -> str:
    """Suggest a file with a similar name; if there is none, list files of the folder."""
    folder = path.parent if path.parent.is_dir() else Path()
    files = sorted(file for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern))
    by_stem = {file.stem.lower(): file for file in files}  # equal suffixes would make all names similar
    if near := difflib.get_close_matches(path.stem.lower(), by_stem, n=1, cutoff=0.75):
        return f"did you mean {by_stem[near[0]]}?"
    more = f" and {len(files) - _MAX_LISTED} more" if len(files) > _MAX_LISTED else ""
    listed = ", ".join(map(str, files[:_MAX_LISTED])) + more
    choice = f"pass {'one of ' if len(files) > 1 else ''}{listed}; or " if files else ""
    return f"{choice}`trimtab init` writes one; or pass all values as flags: --model NAME --data FILE"


def _flag(key: str) -> str:
    return _FLAGS.get(key, f"--{key.rpartition('.')[2].replace('_', '-')}")


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a recipe that holds a value, with the value in its written form."""
    written = section.model_dump()  # Python mode: JSON has no infinity
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
