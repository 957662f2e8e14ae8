"""The optimizer of a recipe: the same for a run and for the trace that foretells its memory."""

import torch

from trimtab.optim.build import build_optimizer
from trimtab.optim.groups import decay_groups
from trimtab.recipe.schema import Recipe


def optimizer_of(
    recipe: Recipe, model: torch.nn.Module, name: str, precision: str, device: str | torch.device
) -> torch.optim.Optimizer:
    """Make the optimizer for what trains, or will.

    Args:
        recipe: Its settings.
        model: The prepared model.
        name: Which one; a recipe may leave that open.
        precision: In which the model is kept; bf16-pure is rounded by chance.
        device: Where the parameters will be when the optimizer steps.
    """
    settings = recipe.train
    unfreezes = any(until != "always" for until in settings.freeze.values())
    groups = decay_groups(
        model, settings.weight_decay, decay_embeddings=settings.decay_embeddings, include_frozen=unfreezes
    )
    return build_optimizer(
        name,
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        momentum=settings.momentum,
        device=device,
        rounds_stochastically=precision == "bf16-pure",
        rounding_seed=recipe.seed,
    )
