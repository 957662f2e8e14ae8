"""Where a benchmark ran and what it found: printed, and kept beside the numbers behind it."""

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch


def machine(device, num_threads, packages):
    """Where and on what a benchmark ran; packages that are not there are left out."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(": ")[1] for line in cpuinfo if line.startswith("model name")), platform.processor())
    gpu = f"{torch.cuda.get_device_name()}; " if device.startswith("cuda") else ""
    versions = [f"{name} {version(name)}" for name in packages if find_spec(name)]

    def git(*words):
        command = ["git", "-C", str(Path(__file__).parents[1]), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""

    return {
        "hardware": f"{gpu}{cpu}, {os.cpu_count()} cores, {num_threads} threads used",
        "load when it began": f"{os.getloadavg()[0]:.1f}",
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "commit": (git("rev-parse", "--short", "HEAD") or "not known")
        + (" and changes" if git("status", "--porcelain", "src") else ""),
    }


def publish(report, text, title, path, save, out=None):
    """Print the text; if asked, keep it beside the numbers behind it, or the numbers alone in a file of one's own."""
    if out:
        out.write_text(json.dumps(report) + "\n")
    if save:
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(report) + "\n")
        path.with_suffix(".md").write_text(f"# {title}\n\n{text}", encoding="utf-8")
    print(text)
