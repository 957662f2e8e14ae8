"""The device that a plan is made for: one in this machine, or one from the catalog."""

import os
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.catalog import Device, find, identify_device, measure_device
from trimtab.hardware.inventory import find_device, native_precision, take_inventory
from trimtab.hardware.memory import (
    free_host_memory,
    free_memory,
    has_expandable_segments,
    memory_in_use,
    non_allocator_memory,
    resolve_budget,
    total_memory,
)
from trimtab.planner.host import activations_on_host
from trimtab.planner.memory import Prediction
from trimtab.planner.trace.cuda import Gpu
from trimtab.techniques.base import Accelerator
from trimtab.units import format_bytes, parse_bytes

SPARE = 0.02  # share of a budget that a plan leaves free
_USUAL_HOST_BYTES = 64 * 2**30
_ROCM = {"mi300x"}
_NOT_CUDA = "predictions assume CUDA kernels and workspaces; they were never compared with measurements on ROCm"
_FIXED_SEGMENTS = (
    "predictions are for fixed allocator segments, because expandable segments are off in this process; "
    "PYTORCH_ALLOC_CONF=expandable_segments:True (or unset) needs less memory where torch supports it"
)
# on a CPU, torch computes attention without storing all pairs, like the memory-efficient kernel of old GPUs
_LIKE_A_CPU = Gpu(capability=(7, 5), flash=False)


class StepMemory(Protocol):
    """The memory of a step, as a `Prediction` has it."""

    @property
    def allocated(self) -> int: ...  # noqa: D102

    @property
    def outside(self) -> int: ...  # noqa: D102

    @property
    def needed(self) -> int: ...  # noqa: D102

    def fits(self, budget: int) -> bool:
        """Whether the step runs within a budget in bytes."""
        ...


@dataclass(frozen=True)
class Target:
    """A device and a memory budget on it.

    Attributes:
        name: Name in messages.
        device: Its rates and capabilities.
        gpu: The GPU that a trace simulates.
        budget_bytes: The budget, including memory outside the allocator.
        outside_bytes: Memory outside the allocator; None means the usual size of a CUDA context.
        note: A limitation of these predictions, shown to the user.
        expandable: Whether the allocator uses expandable segments.
        host_bytes: The budget of host memory for tensors that techniques keep there; None on a CPU.
        host_note: Where that budget is from.
    """

    name: str
    device: Device
    gpu: Gpu
    budget_bytes: int
    outside_bytes: int | None = None
    note: str = ""
    expandable: bool = True
    host_bytes: int | None = None
    host_note: str = ""

    def host_budget(self) -> str:
        """The budget of host memory in words; empty on a CPU."""
        return "" if self.host_bytes is None else f"{format_bytes(self.host_bytes)} ({self.host_note})"

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.device.is_cpu

    @property
    def accelerator(self) -> Accelerator:
        """The device as the techniques' rules see it."""
        return replace(self.gpu.accelerator, type="cpu" if self.is_cpu else "cuda")

    def precision(self, wanted: str) -> str:
        """Resolve `train.precision: auto` for this device."""
        if wanted != "auto":
            return wanted
        if self.is_cpu:
            return native_precision(torch.device("cpu"))
        return "bf16" if self.device.native_bf16 else "fp16"

    def room(self, spare: float) -> int:
        """The budget in bytes, less a share to keep free."""
        return int(self.budget_bytes * (1 - spare))

    def fits(self, prediction: StepMemory, spare: float) -> bool:
        """Whether a step fits into the budget; on a CPU, tensor bytes count without a caching allocator."""
        if self.is_cpu:
            return prediction.allocated + prediction.outside <= self.room(spare)
        return prediction.fits(self.room(spare))

    def without_loaded(self, model: torch.nn.Module) -> "Target":
        """The same CPU target without counting loaded weights as memory in use: the prediction includes them."""
        weights = sum(parameter.nbytes for parameter in model.parameters())
        return replace(self, outside_bytes=max(0, (self.outside_bytes or 0) - weights))

    def needed_bytes(self, prediction: StepMemory) -> int:
        """The smallest limit under which a step runs; on a CPU, the allocated bytes."""
        return prediction.allocated if self.is_cpu else prediction.needed

    def as_here(self, prediction: Prediction) -> Prediction:
        """Adapt a prediction for CUDA to this device."""
        outside = prediction.outside if self.outside_bytes is None else self.outside_bytes
        if not self.is_cpu:
            found = prediction if self.expandable else prediction.with_fixed_segments()
            return replace(found, outside=outside)
        births = prediction.trace.births
        libraries = sum(birth.size for birth in births.values() if birth.part == "library")
        parts = {**prediction.parts, "temporaries": max(0, prediction.parts["temporaries"] - libraries)}
        parts["activations"] += activations_on_host(prediction.trace)
        return replace(prediction, allocated=sum(parts.values()), parts=parts, outside=outside)


