"""The memory that CUDA's allocator holds when a step runs out of memory."""

from collections.abc import Mapping
from typing import Any

import torch

from trimtab.report.allocator_history import blocks_in_use
from trimtab.report.anatomy import named_blocks
from trimtab.report.profiled_blocks import Block
from trimtab.report.step_record import Allocation, StepRecord


def memory_now(model: torch.nn.Module, optimizer: Any, device: torch.device) -> StepRecord | None:
    """The blocks currently in use; None on devices whose allocator does not list them."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    in_use = blocks_in_use(torch.cuda.memory._snapshot(), index)
    reserved = int(torch.cuda.memory_reserved(device))
    return record_of_blocks(in_use, named_blocks(model, optimizer, device), str(device), reserved)


def record_of_blocks(in_use: Mapping[int, int], named: Mapping[int, Block], device: str, reserved: int) -> StepRecord:
    """A record of a single point in time; blocks without a name were computed by the step and count as activations.

    Args:
        in_use: Bytes of each block in use, by address.
        named: Weights, gradients and optimizer state, by address.
        device: Name of the device.
        reserved: Bytes that the allocator holds.
    """
    nameless = Block(0, -1, "activations")
    allocations = []
    for address, size in in_use.items():
        block = named.get(address, nameless)
        allocations.append(Allocation(size, block.part, block.name))
    slack = max(0, reserved - sum(in_use.values()))
    return StepRecord("measured", device, tuple(allocations), beyond={"allocator slack": slack})
