"""A checkpoint as a folder: one safetensors file for each part that has tensors, the rest as JSON, and a manifest."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.checkpoint.codec import Encoded, Tree, tensor_forms
from trimtab.checkpoint.folder import whole_folder
from trimtab.errors import CheckpointError

_FORMAT = 1
_MANIFEST = "trimtab.json"
_STATE = "state.json"


def write_checkpoint(folder: str | os.PathLike[str], parts: dict[str, Encoded]) -> Path:
    """Write `parts` to `folder`; a checkpoint that is there is replaced, anything else that is there is left alone.

    Returns:
        The folder.
    """
    from safetensors.torch import save_file

    with whole_folder(folder, marker=_MANIFEST, what="checkpoint") as place:
        for name, part in parts.items():
            if part.tensors:
                tensors = {key: tensor.contiguous().cpu() for key, tensor in part.tensors.items()}
                save_file(tensors, place / f"{name}.safetensors")
        state = {name: part.tree for name, part in parts.items()}
        (place / _STATE).write_text(json.dumps(state, allow_nan=False))
        files = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
        manifest = {"format": _FORMAT, "trimtab": __version__, "torch": torch.__version__, "files": files}
        (place / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    return Path(folder)


class StoredCheckpoint:
    """A checkpoint folder that was found whole: every file is there and has its size.

    Args:
        folder: Where `write_checkpoint` put it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        for name, num_bytes in self._manifest()["files"].items():
            path = self.folder / name
            if Path(name).name != name or not path.is_file():
                raise CheckpointError(f"{self.folder} is not whole: {name} is missing", "take an older checkpoint")
            if path.stat().st_size != num_bytes:
                found = path.stat().st_size
                raise CheckpointError(
                    f"{path} was cut off or changed: {found} bytes instead of {num_bytes}",
                    "take an older checkpoint",
                )
        self.trees = self._object(_STATE)

    def _manifest(self) -> dict[str, Any]:
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is no folder", "pass the folder that save_state wrote")
        if not (self.folder / _MANIFEST).is_file():
            names = sorted(path.name for path in self.folder.iterdir())
            found = f"it holds {', '.join(names[:4])}" if names else "it is empty"
            foreign = any(name.endswith((".bin", ".pkl", ".pt")) for name in names)
            cure = "pass the folder that save_state wrote"
            if foreign:
                cure += "; checkpoints of other tools are pickled, and trimtab never unpickles"
            raise CheckpointError(f"{self.folder} is no checkpoint of trimtab: {found}", cure)
        manifest = self._object(_MANIFEST)
        if manifest.get("format") != _FORMAT:
            raise CheckpointError(
                f"{self.folder} has checkpoint format {manifest.get('format')}; this version reads {_FORMAT}",
                f"use trimtab {manifest.get('trimtab', 'of another version')}",
            )
        if not isinstance(manifest.get("files"), dict):
            raise CheckpointError(f"{self.folder / _MANIFEST} lists no files", "take an older checkpoint")
        return manifest

    def _object(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.folder / name).read_text())
            if not isinstance(value, dict):
                raise ValueError(f"a JSON object was expected, not {str(value)[:20]!r}")
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.folder / name} cannot be read: {error}", "take an older checkpoint"
            ) from error
        return value

    def tensor_reader(self, part: str) -> "TensorReader":
        """Gives the tensors of a part by name."""
        return TensorReader(self.folder / f"{part}.safetensors")


class TensorReader:
    """Reads the tensors of one file, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor of that name, on the host."""
        from safetensors import SafetensorError

        try:
            tensor: torch.Tensor = self._opened().get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}", "take an older checkpoint") from error
        return tensor

    def check(self, tree: Tree) -> None:
        """Raise unless the file holds what a tree refers to; reads its header only."""
        from safetensors import SafetensorError

        for name, shape in tensor_forms(tree):
            try:
                found = self._opened().get_slice(name).get_shape()
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._path} cannot be read: {error}", "take an older checkpoint") from error
            if shape is not None and found != shape:
                raise CheckpointError(
                    f"{self._path} holds {name} as {found} instead of {shape}", "take an older checkpoint"
                )

    def _opened(self) -> Any:
        from safetensors import safe_open

        if self._file is None:
            self._file = safe_open(self._path, framework="pt")
        return self._file
