"""The key of a predicted step in the cache: a digest of everything that determines its trace.

Settings that no trace depends on (the learning rate, the budget, the data, where a run is written) are set to their
defaults before a recipe is traced. So they cannot change a trace, and are not part of its key. Everything else in the
recipe is part of the key, and so are the config of the model and the shapes of its weights, the task, the GPU, the
specification, the shape of the batch, the versions of Python and of all installed packages, and trimtab's own code.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import trimtab
from trimtab.data.fingerprint import FingerprintError, fingerprint
from trimtab.planner.shapes import StepTask
from trimtab.planner.trace.cuda import Gpu
from trimtab.recipe.schema import DataSettings, MemorySettings, Recipe, TrainSettings

# Sections and settings of a recipe that no trace depends on.
_SECTIONS = ("evaluate", "checkpoint", "early_stopping", "track", "limits", "seed", "name", "out")
_OF_TRAIN = (
    *("epochs", "max_steps", "max_time", "batch_size", "lr", "schedule", "warmup", "group_by_length", "on_nan"),
    "log_every",
)
_OF_MEMORY = ("budget", "allow", "micro_batch")
_KNOWN_CODE = {"torch", "transformers", "trimtab"}  # packages whose modules are traced
_KNOWN_FUNCTIONS = _KNOWN_CODE | {"numpy", "huggingface_hub", "packaging"} | sys.stdlib_module_names
_VARIABLES = ("USE_HUB_KERNELS", "DISABLE_KERNEL_MAPPING")  # with these, transformers runs other kernels


def traced_recipe(recipe: Recipe) -> Recipe:
    """The recipe with defaults for everything that a trace does not depend on."""
    train = recipe.train.model_copy(update=_defaults(TrainSettings, _OF_TRAIN))
    memory = recipe.memory.model_copy(update=_defaults(MemorySettings, _OF_MEMORY))
    others = _defaults(Recipe, _SECTIONS)
    return recipe.model_copy(update={**others, "train": train, "memory": memory, "data": DataSettings(train="rows")})


def _defaults(section: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: section.model_fields[name].get_default(call_default_factory=True) for name in names}


class PredictionKeys:
    """Keys of the steps of one recipe with one method.

    Args:
        recipe: The result of `traced_recipe`.
        task: Its task.
        gpu: The GPU that is simulated.
        model: The model without weights, with the head of the task.
        has_tokenizer: Whether the model was adapted to a tokenizer.
    """

    def __init__(
        self, recipe: Recipe, task: StepTask, gpu: Gpu, model: torch.nn.Module, *, has_tokenizer: bool
    ) -> None:
        self._of_recipe: str | None = None
        # a student is a part of another model, and its teacher is traced as well
        if recipe.distill is not None or not is_known_code(model):
            return
        settings = recipe.model_dump(mode="json", exclude={"model", "data"})
        about_task = [task.name, task.model_kind, task.loss_kind, task.shifts_labels, task.head()]
        parts = [*_versions(), *_switches(), settings, about_task, gpu, _content(model), has_tokenizer]
        with contextlib.suppress(FingerprintError):
            self._of_recipe = fingerprint(parts)

    def of(self, *parts: Any) -> str | None:
        """The key of a step; None if it must not be cached.

        Args:
            parts: Everything besides the recipe that determines the step: its specification, the shape of a batch …
        """
        return None if self._of_recipe is None else fingerprint([self._of_recipe, *parts])


def is_known_code(model: torch.nn.Module) -> bool:
    """Whether all code of a model comes from installed packages: no remote code, and nothing was replaced.

    Packages such as liger-kernel replace classes, functions or a `forward` of transformers in a running process.
    """
    kinds = {type(module) for module in model.modules()}
    names = {kind.__module__ for kind in kinds} | {getattr(kind.forward, "__module__", "") for kind in kinds}
    if any("forward" in vars(module) for module in model.modules()) or not _roots(names) <= _KNOWN_CODE:
        return False
    used = [value for name in names for value in vars(sys.modules[name]).values() if inspect.isroutine(value)]
    return _roots(getattr(value, "__module__", None) or "builtins" for value in used) <= _KNOWN_FUNCTIONS


def _roots(names: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def _content(model: Any) -> list[Any]:
    """Everything in a model that determines its shapes and operations."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [[name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad] for name, tensor in tensors]
    kinds = sorted({f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()})
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    attention = str(getattr(model.config, "_attn_implementation", None))
    return [kinds, shapes, _plain(config), attention]


def _plain(value: Any) -> Any:
    """The values of a config; dtypes by name."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, torch.dtype) else value


def _switches() -> list[Any]:
    """Settings of this process that affect which operations run."""
    attention: Any = torch.backends.cuda
    return [
        torch.cuda.is_available(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_cache_enabled(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
        *(os.environ.get(name) for name in _VARIABLES),
    ]


@functools.cache
def _versions() -> tuple[str, ...]:
    """The versions of Python and the installed packages, and a digest of trimtab's own code."""
    code = hashlib.blake2b(digest_size=20)
    folder = Path(trimtab.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        code.update(f"{path.relative_to(folder)} {len(content)}:".encode() + content)
    packages = sorted({f"{found.name} {found.version}" for found in importlib.metadata.distributions()})
    return (platform.python_version(), platform.machine(), torch.__version__, code.hexdigest(), *packages)
