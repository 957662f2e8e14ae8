"""Memory, bandwidth and compute rates of known devices, to plan for absent devices; and a benchmark of present ones.

Rates are from data sheets: dense, with fp32 accumulation, as training uses them (GeForce cards reach half of the
advertised rate with it). Memory is what torch reports under Linux; driver and ECC change it by about 1%.
"""

import difflib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.inventory import Inventory, find_device, native_precision, take_inventory

GIB = 2**30
_HOST_OP_S = 6e-6  # to launch a small operation without autograd; 6 and 10 µs measured on the hosts of two H200s
_HOST_LINK = 25e9  # bytes per second of PCIe 4 x16
_EMULATED_BF16 = 0.1  # rate of emulated bf16, as a fraction of the fp16 rate; measured on a T4


@dataclass(frozen=True)
class Device:
    """Memory and rates of a device.

    Attributes:
        name: Short name, such as "t4" or "rtx-4090".
        memory_bytes: Total memory as torch reports it.
        bandwidth: Memory bandwidth in bytes per second.
        fp32: FLOP per second of fp32 matrix products.
        tf32: The same for tf32 products; None if not supported.
        fp16: The same for fp16 products.
        bf16: The same for bf16 products; None if emulated.
        capability: Compute capability of CUDA or ROCm; None for a CPU.
        native_bf16: Whether the hardware computes in bf16.
        flash: Whether the flash attention kernel runs on it.
        host_op_s: Seconds to launch a small operation without autograd.
        is_measured: Whether the rates were measured instead of taken from a data sheet.
        num_multiprocessors: Number of multiprocessors, which determines the workspaces of some kernels; 0 if unknown.
        host_link: Bandwidth between host and device in bytes per second, in each direction, with pinned memory. 55 GB/s
            were measured on an H200; the others are rules of thumb for their PCIe generation and width.
        host_bandwidth: Bytes per second, read plus written, of updates that the host computes. Rules of thumb: 100 GB/s
            for servers, 40 GB/s for desktops.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    fp32: float
    tf32: float | None
    fp16: float
    bf16: float | None
    capability: tuple[int, int] | None
    native_bf16: bool
    flash: bool
    host_op_s: float = _HOST_OP_S
    is_measured: bool = False
    num_multiprocessors: int = 0
    host_link: float = _HOST_LINK
    host_bandwidth: float = 40e9

    @property
    def threads_per_multiprocessor(self) -> int:
        """Maximum number of resident threads per multiprocessor."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.capability or (0, 0), 2048)

    @property
    def is_cpu(self) -> bool:
        """Whether operations run on the host, where computation does not overlap with launches."""
        return self.name == "cpu"

    def rate(self, dtype: str) -> float:
        """FLOP per second of matrix products in "fp32", "tf32", "fp16", "bf16" or "fp8".

        Devices without tf32 compute in fp32 instead; devices without bf16 emulate it. Devices with fp8 have twice the
        rate of bf16.
        """
        if dtype == "fp8":
            return 2 * self.rate("bf16")
        if dtype == "tf32":
            return self.tf32 or self.fp32
        if dtype == "bf16":
            return self.bf16 or self.fp16 * _EMULATED_BF16
        return {"fp32": self.fp32, "fp16": self.fp16}[dtype]


def _gpu(
    name: str,
    gib: float,
    gb_s: float,
    fp32: float,
    tf32: float | None,
    fp16: float,
    capability: tuple[int, int],
    num_multiprocessors: int,
    host_gb_s: float = _HOST_LINK / 1e9,
) -> Device:
    """Make a device from the units of data sheets: GiB, GB/s and TFLOP/s. From Ampere on bf16 is as fast as fp16."""
    ampere = capability >= (8, 0)  # true for AMD, whose numbers start at 9
    tera = 1e12
    return Device(
        name=name,
        memory_bytes=int(gib * GIB),
        bandwidth=gb_s * 1e9,
        fp32=fp32 * tera,
        tf32=tf32 * tera if tf32 is not None else None,
        fp16=fp16 * tera,
        bf16=fp16 * tera if ampere else None,
        capability=capability,
        native_bf16=ampere,
        flash=ampere,
        num_multiprocessors=num_multiprocessors,
        host_link=host_gb_s * 1e9,
        host_bandwidth=100e9 if name.startswith(_OF_SERVERS) else 40e9,
    )


_OF_SERVERS = ("a100", "h100", "h200", "mi300x")


