"""A recipe with which a run goes on, against the one it began with: what may differ, and what may not."""

from dataclasses import dataclass
from typing import Any

from trimtab.errors import RecipeError
from trimtab.recipe.schema import AdapterSettings, Recipe

_PLACE = ("name", "out")  # the run is where it is, whatever they say
# what changes nothing that is computed
_HARMLESS = {
    "memory.budget",
    "memory.micro_batch",
    "memory.gradient_checkpointing",
    "memory.offload",
    "memory.loss",
    "memory.kernels",
    "memory.attention_backend",
    "train.max_time",
    "train.log_every",
    "train.deterministic",
    "evaluate.batch_size",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.mirror",
    "track.uri",
    "track.experiment",
    "track.log_model",
    "track.register_as",
}
# mappings of the user's own keys, or that may be a word as well: compared as one value
_WHOLE = ("model", "train.freeze", "adapter.ranks", "adapter.alphas", "memory.gradient_checkpointing")
# what may change in the middle of a run, and then counts from there on
_FROM_HERE_ON = {
    "train.epochs",
    "train.max_steps",
    "train.lr",
    "train.max_grad_norm",
    "train.on_nan",
    "evaluate.every",
    "evaluate.at_start",
    "early_stopping",
    "early_stopping.patience",
    "early_stopping.min_delta",
}


@dataclass(frozen=True)
class Difference:
    """A key whose value is another than when the run began."""

    key: str
    before: Any
    now: Any

    @property
    def is_harmless(self) -> bool:
        """Whether it changes nothing that is computed."""
        return self.key in _HARMLESS

    @property
    def is_refused(self) -> bool:
        """Whether the run would be another one."""
        return not self.is_harmless and self.key not in _FROM_HERE_ON

    @property
    def is_about_length(self) -> bool:
        """Whether it says how long the run is."""
        return self.key in ("train.epochs", "train.max_steps") or self.key.startswith("early_stopping")

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} → {self.now!r}"


def differences(before: Recipe, now: Recipe) -> list[Difference]:
    """Every key that differs, in the order of the recipe; `name` and `out` do not count.

    Raises:
        RecipeError: With all keys that may not differ.
    """
    found = all_differences(before, now)
    refused = [difference for difference in found if difference.is_refused]
    if refused:
        lines = "".join(f"\n  {difference}" for difference in refused)
        raise RecipeError(
            f"the run cannot go on with another value of {'these keys' if len(refused) > 1 else 'this key'}:{lines}",
            "put them back; or start a new run from the model"
            + (": model: RUN" if before.adapter == "none" else ", after `trimtab merge RUN DIR`: model: DIR"),
        )
    return found


def all_differences(before: Recipe, now: Recipe) -> list[Difference]:
    """Every key that differs, also those that may not."""
    old, new = (flat(_spelled_out(recipe)) for recipe in (before, now))
    keys = [key for key in dict.fromkeys([*old, *new]) if key not in _PLACE]
    return [Difference(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def _spelled_out(recipe: Recipe) -> dict[str, Any]:
    """A recipe's values, with all settings of an adapter that was given as a word."""
    values = recipe.model_dump(mode="json")
    if recipe.adapter in ("lora", "qlora"):
        values["adapter"] = AdapterSettings(kind=recipe.adapter).model_dump(mode="json")
    return values


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's values by dotted key."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and prefix + key not in _WHOLE
        values |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return values
