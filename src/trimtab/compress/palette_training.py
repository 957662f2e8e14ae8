"""Train the palettes of a clustered model, with fixed indices, to answer as the original model does."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from trimtab.compress.calibration import Batch
from trimtab.compress.clustered_model import replace_modules
from trimtab.compress.clustered_modules import ClusteredModule
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.engine.engine import Engine
from trimtab.errors import LossNotFinite
from trimtab.log import say
from trimtab.model.forward import IGNORED, logits_of, run_model
from trimtab.training.work_progress import tracked

_LEARNING_RATE = 3e-3  # of the root mean square of a palette: Adam's steps are of the size of the learning rate
_MAX_NORM = 1.0


def train_palettes(
    student: Any,
    teacher: Any,
    loader: DataLoader[Any],
    *,
    kind: str,
    num_steps: int,
    learning_rate: float = _LEARNING_RATE,
) -> list[float]:
    """Train all palettes of a model; nothing else of it changes.

    Both models stay in eval mode: dropout would add noise to a goal that is exact.

    Args:
        student: A model with clustered modules.
        teacher: The original model, on the same device.
        loader: Batches of rows with labels; positions of tokens without a label do not count.
        kind: Kind of the loss of the task.
        num_steps: Steps of the optimizer.
        learning_rate: As a fraction of the root mean square of each palette; it falls linearly to 0.

    Returns:
        The loss of each step: the divergence from the teacher's outputs.
    """
    engine = Engine(device=student.device)
    student.requires_grad_(False)
    palettes = {id(module.palettes): module.palettes for module in student.modules() if is_clustered_module(module)}
    groups = []
    for palette in palettes.values():
        palette.requires_grad_(True)
        groups.append({"params": [palette], "lr": learning_rate * palette.detach().square().mean().sqrt().item()})
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    student, optimizer, loader, schedule = engine.prepare(student, optimizer, loader, schedule)
    losses: list[float] = []
    for batch in tracked(_repeated(loader, num_steps), "train palettes", num_steps):
        with torch.no_grad():
            wanted = _outputs(teacher.eval(), batch)
        loss = divergence(_outputs(student.eval(), batch), wanted, batch, kind)
        engine.backward(loss)
        engine.clip_grad_norm_(list(palettes.values()), _MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    say(f"palettes: {num_steps} steps, divergence from the original {losses[0]:.4g} at first, {losses[-1]:.4g} at last")
    for palette in palettes.values():
        palette.requires_grad_(False)
    if not all(bool(palette.isfinite().all()) for palette in palettes.values()):
        raise LossNotFinite("training palettes gave values that are not finite; use a smaller learning rate")
    return losses


def is_clustered_module(module: nn.Module) -> bool:
    """Whether a module has palettes to train."""
    return isinstance(module, ClusteredModule)


def use_clustered(model: Any, weights: dict[str, ClusteredWeight]) -> None:
    """Replace the modules of a model by ones that hold its clustered weights; shared weights stay shared."""
    places: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            places.setdefault(id(weight), []).append(path)
    for name, weight in weights.items():
        replace_modules(model, places[id(model.get_parameter(name))], weight, torch.float32)


def divergence(logits: Tensor, wanted: Tensor, batch: Batch, kind: str) -> Tensor:
    """Return the mean divergence of outputs from those of the original: KL, or the squared difference of numbers."""
    if kind == "mse":
        return functional.mse_loss(logits, wanted)
    if kind == "binary-cross-entropy":
        by_wanted = functional.binary_cross_entropy_with_logits(wanted, wanted.sigmoid())
        return functional.binary_cross_entropy_with_logits(logits, wanted.sigmoid()) - by_wanted
    if logits.dim() == 3 and batch["labels"].shape == logits.shape[:2]:
        # All tokens of the row count, for shifted labels too: the outputs before a label are those that predict it.
        mask = batch.get("attention_mask")
        is_used = (batch["labels"] != IGNORED) if mask is None or mask.shape != logits.shape[:2] else mask.bool()
        logits, wanted = logits[is_used], wanted[is_used]
    log_p, log_q = wanted.log_softmax(-1), logits.log_softmax(-1)
    return functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean()


def _outputs(model: Any, batch: Batch) -> Tensor:
    logits = logits_of(run_model(model, batch))
    assert logits is not None  # the model of a task has a head
    return logits.float()


def _repeated(loader: Any, num_batches: int) -> Iterator[Any]:
    """Yield batches, in as many epochs as needed."""
    done = 0
    while done < num_batches:
        for batch in loader:
            yield batch
            done += 1
            if done == num_batches:
                return
