"""Blocks whose weights are in host memory, and are copied to the device while they are used.

While a block is not in use, the data of its streamed parameters is in host memory, where code that saves, exports,
compares or loads weights finds it. While a block computes, in forward and in backward, the data is in device memory.
Two buffers are enough: while a block computes with the weights in one of them, those of its successor are copied to the
other one. In forward the successor is the next block, in backward the previous one. The buffer of a block, and the
position of each weight in it, never change. So a tensor that autograd has saved (such as a transposed weight) refers to
the right memory again when backward reaches the block, and keeps no memory alive: the buffers exist anyway. That is why
blocks need not be recomputed, and why no hook has to recognise saved weights.

Backward reaches a block when the gradient of its output is complete, or when the block is recomputed. Blocks follow
each other strictly: autograd runs the operations of a block in the reverse order of forward, and adds gradients to
parameters as soon as they exist. So a block's weights are no longer needed when backward reaches the previous one.

Optimizer state may be copied to the device together with the weights, in backward (`stream_state`). Then weights and
state are changed on the device, and copied back to host memory. State has a third buffer, so that copies in both
directions can overlap.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from trimtab.model.device_visits import Visits
from trimtab.model.host_areas import HostArea, move_to_area
from trimtab.model.host_pages import HostLink

KEY = "memory.stream_weights"
MIN_BYTES = 2**16  # smaller tensors stay on the device: their copies take longer to launch than their memory is worth
_STATE = "_trimtab_streamed_blocks"
_PLACE = "_trimtab_place_in_stream"
_MARK = "is_in_host_memory"  # for code that counts device memory
_DEVICE = "_trimtab_visited_device"

FindState = Callable[[Sequence[torch.Tensor]], tuple[list[torch.Tensor], HostArea | None]]


class StreamedBlocks:
    """The streamed blocks of one model.

    Args:
        units: The streamed tensors of each block, in the order of the model.
        device: The device that computes.
    """

    def __init__(self, units: Sequence[Sequence[torch.Tensor]], device: torch.device) -> None:
        self.device, self.link = device, HostLink()
        self.units = [list(unit) for unit in units]
        self.weights = Visits(device, self.link, "weights")
        self.weights.begin(self.units)
        self.state: Visits | None = None  # state of an optimizer that updates in backward
        self._state_of: FindState | None = None
        self._last = -1  # the current block in forward
        self._backward = -1  # number of the backward that is running
        self._updates = False  # whether the current unit may be changed

    def stream_state(self, find: FindState) -> None:
        """Allow weights to change in backward, and copy the tensors of an optimizer's state to the device with them.

        Args:
            find: Returns the state of a block's weights, in host memory, and the area that it was moved to.
        """
        # With the third buffer, copies in both directions overlap. Weights do not need one: they are copied back before
        # the state, so that the next weights can be copied while the state is copied back.
        self.state, self._state_of = Visits(self.device, self.link, "state", num_buffers=3), find

    def enter(self, number: int) -> None:
        """Copy the weights of a block to the device, and start to fetch those of its successor."""
        if self.weights.visiting == number:
            return
        self.leave()
        is_backward = is_in_backward()
        if is_backward:
            self._watch_end_of_backward()
        else:
            if number <= self._last or self._last < 0:  # left over from another forward
                self._begin()
            self._last = number
        self.weights.enter(number)
        self._updates = is_backward and self.state is not None
        if self.state is not None and is_backward:
            self.state.enter(number)
        successor = number - 1 if is_backward else number + 1
        if self.state is not None and is_backward:
            self.state.fetch(successor)
        self.weights.fetch(successor)
        if self.state is not None and not is_backward and torch.is_grad_enabled() and successor == len(self.units):
            self.state.fetch(number)  # backward starts here

    def _begin(self) -> None:
        self.weights.begin(self.units)
        if self.state is None or self._state_of is None:
            return
        tensors = []
        for number, unit in enumerate(self.units):
            found, area = self._state_of(unit)
            tensors.append(found)
            if area is not None:
                self.state.set_area(number, area)
        self.state.begin(tensors)

    def leave(self) -> None:
        """Release the weights that are on the device, if any."""
        for visits in self._all():
            visits.leave(has_changed=self._updates)
        self._updates = False

    def _all(self) -> list[Visits]:
        return [self.weights] if self.state is None else [self.weights, self.state]

    def _watch_end_of_backward(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.leave()
        if self.state is not None:
            self.link.synchronize(self.device)  # the host may read weights and state now


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    streamed, number, own = self.__dict__[_PLACE]
    is_again = is_in_backward()  # recomputed: backward of the block follows
    streamed.enter(number)
    try:
        with _no_cache_of_casts():
            output = own(*args, **kwargs)
    finally:
        if not is_again:
            streamed.leave()
    if not is_again:
        _call_before_backward(output, streamed, number)
    return output


@contextmanager
def _no_cache_of_casts() -> Iterator[None]:
    """Prevent autocast from keeping half-precision copies of the weights until the end of forward."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _call_before_backward(output: Any, streamed: StreamedBlocks, number: int) -> None:
    """Fetch the weights of a block when the gradient of its output is complete."""
    for tensor in output if isinstance(output, tuple | list) else (output,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: streamed.enter(number))  # type: ignore[no-untyped-call]
            return


