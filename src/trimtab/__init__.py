"""trimtab: fine-tune transformers on the hardware you have.

Importing this package is cheap: each public name imports its module at its first use.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Threads of torch's matrix products spin at each barrier, for milliseconds: next to other busy programs most of their
# time is lost so. OpenMP reads this when torch is loaded; subprocesses inherit it. The user's own setting is kept.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_HOMES = {
    "Engine": "trimtab.engine.engine",
    "DistributedType": "trimtab.distributed.world",
    "set_seed": "trimtab.randomness",
    "Stopped": "trimtab.errors",
    "TrimtabError": "trimtab.errors",
    "Recipe": "trimtab.recipe.schema",
    "fit": "trimtab.run",
    "resume": "trimtab.run",
    "plan": "trimtab.planner.survey",
    "predict_step_memory": "trimtab.planner.predict_step",
    "launch": "trimtab.distributed.launch.notebook",
    "load": "trimtab.inference.load",
    "best_model": "trimtab.inference.load",
}

__all__ = [
    "DistributedType",
    "Engine",
    "Recipe",
    "Stopped",
    "TrimtabError",
    "__version__",
    "best_model",
    "fit",
    "launch",
    "load",
    "plan",
    "predict_step_memory",
    "resume",
    "set_seed",
]

if TYPE_CHECKING:
    from trimtab.distributed.launch.notebook import launch
    from trimtab.distributed.world import DistributedType
    from trimtab.engine.engine import Engine
    from trimtab.errors import Stopped, TrimtabError
    from trimtab.inference.load import best_model, load
    from trimtab.planner.predict_step import predict_step_memory
    from trimtab.planner.survey import plan
    from trimtab.randomness import set_seed
    from trimtab.recipe.schema import Recipe
    from trimtab.run import fit, resume


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name, at the first access."""
    if name == "errors":  # the exceptions: trimtab.errors.DataError
        return import_module("trimtab.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "errors"])
