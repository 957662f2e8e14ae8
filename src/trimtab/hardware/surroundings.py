"""Where and on what something was measured: hardware, versions and commit, for whoever reads the numbers later."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel")


def describe_surroundings(
    device: str, num_threads: int, packages: Sequence[str] = PACKAGES, source: Path | None = None
) -> dict[str, str]:
    """Where and on what a measurement ran, in words.

    Args:
        device: Where it computed.
        num_threads: How many threads a process used.
        packages: Whose versions to name; those that are not installed are left out.
        source: A folder in the repository whose commit counts; by default the one this package lies in.
    """
    gpu = f"{torch.cuda.get_device_name(torch.device(device))}; " if device.startswith("cuda") else ""
    return {
        "hardware": f"{gpu}{_cpu_name()}, {os.cpu_count()} cores, {num_threads} threads used",
        "load when it began": f"{os.getloadavg()[0]:.1f}",
        "versions": ", ".join([*_versions(packages), f"Python {platform.python_version()}"]),
        "commit": _commit(source or Path(__file__).parents[1]),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in cpuinfo if line.startswith("model name")), platform.processor())


def _versions(packages: Sequence[str]) -> list[str]:
    found = []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def _commit(folder: Path) -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""

    # an installed copy may lie in somebody else's repository, whose commit says nothing of it
    if not git("ls-files", str(folder)):
        return "not known"
    return (git("rev-parse", "--short", "HEAD") or "not known") + (
        " and changes" if git("status", "--porcelain", str(folder)) else ""
    )
