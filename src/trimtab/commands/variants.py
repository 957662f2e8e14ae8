"""The variants of a comparison: from `--vary`, a study, or a file."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.errors import RecipeError
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import as_yaml, read_value, read_yaml
from trimtab.report.compare import Variant
from trimtab.report.studies import STUDIES, build_study

_VAGUE = ("none", "off", "on", "auto", "all")
_EXPECTED = "write the variants as a mapping: {name: {key: value}}"


def choose_variants(
    recipe: Recipe, vary: Sequence[str], study: str | None, file: Path | None, num_sampled: int | None = None
) -> list[Variant]:
    """Return the variants selected on the command line in one of three ways; for `--vary` possibly a random sample."""
    if sum((bool(vary), study is not None, file is not None)) != 1:
        raise RecipeError(
            "compare needs one of --vary, --study and --variants",
            f"--vary train.precision=fp32,bf16, --study with {', '.join(STUDIES)}, or --variants FILE",
        )
    if num_sampled is not None and not vary:
        raise RecipeError("--sample selects combinations of --vary, which is missing", "add --vary, or remove --sample")
    if study is not None:
        return build_study(study, recipe)
    return combine_values(vary, num_sampled, recipe.seed) if file is None else read_variants(file)


def combine_values(texts: Sequence[str], num_sampled: int | None = None, seed: int = 0) -> list[Variant]:
    """Return the combinations of the values in `--vary KEY=a,b`; the first values make the first variant.

    Args:
        texts: A key and its values in each text; commas inside braces, brackets and quotes do not separate values.
        num_sampled: Size of a random sample, in the original order. It always contains the first variant, with which
            the others are compared. None returns all.
        seed: Seed of the sample.
    """
    axes: list[list[tuple[str, Any]]] = []
    for text in texts:
        key, equals, values = text.partition("=")
        found = [read_value(value) for value in split_values(values)]
        if not equals or not key.strip() or not found:
            raise RecipeError(f"--vary {text!r} has no key with values", "--vary train.precision=fp32,bf16")
        axes.append([(key.strip(), value) for value in found])
    keys = [axis[0][0] for axis in axes]
    if len(set(keys)) < len(keys):
        raise RecipeError(f"--vary has {max(keys, key=keys.count)} twice", "pass all its values together: KEY=a,b,c")
    bare = {axis[0][0] for axis in axes if all(_means_something(value, len(axes) == 1) for _, value in axis)}
    grid = itertools.product(*axes) if num_sampled is None else _sample(axes, num_sampled, seed)
    variants = [Variant(_name(chosen, bare), dict(chosen)) for chosen in grid]
    names = [variant.name for variant in variants]
    return [
        replace(variant, name=f"{variant.name} ({index})") if names.count(variant.name) > 1 else variant
        for index, variant in enumerate(variants, 1)
    ]


def _sample(
    axes: Sequence[Sequence[tuple[str, Any]]], num_sampled: int, seed: int
) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Yield the first combination and a random sample of the others, without iterating over all of them."""
    if num_sampled < 2:
        raise RecipeError(f"--sample {num_sampled} leaves nothing to compare", "--sample 2 or more")
    total = math.prod(map(len, axes))
    others = random.Random(f"trimtab variants {seed}").sample(range(1, total), min(num_sampled, total) - 1)
    for number in (0, *sorted(others)):
        chosen = []
        for axis in reversed(axes):  # the last key varies fastest, as in the whole grid
            number, place = divmod(number, len(axis))
            chosen.append(axis[place])
        yield tuple(reversed(chosen))


def split_values(text: str) -> list[str]:
    """Split a text at its commas, but not inside braces, brackets or quotes."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values if value.strip()]


def _means_something(value: Any, is_only_key: bool) -> bool:
    """Whether a value names a variant without its key: "bf16" does, a number does not, "none" only if nothing else."""
    if not isinstance(value, str):
        return isinstance(value, Mapping)
    return is_only_key or not (value in _VAGUE or value[:1].isdigit())


def _name(chosen: Sequence[tuple[str, Any]], bare: set[str]) -> str:
    """Join the values; each gets the last part of its key if it is unclear alone, such as a number."""
    words = []
    for key, value in chosen:
        written = as_yaml(value).strip('{}"') or "none"
        words.append(written if key in bare else f"{key.rpartition('.')[2]} {written}")
    return " + ".join(words)


def read_variants(path: Path) -> list[Variant]:
    """Read variants from a YAML file `{name: {key: value, …}, …}`; a name without keys is the unchanged recipe."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"{path} cannot be read: {error.strerror}", "pass a YAML file: {name: {key: value}}"
        ) from None
    variants = []
    for name, changes in read_yaml(text, str(path), _EXPECTED).values.items():
        if not isinstance(changes, Mapping | None):
            raise RecipeError(f"{path}: {name} is {changes!r}", f"{name}: {{train.precision: bf16}}")
        variants.append(Variant(str(name), dict(changes or {})))
    return variants
