"""Keys and values of other tools, and what to write instead.

They are never accepted: a recipe has one name for each setting. The error message gives the recipe key, with the value
that the user wrote converted where possible, ready to be pasted. `trimtab convert` translates whole files with the same
rules.
"""

from collections.abc import Mapping
from typing import Any

from trimtab.recipe.foreign_keys.answers import VALUES, Rule
from trimtab.recipe.foreign_keys.axolotl import AXOLOTL
from trimtab.recipe.foreign_keys.hugging_face import ACCELERATE, HF_SCRIPTS, HF_TRAINER, TRL
from trimtab.recipe.foreign_keys.lightning import LIGHTNING
from trimtab.recipe.foreign_keys.ludwig import LUDWIG
from trimtab.recipe.foreign_keys.torchtune import TORCHTUNE
from trimtab.recipe.foreign_keys.unsloth import UNSLOTH

_LIBRARIES: dict[str, dict[str, Rule]] = {
    "HF Trainer": HF_TRAINER,
    "Accelerate": ACCELERATE,
    "Lightning": LIGHTNING,
    "Hugging Face scripts": HF_SCRIPTS,
    "TRL and PEFT": TRL,
}
_SHARED = {name for answers in _LIBRARIES.values() for name in answers}
# these are also names of recipe keys: in a wrong place they are answered as such
_OURS = {"adapter", "optimizer", "seed", "batch_size", "epochs", "loss", "compile", "model", "name", "prompt"}
for _tool, _answers in (("Axolotl", AXOLOTL), ("Unsloth", UNSLOTH), ("torchtune", TORCHTUNE), ("Ludwig", LUDWIG)):
    _LIBRARIES[_tool] = {name: rule for name, rule in _answers.items() if name not in _SHARED | _OURS}


def translate_key(name: str, value: Any, section: Mapping[str, Any]) -> str:
    """Return what to write instead of a key of another library; empty if no known library has such a key.

    Args:
        name: The key, without its section.
        value: Its value.
        section: All keys of the same section; some keys only have a meaning together.
    """
    libraries = [library for library, answers in _LIBRARIES.items() if name in answers]
    if not libraries:
        return ""
    return f"a key of {' and '.join(libraries)}; {_LIBRARIES[libraries[0]][name](value, section).text}"


def translate_value(key: str, value: Any) -> str:
    """Return what to write instead of another library's value for one of our keys; empty if it is unknown."""
    ours = VALUES.get(key, {}).get(str(value).lower())
    return f"write {ours}" if ours else ""
