"""Weights on the device that are updated after backward, with gradients and optimizer state in host memory.

A gradient is copied to the host as soon as backward has completed it, as in `host_update`. When all gradients are
known, and clipped, slices of gradients and state are copied to the device one after another, where the optimizer's own
code updates the weights (`offloaded_state`). Since weights change only then, clipping, micro-batches, skipped steps and
undoing a step work as usual. The optimizer has stand-ins in host memory for the parameters: tensors of the same shape
that take no memory, whose `.grad` are the gradients on the host.

If a step has one micro-batch, the norm of the gradients is computed on the device before they are copied to the host,
and clipping scales the slices there. Otherwise, or if something else has changed the gradients, the host does both.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimtab.model.streamed_blocks import computing_device
from trimtab.optim import host_update
from trimtab.optim.host_update import HostGradients
from trimtab.optim.in_backward import CLIP_EPSILON, AfterBackward, set_updates
from trimtab.optim.offloaded_state import OffloadedState

KEY = "memory.update: streamed"


class StreamedGradients(HostGradients, AfterBackward):
    """Gradients in host memory, with the norm that they had on the device.

    Args:
        parameters: The parameters, in the order in which norms are summed; those that are frozen now may be unfrozen
            later.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        device = computing_device(parameters[0])
        like = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parameters]
        sums = host_update.empty_sums(like, pins=device.type == "cuda", key=KEY)
        at = torch.device("meta") if device.type == "meta" else torch.device("cpu")
        stand_ins = [torch.empty((), dtype=p.dtype, device=at).expand(p.shape) for p in parameters]
        super().__init__(parameters, stand_ins, sums)
        self._places = {id(stand_in): index for index, stand_in in enumerate(stand_ins)}
        self._measures = False
        self._norms: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}  # versions of the gradients when they were measured
        self._factor: torch.Tensor | None = None
        for parameter, stand_in in zip(self.parameters, stand_ins, strict=True):
            parameter.stand_in = stand_in  # type: ignore[attr-defined]
        self.watch()

    # ------------------------------------------------------------------ for `offloaded_state`

    def parameter_of(self, stand_in: torch.Tensor) -> torch.Tensor:
        """The parameter on the device."""
        return self.parameters[self._places[id(stand_in)]]

    def sum_of(self, stand_in: torch.Tensor) -> torch.Tensor:
        """Its gradient on the host."""
        return self.sums[self._places[id(stand_in)]]

    def clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        """A slice of a gradient on the device, clipped in place."""
        return gradient if self._factor is None else gradient.mul_(self._factor)

    # ------------------------------------------------------------------ clipping

    def begin_window(self, num_micro_batches: int, max_norm: float | None = None) -> None:
        """Measure gradients if the window has a single micro-batch."""
        self._measures, self._factor = num_micro_batches == 1, None
        self._norms.clear()

    def _take(self, parameter: torch.Tensor, index: int) -> None:
        if self._measures and parameter.grad is not None:
            self._norms[index] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        super()._take(parameter, index)
        self._versions[index] = self.sums[index]._version

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Scale the slices of this step on the device, if the gradients have not changed since they were measured."""
        if not self._norms or any(self.sums[index]._version != self._versions[index] for index in self._norms):
            return None
        norm: torch.Tensor = torch.linalg.vector_norm(
            torch.stack([self._norms[index] for index in sorted(self._norms)])
        )
        if max_norm < math.inf:
            self._factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
        return norm


def build_streamed(
    build: Callable[[list[dict[str, Any]], torch.device], torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    device: torch.device,
    model: torch.nn.Module,
) -> torch.optim.Optimizer:
    """Build an optimizer whose gradients and state are in host memory, and are copied to the device in its steps.

    Args:
        build: Builds an optimizer for parameter groups on a device.
        groups: The parameter groups.
        device: The device that the optimizer is built for.
        model: The prepared model.
    """
    known = {id(parameter) for group in groups for parameter in group["params"]}
    gradients = StreamedGradients([parameter for parameter in model.parameters() if id(parameter) in known])
    stand_ins = [{**group, "params": [host_update.optimized(p) for p in group["params"]]} for group in groups]
    optimizer = build(stand_ins, device)
    OffloadedState(optimizer, computing_device(gradients.parameters[0]), gradients)
    set_updates(model, gradients)
    return optimizer
