"""Record a training step on `meta` tensors: when every storage is allocated and freed, and every operation.

On the `meta` device operations compute shapes and allocate nothing. Memory that a real device allocates in addition
(workspaces of libraries, temporary buffers inside kernels) is defined by `Rules`: see `trimtab.planner.trace.cuda`.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trimtab.planner.trace.cache import run_on_meta, tensors_in
from trimtab.planner.trace.data_dependent import depends_on_data, run_with_values
from trimtab.planner.trace.known_values import KnownValues, written
from trimtab.planner.trace.module_names import ModuleNames
from trimtab.planner.trace.routing import flops_of_grouped_product

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_GROUPED = torch.ops.aten._grouped_mm
_READ = torch.ops.aten._local_scalar_dense.default
_WITHOUT_KERNEL = 9  # memory traffic of a host without such a kernel: see `trimtab.optim.stochastic_rounding`
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}


class Event(NamedTuple):
    """The allocation or release of a storage."""

    storage: int  # unique in a trace
    size: int  # bytes if it is allocated; 0 if it is freed


class Op(NamedTuple):
    """One operation on the device; views are left out."""

    name: str
    # "forward", "backward", "recompute" and "update" (inside backward), "optimizer"; "host" is computed by the host,
    # "transfer" a copy between host and device; "replay" and "replayed" are in graphs
    stage: str
    flops: int  # a multiply-add counts two; 0 for operations that only move memory
    moved: int  # bytes read and written
    dtype: str  # dtype of the product: fp32, bf16, fp16, fp8


class Owner(NamedTuple):
    """One of the repeated blocks of a model."""

    stack: int  # 0, or 1 for the decoder after an encoder
    block: int


class Birth(NamedTuple):
    """The allocation of a storage."""

    size: int
    part: str  # "weights", "inputs", "state", "library", or the stage that allocated it
    op: str
    is_wide: bool  # its last dimension is the vocabulary
    owner: Owner | None  # the block that it belongs to
    name: str = ""  # of its module or parameter: see `trimtab.planner.trace.module_names`


class Place(NamedTuple):
    """A part of the step: one pass of a block, or the code between blocks."""

    kind: str  # "forward" or "backward" of a block, its "weights" or their "state"; "" between blocks
    owner: Owner | None
    number: int  # the number of earlier passes of this kind of the block


class Segment(NamedTuple):
    """The start of the events and operations of one place."""

    place: Place
    first_event: int
    first_op: int


@dataclass(frozen=True)
class Mark:
    """A named point in time, such as the end of forward."""

    name: str
    event: int  # number of events before it


@dataclass(frozen=True)
class Trace:
    """The record of a step.

    Attributes:
        events: Allocations and frees in chronological order, starting with tensors that exist before the step.
        births: The allocation of each storage.
        ops: Operations of the timed step.
        marks: Named points in time.
        gradients: Storages that became gradients of parameters.
        segments: The parts of the step, in order.
        shares: Bytes per block of operations between blocks that work on all parameters, by index in `ops`.
        stacks: Names of the lists of blocks.
        remarks: What a user should know about the prediction, such as a block that is predicted uncompiled.
    """

    events: tuple[Event, ...]
    births: Mapping[int, Birth]
    ops: tuple[Op, ...]
    marks: tuple[Mark, ...]
    gradients: frozenset[int]
    segments: tuple[Segment, ...]
    shares: Mapping[int, Mapping[Owner, int]]
    stacks: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class Rules(Protocol):
    """Memory that a real device allocates in addition to the tensors of a step."""

    def temporaries(self, func: Any, args: tuple[Any, ...], out: Any) -> list[int]:
        """Bytes of temporary buffers that a kernel allocates before its outputs."""

    def workspaces(self, func: Any, args: tuple[Any, ...]) -> list[int]:
        """Bytes of temporary buffers that a kernel allocates after its outputs."""

    def kept(self, func: Any, args: tuple[Any, ...], in_backward: bool) -> list[tuple[str, int]]:
        """Workspaces that a library allocates in its first call and keeps: the name and bytes of each."""

    def stand_in(self, func: Any) -> Callable[..., Any] | None:
        """The replacement of an operation that does not run on `meta`; None if there is none."""


class Recorder(TorchDispatchMode):
    """Run operations on `meta` tensors and record what they would allocate and free.

    Args:
        rules: The rules of the simulated device.
        answer: Returns the value for code that reads an unknown tensor (`bool(tensor)`, `tensor.item()`).

    Attributes:
        values: The values of small tensors that are known.
        modules: The running module, after which tensors are named.
        remarks: See `Trace`; a dict keeps their order.
    """

    def __init__(self, rules: Rules, answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules, self._answer = rules, answer
        self.values, self.modules = KnownValues(), ModuleNames()
        self._living: dict[int, int] = {}  # the number of each storage by address; -1 if it is not on the device
        self._stand_for: dict[int, torch.Tensor] = {}  # parameters that tensors on the host belong to, by address
        self._owners_on_host: dict[int, Owner | None] = {}
        self._kept: set[str] = set()
        self._library: list[Event] = []
        self._is_recomputing = self._is_updating = False
        self._num_storages = 0
        self._is_on_host = self._is_paused = self._has_host_weights = False
        self._part: str | None = None
        self._stage = "forward"
        self._visits: dict[tuple[str, Owner | None], int] = {}
        self._counts_of_unshared: tuple[int, int] | None = None
        self.vocab_size: int | None = None  # the width of logits
        self.events: list[Event] = []
        self.births: dict[int, Birth] = {}
        self.ops: list[Op] = []
        self.marks: list[Mark] = []
        self.segments: list[Segment] = []
        self.shares: dict[int, dict[Owner, int]] = {}
        self.gradients: set[int] = set()
        self.remarks: dict[str, None] = {}
        self.is_timing = True
        self._learn_counts()
        self.enter("", None)

    def trace(self) -> Trace:
        """The record so far; workspaces of libraries, which are never freed, are moved to its start."""
        later = len(self._library)
        first, *others = self.segments
        return Trace(
            (*self._library, *self.events),
            dict(self.births),
            tuple(self.ops),
            tuple(Mark(mark.name, mark.event + later) for mark in self.marks),
            frozenset(self.gradients),
            (first, *(segment._replace(first_event=segment.first_event + later) for segment in others)),
            dict(self.shares),
            self.modules.stacks,
            tuple(self.remarks),
        )

    # ------------------------------------------------------------------ the position in the step

    @property
    def stage(self) -> str:
        """One of "forward", "backward", "recompute", "update", "optimizer" and "host"."""
        if self._is_updating:
            return "update"
        if self._is_on_host and self._has_host_weights:
            return "host"
        again = torch.is_grad_enabled() or self._is_recomputing  # custom autograd functions recompute without autograd
        return "recompute" if self._stage == "backward" and again else self._stage

    @property
    def is_in_backward(self) -> bool:
        """Whether backward is running."""
        return self._stage == "backward"

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Record everything inside the context as a stage of the step."""
        before, self._stage = self._stage, stage
        self.mark(f"{stage} begins")
        try:
            yield
        finally:
            self._stage = before
            self.enter("", None)
            self.mark(f"{stage} ends")

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Record everything inside the context as recomputation."""
        before, self._is_recomputing = self._is_recomputing, True
        try:
            yield
        finally:
            self._is_recomputing = before

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Record everything inside the context as the optimizer, which updates single parameters inside backward."""
        before, self._is_updating = self._is_updating, True
        try:
            yield
        finally:
            self._is_updating = before

    def mark(self, name: str) -> None:
        """Name the current point in time."""
        self.marks.append(Mark(name, len(self.events)))

    def enter(self, kind: str, owner: Owner | None) -> None:
        """Start a pass of a block, or, without an owner, the code between blocks."""
        if self._is_paused:
            return
        self.values.enter_block()
        number = self._visits.get((kind, owner), 0)
        self._visits[kind, owner] = number + 1
        self.segments.append(Segment(Place(kind, owner, number), len(self.events), len(self.ops)))

    @property
    def _owner(self) -> Owner | None:
        return self.segments[-1].place.owner if self.segments else None

    # ------------------------------------------------------------------ existing tensors

    def adopt(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Record existing tensors as allocated now."""
        for tensor in tensors:
            if tensor.is_meta:
                self._bear(tensor, part, "", self._owner, self.modules.of_parameter(tensor))

    def adopt_on_host(self, tensors: list[torch.Tensor], parameters: Iterable[torch.Tensor]) -> None:
        """Record existing tensors of parameters as host memory; operations only on such tensors run on the host."""
        self._has_host_weights = True
        for tensor, parameter in zip(tensors, parameters, strict=True):
            address = tensor.untyped_storage()._cdata
            # the parameter itself is on the host and already recorded
            if address == parameter.untyped_storage()._cdata:
                continue
            with self.on_host():
                self.adopt([tensor], "host")
            self._stand_for[address] = parameter

    def adopt_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the tensors in `.grad` of the parameters as gradients."""
        for parameter in parameters:
            if parameter.grad is not None:
                number = self._living.get(parameter.grad.untyped_storage()._cdata)
                if number is not None:
                    self.gradients.add(number)
                    name = self.modules.of_parameter(parameter)
                    if number >= 0 and name:
                        self.births[number] = self.births[number]._replace(name=name)

    @contextmanager
    def born_as(self, part: str) -> Iterator[None]:
        """Record new tensors inside the context as this part of the anatomy."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Record new tensors inside the context as host memory, which is not counted."""
        before, self._is_on_host = self._is_on_host, True
        try:
            yield
        finally:
            self._is_on_host = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the context; tensors created there must be freed before its end."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    # ------------------------------------------------------------------ operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it would cost as much as a small operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _READ and args[0].is_meta:
            known = self.values.of(args[0])
            return self._answer(args[0]) if known is None else known.item()
        if func is _ADD and self._stage == "backward" and not self._is_paused and self._adds_in_place(args, kwargs):
            func = _ADD_IN_PLACE
        out = self._run(func, args, kwargs)
        if self._stage != "optimizer" and self._part != "state":
            self.values.follow(func, args, kwargs, out)
        if not self._is_paused:
            self._observe(func, args, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if depends_on_data(func):
            out = run_with_values(self.values, self._run_inside, func, args, kwargs)
            if out is not NotImplemented:
                return out
        stand_in = self._rules.stand_in(func)
        return run_on_meta(func, args, kwargs) if stand_in is None else stand_in(*args, **kwargs)

    def _run_inside(self, func: Any, args: Any) -> Any:
        """Run an operation that is a part of another one."""
        return self.__torch_dispatch__(func, (), args)

    def note(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Record a replaced kernel that reads and writes these tensors."""
        if self.is_timing:
            stage, moved = self.stage, sum(map(tensor_bytes, tensors))
            if self._has_host_weights and self._are_on_host(tensors):
                stage, moved = "host", moved * _WITHOUT_KERNEL
            self.ops.append(Op(name, stage, 0, moved, "fp32"))
            self._share_out(tensors)

    def transfer(self, name: str, num_bytes: int, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Record a copy over the host link, or a wait for one; see `trimtab.techniques.base`."""
        if self.is_timing and not self._is_paused:
            self.ops.append(Op(name, self.stage, 0, num_bytes, "fp32"))
            self._share_out(list(tensors))

    def copy_weights(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Record a copy between host and device, which overlaps with computation."""
        if self.is_timing and not self._is_paused:
            self.ops.append(Op("transfer", "transfer", 0, tensor_bytes(target), "fp32"))
            self._share_out([target, source])

    def launch(self, name: str, made: list[torch.Tensor], read_bytes: int) -> None:
        """Record a kernel whose results were computed while the recorder was paused."""
        if self._is_paused:
            return
        for tensor in made:
            self._bear(tensor, self._part or self.stage, name, self._owner)
        if self.is_timing:
            moved = read_bytes + sum(map(tensor_bytes, made))
            self.ops.append(Op(name, self.stage, 0, moved, "fp32"))

    def _observe(self, func: Any, args: Any, out: Any) -> None:
        if self._has_host_weights and not self._is_on_host and self._are_on_host(args):
            with self.on_host():
                self._observe(func, args, out)
            return
        name, is_mutable = _known(func)
        for label, size in self._rules.kept(func, args, self.is_in_backward):
            if label not in self._kept:
                self._kept.add(label)
                self._make(size, "library", label, False, None)
                self._library.append(self.events.pop())
        temporary = [
            self._make(size, self.stage, name, False, self._owner) for size in self._rules.temporaries(func, args, out)
        ]
        outs = [tensor for tensor in tensors_in(out) if tensor.is_meta]
        owners = self._owners_in_lists(args, outs)
        is_new = False
        for tensor, owner in zip(outs, owners, strict=True):
            is_new = self._bear(tensor, self._part or self.stage, name, owner) or is_new
        for size in self._rules.workspaces(func, args):
            temporary.append(self._make(size, self.stage, name, False, self._owner))
        for number in temporary:
            self.events.append(Event(number, 0))
        if self.is_timing and (is_new or temporary or is_mutable):
            tensors = [tensor for tensor in tensors_in(args) if tensor.is_meta]
            flops, dtype = _flops(func, args, out)
            tensors += outs
            if is_mutable and not outs:  # what it writes, it has read
                changed = tensors_in([args[index] for index in written(func) if index < len(args)])
                tensors += [tensor for tensor in changed if tensor.is_meta]
            self.ops.append(Op(name, self.stage, flops, sum(map(tensor_bytes, tensors)), dtype))
            self._share_out(tensors)

    def _are_on_host(self, args: Any) -> bool:
        """Whether all tensors among the arguments are in host memory, and there is at least one."""
        tensors = [tensor for tensor in tensors_in(args) if tensor.is_meta]
        tensors = [tensor for tensor in tensors if tensor.dim()] or tensors  # scalars may be anywhere
        return bool(tensors) and all(self._living.get(t.untyped_storage()._cdata) == -1 for t in tensors)

    def _owners_in_lists(self, args: Any, outs: list[torch.Tensor]) -> list[Owner | None]:
        """The block of each result: the running block, or the block of the corresponding item of a list argument."""
        here = self._owner
        if here is not None or not args or not isinstance(args[0], list | tuple) or len(args[0]) != len(outs):
            return [here] * len(outs)
        return [self._owner_of(item) if isinstance(item, torch.Tensor) else None for item in args[0]]

    def _owner_of(self, tensor: torch.Tensor) -> Owner | None:
        address = tensor.untyped_storage()._cdata
        number = self._living.get(address, -1)
        if number >= 0:
            return self.births[number].owner
        parameter = self._stand_for.get(address)
        return self._owners_on_host.get(address) if parameter is None else self._owner_of(parameter)

    def _share_out(self, tensors: list[torch.Tensor]) -> None:
        if self._owner is not None:
            return
        shares: dict[Owner, int] = {}
        for tensor in tensors:
            owner = self._owner_of(tensor)
            if owner is not None:
                shares[owner] = shares.get(owner, 0) + tensor_bytes(tensor)
        if shares:
            self.shares[len(self.ops) - 1] = shares

    def _bear(self, tensor: torch.Tensor, part: str, op: str, owner: Owner | None, name: str = "") -> bool:
        storage = tensor.untyped_storage()
        address = storage._cdata
        size = storage.nbytes()
        if address in self._living or not size:
            return False
        if self._is_on_host:
            number = -1  # views of such storages do not count either
            self._owners_on_host[address] = owner
        else:
            is_wide = self.vocab_size is not None and tensor.dim() > 1 and tensor.shape[-1] == self.vocab_size
            number = self._make(size, part, op, is_wide, owner, name)
        self._living[address] = number
        weakref.finalize(storage, self._die, address, number).atexit = False
        return number >= 0

    def _make(self, size: int, part: str, op: str, is_wide: bool, owner: Owner | None, name: str = "") -> int:
        number = self._num_storages
        self._num_storages += 1
        self.events.append(Event(number, size))
        if not name and part != "library":
            name = self.modules.running()
        self.births[number] = Birth(size, part, op, is_wide, owner, name)
        return number

    def _die(self, address: int, number: int) -> None:
        self._living.pop(address, None)
        self._owners_on_host.pop(address, None)
        if number >= 0:
            self.events.append(Event(number, 0))

    # ------------------------------------------------------------------ sums of gradients

    def _adds_in_place(self, args: Any, kwargs: Any) -> bool:
        """Whether this operation is autograd adding two gradients in place, into the first one.

        On real devices it adds in place if autograd holds the only reference to the first gradient; on `meta` it never
        does, so the recorder decides.
        """
        if torch.is_grad_enabled() or kwargs or len(args) != 2 or not isinstance(args[1], torch.Tensor):
            return False
        first, second = args
        counts = (first._use_count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata))
        if self._counts_of_unshared is None:  # the first addition comes from `_learn_counts`
            self._counts_of_unshared = counts
        is_alike = first.dtype == second.dtype and first.shape == second.shape
        is_dense = first.numel() * first.element_size() <= first.untyped_storage().nbytes()
        return is_alike and is_dense and counts == self._counts_of_unshared

    def _learn_counts(self) -> None:
        """Determine the reference counts of a gradient that only autograd holds, with a small backward."""
        weight = torch.empty((2, 2), device="meta", requires_grad=True)
        with self, self.during("backward"):
            (torch.empty((2, 2), device="meta") @ weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
        del weight
        for record in (
            self.events,
            self.births,
            self.ops,
            self.marks,
            self.segments,
            self._visits,
            self._kept,
            self._library,
        ):
            record.clear()
        self._living.clear()


@cache
def _known(func: Any) -> tuple[str, bool]:
    """The name of an operation, and whether it writes to its arguments."""
    return str(func._schema.name).replace("::", "."), bool(func._schema.is_mutable)


_TENSORS_OF_PRODUCTS = {"mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3}


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; an expanded tensor is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flops(func: Any, args: tuple[Any, ...], out: Any) -> tuple[int, str]:
    """FLOPs of a matrix product and its dtype; 0 FLOPs for other operations."""
    name = func._overloadpacket.__name__
    tensors = tensors_in(args)
    if not tensors:
        return 0, "fp32"
    dtype = _NAMES.get(tensors[0].dtype, "fp32")
    if "attention" in name:
        first = 1 if "backward" in name else 0  # backward has five products instead of two
        query, key, value = args[first : first + 3]
        flops = _flops_of_attention(query, key, value, args[_MAX_LENGTH[name]] if name in _MAX_LENGTH else None)
        if any(args[index] for index in _causal(func) if index < len(args)):
            flops //= 2  # kernels skip the part above the diagonal
        return flops * 5 // 2 if first else flops, dtype
    if func._overloadpacket is _GROUPED:  # torch counts no FLOPs
        return flops_of_grouped_product(*args[:2]), dtype
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0, dtype
    num_tensors = _TENSORS_OF_PRODUCTS.get(name)
    if num_tensors is not None:  # the same result as torch's counter, in a tenth of the time
        last = args[num_tensors - 1]  # a dtype may follow
        return 2 * out.numel() * last.shape[-2], _NAMES.get(last.dtype, "fp32")
    return int(count(*args, out_val=out)), dtype


@cache
def _causal(func: Any) -> list[int]:
    """Position of the argument of an attention kernel that says whether tokens attend only to earlier ones."""
    names = [argument.name for argument in func._schema.arguments]
    return [names.index(name) for name in ("is_causal", "custom_mask_type") if name in names]


# Position of the length of the longest row among the arguments of attention over packed rows.
_MAX_LENGTH = {
    "_flash_attention_forward": 6,
    "_flash_attention_backward": 9,
    "_efficient_attention_forward": 7,
    "_efficient_attention_backward": 9,
    "short_attention_forward": 5,
    "short_attention_backward": 8,
}


def _flops_of_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, max_length: int | None) -> int:
    """FLOPs of attention's two products. Keys may have fewer heads than queries; packed rows count as the longest."""
    pairs = query.numel() // query.shape[-1] * (max_length or key.shape[-2])
    return 2 * pairs * (query.shape[-1] + value.shape[-1])
