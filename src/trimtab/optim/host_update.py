"""Weights that are updated in host memory, together with gradients, fp32 master weights and optimizer state.

A gradient is copied to the host as soon as backward has completed it, on a separate stream, and freed on the device.
Gradients of further micro-batches are added on the device, to a copy of the sum on the host, slice by slice: the
numbers are those of a sum on the device. When backward returns, all sums are on the host. Clipping, unscaling, skipping
and undoing a step work on the master weights as on any other parameters, because the optimizer is an ordinary CPU
optimizer of the master weights. After its step, weights are copied back to the device.

Only the stream and pinned memory depend on CUDA: on a CPU the same code copies within host memory.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.model.gradient_hooks import register_gradient_hook
from trimtab.model.half_weights import take_exact
from trimtab.model.host_areas import empty_on_host, require_host_memory
from trimtab.model.streamed_blocks import computing_device, is_streamed

SLICE = 2**24  # number of elements that are converted or added at a time
MOST_IN_FLIGHT = 2**28  # bytes that may wait on the device before they are copied
_HOST = torch.device("cpu")


def empty_sums(tensors: Sequence[torch.Tensor], *, pins: bool, key: str) -> list[torch.Tensor]:
    """Host memory for gradients of tensors like these."""
    return empty_on_host(tensors, pins=pins, key=key)


class HostGradients:
    """Gradients that are moved to the host as soon as they are complete.

    Args:
        parameters: The parameters; those that are frozen now may be unfrozen later.
        holders: For each parameter, a tensor in host memory whose `.grad` becomes the gradient.
        sums: Host memory for the gradients.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], holders: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]
    ) -> None:
        self.parameters, self.holders, self.sums = list(parameters), list(holders), list(sums)
        self._queue = _Queue(computing_device(self.parameters[0]))
        self._backward = -1  # number of the current backward

    def watch(self) -> None:
        """Move the gradients of the parameters to the host from now on."""
        for index, parameter in enumerate(self.parameters):
            register_gradient_hook(parameter, self._finish, index=index)

    def settle(self) -> None:
        """Wait until all gradients are on the host. This is a host-device sync."""
        self._queue.drain()

    def _finish(self, parameter: torch.Tensor, index: int) -> None:
        self._take(parameter, index)  # looked up when called: a trace replaces it, and must not be kept alive

    def _take(self, parameter: torch.Tensor, index: int) -> None:
        """Move a complete gradient to the host, or add it to the sum on the host."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            if self._queue.is_busy:  # left over from a backward that failed
                self._queue.drain()
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        holder, total = self.holders[index], self.sums[index]
        if holder.grad is None:
            holder.grad = total
            self._send(total, gradient)
        else:
            self._add(total, gradient)

    def _send(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.dtype == target.dtype:
            self._copy_to_host(target, gradient)
            return
        for to, piece in _slices(target, gradient):
            self._copy_to_host(to, piece.to(to.dtype), gradient)

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor, *needed: torch.Tensor) -> None:
        with self._queue.after_device():
            copy(target, source)
        self._queue.keep(source, *needed)

    def _add(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        for to, piece in _slices(target, gradient):
            total = torch.empty_like(piece, dtype=to.dtype)  # on the device's stream, like all memory here
            with self._queue.after_device():
                copy(total, to)
                total.add_(piece)
                copy(to, total)
            self._queue.keep(total, gradient)


class HostWeights(HostGradients):
    """Master weights in host memory, and the copies between host and device.

    Args:
        parameters: The parameters; those that are frozen now may be unfrozen later.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        pins = computing_device(parameters[0]).type == "cuda"
        exact = [take_exact(parameter) for parameter in parameters]
        self.masters, sums = (empty_on_host(exact, pins=pins) for _ in range(2))
        super().__init__(parameters, self.masters, sums)
        for parameter, master, source in zip(self.parameters, self.masters, exact, strict=True):
            copy(master, source)
            if is_streamed(parameter) and parameter.dtype == master.dtype:
                parameter.data = master  # the host has only one copy of the weights
            parameter.master = master  # type: ignore[attr-defined]
        self._queue.drain()
        self.watch()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy weights to the device after every step of the optimizer of the master weights."""
        optimizer.register_step_post_hook(lambda *_: self.copy_to_device())

    @torch.no_grad()
    def copy_to_device(self) -> None:
        """Copy the master weights to the parameters, before the next forward on the device."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if is_streamed(parameter):  # its block fetches it from host memory
                if parameter.dtype != master.dtype:
                    parameter.copy_(master)
                continue
            if parameter.dtype == master.dtype:
                copy(parameter, master)
                continue
            for piece, whole in _slices(parameter.data, master):
                exact = torch.empty_like(piece, dtype=whole.dtype)
                copy(exact, whole)
                piece.copy_(exact)


