"""The recipe keys that may change when a run resumes; techniques decide about their own keys."""

from dataclasses import dataclass
from typing import Any

from trimtab.errors import RecipeError, as_argument
from trimtab.recipe.schema import Recipe
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.adapter import adapter_settings
from trimtab.techniques.apply import resume_rule

_PLACE = ("name", "out")  # ignored: a run resumes in its own folder
# may change freely: they do not affect the result of training
_HARMLESS = {
    "memory.budget",
    "memory.micro_batch",
    "memory.micro_batch_tokens",
    "train.max_time",
    "train.log_every",
    "train.deterministic",
    "evaluate.batch_size",
    "evaluate.samples",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.mirror",
    "track.uri",
    "track.experiment",
    "track.log_model",
    "track.register_as",
}
# compared as one value: mappings with keys chosen by the user, or that may also be a single word
_WHOLE = ("model", "train.freeze", "train.class_weights", "adapter.ranks", "adapter.alphas")
_WHOLE_TECHNIQUES = frozenset(technique.setting for technique in TECHNIQUES if "." in technique.setting)
# may change: the new value applies from the resumed step on
_FROM_HERE_ON = {
    "train.epochs",
    "train.max_steps",
    "train.lr",
    "train.max_grad_norm",
    "train.clip_by",
    "train.on_nan",
    "evaluate.every",
    "evaluate.at_start",
    "early_stopping",
    "early_stopping.patience",
    "early_stopping.min_delta",
}


@dataclass(frozen=True)
class Difference:
    """A key whose value changed since the run started."""

    key: str
    before: Any
    now: Any

    @property
    def is_harmless(self) -> bool:
        """Whether the result of training stays the same."""
        return self.key in _HARMLESS or self._technique_rule == "free"

    @property
    def is_refused(self) -> bool:
        """Whether the run cannot be resumed with this change."""
        return not self.is_harmless and self.key not in _FROM_HERE_ON and self._technique_rule != "from here on"

    @property
    def _technique_rule(self) -> str | None:
        return resume_rule(self.key, self.before, self.now)

    @property
    def is_about_length(self) -> bool:
        """Whether it changes the length of the run."""
        return self.key in ("train.epochs", "train.max_steps") or self.key.startswith("early_stopping")

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} → {self.now!r}"


def differences(before: Recipe, now: Recipe) -> list[Difference]:
    """List every key that differs, in the order of the recipe, except `name` and `out`.

    Raises:
        RecipeError: Keys changed that must not change; the message lists all of them.
    """
    found = find_differences(before, now)
    refused = [difference for difference in found if difference.is_refused]
    if refused:
        lines = "".join(f"\n  {difference}" for difference in refused)
        run = now.out or "RUN"
        merged = f", after `trimtab merge {as_argument(run)} DIR`: model: DIR"
        model = f": model: {run}" if before.adapter == "none" else merged
        raise RecipeError(
            f"the run cannot be resumed with {'these changes' if len(refused) > 1 else 'this change'}:{lines}",
            f"restore the old values; or start a new run from the model{model}",
        )
    return found


def find_differences(before: Recipe, now: Recipe) -> list[Difference]:
    """List every key that differs, including those that must not change."""
    old, new = (flat(_dump(recipe)) for recipe in (before, now))
    keys = [key for key in dict.fromkeys([*old, *new]) if key not in _PLACE]
    return [Difference(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def _dump(recipe: Recipe) -> dict[str, Any]:
    """Dump a recipe; an adapter given as one word becomes the mapping that it is short for."""
    values = recipe.model_dump(mode="json")
    settings = adapter_settings(recipe)
    if settings is not None:
        values["adapter"] = settings.model_dump(mode="json")
    return values


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a dumped recipe: values by dotted key."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        is_whole = prefix + key in _WHOLE or prefix + key in _WHOLE_TECHNIQUES
        nested = isinstance(value, dict) and not is_whole
        values |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return values
