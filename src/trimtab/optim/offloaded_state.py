"""Optimizer state in host memory that is copied to the device slice by slice, while the weights stay on the device.

The optimizer is an ordinary one. Before each of its steps, the parameters that have a gradient are updated slice by
slice: the state of a slice is copied to a buffer on the device, the optimizer's own code runs on the slice of weights,
gradient and state, and the state is copied back. The next slices are prefetched on a separate stream, in the order of
the previous step. With updates in backward, copies overlap with the rest of backward.

All optimizers whose update of an element depends only on that element, or on its block of 256, give bit-identical
results to state on the device, except for stochastic rounding, which draws random numbers per slice.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trimtab.model import device_visits
from trimtab.model.host_areas import aligned, empty_on_host, laid_out
from trimtab.model.host_pages import HostLink
from trimtab.model.streamed_blocks import mark_streamed
from trimtab.optim.preallocation import preallocate_as_usual
from trimtab.optim.quantized import BLOCK
from trimtab.optim.stochastic_rounding import flat

KEY = "memory.offload_state"
# The size of a slice. The host takes several hundred microseconds to launch the copies and the update of a slice; with
# 16 MiB, all weights of 8 B parameters trained at 2,112 tokens/s on an H200, whose link allows twice that.
SLOT_BYTES = 2**26
NUM_SLOTS = 4  # number of slices that are being fetched, used or copied back
MIN_ELEMENTS = 2**16  # the state of smaller parameters stays on the device: its copies take longer to launch
_LENGTHS = 16 * BLOCK  # slices have a multiple of this many elements
_MOST_BYTES_PER_ELEMENT = 13  # two fp32 moments, a gradient, and space to align tensors
_STEP = "step"  # the name of the number of steps
_GRADIENT = "gradient"  # key of the gradient among the tensors of a slice; no optimizer's state has this name
_SMALLEST_SLOT = aligned(_LENGTHS * _MOST_BYTES_PER_ELEMENT)
_MARK = "has_state_on_host"

Key = tuple[int, int]  # a parameter and the number of a slice


class GradientsOnHost(Protocol):
    """Gradients in host memory, of parameters that stand-ins in host memory represent in the optimizer."""

    def parameter_of(self, stand_in: torch.Tensor) -> torch.Tensor:
        """The parameter on the device."""

    def sum_of(self, stand_in: torch.Tensor) -> torch.Tensor:
        """Its gradient on the host."""

    def clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        """A slice of a gradient on the device, as passed to the optimizer; may be changed in place."""


class OffloadedState:
    """The state of an optimizer's larger parameters, in host memory.

    Args:
        optimizer: The optimizer, without state yet; its steps fetch the state from now on.
        device: The device of the weights.
        gradients: Gradients in host memory, which are copied to the device with the state of all parameters; None if
            they are on the device.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, gradients: "GradientsOnHost | None" = None
    ) -> None:
        self._optimizer, self._device, self._link, self._gradients = optimizer, device, HostLink(), gradients
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        fewest = MIN_ELEMENTS if gradients is None else 1
        self._parameters = parameters = [parameter for parameter in parameters if parameter.numel() >= fewest]
        for parameter in parameters:
            vars(parameter)[_MARK] = True
        largest = max((parameter.numel() for parameter in parameters), default=0)
        self._slot_bytes = max(_SMALLEST_SLOT, min(SLOT_BYTES, aligned(largest * _MOST_BYTES_PER_ELEMENT)))
        buffer = device_visits.empty_buffer(NUM_SLOTS * self._slot_bytes, device, "state")
        begins = range(0, buffer.numel(), self._slot_bytes)
        self._free = deque(_Slot(buffer[begin : begin + self._slot_bytes]) for begin in begins)
        self._pieces: dict[Key, _Piece] = {}
        self._keys: dict[int, list[Key]] = {}  # the slices of each parameter
        self._fetched: dict[Key, _Slot] = {}  # slices that were fetched ahead
        self._order: list[Key] = []  # order of the previous pass, in which slices are fetched ahead
        self._next = 0  # position in this order of the slice to fetch next
        self._seen: dict[Key, None] = {}  # slices of the current pass
        self._num_sent = 0
        self._is_stepping = False
        vars(optimizer).update(allocate_state=self.allocate, state_on_host=self)
        optimizer.register_step_pre_hook(self._update_before)
        optimizer.register_state_dict_pre_hook(lambda _: self.settle())
        optimizer.register_load_state_dict_post_hook(lambda _: self._renew())

    def settle(self) -> None:
        """Let the host read and change the state: wait for all copies, and discard prefetched slices.

        This is a host-device sync.
        """
        self._link.synchronize(self._device)
        self._forget()

    def _renew(self) -> None:
        """Discard all slices, because the optimizer's state has other tensors now."""
        self.settle()
        for slices in (self._pieces, self._keys, self._order, self._seen):
            slices.clear()

    def _forget(self) -> None:
        self._free.extend(self._fetched.values())
        self._fetched.clear()

    # ------------------------------------------------------------------ state in host memory

    def allocate(self, parameters: Iterable[torch.Tensor]) -> None:
        """Allocate the state of parameters that have none yet."""
        for parameter in parameters:
            if not has_state_on_host(parameter):
                preallocate_as_usual(self._optimizer, [parameter])
            elif not self._is_ready(parameter):
                if not self._optimizer.state.get(parameter):
                    with _at_host(parameter):
                        preallocate_as_usual(self._optimizer, [parameter])
                self._move_to_host(parameter)

    def _move_to_host(self, parameter: torch.Tensor) -> None:
        state = self._optimizer.state[parameter]
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        large = {name: value for name, value in tensors.items() if value.dim() or name != _STEP}  # also of scalars
        if self._device.type != "meta":
            for name in tensors.keys() - large.keys():  # fused kernels count steps on the device, others on the host
                state[name] = tensors[name].to(self._device) if self._optimizer.defaults.get("fused") else tensors[name]
            plain = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in large.values()]
            homes = empty_on_host(plain, pins=self._device.type == "cuda", key=KEY)
            for (name, value), home in zip(large.items(), homes, strict=True):
                state[name] = home.copy_(value)
        for name in large:
            mark_streamed(state[name], self._device)
        visitors = {name: state[name] for name in large}
        if self._gradients is not None:
            visitors[_GRADIENT] = self._gradients.sum_of(parameter)
        pieces = _slices(parameter, visitors, self._slot_bytes)
        made = {(id(parameter), number): piece for number, piece in enumerate(pieces)}
        self._pieces.update(made)
        self._free.extend(self._fetched.pop(key) for key in made if key in self._fetched)  # left over from former state
        self._keys[id(parameter)] = list(made)

    def _is_ready(self, parameter: torch.Tensor) -> bool:
        return bool(self._optimizer.state.get(parameter)) and id(parameter) in self._keys

    # ------------------------------------------------------------------ steps

    @torch.no_grad()
    def _update_before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Update the parameters that have state in host memory; the optimizer's own step updates the others."""
        if self._is_stepping:  # the optimizer is being called for a slice
            return
        if self._gradients is not None:
            self._forget()  # slices that a step fetched but did not use, because the parameter had no gradient
        members = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
        for number, (group, parameter) in enumerate(members):
            if parameter.grad is not None and has_state_on_host(parameter):
                self.allocate([parameter])
                self._update(group, number, parameter)
                parameter.grad = None

    def _update(self, group: dict[str, Any], number: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        home = parameter if self._gradients is None else self._gradients.parameter_of(parameter)
        weights, gradient = flat(home), flat(parameter.grad)
        state = self._optimizer.state[parameter]
        for key in (keys := self._keys[id(parameter)]):
            piece, slot = self._pieces[key], self._take(key)
            options = dict(group)
            if "rounding_seed" in group:
                options["rounding_seed"] = f"{group['rounding_seed']} {number} {key[1]}"
            try:
                # scalars, such as the number of steps, change with the last slice
                own = {name: value if key == keys[-1] else _copied(value) for name, value in state.items()}
                own.update(slot.state)
                here = gradient[piece.here]
                if self._gradients is not None:
                    here = self._gradients.clipped(slot.views[_GRADIENT])
                with self._only(options, weights[piece.here], here, own):
                    type(self._optimizer).step(self._optimizer)
            except BaseException:  # memory may run out; then the run continues from its last checkpoint
                self._free.append(slot)
                raise
            self._send_back(piece, slot)
            self._fetch_ahead()
        state.update({name: value for name, value in own.items() if name not in piece.visitors})
        if not home.is_contiguous():
            home.copy_(weights.view_as(home))

    @contextmanager
    def _only(
        self, group: dict[str, Any], weights: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]
    ) -> Iterator[None]:
        """A context in which the optimizer has a single parameter: a slice."""
        optimizer = self._optimizer
        groups, states = optimizer.param_groups, optimizer.state
        weights.grad = gradient
        optimizer.param_groups, optimizer.state = [{**group, "params": [weights]}], defaultdict(dict, {weights: state})
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            optimizer.param_groups, optimizer.state = groups, states

    # ------------------------------------------------------------------ copies

    def _take(self, key: Key) -> "_Slot":
        """Return the buffer with the state of a slice; the current stream waits for the copy."""
        if key in self._seen or not self._order:  # another pass starts, or the first one
            order = list(self._seen) or self._usual_order(key)
            if order != self._order:  # prefetched slices may never be used
                self._forget()
            self._order, self._seen = order, {}
        self._seen[key] = None
        if key not in self._fetched:
            self._forget()
            self._fetch(key)
            self._next = self._order.index(key) + 1 if key in self._order else self._next
        slot = self._fetched.pop(key)
        self._link.wait_fetched(slot.arrived)
        return slot

    def _usual_order(self, first: Key) -> list[Key]:
        """The order of the parameters for updates after backward; in backward it is usually reversed."""
        is_after = first[0] == id(self._parameters[0])
        parameters = self._parameters if is_after else self._parameters[::-1]
        return [key for parameter in parameters for key in self._keys.get(id(parameter), ())]

    def _fetch(self, key: Key) -> None:
        piece, slot = self._pieces[key], self._free.popleft()
        slot.hold(piece)
        # the later of the copies to the host that this one must not overtake
        after = max((sent for sent in (slot.sent, piece.sent) if sent is not None), key=lambda s: s[0], default=None)
        pairs = [(slot.views[name], tensor) for name, tensor in piece.visitors.items()]
        slot.arrived = self._link.copy_in(pairs, self._device, None if after is None else after[1])
        self._fetched[key] = slot

    def _fetch_ahead(self) -> None:
        while self._free:
            if self._next >= len(self._order) and self._gradients is not None:
                return  # the next gradients do not exist yet
            self._next %= len(self._order)
            if self._order[self._next] in self._fetched:
                return
            self._fetch(self._order[self._next])
            self._next += 1

    def _send_back(self, piece: "_Piece", slot: "_Slot") -> None:
        pairs = [(piece.visitors[name], view) for name, view in slot.state.items()]
        self._num_sent += 1
        slot.sent = piece.sent = self._num_sent, self._link.copy_out(pairs, self._device)
        self._free.append(slot)


