"""One micro-batch as a CUDA graph: forward, loss and backward on fixed addresses.

Inputs are copied into tensors of the graph. Gradients are written into or added to tensors that stay allocated for the
whole run. Numbers that differ between replays (the loss scale, the expected weight of a window) are also tensors.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trimtab.garbage_collection import gc_disabled
from trimtab.model.batch_tree import map_tensors, tensors_of
from trimtab.model.capture_masks import usual_masks
from trimtab.model.half_weights import HalfWeights


class ComputedLoss(Protocol):
    """The loss of a micro-batch, such as `trimtab.model.losses.StepLoss`."""

    @property
    def value(self) -> torch.Tensor:
        """The differentiable mean."""

    @property
    def weight(self) -> Any:
        """The number of items in the mean; None if all micro-batches count the same."""

    def reported(self) -> torch.Tensor:
        """The value that the step reports, detached."""


Batch = Any  # for `fit` a dict of tensors, else any structure of `trimtab.model.batch_tree`
Loss = Callable[[Any, Any], ComputedLoss]
Weight = torch.Tensor | float | None
Result = tuple[torch.Tensor, Any]  # the reported value of a loss, and its weight
Compute = Callable[[Any, torch.nn.Module, Loss, Batch], Result]


class Recorder(Protocol):
    """Records the work of a function, to be repeated on the same memory."""

    def supports(self, device: torch.device) -> bool:
        """Return whether work on a device can be recorded."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` without computing anything; return a function that computes it."""

    def forget(self) -> None:
        """Release the memory that recordings share; none of them is used any more."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool; the largest one should come first."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def supports(self, device: torch.device) -> bool:
        """Return whether it is an NVIDIA GPU."""
        return device.type == "cuda"

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the kernels that `work` launches."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # not torch.cuda.graph: if a capture cannot be ended, it leaves its stream as the current one. A graph of an
        # earlier run that the garbage collector frees during a capture would make the capture fail
        with gc_disabled(), torch.cuda.stream(self._stream):
            # threads that save checkpoints or copy batches continue during the capture
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def forget(self) -> None:
        """Release the memory pool: torch frees it with the last graph, and it cannot be used again."""
        self._pool = None


@dataclass(frozen=True)
class FirstRun:
    """What the first run of a micro-batch of some size, without a graph, has shown.

    Attributes:
        weight: The weight of the batch: a tensor if it depends on the rows, else the number itself, or None.
        dtype: The dtype of the reported loss.
    """

    weight: Weight
    dtype: torch.dtype


class CapturedMicroBatch:
    """A micro-batch of one size as a graph.

    Args:
        inputs: A batch of this size; it is copied.
        first: What the first run of this size, without a graph, has shown.
        owners: The parameters that get gradients, with the tensors in which these are accumulated.
        device: The device of the model.
        half_weights: Copies of weights that the model computes with.
        writes: Whether gradients are overwritten instead of added to those of earlier micro-batches.
    """

    def __init__(
        self,
        inputs: Batch,
        first: FirstRun,
        owners: Mapping[torch.nn.Parameter, torch.Tensor],
        device: torch.device,
        half_weights: HalfWeights,
        *,
        writes: bool,
    ) -> None:
        self._inputs = map_tensors(torch.clone, inputs)
        self._owners = owners
        self._half_weights = half_weights
        self._writes = writes
        self.device = device
        self.usual_weight: Weight = first.weight
        self._reported = torch.zeros((), dtype=first.dtype, device=device)
        is_counted_on_device = isinstance(first.weight, torch.Tensor)
        self._weight: Weight = torch.zeros((), device=device) if is_counted_on_device else first.weight
        self._expected = torch.ones((), device=device)  # E of `trimtab.engine.accumulation`
        self._is_alone = torch.ones((), dtype=torch.bool, device=device)
        self._share = torch.ones((), device=device)  # total of the window, for a weight that the host knows
        self._length = torch.ones((), device=device)  # length of the window, for losses without weights
        self._scale = torch.ones((), device=device)
        self._replay: Callable[[], None] | None = None

    def capture(self, recorder: Recorder, model: torch.nn.Module, loss: Loss) -> None:
        """Record forward, loss and backward."""
        bind_gradients(self._owners, with_values=not self._writes)
        # copies of weights that autocast caches inside an outer context would not be computed again by a replay
        torch.clear_autocast_cache()
        # a stream belongs to the current device, which need not be that of the model
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with usual_masks(), on_device:
            self._replay = recorder.record(lambda: (self._write if self._writes else self._add)(model, loss))
        torch.clear_autocast_cache()

    def _add(self, model: torch.nn.Module, loss: Loss) -> None:
        with self._half_weights.in_use():
            self._compute(model, loss)

    def _write(self, model: torch.nn.Module, loss: Loss) -> None:
        """Let autograd create new gradients, and copy all of them with one kernel."""
        for parameter in self._owners:
            parameter.grad = None
        with self._half_weights.in_use(keeps_gradients=True):
            self._compute(model, loss)
        halves = dict(self._half_weights.take_gradients())
        for weight, half in halves.items():
            if weight.grad is not None:  # for a loss function that reads the weight itself
                halves[weight] = weight.grad.add_(half)
        found = [(buffer, halves.get(p, p.grad)) for p, buffer in self._owners.items()]
        for dtype in {gradient.dtype for _, gradient in found if gradient is not None}:
            targets, sources = [], []
            for buffer, gradient in found:
                if gradient is not None and gradient.dtype == dtype:
                    targets.append(buffer)
                    sources.append(gradient)
            torch._foreach_copy_(targets, sources)
        missing = [buffer for buffer, gradient in found if gradient is None]
        if missing:
            torch._foreach_zero_(missing)
        bind_gradients(self._owners, with_values=False)

    def _compute(self, model: torch.nn.Module, loss: Loss) -> None:
        step = loss(model, self._inputs)
        self._reported.copy_(step.reported())
        self._check_weight(step.weight)
        if isinstance(self._weight, torch.Tensor):
            self._weight.copy_(step.weight.detach().reshape(()))
            share = torch.where(self._is_alone, torch.ones_like(self._weight), self._weight / self._expected)
            contribution = torch.where(self._weight > 0, step.value * share, torch.zeros_like(step.value))
        elif self._weight is None:
            contribution = step.value / self._length.to(step.value.dtype)
        else:
            contribution = step.value * self._share
        (contribution * self._scale).backward()  # type: ignore[no-untyped-call]

    def _check_weight(self, weight: Any) -> None:
        """Check that a weight known to the host, which a graph contains, is the same in all batches of this size."""
        num_tensors = isinstance(self._weight, torch.Tensor) + isinstance(weight, torch.Tensor)
        if num_tensors == 1 or (num_tensors == 0 and weight != self._weight):
            raise ValueError(
                f"batches of one size have different weights ({self._weight} and {weight}); return the weight as a "
                "tensor on the device"
            )

    def load(self, batch: Batch) -> None:
        """Copy the inputs of the next replay."""
        for mine, theirs in zip(tensors_of(self._inputs), tensors_of(batch), strict=True):
            mine.copy_(theirs, non_blocking=True)

    def run(self, expected: torch.Tensor | float | None, scale: float) -> None:
        """Add the gradients of the loaded inputs to `.grad`.

        Args:
            expected: The weight that the contribution is divided by, or the number of micro-batches for losses without
                weights; None for the only micro-batch of a window.
            scale: The loss scale.
        """
        assert self._replay is not None
        bind_gradients(self._owners, with_values=not self._writes)
        self._is_alone.fill_(expected is None)
        if expected is not None:
            _set(self._expected, expected)
        if self._weight is None:
            _set(self._length, 1.0 if expected is None else expected)
        elif not isinstance(self._weight, torch.Tensor):
            _set(self._share, 1.0 if expected is None else self._weight / expected)
        self._scale.fill_(scale)
        self._replay()

    @property
    def weight(self) -> Weight:
        """The weight of the last replay."""
        return self._weight.clone() if isinstance(self._weight, torch.Tensor) else self._weight

    @property
    def reported(self) -> torch.Tensor:
        """The value that the loss of the last replay reported."""
        return self._reported.clone()


def bind_gradients(owners: Mapping[torch.nn.Parameter, torch.Tensor], *, with_values: bool = True) -> None:
    """Bind `.grad` to the given tensors; their values are those of `.grad` (zero if it is None), or arbitrary."""
    if not with_values:
        for parameter, buffer in owners.items():
            parameter.grad = buffer
        return
    zeroed, targets, sources = [], [], []
    for parameter, buffer in owners.items():
        gradient = parameter.grad
        if gradient is buffer:
            continue
        if gradient is None:
            zeroed.append(buffer)
        else:
            targets.append(buffer)
            sources.append(gradient)
        parameter.grad = buffer
    if zeroed:
        torch._foreach_zero_(zeroed)
    if targets:
        torch._foreach_copy_(targets, sources)


def _set(target: torch.Tensor, value: torch.Tensor | float) -> None:
    """Set a number on the device without a host-device sync."""
    if isinstance(value, torch.Tensor):
        target.copy_(value, non_blocking=True)
    else:
        target.fill_(value)