def known_target(name: str, budget: str | None, host_memory: str | None = None) -> Target:
    """The target for a device of the catalog, which need not be in this machine.

    Args:
        name: Its common name, such as "t4" or "RTX 4090".
        budget: The budget, such as "8GiB"; None or "auto" means all of its memory.
        host_memory: The host's memory, such as "32GiB"; None means twice the device's, at least 64 GiB.
    """
    if name.strip().lower() == "cpu":
        return target_here("cpu", budget, host_memory)
    device = find(name)
    assert device.capability is not None
    gpu = Gpu(device.capability, device.flash, device.num_multiprocessors, device.threads_per_multiprocessor)
    whole = device.memory_bytes
    budget_bytes = whole if budget in (None, "auto") else parse_bytes(str(budget))
    if budget_bytes > whole:
        raise RecipeError(
            f"the budget of {format_bytes(budget_bytes)} exceeds the {format_bytes(whole)} of {device.name}",
            f"--memory {whole // 2**30}GiB, or omit it",
        )
    is_rocm = device.name in _ROCM
    host_bytes, host_note = max(2 * whole, _USUAL_HOST_BYTES), "assumed; set --host-memory"
    if host_memory is not None:
        host_bytes, host_note = parse_bytes(host_memory), "--host-memory"
    note = _NOT_CUDA if is_rocm else ""
    return Target(
        device.name,
        device,
        gpu,
        budget_bytes,
        note=note,
        expandable=not is_rocm,
        host_bytes=host_bytes,
        host_note=host_note,
    )


def target_here(
    requested: str | torch.device | None = None, budget: str | None = None, host_memory: str | None = None
) -> Target:
    """The target for the device in this machine that a run would use.

    Args:
        requested: A device such as "cuda:1"; None detects it.
        budget: The budget; None means the free memory of a GPU, or all memory of a CPU host.
        host_memory: The budget of host memory; None means what is free.

    Raises:
        RecipeError: Plans do not support this kind of device, or it has less memory than the budget.
    """
    device = find_device(requested)
    inventory = take_inventory(device)
    if device.type == "cpu":
        if host_memory is not None:
            raise RecipeError("--host-memory is for plans on a GPU", f"on a CPU: --memory {host_memory}")
        known = identify_device(inventory)
        assert known is not None
        budget_bytes = resolve_budget(budget, device) or total_memory(device)
        note = "predictions for a CPU are estimates: they count tensors, not the workspaces of libraries"
        return Target("cpu", known, _LIKE_A_CPU, budget_bytes, memory_in_use(device), note)
    if device.type != "cuda" or inventory.capability is None:
        raise RecipeError(f"plans support NVIDIA GPUs and CPUs; this device is {device.type}", "--gpu NAME")
    properties = torch.cuda.get_device_properties(device)
    gpu = Gpu(
        inventory.capability,
        inventory.flash_attention,
        properties.multi_processor_count,
        properties.max_threads_per_multi_processor,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )
    budget_bytes = resolve_budget(budget, device) or free_memory(device) + non_allocator_memory(device)
    name, known = f"{device} ({inventory.name})", identify_device(inventory) or measure_device(device)
    found = Target(name, known, gpu, budget_bytes, host_bytes=free_host_memory(), host_note="free")
    if host_memory is not None:
        found = replace(found, host_bytes=parse_bytes(host_memory), host_note="--host-memory")
    return found if has_expandable_segments() else replace(found, note=_FIXED_SEGMENTS, expandable=False)