_ROWS = (
    #    name          GiB    GB/s   fp32   tf32   fp16   capability   multiprocessors   GB/s to the host
    _gpu(
        "p100", 15.89, 732, 9.3, None, 9.3, (6, 0), 56, 12
    ),  # no tensor cores: with fp32 accumulation fp16 is no faster
    _gpu("v100", 15.77, 900, 15.7, None, 125, (7, 0), 80, 12),
    _gpu("v100-32gb", 31.74, 900, 15.7, None, 125, (7, 0), 80, 12),
    _gpu("t4", 14.74, 320, 8.1, None, 65, (7, 5), 40, 12),
    _gpu("rtx-2060", 5.79, 336, 6.5, None, 25.8, (7, 5), 30, 12),
    _gpu("rtx-2070", 7.78, 448, 7.5, None, 29.9, (7, 5), 36, 12),
    _gpu("rtx-2080", 7.78, 448, 10.1, None, 40.3, (7, 5), 46, 12),
    _gpu("rtx-2080-ti", 10.76, 616, 13.4, None, 53.8, (7, 5), 68, 12),
    _gpu("a100-40gb", 39.39, 1555, 19.5, 156, 312, (8, 0), 108),
    _gpu("a100", 79.15, 2039, 19.5, 156, 312, (8, 0), 108),
    _gpu("a10", 22.19, 600, 31.2, 62.5, 125, (8, 6), 72),
    _gpu("a10g", 22.19, 600, 35, 35, 70, (8, 6), 80),
    _gpu("rtx-a6000", 47.53, 768, 38.7, 77.4, 154.8, (8, 6), 84),
    _gpu("rtx-3060", 11.76, 360, 12.7, 12.7, 25.5, (8, 6), 28),
    _gpu("rtx-3070", 7.78, 448, 20.3, 20.3, 40.6, (8, 6), 46),
    _gpu("rtx-3080", 9.77, 760, 29.8, 29.8, 59.5, (8, 6), 68),
    _gpu("rtx-3090", 23.69, 936, 35.6, 35.6, 71.2, (8, 6), 82),
    _gpu("l4", 22.16, 300, 30.3, 60.5, 121, (8, 9), 58),
    _gpu("l40s", 44.40, 864, 91.6, 183, 362, (8, 9), 142),
    _gpu("rtx-4060", 7.63, 272, 15.1, 15.1, 30.2, (8, 9), 24, 12),
    _gpu("rtx-4060-ti", 15.59, 288, 22.1, 22.1, 44.1, (8, 9), 34, 12),
    _gpu("rtx-4070", 11.72, 504, 29.1, 29.1, 58.3, (8, 9), 46),
    _gpu("rtx-4080", 15.70, 717, 48.7, 48.7, 97.5, (8, 9), 76),
    _gpu("rtx-4090", 23.64, 1008, 82.6, 82.6, 165.2, (8, 9), 128),
    _gpu("h100-pcie", 79.11, 2039, 51.2, 378, 756, (9, 0), 114, 50),
    _gpu("h100", 79.11, 3350, 66.9, 495, 989, (9, 0), 132, 50),
    _gpu("h200", 139.81, 4800, 66.9, 495, 989, (9, 0), 132, 55),
    _gpu("rtx-5070-ti", 15.46, 896, 43.9, 43.9, 87.9, (12, 0), 70, 50),
    _gpu("rtx-5080", 15.46, 960, 56.3, 56.3, 112.6, (12, 0), 84, 50),
    _gpu("rtx-5090", 31.36, 1792, 104.8, 104.8, 209.5, (12, 0), 170, 50),
    _gpu("mi300x", 191.69, 5300, 163.4, 653.7, 1307.4, (9, 4), 304, 50),
    # a desktop CPU with eight cores and AVX2; bf16 and fp16 autocast were measured 12 to 16 times slower than fp32
    Device("cpu", 16 * GIB, 40e9, 0.6e12, None, 0.04e12, 0.04e12, None, native_bf16=False, flash=False),
)
CATALOG = {device.name: device for device in _ROWS}

_NOMINAL_GB = (6, 8, 10, 11, 12, 16, 24, 32, 40, 48, 80, 141, 192)  # advertised memory sizes, which names can contain
_MAKERS = {"nvidia", "amd", "geforce", "tesla", "instinct", "gpu"}
_BOARDS = re.compile(r"sxm[0-9]?|hbm[0-9]e?|pcie|oam|vf$")


def _letters(name: str) -> str:
    """Reduce a name to lower-case letters and digits, without the manufacturer."""
    return "".join(word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in _MAKERS)


def _spellings(device: Device) -> set[str]:
    plain = _letters(device.name)
    spellings = {plain, plain.removeprefix("rtx")}
    if not device.is_cpu and not plain.endswith("gb"):
        gigabytes = next(size for size in _NOMINAL_GB if size * GIB >= device.memory_bytes)
        spellings |= {f"{spelling}{gigabytes}gb" for spelling in spellings}
    return spellings | {spelling.removesuffix("b") for spelling in spellings if spelling.endswith("gb")}


