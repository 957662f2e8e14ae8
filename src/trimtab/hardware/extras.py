"""Packages that are missing or broken: the errors that name the pip command."""

import importlib.util
import sys
import traceback
from pathlib import Path

from trimtab.errors import MissingDependency, summarize_error

# import name: (name of trimtab's extra, what it is for)
EXTRAS = {
    "bitsandbytes": ("bitsandbytes", "QLoRA and 8-bit optimizers"),
    "liger_kernel": ("liger", "fused kernels on NVIDIA GPUs"),
    "torchao": ("torchao", "models with int8, int4 and fp8 weights"),
    "gguf": ("gguf", "models in GGUF files"),
    "onnx": ("onnx", "models in ONNX files"),
    "onnxscript": ("onnx", "models in ONNX files"),
    "onnxruntime": ("onnx", "models in ONNX files"),
}


def has_package(name: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    return importlib.util.find_spec(name) is not None


def require_extra(name: str, asked: str) -> None:
    """Raise an error if an optional package is not installed.

    Args:
        name: Import name of the package.
        asked: What needs it, for the message: a recipe key with its value, or a short description.

    Raises:
        MissingDependency: The package is missing; the error names the pip command.
    """
    if not has_package(name):
        package = name.replace("_", "-")
        raise MissingDependency(f"{asked} needs {package}, which is not installed", install_line(name))


def install_line(name: str) -> str:
    """The pip command that installs an optional package."""
    return f"pip install 'trimtab[{EXTRAS[name][0]}]'"


def import_failure(error: BaseException) -> MissingDependency | None:
    """Explain an exception that was raised while a package of someone else was imported; None for any other."""
    cause: BaseException | None = error
    while cause is not None:
        name = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if name and name not in sys.stdlib_module_names | {"trimtab"}:
            cure = install_line(name) if name in EXTRAS else f"pip install {name}"
            return MissingDependency(f"the package {name} is not installed", cure)
        imported = [frame for frame, _ in traceback.walk_tb(cause.__traceback__) if frame.f_code.co_name == "<module>"]
        package = _installed_package(imported[-1].f_code.co_filename) if imported else None
        if package is not None:
            problem = f"the package {package} is installed and cannot be imported: {summarize_error(cause)}"
            return MissingDependency(problem, f"pip install --force-reinstall {package}")
        cause = cause.__cause__
    return None


def _installed_package(file: str) -> str | None:
    """The import name of the installed package that contains a file; None for files of trimtab and of programs."""
    parts = Path(file).with_suffix("").parts
    root = next((parts.index(name) for name in ("site-packages", "dist-packages") if name in parts), None)
    return None if root is None or parts[root + 1] == "trimtab" else parts[root + 1]
