"""Built-in studies: common comparisons, each a list of variants of a recipe."""

import difflib
from collections.abc import Callable
from typing import Any

from trimtab.errors import RecipeError
from trimtab.recipe.schema import Recipe
from trimtab.report.compare import Variant
from trimtab.techniques import TECHNIQUES


def build_study(name: str, recipe: Recipe) -> list[Variant]:
    """Return the variants of a built-in study.

    Args:
        name: One of `STUDIES`.
        recipe: The recipe to vary.
    """
    if name not in STUDIES:
        near = difflib.get_close_matches(name.lower(), STUDIES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"--study {name!r} is not valid{meant}", f"use one of {', '.join(STUDIES)}")
    return STUDIES[name](recipe)


def _of_key(key: str, *values: Any) -> Callable[[Recipe], list[Variant]]:
    """Return a study of one key. A value with a different display name is given as (name, value)."""
    named = [value if isinstance(value, tuple) else (value, value) for value in values]
    return lambda recipe: [Variant(str(name), {key: value}) for name, value in named]


def _accumulation(recipe: Recipe) -> list[Variant]:
    """Vary the micro-batch size at the recipe's batch size; last, use the smallest micro-batch size as batch size."""
    whole = recipe.train.batch_size
    sizes = [size for size in (whole, whole // 2, whole // 4, whole // 8) if size]
    cut = [
        Variant(f"{whole} as {-(-whole // size)} × {size}", {"train.batch_size": whole, "memory.micro_batch": size})
        for size in dict.fromkeys(sizes)
    ]
    small = Variant(f"{sizes[-1]} alone", {"train.batch_size": sizes[-1], "memory.micro_batch": sizes[-1]})
    return [*cut, small] if sizes[-1] < whole else cut


def _methods(recipe: Recipe) -> list[Variant]:
    """Compare full fine-tuning, training the head only, LoRA and QLoRA; adapter settings are those of the recipe."""
    whole: dict[str, Any] = {"train.freeze": {}}
    own: dict[str, Any] = getattr(recipe.adapter, "model_dump", dict)()
    own.pop("base", None)  # of LoRA only
    adapters = {kind: {**own, "kind": kind} if own else kind for kind in ("lora", "qlora")}
    return [
        Variant("full", {"adapter": "none", **whole}),
        Variant("head-only", {"adapter": "none", "train.freeze": {"base": "always"}}),
        *(Variant(kind, {"adapter": settings, **whole}) for kind, settings in adapters.items()),
    ]


STUDIES: dict[str, Callable[[Recipe], list[Variant]]] = {
    "precisions": _of_key("train.precision", "fp32", "tf32", "bf16", "fp16", "bf16-pure"),
    "accumulation": _accumulation,
    "methods": _methods,
    **{
        technique.study[0]: _of_key(technique.setting, *technique.study[1])
        for technique in TECHNIQUES
        if technique.study is not None
    },
}
