"""The machine, its device and the installed packages, as `trimtab doctor` shows them."""

import importlib.metadata
import platform
from dataclasses import dataclass

import torch

from trimtab.hardware.extras import EXTRAS, install_line
from trimtab.hardware.inventory import Inventory, native_precision, take_inventory
from trimtab.hardware.private_names import missing_names

_PACKAGES = {
    "torch": "",
    **{
        name: f"pip install {name}"
        for name in (
            *("transformers", "datasets", "safetensors", "pydantic", "rich"),
            *("peft", "accelerate", "matplotlib", "mlflow"),
        )
    },
    **{name.replace("_", "-"): f"{install_line(name)}   ({use})" for name, (_, use) in EXTRAS.items()},
}

_TESTED = "install a tested version: pip install -c constraints.txt trimtab"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    found: str
    cure: str = ""


def collect_findings() -> list[Finding]:
    """Inspect the machine and the installed packages."""
    inventory = take_inventory()
    auto = native_precision(torch.device(inventory.device))
    emulated = f"emulated: correct but slow; use {auto} here"
    findings = [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("device", _describe(inventory)),
        Finding("precision: auto", auto),
        Finding("bf16", "native" if inventory.native_bf16 else emulated),
        Finding("fp16", "native" if inventory.native_fp16 else emulated),
        Finding("attention", _attention(inventory)),
    ]
    return findings + [_package(name, cure) for name, cure in _PACKAGES.items()] + _incompatible()


def _describe(inventory: Inventory) -> str:
    memory = f"{inventory.memory_bytes / 2**30:.1f} GiB"
    if inventory.device == "cpu":
        return f"no accelerator; {inventory.num_cpus} CPU cores, {memory}, {torch.backends.cpu.get_cpu_capability()}"
    others = f", one of {inventory.num_devices}" if inventory.num_devices > 1 else ""
    capability = f", sm{inventory.capability[0]}{inventory.capability[1]}" if inventory.capability else ""
    return f"{inventory.device}: {inventory.name}, {memory}{capability}{others}; {inventory.num_cpus} CPU cores"


def _attention(inventory: Inventory) -> str:
    if inventory.device == "cpu":
        return "scaled_dot_product_attention on the CPU"
    if inventory.flash_attention:
        return "flash and memory-efficient kernels of scaled_dot_product_attention"
    return "memory-efficient kernel; flash needs compute capability 8.0"


def _package(name: str, cure: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", cure)


def _incompatible() -> list[Finding]:
    """Names that other versions of packages have renamed or removed."""
    return [
        Finding(f"{name.partition('.')[0]}: {name}", f"does not exist in this version; needed for: {use}", _TESTED)
        for name, use in missing_names().items()
    ]
