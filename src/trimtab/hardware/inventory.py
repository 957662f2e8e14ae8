"""The device that a process trains on, and which precisions and kernels it supports."""

import os
from dataclasses import dataclass

import torch

from trimtab.errors import RecipeError
from trimtab.log import log_info_once


def find_device(requested: str | torch.device | None = None, local_rank: int | None = None) -> torch.device:
    """Return the device to train on: the requested one, else torch's current accelerator, else the CPU.

    Args:
        requested: A device such as "cpu", "cuda:1" or "mps", or None to choose one.
        local_rank: Rank of this process on its host; each local rank gets its own device.

    Returns:
        An existing device; accelerators have an index.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if requested is None:
        return _with_index(accelerator, local_rank) if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise RecipeError(f"device={requested!r} is not a torch device", "cpu, cuda or cuda:1") from error
    if device.type in ("cpu", "meta"):
        return device
    if accelerator is None or accelerator.type != device.type:
        found = "only a CPU" if accelerator is None else f"a CPU and {accelerator.type}"
        raise RecipeError(f"device={str(requested)!r} was requested, but torch finds {found}", "leave device out")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise RecipeError(
            f"device={str(requested)!r} was requested, but there are {count} devices", f"use an index 0 … {count - 1}"
        )
    return _with_index(device, local_rank)


def _with_index(device: torch.device, local_rank: int | None) -> torch.device:
    if device.index is not None or device.type == "mps":
        return device
    count = torch.accelerator.device_count()
    if local_rank is not None:
        if local_rank >= count:
            raise RecipeError(
                f"no device is left for local rank {local_rank}: this host has {count} ({device.type})",
                f"start {count} processes on this host, or use cpu=True",
            )
        return torch.device(device.type, local_rank)
    index = torch.accelerator.current_device_index()
    if count > 1:
        log_info_once(
            f"using one of {count} devices ({device.type}:{index}); choose another with device=, "
            f"or use all of them: trimtab launch --processes {count} …"
        )
    return torch.device(device.type, index)


@dataclass(frozen=True)
class Inventory:
    """Memory, counts and native capabilities of the device of this process."""

    device: str
    name: str
    memory_bytes: int
    num_devices: int
    num_cpus: int
    capability: tuple[int, int] | None  # CUDA's compute capability
    native_bf16: bool
    native_fp16: bool
    flash_attention: bool


def take_inventory(requested: str | torch.device | None = None) -> Inventory:
    """Describe the device that a run would use. Emulated precisions do not count as native."""
    device = find_device(requested)
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return Inventory("cpu", "CPU", memory, 0, num_cpus, None, bf16, False, False)
    module = torch.get_device_module(device)
    count = torch.accelerator.device_count()
    if device.type != "cuda":
        memory = torch.accelerator.get_memory_info(device)[1] if device.type == "xpu" else 0
        return Inventory(
            str(device), device.type.upper(), memory, count, num_cpus, None, device.type == "xpu", True, False
        )
    properties = module.get_device_properties(device)
    capability = module.get_device_capability(device)
    ampere = capability >= (8, 0)  # true for AMD, whose numbers start at 9
    return Inventory(
        str(device), properties.name, properties.total_memory, count, num_cpus, capability, ampere, True, ampere
    )


def native_precision(device: torch.device) -> str:
    """The precision for `auto`: bf16 if it is native, fp16 on other CUDA devices, else fp32.

    On a CPU, TRIMTAB_CPU_PRECISION (fp32 or bf16) decides instead of the processor. `torch.cuda.is_bf16_supported` is
    not used because it counts emulation: it is true for a T4, where bf16 is ten times slower than fp16.
    """
    wanted = os.environ.get("TRIMTAB_CPU_PRECISION") if device.type == "cpu" else None
    if wanted not in (None, "", "fp32", "bf16"):
        raise RecipeError(f"TRIMTAB_CPU_PRECISION is {wanted!r}", "set it to fp32 or bf16, or unset it")
    if wanted:
        return wanted
    inventory = take_inventory(device)
    if inventory.native_bf16:
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"


def describe_slow_precision(precision: str, device: torch.device) -> str | None:
    """Say that a device emulates a precision, and what is fast there; None if it does not."""
    dtype = precision.removesuffix("-pure")
    if device.type not in ("cpu", "cuda") or dtype not in ("bf16", "fp16"):
        return None
    fast = native_precision(device)
    if dtype == fast or (dtype == "fp16" and device.type == "cuda"):
        return None
    return (
        f"{precision} is emulated on this {device.type.upper().replace('CUDA', 'GPU')}: correct, but many times slower "
        f"than {fast}, which precision auto takes here"
    )
