"""Values in a run's files that act outside the run: each needs the user's word, not only that of the files.

Anyone who can write to a mirror, or to a run folder on its way to this machine, can change every value and recompute
every checksum. docs/resume.md lists all values that act, and what is decided about each.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.addresses import redact
from trimtab.build.paths import with_absolute_paths
from trimtab.checkpoint.mirror import has_mirror
from trimtab.errors import RecipeError, as_argument
from trimtab.recipe.load import LoadedRecipe
from trimtab.recipe.schema import ModelSettings, Recipe
from trimtab.runs.consent import ADDRESSES, consent_of, record_consent
from trimtab.tracking.mlflow.uri import default_uri, store_root

_CODE = "model.trust_remote_code"
_ASKED = ("track.uri", "track.register_as", "checkpoint.mirror")
_SAID = ("data.train", "data.eval", "track.experiment")


def check_consent(loaded: LoadedRecipe, run: Path, *, is_mirror: bool, trusts: bool) -> None:
    """Refuse to resume a run whose files ask for something that the user has not agreed to.

    Args:
        loaded: The recipe that the run's files contain, with the user's changes.
        run: The folder that the user named.
        is_mirror: Whether it is a mirror, for whose files nothing that was recorded before counts.
        trusts: Whether the user agrees to run the Python code that the files name.

    Raises:
        RecipeError: The message lists all such values, and the options that agree to them.
    """
    recipe = loaded.recipe
    known = {} if is_mirror else consent_of(run)
    asked = {key: value for key, value in _acting_values(recipe).items() if key not in loaded.changed}
    is_new = is_mirror or not known
    code = asked.pop(_CODE, None)
    lines, options = [], []
    if trusts and not _trusts(recipe):
        raise RecipeError(
            f"--trust-remote-code: the recipe of {run} executes no Python code of its model", "leave it out"
        )
    if code is not None and not trusts and known.get(_CODE) != code:
        sources = [*_names_in(code), *(_code_in(run / "best") if is_new else ())]
        lines.append(f"{_CODE}: execute the Python code of {', '.join(dict.fromkeys(sources))}")
        options.append("--trust-remote-code")
    if "track.uri" in asked and is_given_address(run, asked["track.uri"], known):
        del asked["track.uri"]
    if "checkpoint.mirror" in asked and has_mirror(run, asked["checkpoint.mirror"]):
        del asked["checkpoint.mirror"]
    for key, value in asked.items():
        if known.get(key) != value:
            lines.append(f"{key}: {value}")
            options.append(f"--set {as_argument(f'{key}={value}')}")
    if lines:
        listed = "".join(f"\n  {line}" for line in lines)
        raise RecipeError(
            f"the files of {run} ask for what was not agreed to on this machine:{listed}",
            f"agree to what you trust: trimtab resume {as_argument(run)} {' '.join(options)}; or set other values "
            "(null or none to do without)",
        )


def describe_sources(recipe: Recipe) -> str:
    """Return the values of a recipe that name what the run reads, and the experiment that it belongs to."""
    values = {"model": _model_of(recipe), "distill.teacher": recipe.distill and recipe.distill.teacher}
    values |= {key: _value_of(recipe, key) for key in _SAID}
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def record_agreed(recipe: Recipe, run: Path, model_server: str | None) -> None:
    """Record that the user started or resumed a run with this recipe, so that the run can be resumed unattended.

    Args:
        recipe: The recipe.
        run: The run folder.
        model_server: The tracking server that has the model to train, if one has.
    """
    values = _acting_values(recipe)
    addresses = [redact(uri) for uri in (model_server, values.get("track.uri")) if uri is not None]
    if values or addresses or consent_of(run):
        record_consent(run, values | {ADDRESSES: addresses})


def is_given_address(run: Path, uri: str, known: dict[str, Any] | None = None) -> bool:
    """Whether the address of a tracking server is the user's: from the environment, or given for this run before.

    Args:
        run: The run folder.
        uri: The address in the run's files.
        known: What is recorded for the run; read if it is not given.
    """
    given = (consent_of(run) if known is None else known).get(ADDRESSES, [])
    return redact(uri) in {redact(default_uri(store_root(run))), *given}


def check_address_is_given(run: Path, uri: str, cure: str) -> None:
    """Refuse to contact a server that only the run's files name.

    Raises:
        RecipeError: Its address was not given by the user.
    """
    if not is_given_address(run, uri):
        raise RecipeError(f"the files of {run} name the tracking server {redact(uri)}, which was not given here", cure)


def _acting_values(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe that act outside the run's folder."""
    recipe = with_absolute_paths(recipe)
    values = {key: _value_of(recipe, key) for key in _ASKED}
    if _trusts(recipe):
        model = recipe.model.model_dump(mode="json") if isinstance(recipe.model, ModelSettings) else {}
        values[_CODE] = {"model": model, "teacher": recipe.distill and recipe.distill.teacher}
    return {key: value for key, value in values.items() if value not in (None, "local", "none")}


def _trusts(recipe: Recipe) -> bool:
    return isinstance(recipe.model, ModelSettings) and recipe.model.trust_remote_code


def _value_of(recipe: Recipe, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def _model_of(recipe: Recipe) -> str:
    model = recipe.model
    if isinstance(model, str):
        return model
    own = model.name or "of the configuration"
    return own if model.tokenizer is None else f"{own} with the tokenizer {model.tokenizer}"


def _names_in(code: dict[str, Any]) -> Iterator[str]:
    model = code["model"]
    yield from (name for name in (model["name"], model["tokenizer"], code["teacher"]) if name not in (None, "train"))
    yield from _repositories(model["config"])


def _code_in(best: Path) -> Iterator[str]:
    """The Python files in a model folder, and the repositories that its configurations name."""
    yield from map(str, sorted(best.glob("*.py")))
    for path in sorted(best.glob("*.json")):
        try:
            yield from _repositories(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            continue


def _repositories(config: Any) -> Iterator[str]:
    """The repositories in `auto_map`, and the base of an adapter: transformers loads Python code from them."""
    if not isinstance(config, dict):
        return
    mapped = config.get("auto_map")
    for value in mapped.values() if isinstance(mapped, dict) else ():
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and "--" in name:
                yield name.partition("--")[0]
    yield from (config[key] for key in ("base", "base_model_name_or_path") if isinstance(config.get(key), str))
