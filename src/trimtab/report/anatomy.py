"""What memory consists of at the peak of a training step, measured by replaying the allocations of one real step.

`MemoryWatch` records a step with torch's profiler, which sees each block that the allocator allocates or frees, the
operator that allocated it, and the shapes in which operators use it. The record is replayed up to the peak; each block
that is alive then belongs to one part, and the parts add up to the peak.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

# the name of each part, and its field in `Anatomy`; the first six are allocated
_FIELDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer state": "optimizer_state",
    "activations": "activations",
    "logits and loss": "logits_and_loss",
    "temporaries": "temporaries",
    "allocator slack": "allocator_slack",
    "outside the allocator": "outside",
}
PARTS = tuple(_FIELDS)
_NUM_LARGEST = 12
_GRADIENT = "trimtab: gradient "  # followed by address and size of its storage
_FORWARD = "trimtab: forward"
_BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Anatomy:
    """The parts of memory at the peak of a step, in bytes.

    Args:
        weights: Parameters and buffers, quantization constants included.
        gradients: Of parameters.
        optimizer_state: Of the optimizer, on the device.
        activations: Tensors that forward saves for backward, including copies of weights in half precision, and
            recomputed ones.
        logits_and_loss: Tensors as wide as the vocabulary.
        temporaries: All else that is alive at the peak: workspaces, gradients of activations, the batch, rounding.
        allocator_slack: Reserved by the allocator but not in use at the peak; None without such an allocator.
        outside: On a GPU: context, libraries, and the memory of other processes; None elsewhere.
        host_weights: Weights in host memory when training on an accelerator.
        host_state: Optimizer state in host memory, including paged state.
        largest: The largest blocks at the peak, grouped: part, operator, bytes of each, count.
    """

    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    logits_and_loss: int
    temporaries: int
    allocator_slack: int | None = None
    outside: int | None = None
    host_weights: int = 0
    host_state: int = 0
    largest: tuple[tuple[str, str, int, int], ...] = ()

    @property
    def allocated(self) -> int:
        """Allocated bytes at the peak."""
        return sum(size or 0 for size in list(self.parts().values())[:6])

    def parts(self) -> dict[str, int | None]:
        """Return the bytes of each of `PARTS`."""
        return {part: getattr(self, name) for part, name in _FIELDS.items()}


@dataclass
class _Block:
    """A block of memory from its allocation to its release, in positions of the record."""

    size: int  # with the allocator's rounding
    born: int
    part: str = ""
    exact_size: int | None = None  # without the rounding, if known
    died: float = math.inf
    op: str = ""
    is_recomputed: bool = False
    is_wide: bool = False  # used as a tensor as wide as the vocabulary


@dataclass
class _Record:
    """The profiler's events in chronological order."""

    blocks: list[_Block] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    in_use: list[tuple[int, int]] = field(default_factory=list)  # position and bytes, after each change
    living: dict[int, _Block] = field(default_factory=dict)  # alive at the end, by address


