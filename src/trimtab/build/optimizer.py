"""The optimizer of a recipe: the same for a run and for the trace that predicts its memory."""

from typing import Any

import torch

from trimtab.optim.build import build_optimizer
from trimtab.optim.groups import decay_groups, split_by_rate
from trimtab.recipe.schema import Recipe
from trimtab.techniques.adapter import learning_rates
from trimtab.techniques.apply import wrap_build
from trimtab.techniques.base import StepSpec
from trimtab.techniques.optimizer_state import OptimizerState


def optimizer_of(
    recipe: Recipe, model: torch.nn.Module, spec: StepSpec, device: str | torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer for parameters that are trainable, or will be.

    Args:
        recipe: The recipe with its settings.
        model: The prepared model.
        spec: The specification, which names the optimizer; with bf16-pure it rounds stochastically.
        device: Where the parameters will be when the optimizer steps.
    """
    settings = recipe.train
    unfreezes = any(until != "always" for until in settings.freeze.values())
    groups = decay_groups(
        model, settings.weight_decay, decay_embeddings=settings.decay_embeddings, include_frozen=unfreezes
    )

    def build(groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
        return build_optimizer(
            spec[OptimizerState.key],
            groups,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            momentum=settings.momentum,
            device=device,
            rounds_stochastically=spec.precision == "bf16-pure",
            rounding_seed=recipe.seed,
        )

    groups = split_by_rate(groups, learning_rates(recipe, model))
    return wrap_build(build, spec, model)(groups, torch.device(device))