@dataclass
class _Piece:
    """The state of a slice of a parameter, in host memory, perhaps with its gradient."""

    here: slice
    visitors: dict[str, torch.Tensor]
    sent: tuple[int, Any] | None = None  # number and event of the last copy to the host


@dataclass
class _Slot:
    """A buffer on the device."""

    buffer: torch.Tensor
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    arrived: Any = None
    sent: tuple[int, Any] | None = None

    def hold(self, piece: _Piece) -> None:
        """Lay out the state of a slice in the buffer."""
        begin = 0
        self.views = {}
        for name, tensor in piece.visitors.items():
            self.views[name] = laid_out(self.buffer[begin : begin + tensor.nbytes], tensor)
            begin += aligned(tensor.nbytes)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The tensors to copy back to the host."""
        return {name: view for name, view in self.views.items() if name != _GRADIENT}


def _slices(parameter: torch.Tensor, state: dict[str, torch.Tensor], most_bytes: int) -> Iterator[_Piece]:
    """Divide the state of a parameter evenly."""
    num_elements = parameter.numel()
    per_length = sum(-(-tensor.nbytes * _LENGTHS // num_elements) for tensor in state.values())
    most_lengths = max(1, (most_bytes - len(state) * aligned(1)) // max(1, per_length))
    num_slices = -(-num_elements // (most_lengths * _LENGTHS))
    length = -(-num_elements // (num_slices * _LENGTHS)) * _LENGTHS
    for begin in range(0, num_elements, length):
        here, blocks = slice(begin, begin + length), slice(begin // BLOCK, (begin + length) // BLOCK)
        parts = {}
        for name, tensor in state.items():
            parts[name] = tensor.view(-1)[here if tensor.numel() == num_elements else blocks]
        yield _Piece(here, parts)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value


@contextmanager
def _at_host(parameter: torch.Tensor) -> Iterator[None]:
    """A context in which a parameter appears to be in host memory, so that its state is allocated there."""
    data, gradient, parameter.grad = parameter.data, parameter.grad, None
    if not data.is_meta:
        parameter.data = torch.empty((), dtype=data.dtype).expand(data.shape)
    try:
        yield
    finally:
        parameter.data = data
        parameter.grad = gradient


def has_state_on_host(parameter: torch.Tensor) -> bool:
    """Whether the state of a parameter is in host memory."""
    return bool(vars(parameter).get(_MARK))


def offload_state(
    build: Callable[[list[dict[str, Any]], torch.device], torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    device: torch.device,
) -> torch.optim.Optimizer:
    """Build an optimizer whose state is in host memory.

    Args:
        build: Builds an optimizer for parameter groups on a device.
        groups: The parameter groups.
        device: The device that the optimizer is built for.
    """
    optimizer = build(groups, device)
    OffloadedState(optimizer, groups[0]["params"][0].device)
    return optimizer
