"""The device that a plan is made for: the one that is here, or a known one that is not."""

import os
from dataclasses import dataclass, replace

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.catalog import Device, find, identify_device, measure_device
from trimtab.hardware.inventory import find_device, take_inventory
from trimtab.hardware.memory import (
    free_memory,
    has_expandable_segments,
    memory_in_use,
    non_allocator_memory,
    resolve_budget,
    total_memory,
)
from trimtab.planner.memory import Prediction
from trimtab.planner.trace.cuda import Gpu
from trimtab.techniques.base import Accelerator
from trimtab.units import format_bytes, parse_bytes

SPARE = 0.02  # share of a budget that a plan leaves free
_ROCM = {"mi300x"}
_NOT_CUDA = "figures are those of CUDA's kernels and work memory: those of ROCm were never compared"
_FIXED_SEGMENTS = (
    "figures are those of the allocator's fixed segments, because expandable ones are not set in this process; "
    "PYTORCH_ALLOC_CONF=expandable_segments:True, or no such variable, needs less memory where torch has them"
)
# torch computes attention on the CPU without a matrix of all pairs, as its kernel for old GPUs does
_LIKE_A_CPU = Gpu(capability=(7, 5), flash=False)


@dataclass(frozen=True)
class Target:
    """A device and how much of it may be used.

    Attributes:
        name: For the user.
        device: What it can do.
        gpu: What tracing stands in for.
        budget_bytes: Of its memory, what is outside the allocator included.
        outside_bytes: What is outside the allocator; None is what a context usually takes.
        note: What a user has to know of these figures.
        expandable: Whether the allocator has expandable segments there.
    """

    name: str
    device: Device
    gpu: Gpu
    budget_bytes: int
    outside_bytes: int | None = None
    note: str = ""
    expandable: bool = True

    @property
    def is_cpu(self) -> bool:
        """Whether it is the host itself."""
        return self.device.is_cpu

    @property
    def accelerator(self) -> Accelerator:
        """The device for the rules of techniques."""
        return replace(self.gpu.accelerator, type="cpu" if self.is_cpu else "cuda")

    def precision(self, wanted: str) -> str:
        """What `auto` means on it."""
        if wanted != "auto":
            return wanted
        if self.is_cpu:
            return "fp32"
        return "bf16" if self.device.native_bf16 else "fp16"

    def room(self, spare: float) -> int:
        """The budget without a share that stays free."""
        return int(self.budget_bytes * (1 - spare))

    def fits(self, prediction: Prediction, spare: float) -> bool:
        """Whether a step runs in the budget; no allocator of blocks stands between on a CPU."""
        if self.is_cpu:
            return prediction.allocated + prediction.outside <= self.room(spare)
        return prediction.fits(self.room(spare))

    def without_loaded(self, model: torch.nn.Module) -> "Target":
        """The same CPU, where weights that are in memory already are not counted as memory in use."""
        weights = sum(parameter.nbytes for parameter in model.parameters())
        return replace(self, outside_bytes=max(0, (self.outside_bytes or 0) - weights))

    def needed_bytes(self, prediction: Prediction) -> int:
        """The smallest limit under which a step runs; on a CPU no allocator rounds sizes up."""
        return prediction.allocated if self.is_cpu else prediction.needed

    def as_here(self, prediction: Prediction) -> Prediction:
        """A prediction for CUDA as one for this device."""
        outside = prediction.outside if self.outside_bytes is None else self.outside_bytes
        if not self.is_cpu:
            found = prediction if self.expandable else prediction.with_fixed_segments()
            return replace(found, outside=outside)
        births = prediction.trace.births
        libraries = sum(birth.size for birth in births.values() if birth.part == "library")
        parts = {**prediction.parts, "temporaries": max(0, prediction.parts["temporaries"] - libraries)}
        return replace(prediction, allocated=sum(parts.values()), parts=parts, outside=outside)


def known_target(name: str, budget: str | None) -> Target:
    """A device that is not here.

    Args:
        name: As people know it: "t4", "RTX 4090".
        budget: What may be used of it; None or "auto" is all.
    """
    if name.strip().lower() == "cpu":
        return target_here("cpu", budget)
    device = find(name)
    assert device.capability is not None
    gpu = Gpu(device.capability, device.flash, device.num_multiprocessors, device.threads_per_multiprocessor)
    whole = device.memory_bytes
    budget_bytes = whole if budget in (None, "auto") else parse_bytes(str(budget))
    if budget_bytes > whole:
        raise RecipeError(
            f"a {device.name} has {format_bytes(whole)}, less than {format_bytes(budget_bytes)}",
            f"--memory {whole // 2**30}GiB, or leave it out",
        )
    is_rocm = device.name in _ROCM
    return Target(device.name, device, gpu, budget_bytes, note=_NOT_CUDA if is_rocm else "", expandable=not is_rocm)


def target_here(requested: str | torch.device | None = None, budget: str | None = None) -> Target:
    """The device that a run would use.

    Args:
        requested: Such as "cuda:1"; None to look for one.
        budget: What may be used of it; None is what is free, of a CPU all that the host has.

    Raises:
        RecipeError: A plan cannot be made for such a device, or it has less memory.
    """
    device = find_device(requested)
    inventory = take_inventory(device)
    if device.type == "cpu":
        known = identify_device(inventory)
        assert known is not None
        budget_bytes = resolve_budget(budget, device) or total_memory(device)
        note = "figures of a CPU are estimates: tensors alone, without what its libraries take for themselves"
        return Target("cpu", known, _LIKE_A_CPU, budget_bytes, memory_in_use(device), note)
    if device.type != "cuda" or inventory.capability is None:
        raise RecipeError(f"plans are made for NVIDIA GPUs and CPUs; this device is {device.type}", "--gpu NAME")
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
    if has_expandable_segments():
        return Target(name, known, gpu, budget_bytes)
    return Target(name, known, gpu, budget_bytes, note=_FIXED_SEGMENTS, expandable=False)