_BY_SPELLING = {spelling: device for device in _ROWS for spelling in _spellings(device)}


def _look_up(name: str) -> Device | None:
    letters = _letters(name)
    return _BY_SPELLING.get(letters) or _BY_SPELLING.get(_BOARDS.sub("", letters))


def find(name: str) -> Device:
    """Find a device by name; accepts variants such as "RTX 4090", "4090", "nvidia-a100-80gb" and "A100".

    Raises:
        RecipeError: The name is unknown; the error lists similar names.
    """
    device = _look_up(name)
    if device is not None:
        return device
    close = difflib.get_close_matches(_letters(name), _BY_SPELLING, n=12, cutoff=0.6)
    names = dict.fromkeys(_BY_SPELLING[spelling].name for spelling in close) or dict.fromkeys(CATALOG)
    raise RecipeError(f"unknown device {name!r}", f"use one of {', '.join(names)}")


def identify_device(inventory: Inventory) -> Device | None:
    """Find the catalog entry of the device of this machine, with its actual memory; None if it is unknown.

    The memory has to match as well: laptop and reduced versions have the same name with less memory and fewer cores.
    """
    if inventory.device == "cpu":
        cpu = replace(CATALOG["cpu"], memory_bytes=inventory.memory_bytes)
        has_bf16 = native_precision(torch.device("cpu")) == "bf16"
        return replace(cpu, bf16=2 * cpu.fp32, native_bf16=True) if has_bf16 else cpu
    device = _look_up(inventory.name)
    if device is None or abs(inventory.memory_bytes / device.memory_bytes - 1) > 0.1:
        return None
    return replace(device, memory_bytes=inventory.memory_bytes)


def measure_device(device: str | torch.device | None = None) -> Device:
    """Measure the rates of one large product, the bandwidth of a large copy and the launch time of a small operation.

    Takes a few seconds on a GPU, less than three on a CPU.

    Args:
        device: A device such as "cuda:0" or "cpu"; None for the device that a run would use.
    """
    device = find_device(device)
    inventory = take_inventory(device)
    known = identify_device(inventory)
    is_cpu = device.type == "cpu"
    has_tf32 = device.type == "cuda" and torch.version.cuda is not None and (inventory.capability or (0, 0)) >= (8, 0)
    with torch.inference_mode():
        return Device(
            name=known.name if known is not None else inventory.name,
            memory_bytes=inventory.memory_bytes,
            bandwidth=_bandwidth(device),
            fp32=_product_rate(device, torch.float32),
            tf32=_tf32_rate(device) if has_tf32 else None,
            fp16=_product_rate(device, torch.float16),
            bf16=_product_rate(device, torch.bfloat16) if is_cpu or inventory.native_bf16 else None,
            capability=inventory.capability,
            native_bf16=inventory.native_bf16,
            flash=inventory.flash_attention,
            host_op_s=_host_op_seconds(device),
            is_measured=True,
            num_multiprocessors=known.num_multiprocessors if known is not None else 0,
            host_link=known.host_link if known is not None else _HOST_LINK,
            host_bandwidth=known.host_bandwidth if known is not None else 40e9,
        )


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of one large square product."""
    size = 8192 if device.type == "cuda" else 2048
    if device.type == "cpu":
        # half precision may be emulated and more than ten times slower
        size = 1024 if dtype == torch.float32 else 384
    elif device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * GIB:
        size = 4096
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / _best_seconds(device, lambda: torch.mm(left, right, out=out))


def _tf32_rate(device: torch.device) -> float:
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        return _product_rate(device, torch.float32)
    finally:
        products.fp32_precision = before


def _bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a copy larger than any cache."""
    num_bytes = 128 * 2**20 if device.type == "cpu" else 512 * 2**20
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_seconds(device, lambda: target.copy_(source))


def _best_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds per call: the best of three groups of calls, after one warm-up call.

    Calls within a group are queued without a host-device sync, which hides launch times.
    """
    group_s = 0.05 if device.type == "cpu" else 0.25
    work()
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    once = time.perf_counter() - began
    count = max(1, min(50, int(group_s / max(once, 1e-9))))
    best = once
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            work()
        _wait(device)
        best = min(best, (time.perf_counter() - began) / count)
    return best


def _host_op_seconds(device: torch.device) -> float:
    """Seconds that the host takes to launch a small operation, without a host-device sync."""
    number, best = torch.ones(1, device=device), float("inf")
    for _ in range(5):
        _wait(device)
        began = time.perf_counter()
        for _ in range(400):  # fits into the launch queue, so the host never blocks
            number.mul_(1.0)
        best = min(best, (time.perf_counter() - began) / 400)
    _wait(device)
    return best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