# ---------------------------------------------------------------------- the tensors to stream


def tables_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Scales and lookup tables of a 4-bit weight, which are not parameters."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    values = [value for part in (state, getattr(state, "state2", None)) if part is not None for value in _items(part)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _items(state: Any) -> list[Any]:
    return [item for value in vars(state).values() for item in (value if isinstance(value, list) else [value])]


def streamable(block: nn.Module, *, trains: bool, but: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """The tensors of a block that are worth streaming.

    Args:
        block: The block.
        trains: Whether trainable parameters are streamed as well.
        but: Parameters that stay on the device.
    """
    kept = {id(parameter) for parameter in but}
    found: dict[int, torch.Tensor] = {}
    for parameter in block.parameters():
        if id(parameter) in kept or (parameter.requires_grad and not trains):
            continue
        for tensor in (parameter, *tables_of(parameter)):
            if tensor.nbytes >= MIN_BYTES:
                found[id(tensor)] = tensor
    return list(found.values())


def stream_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], units: Sequence[Sequence[torch.Tensor]], device: torch.device
) -> StreamedBlocks:
    """Move tensors of blocks to host memory, from which they are copied to the device when needed.

    Args:
        model: The model. Its parameters, their names and its outputs do not change. `to` does not move streamed
            tensors.
        blocks: The blocks, in the order in which they compute.
        units: The tensors of each block to stream; parameters as the objects themselves.
        device: The device that computes.
    """
    streamed = StreamedBlocks(units, device)
    for number, (block, unit) in enumerate(zip(blocks, units, strict=True)):
        if device.type != "meta":
            streamed.weights.set_area(number, move_to_area(unit, pins=device.type == "cuda", key=KEY))
            _move_tables(block, unit, device)
        for tensor in unit:
            mark_streamed(tensor, device)
        for module in block.modules():
            if any(is_streamed(parameter) for parameter in module._parameters.values()):
                module.__dict__["_apply"] = MethodType(_apply_to_others, module)
        own = block.forward
        # Bound methods follow their object through copy.deepcopy; a closure over the block would not.
        block.__dict__[_PLACE] = streamed, number, own
        block.forward = MethodType(_with_signature_of(own), block)
    model.__dict__[_STATE] = streamed
    return streamed


def innermost_forward(block: nn.Module) -> Any:
    """The forward of a block, without the code that fetches its weights."""
    return block.__dict__[_PLACE][2] if _PLACE in block.__dict__ else block.forward


def set_innermost_forward(block: nn.Module, forward: Any) -> None:
    """Replace the forward of a block; its weights are still fetched first."""
    if _PLACE in block.__dict__:
        block.__dict__[_PLACE] = *block.__dict__[_PLACE][:2], forward
    else:
        block.forward = forward


def streamed_blocks_of(model: nn.Module) -> StreamedBlocks | None:
    """The streamed blocks of a model, if it has any."""
    return model.__dict__.get(_STATE)


def mark_streamed(tensor: torch.Tensor, device: torch.device) -> None:
    """Mark a tensor as streamed: it is in host memory and copied to a device when needed."""
    vars(tensor).update({_MARK: True, _DEVICE: device})


def is_streamed(tensor: Any) -> bool:
    """Whether a tensor is streamed: in host memory, and copied to a device when needed."""
    return hasattr(tensor, _DEVICE)


def computing_device(tensor: torch.Tensor) -> torch.device:
    """The device that computes with a tensor: the one it is copied to, or the one it is on."""
    found: torch.device = getattr(tensor, _DEVICE, tensor.device)
    return found


def _with_signature_of(own: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, *args, **kwargs)

    forward.__wrapped__ = getattr(own, "__func__", own)  # type: ignore[attr-defined]  # for inspect.signature
    return forward


def _move_tables(block: nn.Module, unit: Sequence[torch.Tensor], device: torch.device) -> None:
    """Move small tables of 4-bit weights to the device, which `to` finds only through the weights."""
    streamed = {id(tensor) for tensor in unit}
    for parameter in block.parameters():
        if id(parameter) in streamed:
            for table in tables_of(parameter):
                if id(table) not in streamed:
                    table.data = table.data.to(device)


def _apply_to_others(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`Module._apply`, which moves and converts parameters, without the streamed ones."""
    before = dict(self._parameters)
    for name, parameter in before.items():
        if is_streamed(parameter):
            del self._parameters[name]
    try:
        type(self)._apply(self, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        moved = dict(self._parameters)
        self._parameters.clear()
        self._parameters.update({name: moved.get(name, parameter) for name, parameter in before.items()})
    return self
