"""The models, optimizers, loaders and schedulers that `Engine.prepare` has prepared."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from trimtab.checkpoint.frozen_base import FrozenBase
from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import World
from trimtab.engine.accumulation import Accumulation
from trimtab.engine.gradients import Gradients
from trimtab.engine.loader_setup import prepare_loader
from trimtab.engine.placement import Placement, placement_for
from trimtab.engine.prepared_loader import ActiveLoaders, PreparedLoader
from trimtab.engine.prepared_optimizer import PreparedOptimizer, PreparedScheduler, optimizers_of
from trimtab.engine.sharding import LoaderRules
from trimtab.errors import PrepareError
from trimtab.log import log_info_once
from trimtab.model.compiled_blocks import compile_blocks
from trimtab.model.precision import Precision
from trimtab.optim.build import rounds_stochastically
from trimtab.randomness import seed_by_rank


@dataclass(eq=False)
class PreparedParts:
    """Prepare the parts of a training loop and keep references to them.

    Args:
        world: The processes.
        device: The device of this process.
        moves: Whether models and batches are moved to the device by default.
        precision: The precision that models compute in.
        accumulation: The current accumulation window.
        gradients: The gradients of all prepared models.
        active_loaders: The loaders being iterated.
        loader_rules: How loaders are divided among processes; a new value applies to loaders prepared later.
        follows_optimizer: Whether schedulers step only after an optimizer step.
    """

    world: World
    device: torch.device
    moves: bool
    precision: Precision
    accumulation: Accumulation
    gradients: Gradients
    active_loaders: ActiveLoaders
    loader_rules: LoaderRules
    follows_optimizer: bool
    models: list[torch.nn.Module] = field(default_factory=list)
    frozen: list[FrozenBase] = field(default_factory=list)  # per model, the weights that were frozen at `prepare`
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._placement: Placement = placement_for(self.device if self.moves else torch.device("cpu"))

    def prepare(self, parts: Sequence[Any], moves: Sequence[bool]) -> list[Any]:
        """Prepare parts that `check_parts` has accepted, and return them in the same order."""
        prepared = list(parts)
        # schedulers last: they look up the prepared optimizers that they drive
        for position in sorted(range(len(parts)), key=lambda i: not isinstance(parts[i], _NOT_SCHEDULERS)):
            prepared[position] = self._prepare_one(parts[position], moves[position])
        if any(isinstance(part, torch.nn.Module) for part in parts):
            for part in parts:
                if isinstance(part, torch.optim.Optimizer):
                    self._report_foreign(part)
        return prepared

    def _report_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if an optimizer has none of a model's parameters, often because the model was replaced."""
        trained = {id(parameter) for model in self.models for parameter in model.parameters()}
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not trained & updated:
            log_info_once(
                f"{type(optimizer).__name__} updates no parameter of a prepared model; if it should, create it from "
                "the model's parameters() after the model was loaded and changed"
            )

    def _prepare_one(self, part: Any, moves: bool) -> Any:
        if isinstance(part, torch.nn.Module):
            return self.prepare_model(part, moves)
        if isinstance(part, torch.optim.Optimizer):
            return self.prepare_optimizer(part)
        if isinstance(part, DataLoader | PreparedLoader):
            return self.prepare_loader(part, moves)
        return None if part is None else self.prepare_scheduler(part)

    def prepare_model(self, model: torch.nn.Module, moves: bool) -> torch.nn.Module:
        """Move a model, attach autocast, and connect it to the other processes."""
        if any(model is known for known in self.models):
            return model
        if moves and not _is_placed_by_its_loader(model):
            model.to(self.device)
        self.precision.attach(model)
        self.frozen.append(FrozenBase(unwrap(model)))
        model = self.world.connect(model)
        if not self.models and not self.loader_rules.as_accelerate:
            seed_by_rank(self.world.process_index)
        self.models.append(model)
        self.gradients.watch(model)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Make an optimizer step only at the end of a window."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if self.precision.is_pure and not rounds_stochastically(optimizer):
            log_info_once(
                f"bf16-pure: {type(optimizer).__name__} rounds to nearest, which loses small updates; use "
                "trimtab.optim.build.build_optimizer(…, rounds_stochastically=True)"
            )
        prepared = PreparedOptimizer(optimizer, self.accumulation, self.gradients)
        self.optimizers.append(prepared)
        self.gradients.watch(optimizer)
        return prepared

    def prepare_loader(self, loader: DataLoader[Any] | PreparedLoader, moves: bool) -> PreparedLoader:
        """Make a loader deliver this process's batches on the device."""
        if isinstance(loader, PreparedLoader):
            return loader
        placement = self._placement if moves else placement_for(torch.device("cpu"))
        prepared = prepare_loader(loader, placement, self.active_loaders, self.world, self.loader_rules)
        if self.loader_rules.as_accelerate:
            prepared.when_moved = self.gradients.abandon_window
        self.loaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Make a scheduler count optimizer steps."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        optimizers = optimizers_of(scheduler, self.optimizers)
        num_steps_each = 1 if self.loader_rules.splits else self.world.num_processes
        prepared = PreparedScheduler(scheduler, optimizers, self.accumulation, self.follows_optimizer, num_steps_each)
        self.schedulers.append(prepared)
        return prepared

    def clear(self) -> None:
        """Drop all references to prepared parts."""
        for parts in (self.models, self.frozen, self.optimizers, self.loaders, self.schedulers):
            parts.clear()