class MemoryWatch:
    """Records a step and finds out what memory consists of at its peak. It changes no results, but takes time.

    Start after the first step, in which the optimizer allocates its state, and between two steps or just before a
    forward.

    Args:
        model: The model.
        optimizer: Its optimizer, prepared or not.
        device: Where the model computes.

    Example:
        watch = MemoryWatch(model, optimizer, device)
        watch.start()
        …one step…
        anatomy = watch.stop()
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._profiler: Any = None
        self._handles: list[Any] = []
        self._known: dict[int, _Block] = {}
        self._in_use_at_start = 0
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self._vocab_size: int | None = None if head is None else int(head.weight.shape[0])

    @property
    def is_recording(self) -> bool:
        """Whether a record has been started and not stopped."""
        return self._profiler is not None

    def start(self) -> None:
        """Start to record."""
        from torch.profiler import ProfilerActivity, profile

        self._known = self._named_blocks()
        self._in_use_at_start = self._in_use_now()
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(_note_gradient)  # type: ignore[no-untyped-call]
                )
        self._handles.append(self._model.register_forward_pre_hook(_note_forward))
        # CPU activities only: tracing kernels would take device memory
        self._profiler = profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            record_shapes=True,
            acc_events=True,  # avoids a warning that events of earlier cycles are discarded: there is only one cycle
        )
        self._profiler.start()
        _note_forward()  # inside a forward, the model's pre-hooks have run already

    def stop(self) -> Anatomy:
        """Stop the record, and return what memory consisted of at its peak."""
        profiler, self._profiler = self._profiler, None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        profiler.stop()
        events = profiler.profiler.kineto_results.experimental_event_tree()
        record = _replay(events, self._known, self._in_use_at_start, self._device, self._vocab_size)
        for address, named in self._named_blocks().items():  # such as state that was allocated in this step
            block = record.living.get(address)
            if block is not None and not block.part:
                block.part, block.exact_size = named.part, named.exact_size
        return self._dissect(record)

    # ------------------------------------------------------------------ tensors that are known without a record

    def _in_use_now(self) -> int:
        if self._device.type == "cpu":
            return sum(block.size for block in self._known.values())
        return int(torch.get_device_module(self._device).memory_allocated(self._device))

    def _named_blocks(self) -> dict[int, _Block]:
        """Return the weights, gradients and optimizer state on the device, by the address of their storage."""
        found: dict[int, _Block] = {}
        for part, tensors in self._named_tensors():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if self._is_here(tensor) and storage.nbytes():
                    found.setdefault(storage.data_ptr(), _Block(storage.nbytes(), -1, part, storage.nbytes()))
        return found

    def _named_tensors(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        parameters = list(self._model.parameters())
        weights = [*parameters, *self._model.buffers()]
        for parameter in parameters:  # scales and code tables of bitsandbytes
            weights += _tensors_in(getattr(parameter, "quant_state", None))
        yield "weights", weights
        yield "gradients", [p.grad for p in parameters if p.grad is not None]
        yield "optimizer state", _tensors_in(list(self._optimizer.state.values()))

    def _is_here(self, tensor: torch.Tensor) -> bool:
        is_elsewhere = getattr(tensor, "is_paged", False) or getattr(tensor, "is_in_host_memory", False)
        return tensor.device.type == self._device.type and not is_elsewhere

    def _host_bytes(self, part: str) -> int:
        if self._device.type == "cpu":
            return 0
        tensors = next(tensors for name, tensors in self._named_tensors() if name == part)
        elsewhere = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not self._is_here(t)
        }
        return sum(elsewhere.values())

    # ------------------------------------------------------------------ the peak

    def _dissect(self, record: _Record) -> Anatomy:
        at, in_use = max(record.in_use, key=lambda change: change[1])
        sizes: Counter[str] = Counter()
        alike: Counter[tuple[str, str, int]] = Counter()
        for block in record.blocks:
            if block.born <= at < block.died:
                part = _part_of(block, record)
                sizes[part] += block.size if block.exact_size is None else block.exact_size
                alike[part, block.op, block.size] += 1
        # includes memory that the record has not seen: workspaces, the batch, rounding
        sizes["temporaries"] = in_use - sum(size for part, size in sizes.items() if part != "temporaries")
        largest = sorted(alike.items(), key=lambda item: -item[0][2] * item[1])[:_NUM_LARGEST]
        slack, outside = self._beyond(in_use)
        return Anatomy(
            **{_FIELDS[part]: sizes[part] for part in PARTS[:6]},
            allocator_slack=slack,
            outside=outside,
            host_weights=self._host_bytes("weights"),
            host_state=self._host_bytes("optimizer state"),
            largest=tuple((part, op, size, count) for (part, op, size), count in largest),
        )

    def _beyond(self, in_use: int) -> tuple[int | None, int | None]:
        """Return the slack of the allocator, and the memory outside it."""
        if self._device.type != "cuda":  # torch does not report it
            return None, None
        reserved = torch.cuda.memory_reserved(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, reserved - in_use), max(0, total - free - reserved)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in nested containers and in bitsandbytes' quantization states."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in _tensors_in(inner)]
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in _tensors_in(inner)]
    return _tensors_in(vars(value)) if type(value).__name__ == "QuantState" else []


def _note_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        storage = parameter.grad.untyped_storage()
        with torch.profiler.record_function(f"{_GRADIENT}{storage.data_ptr()} {storage.nbytes()}"):
            pass


def _note_forward(*called_with: object) -> None:
    with torch.profiler.record_function(_FORWARD):
        pass


def _replay(
    events: Iterable[Any], known: dict[int, _Block], in_use: int, device: torch.device, vocab_size: int | None
) -> _Record:
    """Replay the profiler's events."""
    record = _Record(blocks=list(known.values()), in_use=[(-1, in_use)])
    living = dict(known)
    for position, event in enumerate(_in_order(events)):
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            if _is_on(fields.device, device):
                in_use += _move(event, position, living, record)
                if device.type == "cuda":  # includes allocations of other threads
                    in_use = int(fields.total_allocated)
                record.in_use.append((position, in_use))
        elif event.name.startswith(_GRADIENT):
            address, size = map(int, event.name.removeprefix(_GRADIENT).split())
            if address in living:
                living[address].part, living[address].exact_size = "gradients", size
        elif event.name == _FORWARD:
            record.forwards.append(position)
        elif event.name.startswith(_BACKWARD):
            record.backwards.append(position)
        elif vocab_size is not None:
            for tensor in getattr(fields, "inputs", ()):
                _note_width(tensor, vocab_size, living)
    record.living = living
    return record


