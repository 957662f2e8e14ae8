"""Describe the environment of a measurement: hardware, load, package versions and commit."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel")


def describe_environment(
    device: str, num_threads: int, packages: Sequence[str] = PACKAGES, source: Path | None = None
) -> dict[str, str]:
    """Describe the environment of a measurement as text by topic.

    Args:
        device: Device of the measurement.
        num_threads: Threads per process.
        packages: Packages whose versions to list; those that are not installed are left out.
        source: Folder in the repository whose commit to report; by default the folder of this package.
    """
    gpu = f"{torch.cuda.get_device_name(torch.device(device))}; " if device.startswith("cuda") else ""
    return {
        "hardware": f"{gpu}{_cpu_name()}, {os.cpu_count()} cores, threads used: {num_threads}",
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

    # an installed copy can be inside another repository that does not track it; that repository's commit would be wrong
    if not git("ls-files", str(folder)):
        return "unknown"
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        " and changes" if git("status", "--porcelain", str(folder)) else ""
    )
