"""The composition of memory during a training step, measured by replaying the allocations of one real step.

`MemoryWatch` records a step with torch's profiler, which knows the operator that allocated each block and the shapes in
which operators use it, and on CUDA with the allocator's own history, which knows how long each block was in use. Each
block belongs to one part, so the parts add up to the memory in use, at the peak and at any other time.
"""

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trimtab.model.module_hooks import passive
from trimtab.report.allocator_history import AllocatorHistory, History, with_lifetimes
from trimtab.report.profiled_blocks import FORWARD, GRADIENT, MODULE, Block, Profile, read_profile
from trimtab.report.step_record import ALLOCATED, Allocation, StepRecord

# the name of each part, and its field in `Anatomy`
_FIELDS = {part: part.replace(" ", "_") for part in (*ALLOCATED, "allocator slack")} | {
    "outside the allocator": "outside"
}
PARTS = tuple(_FIELDS)
_NUM_LARGEST = 12


@dataclass(frozen=True)
class Anatomy:
    """The parts of memory at the peak of a step, in bytes.

    Args:
        weights: Parameters and buffers, including quantization constants.
        gradients: Gradients of parameters.
        optimizer_state: Optimizer state on the device.
        activations: Tensors that forward saves for backward, including copies of weights in half precision, and
            recomputed ones.
        logits_and_loss: Tensors as wide as the vocabulary.
        temporaries: Everything else that is alive at the peak: workspaces, gradients of activations, the batch,
            rounding.
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


class MemoryWatch:
    """Record a step and determine the composition of memory. This changes no results, but takes time.

    Start after the first step, in which the optimizer allocates its state, and between two steps or just before a
    forward.

    Args:
        model: The model.
        optimizer: Its optimizer, prepared or not.
        device: Where the model computes.
        names_modules: Whether to name blocks by module. The hooks for this would make compiled modules compile again.

    Attributes:
        history: The record of CUDA's allocator; None on other devices.

    Example:
        watch = MemoryWatch(model, optimizer, device)
        watch.start()
        …one step…
        anatomy = watch.stop()
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, device: torch.device, *, names_modules: bool = False
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._names_modules = names_modules
        self._profiler: Any = None
        self._handles: list[Any] = []
        self._known: dict[int, Block] = {}
        self._started_ns, self._has_begun = 0, False
        self._unknown_bytes = 0
        is_cuda = self._device.type == "cuda"
        self._allocator = AllocatorHistory(self._device, with_stacks=names_modules) if is_cuda else None
        self.history: History | None = None
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self._vocab_size: int | None = None if head is None else int(head.weight.shape[0])

    @property
    def is_recording(self) -> bool:
        """Whether a record has been started and not stopped."""
        return self._profiler is not None

    def start(self) -> None:
        """Start recording."""
        from torch.profiler import ProfilerActivity, profile

        self._known = named_blocks(self._model, self._optimizer, self._device)
        self._unknown_bytes = self._in_use_now() - sum(block.size for block in self._known.values())
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                hook = partial(_note_gradient, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._handles.append(self._model.register_forward_pre_hook(self._begin_forward))
        if self._names_modules:
            self._handles += _name_modules(self._model)
        # CPU activities only: tracing kernels would take device memory
        self._profiler = profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            record_shapes=True,
            acc_events=True,  # avoids a warning that events of earlier cycles are discarded: there is only one cycle
        )
        if self._allocator is not None:
            self._allocator.start()
        self._profiler.start()
        self._started_ns, self._has_begun = time.perf_counter_ns(), False
        _note_forward()  # inside a forward, the model's pre-hooks have already run

    def _begin_forward(self, *called_with: object) -> None:
        if not self._has_begun:  # a batch may have been read before
            self._started_ns, self._has_begun = time.perf_counter_ns(), True
        _note_forward()

    def stop(self) -> Anatomy:
        """Stop recording, and return the composition of memory at its peak."""
        return self._dissect(self._stop())

    def stop_and_record(self) -> StepRecord:
        """Stop recording, and return the whole record."""
        profile = self._stop()
        slack, outside = self._beyond(self._record(profile).peak().num_bytes)
        beyond = {"allocator slack": slack, "outside the allocator": outside}
        return self._record(profile, {name: size for name, size in beyond.items() if size is not None})

    def _stop(self) -> Profile:
        profiler, self._profiler = self._profiler, None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        duration_ns = time.perf_counter_ns() - self._started_ns
        profiler.stop()
        self.history = None if self._allocator is None else self._allocator.stop()
        events = profiler.profiler.kineto_results.experimental_event_tree()
        profile = read_profile(events, self._known, self._device, self._vocab_size)
        if self.history is not None:
            profile = with_lifetimes(profile, self.history, self._known)
        elif self._unknown_bytes > 0:
            profile.blocks.append(Block(self._unknown_bytes, -1, "temporaries"))
        for address, named in named_blocks(
            self._model, self._optimizer, self._device
        ).items():  # such as state that was allocated in this step
            block = profile.living.get(address)
            if block is not None and not block.part:
                block.name_as(named)
        _assign_parts(profile)
        if profile.times_ns:  # the end of the step changes no memory; the optimizer may change none either
            first, last = profile.times_ns[0], profile.times_ns[-1]
            profile.times_ns.append(max(first + duration_ns, last + 1))  # the allocator has its own clock
        return profile

    def _in_use_now(self) -> int:
        if self._device.type == "cpu":
            return sum(block.size for block in self._known.values())
        return int(torch.get_device_module(self._device).memory_allocated(self._device))

    def _host_bytes(self, part: str) -> int:
        if self._device.type == "cpu":
            return 0
        elsewhere = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for found, _, tensor in _named_tensors(self._model, self._optimizer)
            if found == part and not _is_on(tensor, self._device)
        }
        return sum(elsewhere.values())

    # ------------------------------------------------------------------ results

    def _record(self, profile: Profile, beyond: dict[str, int] | None = None) -> StepRecord:
        begin = profile.times_ns[0] if profile.times_ns else 0
        return StepRecord(
            source="measured",
            device=str(self._device),
            allocations=tuple(_allocation(block) for block in profile.blocks),
            times=tuple((time - begin) / 1e9 for time in profile.times_ns),
            stages=_stages(profile),
            beyond=beyond or {},
        )

    def _dissect(self, profile: Profile) -> Anatomy:
        peak = self._record(profile).peak()
        sizes: Counter[str] = Counter()
        alike: Counter[tuple[str, str, int]] = Counter()
        for block in profile.blocks:
            if block.born <= peak.change < block.died:
                exact = block.size if block.exact_size is None else min(block.exact_size, block.size)
                sizes[block.part] += exact
                sizes["temporaries"] += block.size - exact  # rounding
                alike[block.part, block.op, block.size] += 1
        largest = sorted(alike.items(), key=lambda item: -item[0][2] * item[1])[:_NUM_LARGEST]
        slack, outside = self._beyond(peak.num_bytes)
        return Anatomy(
            **{_FIELDS[part]: sizes[part] for part in ALLOCATED},
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


def named_blocks(model: torch.nn.Module, optimizer: Any, device: torch.device) -> dict[int, Block]:
    """Return the weights, gradients and optimizer state on a device, by the address of their storage."""
    found: dict[int, Block] = {}
    for part, name, tensor in _named_tensors(model, optimizer):
        storage = tensor.untyped_storage()
        if _is_on(tensor, device) and storage.nbytes():
            address, size = storage.data_ptr(), storage.nbytes()
            found.setdefault(address, Block(size, -1, part, size, name=name, address=address))
    return found


def _named_tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        # with scales and code tables of bitsandbytes
        for tensor in (weight, *_tensors_in(getattr(weight, "quant_state", None))):
            yield "weights", name, tensor
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad
    for key, state in optimizer.state.items():
        for tensor in _tensors_in(state):
            yield "optimizer state", names.get(id(key), ""), tensor


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    is_elsewhere = getattr(tensor, "is_paged", False) or getattr(tensor, "is_in_host_memory", False)
    return tensor.device.type == device.type and not is_elsewhere


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in nested containers and in bitsandbytes' quantization states."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in _tensors_in(inner)]
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in _tensors_in(inner)]
    return _tensors_in(vars(value)) if type(value).__name__ == "QuantState" else []


