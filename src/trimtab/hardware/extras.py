"""Packages that only some settings need: whether they are there, and the one message where they are not."""

import importlib.util

from trimtab.errors import MissingDependency

# how a package is imported, and what trimtab's extra of it is called and good for
EXTRAS = {
    "bitsandbytes": ("bitsandbytes", "QLoRA and 8-bit optimizers"),
    "liger_kernel": ("liger", "fused kernels on NVIDIA GPUs"),
    "gguf": ("gguf", "models in GGUF files"),
}


def has_package(name: str) -> bool:
    """Whether a package can be imported; it is not."""
    return importlib.util.find_spec(name) is not None


def require_extra(name: str, asked: str) -> None:
    """Refuse what was asked for where a package is missing.

    Args:
        name: The package as it is imported.
        asked: What needs it: a key of the recipe with its value, or a few words.

    Raises:
        MissingDependency: With the pip line.
    """
    if not has_package(name):
        package = name.replace("_", "-")
        raise MissingDependency(f"{asked} needs {package}, which is not installed", install_line(name))


def install_line(name: str) -> str:
    """The command that installs a package with trimtab."""
    return f"pip install 'trimtab[{EXTRAS[name][0]}]'"