def master_of(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor with the exact weights: a parameter's master weight in host memory, or the parameter itself."""
    return getattr(parameter, "master", parameter)


def optimized(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor whose `.grad` the optimizer reads: a master weight, a stand-in, or the parameter itself."""
    return getattr(parameter, "stand_in", master_of(parameter))


def masters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The master weights of a model's parameters by name; empty if the device updates them."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: master.detach() for name, p in named if (master := master_of(p)) is not p}


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between host and device, asynchronously if host memory is pinned.

    Asynchronous copies are used only on CUDA: on another device (MPS) they could arrive after the host has read the
    target.
    """
    target.copy_(source, non_blocking="cuda" in (target.device.type, source.device.type))


def _slices(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Corresponding slices of two tensors, if their elements are in the same order in memory; else one slice."""
    if not (target.is_contiguous() and source.is_contiguous()):
        yield target, source
        return
    yield from zip(torch.split(target.view(-1), SLICE), torch.split(source.view(-1), SLICE), strict=True)


class _Queue:
    """Copies that overlap with the computation of a device; on a CPU, and in a trace, they run immediately.

    Memory on the device that a copy needs is kept until the device's own stream has waited for the copy, so that the
    allocator can reuse it. This is decided by bytes, not by time, so that the memory of a step can be predicted.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._kept: deque[tuple[Any, tuple[torch.Tensor, ...], int]] = deque()
        self._num_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether copies may be in progress."""
        return bool(self._kept)

    @contextmanager
    def after_device(self) -> Iterator[None]:
        """A context for copies that start when the device has finished everything before them."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keep tensors until the last copy is done."""
        num_bytes = sum(tensor.nbytes for tensor in tensors[:1])
        self._kept.append((self._stream and self._stream.record_event(), tensors, num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > MOST_IN_FLIGHT:
            event, _, oldest = self._kept.popleft()
            if event is not None and self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_event(event)
            self._num_bytes -= oldest

    def drain(self) -> None:
        """Wait for all copies, at the end of a backward. This is a host-device sync."""
        with self.after_device():
            if self._stream is not None:
                self._stream.synchronize()
        self._kept.clear()
        self._num_bytes = 0


# ---------------------------------------------------------------------- host memory


def check_host_memory(needed_bytes: int) -> None:
    """Check that there is enough host memory, before any of it is used.

    Raises:
        DoesNotFit: There is not enough host memory.
    """
    require_host_memory(
        needed_bytes,
        "memory.update needs {} of host memory for gradients, optimizer state, and with host also weights",
        "use train.optimizer: adamw8bit, adapter: lora, or a machine with more memory",
    )


Build = Callable[[list[dict[str, Any]], torch.device], torch.optim.Optimizer]


def build_on_host(build: Build, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build an optimizer whose parameters are updated in host memory.

    Args:
        build: Builds an optimizer for parameter groups on a device.
        groups: The parameter groups.
    """
    weights = HostWeights([parameter for group in groups for parameter in group["params"]])
    masters = [{**group, "params": [master_of(p) for p in group["params"]]} for group in groups]
    optimizer = build(masters, _HOST)
    weights.follow(optimizer)
    return optimizer
