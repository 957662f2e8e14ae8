"""The memory blocks of a step as torch's profiler reports them: which operator and module allocated each, and when.

The profiler sees the blocks of every device, but on CUDA not every release: at most peaks on an H200, the blocks that
it had seen allocated and not released added up to more than the allocator had in use. On CUDA the lifetimes therefore
come from `trimtab.report.allocator_history`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

GRADIENT = "trimtab: gradient "  # followed by address and size of its storage, and the parameter
FORWARD = "trimtab: forward"
MODULE = "trimtab: module "  # followed by its name
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"


@dataclass
class Block:
    """A block of memory from its allocation to its release, in indices of changes of memory."""

    size: int  # including the allocator's rounding
    born: int  # -1 if it existed before
    part: str = ""
    exact_size: int | None = None  # without the rounding, if known
    died: float = math.inf
    op: str = ""
    name: str = ""
    address: int = 0
    is_recomputed: bool = False
    is_wide: bool = False  # used as a tensor as wide as the vocabulary

    def name_as(self, other: "Block") -> None:
        """Copy the information in another description of the same block."""
        self.part, self.exact_size, self.name = other.part, other.exact_size, other.name or self.name


@dataclass
class Profile:
    """The blocks of a step, and the events between them.

    Attributes:
        blocks: Every block.
        marks: In chronological order, the number of changes before a forward, a function of backward, or the optimizer.
        times_ns: The time of each change.
        living: Blocks that are in use at the end, by address.
    """

    blocks: list[Block] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    living: dict[int, Block] = field(default_factory=dict)

    def marks_of(self, stage: str) -> list[int]:
        """The marks of one stage."""
        return [mark for mark, found in self.marks if found == stage]


def read_profile(
    events: Iterable[Any], known: dict[int, Block], device: torch.device, vocab_size: int | None
) -> Profile:
    """Replay the profiler's events.

    Args:
        events: The roots of its event tree.
        known: Blocks that existed before, by address.
        device: The device whose memory is counted.
        vocab_size: Width of logits; None if the model has none.
    """
    profile = Profile(blocks=list(known.values()), living=dict(known))
    living, modules = profile.living, _ModulesOfNodes()
    for event in _in_order(events):
        fields, now = event.extra_fields, len(profile.times_ns)
        if hasattr(fields, "alloc_size"):
            if _is_on(fields.device, device) and _move(event, now, profile, modules):
                profile.times_ns.append(int(event.start_time_ns))
        elif event.name.startswith(GRADIENT):
            address, size, name = event.name.removeprefix(GRADIENT).split(" ", 2)
            if int(address) in living:
                living[int(address)].name_as(Block(0, -1, "gradients", int(size), name=name))
        elif event.name == FORWARD:
            profile.marks.append((now, "forward"))
        elif event.name.startswith(_BACKWARD):
            profile.marks.append((now, "backward"))
        elif event.name.startswith(_OPTIMIZER):
            profile.marks.append((now, "optimizer"))
        else:
            modules.learn(event)
            if vocab_size is not None:
                for tensor in getattr(fields, "inputs", ()):
                    _note_width(tensor, vocab_size, living)
    return profile


def _in_order(events: Iterable[Any]) -> list[Any]:
    found, waiting = [], list(events)
    while waiting:
        event = waiting.pop()
        found.append(event)
        waiting += event.children
    return sorted(found, key=lambda event: event.start_time_ns)


def _is_on(found: torch.device, wanted: torch.device) -> bool:
    return found.type == wanted.type and (wanted.index is None or found.index in (None, wanted.index))


def _move(event: Any, now: int, profile: Profile, modules: "_ModulesOfNodes") -> bool:
    """Apply an allocation or a release; return whether it changes the memory in use."""
    address, size = int(event.extra_fields.ptr), int(event.extra_fields.alloc_size)
    # the CPU's allocator does not report the release of blocks from before the record; if an address is allocated
    # again, its previous block was released
    before = profile.living.pop(address, None)
    if before is not None:
        before.died = now
    if size < 0:
        return before is not None
    op, name, is_recomputed = _origin(event, modules)
    block = Block(size, now, op=op, name=name, address=address, is_recomputed=is_recomputed)
    profile.living[address] = block
    profile.blocks.append(block)
    return True


class _ModulesOfNodes:
    """The module of each node of autograd, by the sequence number that forward and backward share."""

    def __init__(self) -> None:
        self._modules: dict[int, str] = {}

    def learn(self, event: Any) -> None:
        """Remember the module of a forward operator."""
        number = getattr(event.extra_fields, "sequence_number", -1)
        if number < 0 or number in self._modules:
            return
        while (event := event.parent) is not None:
            if event.name.startswith(_BACKWARD):
                return
            if event.name.startswith(MODULE):
                self._modules[number] = event.name.removeprefix(MODULE)
                return

    def of(self, node: Any) -> str:
        """The module of a node that backward evaluates; empty if unknown."""
        return self._modules.get(getattr(node.extra_fields, "sequence_number", -1), "")


def _origin(event: Any, modules: _ModulesOfNodes) -> tuple[str, str, bool]:
    """Return the operator that allocated a block, outermost first, its module, and whether backward recomputes it.

    Operators in backward are not recorded by autograd; only those of a recomputed forward have a sequence number.
    """
    names: list[str] = []
    module = ""
    is_in_backward = has_number = False
    while (event := event.parent) is not None:
        if event.name.startswith(_BACKWARD):
            is_in_backward = True
            module = module or modules.of(event)
            continue
        if event.name.startswith(MODULE):
            module = module or event.name.removeprefix(MODULE)
            continue
        names.append(event.name)
        is_forward = getattr(event.extra_fields, "scope", None) == torch._C._profiler.RecordScope.FUNCTION
        has_number = has_number or (is_forward and event.extra_fields.sequence_number >= 0)
    op = " › ".join(dict.fromkeys((names[-1], names[0]))) if names else ""
    return op, module, is_in_backward and has_number


def _note_width(tensor: Any, vocab_size: int, living: dict[int, Block]) -> None:
    """Mark the block of a tensor whose last dimension is the vocabulary, unless it is a transposed weight."""
    sizes = getattr(tensor, "sizes", None)
    if not sizes or sizes[-1] != vocab_size or tensor.strides[-1] != 1 or math.prod(sizes) == vocab_size:
        return  # a single row is a bias or its gradient
    block = living.get(tensor.storage_data_ptr)
    if block is not None and not block.part and 2 * tensor.dtype.itemsize * math.prod(sizes) > block.size:
        block.is_wide = True
