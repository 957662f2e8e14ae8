"""Optional packages: whether they are installed, and the error that names the pip command if not."""

import importlib.util

from trimtab.errors import MissingDependency

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
