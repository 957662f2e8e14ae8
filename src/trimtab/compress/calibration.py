"""Calibration from rows of data: second moments of the inputs of modules, and squared gradients of weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.engine.placement import to_device
from trimtab.model.forward import run_model

Batch = Mapping[str, Tensor]


@torch.no_grad()
def input_moments(model: Any, paths: Iterable[str], batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Return the mean of x xᵀ over the inputs x of each module, without padding, in fp32.

    Args:
        model: The model, on its device.
        paths: Names of linear modules.
        batches: Batches of calibration rows.
    """
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(paths, 0)
    mask: list[Tensor | None] = [None]

    def hook_for(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0].detach()
            is_token = mask[0]
            # Only inputs of the shape of the mask are known to belong to its tokens.
            x = x[is_token] if is_token is not None and x.shape[:-1] == is_token.shape else x.flatten(0, -2)
            x = x.float()
            sums[path] = x.T @ x if path not in sums else sums[path].addmm_(x.T, x)
            counts[path] += len(x)

        return add

    handles = [model.get_submodule(path).register_forward_pre_hook(hook_for(path)) for path in counts]
    try:
        with _evaluating(model):
            for batch in batches:
                moved = to_device(batch, model.device)
                found = moved.get("attention_mask")
                mask[0] = found.bool() if found is not None and found.dim() == 2 else None
                run_model(model, moved)
    finally:
        for handle in handles:
            handle.remove()
    return {path: total / max(1, counts[path]) for path, total in sums.items()}


def squared_gradients(
    model: Any, names: Iterable[str], batches: Iterable[Batch], loss_of: Callable[[Any, Batch], Tensor]
) -> dict[str, Tensor]:
    """Return the mean over batches of the squared gradient of parameters, in fp32.

    Args:
        model: The model, on its device.
        names: Names of parameters.
        batches: Batches of calibration rows; small ones, since gradients of rows cancel in a batch.
        loss_of: Computes the loss of a batch, given the model and the batch.
    """
    wanted = {name: model.get_parameter(name) for name in names}
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in wanted.items()}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    num_batches = 0
    try:
        model.requires_grad_(False)
        for parameter in wanted.values():
            parameter.requires_grad_(True)
        with _evaluating(model), torch.enable_grad():
            for batch in batches:
                loss = loss_of(model, to_device(batch, model.device))
                grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
                for total, grad in zip(sums.values(), grads, strict=True):
                    if grad is not None:
                        total += grad.float().square()
                num_batches += 1
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    return {name: total / max(1, num_batches) for name, total in sums.items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
