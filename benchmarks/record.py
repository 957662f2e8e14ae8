"""Where a benchmark ran and what it found: printed, and kept beside the numbers behind it."""

import json
from pathlib import Path

from trimtab.hardware.environment import describe_environment


def machine(device, num_threads, packages):
    """Where and on what a benchmark ran; packages that are not there are left out."""
    return describe_environment(device, num_threads, packages, Path(__file__).parents[1] / "src")


def keep(report, text, title, path):
    """Write the numbers as .json and the text about them as .md."""
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(report) + "\n")
    path.with_suffix(".md").write_text(f"# {title}\n\n{text}", encoding="utf-8")


def publish(report, text, title, path, save, out=None):
    """Print the text; if asked, keep it beside the numbers behind it, or the numbers alone in a file of one's own."""
    if out:
        out.write_text(json.dumps(report) + "\n")
    if save:
        keep(report, text, title, path)
    print(text)