_NOT_SCHEDULERS = (torch.nn.Module, torch.optim.Optimizer, DataLoader, PreparedLoader)


def check_parts(parts: Sequence[Any], moves: Sequence[bool], allows_none: bool = False) -> None:
    """Raise `PrepareError` for a part that cannot be prepared, before any part is changed."""
    for position, part in enumerate(parts):
        is_scheduler = all(hasattr(part, name) for name in ("step", "state_dict", "load_state_dict"))
        if part is None and allows_none:
            continue
        if not isinstance(part, _NOT_SCHEDULERS) and not is_scheduler:
            raise PrepareError(
                f"argument {position + 1} of prepare is a {type(part).__module__}.{type(part).__qualname__}, "
                "not a model, optimizer, DataLoader or scheduler",
                "leave it out; batches of a DataLoader are moved to engine.device, other tensors with "
                ".to(engine.device)",
            )
    if len(moves) != len(parts):
        raise PrepareError(f"device_placement has {len(moves)} values for {len(parts)} parts", "one value per part")


def require_prepared(model: torch.nn.Module, models: Sequence[torch.nn.Module], verb: str) -> None:
    """Raise `PrepareError` if a model given to a verb of the engine is not among the prepared ones."""
    if not any(model is known or unwrap(model) is unwrap(known) for known in models):
        raise PrepareError(
            f"{verb} was given a {type(model).__name__} that was not prepared", "engine.prepare(model) first"
        )


def compile_models(parts: Sequence[Any]) -> None:
    """Compile the repeated blocks of every model among the parts."""
    for part in parts:
        if isinstance(part, torch.nn.Module) and compile_blocks(unwrap(part)) is None:
            log_info_once(f"compile_blocks: {type(unwrap(part)).__name__} has no repeated blocks and is not compiled")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside torch.compile and data parallelism."""
    inner: Any = model
    while isinstance(inner, DataParallel) or "_orig_mod" in inner._modules:
        inner = inner.module if isinstance(inner, DataParallel) else inner._orig_mod
    unwrapped: torch.nn.Module = inner
    return unwrapped


def _is_placed_by_its_loader(model: torch.nn.Module) -> bool:
    """Whether transformers has placed the model: `.to` fails for quantized models and undoes a device map."""
    return bool(getattr(model, "hf_device_map", None)) or bool(getattr(model, "is_quantized", False))