def _in_order(events: Iterable[Any]) -> list[Any]:
    found, waiting = [], list(events)
    while waiting:
        event = waiting.pop()
        found.append(event)
        waiting += event.children
    return sorted(found, key=lambda event: event.start_time_ns)


def _is_on(found: torch.device, wanted: torch.device) -> bool:
    return found.type == wanted.type and (wanted.index is None or found.index in (None, wanted.index))


def _move(event: Any, position: int, living: dict[int, _Block], record: _Record) -> int:
    """Apply an allocation or a release, and return by how much it changes the memory in use."""
    address, size = int(event.extra_fields.ptr), int(event.extra_fields.alloc_size)
    before = living.pop(address, None)
    if before is not None:
        before.died = position
    if size < 0:
        return size if before is not None else 0
    op, is_recomputed = _origin(event)
    living[address] = block = _Block(size, position, op=op, is_recomputed=is_recomputed)
    record.blocks.append(block)
    # the CPU's allocator does not report the release of blocks from before the record: this one was released
    return size - (before.size if before is not None else 0)


def _origin(event: Any) -> tuple[str, bool]:
    """Return the operator that allocated a block, outermost first, and whether it is recomputed in backward.

    Operators in backward are not recorded by autograd; only those of a recomputed forward have a sequence number.
    """
    names: list[str] = []
    is_in_backward = has_number = False
    while (event := event.parent) is not None:
        if event.name.startswith(_BACKWARD):
            is_in_backward = True
            continue
        names.append(event.name)
        is_forward = getattr(event.extra_fields, "scope", None) == torch._C._profiler.RecordScope.FUNCTION
        has_number = has_number or (is_forward and event.extra_fields.sequence_number >= 0)
    return " › ".join(dict.fromkeys((names[-1], names[0]))) if names else "", is_in_backward and has_number


def _note_width(tensor: Any, vocab_size: int, living: dict[int, _Block]) -> None:
    """Mark the block of a tensor whose last dimension is the vocabulary, unless it is a transposed weight."""
    sizes = getattr(tensor, "sizes", None)
    if not sizes or sizes[-1] != vocab_size or tensor.strides[-1] != 1 or math.prod(sizes) == vocab_size:
        return  # a single row is a bias or its gradient
    block = living.get(tensor.storage_data_ptr)
    if block is not None and not block.part and 2 * tensor.dtype.itemsize * math.prod(sizes) > block.size:
        block.is_wide = True


def _part_of(block: _Block, record: _Record) -> str:
    if block.part:
        return block.part
    if block.is_wide:
        return "logits and loss"
    if block.is_recomputed:
        return "activations"
    began = bisect_right(record.forwards, block.born)
    if not began:  # allocated before the first forward: the batch
        return "temporaries"
    turn = bisect_right(record.backwards, record.forwards[began - 1])
    backward = record.backwards[turn] if turn < len(record.backwards) else math.inf
    return "activations" if block.born < backward < block.died else "temporaries"