# ---------------------------------------------------------------------- marks for the profiler


def _note_gradient(name: str, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        storage = parameter.grad.untyped_storage()
        with torch.profiler.record_function(f"{GRADIENT}{storage.data_ptr()} {storage.nbytes()} {name}"):
            pass


def _note_forward(*called_with: object) -> None:
    with torch.profiler.record_function(FORWARD):
        pass


def _name_modules(model: torch.nn.Module) -> list[Any]:
    """Open a scope of the profiler around the forward of every module; return the handles of the hooks."""
    running: list[tuple[str, Any]] = []

    def enter(name: str, *called_with: object) -> None:
        scope = torch.profiler.record_function(f"{MODULE}{name}")
        scope.__enter__()  # type: ignore[no-untyped-call]
        running.append((name, scope))

    def leave(name: str, *called_with: object) -> None:
        if running and running[-1][0] == name:  # recording may start inside a module
            running.pop()[1].__exit__(None, None, None)

    handles: list[Any] = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(passive(partial(enter, name))))
            handles.append(module.register_forward_hook(passive(partial(leave, name)), always_call=True))
    return handles


# ---------------------------------------------------------------------- from blocks to a record


def _allocation(block: Block) -> Allocation:
    op = block.op.rpartition(" › ")[2].removeprefix("aten::")
    died = None if block.died == math.inf else int(block.died)
    return Allocation(block.size, block.part, block.name, op, block.born, died)


def _stages(profile: Profile) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = [("forward", 0)]
    for mark, stage in profile.marks:
        if stage != found[-1][0] and mark < len(profile.times_ns):
            found.append((stage, mark))
    return tuple(found)


def _assign_parts(profile: Profile) -> None:
    """Assign a part to every block without one."""
    forwards, backwards = profile.marks_of("forward"), profile.marks_of("backward")
    for block in profile.blocks:
        block.part = block.part or _part_of(block, forwards, backwards)


def _part_of(block: Block, forwards: list[int], backwards: list[int]) -> str:
    if block.is_wide:
        return "logits and loss"
    if block.is_recomputed:
        return "activations"
    began = bisect_right(forwards, block.born)
    if not began:  # allocated before the first forward: the batch
        return "temporaries"
    turn = bisect_right(backwards, forwards[began - 1])
    backward = backwards[turn] if turn < len(backwards) else math.inf
    return "activations" if block.born < backward <= block.died else "temporaries"
