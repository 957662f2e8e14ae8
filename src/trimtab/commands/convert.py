"""Convert the config file of another tool to a recipe. No key is dropped silently: each is translated or listed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.addresses import HIDDEN, is_secret_name
from trimtab.errors import RecipeError, as_argument
from trimtab.recipe.foreign_keys.answers import Answer, left_out
from trimtab.recipe.foreign_keys.axolotl import AXOLOTL, DEFAULTS, INSTEAD, REFUSED
from trimtab.recipe.foreign_keys.axolotl_data import dataset_answers
from trimtab.recipe.mistakes import shown
from trimtab.recipe.schema import Recipe
from trimtab.recipe.schema_keys import keys_of
from trimtab.recipe.yaml_text import as_yaml, read_yaml

_DATASETS = ("datasets", "pretraining_dataset", "test_datasets")
_ORDER = [key.dotted for key in keys_of(Recipe)]
_EXPECTED = "pass an Axolotl config: a mapping with base_model, and datasets or pretraining_dataset"
_UNKNOWN = "unknown to `trimtab convert`"


@dataclass
class Converted:
    """A recipe made from a config of another tool.

    Attributes:
        settings: Values of the recipe by dotted key.
        origins: For each of them, the keys that it was made from.
        notes: For some of them, how the meaning differs.
        lost: Keys without an equivalent, with their value and the reason.
        omitted: Keys that a recipe does not need, with the reason.
        empty: Keys without a value.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    lost: list[tuple[str, str, str]] = field(default_factory=list)
    omitted: list[tuple[str, str]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    @property
    def num_translated(self) -> int:
        """The number of keys of the file that are in the recipe."""
        return len({name for names in self.origins.values() for name in names})

    def add(self, name: str, value: Any, answer: Answer) -> None:
        """Add the answer for one key."""
        reason = answer.text.removeprefix("leave it out: ")
        problem = _problem_of(answer.settings)
        if problem:
            self.lost.append((name, _shown(name, value), problem))
        elif answer.settings:
            for key, ours in answer.settings.items():
                self.settings[key] = ours
                self.origins.setdefault(key, []).append(name)
            if answer.note:
                self.notes[next(iter(answer.settings))] = answer.note
        elif answer.is_lost and value is not False:
            self.lost.append((name, _shown(name, value), reason))
        else:
            self.omitted.append((name, reason))

    def recipe(self) -> Recipe:
        """Validate the whole recipe.

        Raises:
            RecipeError: If settings that are each valid contradict each other.
        """
        return Recipe(**_nested(self.settings))

    def drop_contradictions(self) -> None:
        """Move settings that contradict others from the recipe to the list of lost settings.

        Raises:
            RecipeError: If the recipe is not valid for another reason.
        """
        while True:
            try:
                self.recipe()
                return
            except RecipeError as error:
                found = re.search(r"^\s+([\w.]+): (.*)$", error.problem, flags=re.MULTILINE)
                if found is None or found[1] not in self.settings:
                    raise
                value, names = self.settings.pop(found[1]), self.origins.pop(found[1])
                self.lost.append((", ".join(names), f"{found[1]}: {as_yaml(value)}", found[2]))

    def render(self, source: str) -> str:
        """Write the recipe as YAML, with the origin of every value, and a list of everything that is not in it."""
        lines = [f"# Converted from {source} by `trimtab convert`. Next: trimtab check, then trimtab plan."]
        lines += self._comments()
        nested = _nested(dict(sorted(self.settings.items(), key=lambda item: _ORDER.index(item[0]))))
        for name, value in nested.items():
            if isinstance(value, Mapping):
                lines += ["", f"{name}:", *(self._line(f"{name}.{inner}", item, "  ") for inner, item in value.items())]
            else:
                lines += ["", self._line(name, value, "")]
        return "\n".join(lines) + "\n"

    def _line(self, dotted: str, value: Any, indent: str) -> str:
        names = ", ".join(self.origins[dotted])
        note = f"; {self.notes[dotted]}" if dotted in self.notes else ""
        return f"{indent}{dotted.rpartition('.')[2]}: {as_yaml(value)}  # {_one_line(names + note)}"

    def _comments(self) -> Iterator[str]:
        if self.lost:
            yield "#"
            yield "# Without an equivalent:"
            for name, value, reason in self.lost:
                yield f"#   {_one_line(f'{name}: {value}: {reason}')}"
        if self.omitted:
            yield "#"
            yield "# Not needed:"
            for name, reason in self.omitted:
                yield f"#   {_one_line(f'{name}: {reason}')}"
        if self.empty:
            yield "#"
            yield f"# Empty: {_one_line(', '.join(self.empty))}"


def convert_axolotl(path: Path) -> Converted:
    """Convert a config of Axolotl.

    Raises:
        RecipeError: If the file cannot be read, is not a config of Axolotl, or is for another kind of training.
    """
    config = _read(path)
    found = Converted()
    for name, value in config.items():
        if value is None or value == "" or value == [] or value == {}:
            found.empty.append(name)
        elif name in _DATASETS:
            for key, inner, answer in dataset_answers(name, value):
                found.add(key, inner, answer)
        elif name in AXOLOTL:
            found.add(name, value, AXOLOTL[name](value, {"adapter": None, **config}))
        else:
            found.add(name, value, left_out(_UNKNOWN, is_lost=True))
    _add_defaults(found, config)
    if "data.train" not in found.settings:
        raise RecipeError(f"{path}: no data source that a recipe can use", _cure_of_data(found))
    found.drop_contradictions()
    return found


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RecipeError(f"there is no file {path}", "pass the path of an Axolotl config: trimtab convert axolotl.yml")
    try:
        document = read_yaml(path.read_text(encoding="utf-8-sig"), str(path), _EXPECTED)
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not UTF-8 text", "pass the path of an Axolotl config (YAML)") from None
    if document.duplicates:
        name, place, first_line = document.duplicates[0]
        raise RecipeError(f"{place}: {name} is given twice, first on line {first_line}", "keep one of them")
    config = document.values
    if "model" in config and "base_model" not in config:
        raise RecipeError(f"{path} is already a recipe", f"trimtab check {as_argument(path)}")
    if "base_model" not in config or not any(config.get(name) for name in _DATASETS[:2]):
        raise RecipeError(
            f"{path} is not an Axolotl config: it needs base_model, and datasets or pretraining_dataset",
            f"found {', '.join(list(config)[:8]) or 'no keys'}; trimtab check explains the keys of other tools",
        )
    for name, kind in REFUSED.items():
        if config.get(name):
            raise RecipeError(
                f"{path}: {name}: {shown(config[name])} requests {kind}, which trimtab does not support",
                f"remove {name} to convert the rest as supervised fine-tuning",
            )
    return config


def _add_defaults(found: Converted, config: Mapping[str, Any]) -> None:
    """Write Axolotl's defaults for missing keys, if a recipe's defaults are different."""
    for name, value in DEFAULTS.items():
        answer = AXOLOTL[name](value, {**config, name: value})
        is_given = any(config.get(key) is not None for key in (name, INSTEAD.get(name, name)))
        if answer.settings and not is_given:
            found.add(f"{name} (Axolotl's default)", value, answer)


def _cure_of_data(found: Converted) -> str:
    reasons = [reason for name, _, reason in found.lost if name.startswith(_DATASETS)]
    return reasons[0] if reasons else "write datasets: [{path: FILE, type: chat_template}]"


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, value in settings.items():
        section, _, name = dotted.rpartition(".")
        holder = nested.setdefault(section, {}) if section else nested
        holder[name] = value
    return nested


def _problem_of(settings: Mapping[str, Any]) -> str:
    """Return why a recipe does not accept a setting; empty if it does."""
    required = {"model": "model", "data.train": "data"}
    if any(key.startswith("model.") for key in settings):
        required = {"model.name": "model", "data.train": "data"}
    try:
        Recipe(**_nested({**required, **settings}))
    except RecipeError as error:
        return re.sub(r"^the recipe has .*?:\n\s*", "", error.problem).partition("\n")[0]
    return ""


def _shown(name: str, value: Any) -> str:
    return HIDDEN if is_secret_name(name) else _one_line(shown(_without_secrets(value)))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret_name(str(key)) else _without_secrets(inner) for key, inner in value.items()}
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value


def _one_line(text: str) -> str:
    return " ".join(text.split())
