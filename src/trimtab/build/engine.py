"""Build the engine of a recipe, and check that all processes agree."""

from contextlib import suppress
from typing import Any

import torch

from trimtab.build.parts import Data, Tokens
from trimtab.build.resume_rules import flat
from trimtab.data.fingerprint import FingerprintError, fingerprint
from trimtab.data.tasks.base import Task
from trimtab.distributed.ddp import has_routed_modules, ignore_parameters
from trimtab.engine.engine import Engine
from trimtab.engine.placement import to_device
from trimtab.hardware.inventory import find_device, native_precision
from trimtab.hardware.memory import keep_freed_memory, prefer_expandable_segments, resolve_budget
from trimtab.log import say
from trimtab.model.freeze import Freezing
from trimtab.model.losses import Loss
from trimtab.randomness import use_deterministic_kernels
from trimtab.recipe.schema import Recipe


def build_engine(recipe: Recipe, device: str | None) -> Engine:
    """Build the engine; `train.precision: auto` is the native precision of the device."""
    found = find_device(device)
    if found.type == "cpu":
        keep_freed_memory()
    elif found.type == "cuda":
        prefer_expandable_segments()
    resolve_budget(recipe.memory.budget, found)  # refuses a budget above the device memory before anything is loaded
    if recipe.train.deterministic:
        use_deterministic_kernels()
    wanted = recipe.train.precision
    precision = native_precision(found) if wanted == "auto" else wanted
    return Engine("no" if precision == "fp32" else precision, device=device)


def with_stored_precision(engine: Engine, recipe: Recipe, device: str | None, stored: str | None) -> Engine:
    """The engine of a resumed run, which keeps what `train.precision: auto` was where it started, slow or not.

    Args:
        engine: The engine for this device.
        recipe: The recipe.
        device: The device that was asked for.
        stored: The precision in the plan of the run; None for a new run.
    """
    name = "no" if stored == "fp32" else stored
    if stored is None or recipe.train.precision != "auto" or engine.mixed_precision == name:
        return engine
    here = native_precision(engine.device)
    say(f"the run stays in {stored}, with which it started; precision auto would take {here} on this device")
    return Engine(name, device=device)


def compare_processes(recipe: Recipe, data: Data, tokens: Tokens, engine: Engine) -> None:
    """Check that all processes have the same recipe and the same rows."""
    if not engine.use_distributed:
        return
    precision = {"train.precision": engine.mixed_precision}  # of `auto`, which depends on the device
    engine.require_same("recipe", flat(recipe.model_dump(mode="json")) | precision)
    found: dict[str, Any] = {"rows": len(tokens.train), "tokens": int(sum(tokens.train.lengths))}
    with suppress(FingerprintError):
        found |= {"data.train": fingerprint([data.train]), "data.eval": fingerprint([data.eval])}
    engine.require_same("data", found)


def leave_out_unused(
    model: torch.nn.Module, freezing: Freezing, loss: Loss, task: Task, tokens: Tokens, engine: Engine
) -> None:
    """Exclude parameters without a gradient from synchronization; they are found with a backward on one row."""
    if not engine.use_distributed or has_routed_modules(model):  # the unused parameters differ by row
        return
    model.to(engine.device)
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    was_training = model.training
    batch = to_device(task.collate([tokens.train[0]]), engine.device)
    try:
        model.eval()
        for parameter in freezing.released_later():
            parameter.requires_grad_(True)
        loss(model, batch).value.backward()  # type: ignore[no-untyped-call]
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    finally:
        model.train(was_training).zero_grad(set_to_none=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains[name])
    ignore_parameters(model, unused)
