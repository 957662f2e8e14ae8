"""A checkpoint as a folder: one safetensors file per part that has tensors, everything else as JSON, and a manifest.

The manifest contains the size and checksum of every file, its own checksum, and facts that can be read without loading
the checkpoint.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.checkpoint.codec import Encoded, Tree, decode, encode, stored_shapes
from trimtab.checkpoint.disk_errors import cure_for_os_error
from trimtab.checkpoint.folder import atomic_folder, restore_interrupted
from trimtab.checkpoint.snapshot import CopiedPart
from trimtab.checkpoint.tensor_file import (
    ChecksummedFile,
    LiveTensor,
    Staging,
    write_tensors,
)
from trimtab.checksums import checksum_of, checksum_text
from trimtab.errors import CheckpointError

MANIFEST = "trimtab.json"
_FORMAT = 2
_STATE = "state.json"
_NO_CHECKSUM = checksum_text(0)  # placeholder for the manifest's own checksum while that is computed
_OLDER = "load an older checkpoint"
_FEWER = "lower checkpoint.keep; the checkpoints written before are intact"
_PICKLES = (".bin", ".pkl", ".pickle", ".pt", ".pth", ".ckpt")


def write_checkpoint(
    folder: str | os.PathLike[str],
    parts: Mapping[str, Encoded | CopiedPart],
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write `parts` to `folder`; an existing checkpoint is replaced, a folder with other files is refused.

    Args:
        folder: The checkpoint's folder.
        parts: The encoded parts by name.
        facts: Plain values to be read without loading the state, such as the step, metrics, time and versions.

    Returns:
        The folder.

    Raises:
        CheckpointError: It could not be written; the previous content of the folder is unchanged.
    """
    encoded_facts = encode(dict(facts or {}))
    if encoded_facts.tensors:
        raise CheckpointError("the metadata of a checkpoint contains a tensor", "use plain numbers and text")
    try:
        with atomic_folder(folder, marker=MANIFEST, what="checkpoint") as place:
            files: dict[str, dict[str, Any]] = {}
            staging = Staging()
            for name, part in parts.items():
                if part.tensors:
                    with ChecksummedFile(_file_in(place, f"{name}.safetensors")) as file:
                        tensors = part.tensors.items()
                        write_tensors(
                            file,
                            {key: LiveTensor(t, staging) if isinstance(t, torch.Tensor) else t for key, t in tensors},
                        )
                    files[f"{name}.safetensors"] = {"bytes": file.num_bytes, "checksum": file.checksum}
            with ChecksummedFile(place / _STATE) as file:
                file.write(json.dumps({name: part.tree for name, part in parts.items()}, allow_nan=False).encode())
            files[_STATE] = {"bytes": file.num_bytes, "checksum": file.checksum}
            manifest = {"format": _FORMAT, "trimtab": __version__, "torch": torch.__version__}
            (place / MANIFEST).write_bytes(_signed({**manifest, "facts": encoded_facts.tree, "files": files}))
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written: {error.strerror or error}", cure_for_os_error(error, less=_FEWER)
        ) from error
    return Path(folder)


def _file_in(place: Path, name: str) -> Path:
    if not _is_plain(name):
        raise CheckpointError(f"{name!r} cannot be the name of a file in a checkpoint", "rename the part")
    return place / name


def _is_plain(name: str) -> bool:
    """Whether this is the name of a file directly in the folder, without any path component."""
    return Path(name).name == name and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _signed(manifest: dict[str, Any]) -> bytes:
    """Serialize a manifest with its own checksum, which is computed with zeros in the checksum's place."""
    blank = json.dumps({**manifest, "checksum": _NO_CHECKSUM}, indent=1, allow_nan=False).encode()
    head, _, tail = blank.rpartition(_NO_CHECKSUM.encode())
    return head + checksum_text(zlib.crc32(blank)).encode() + tail


@dataclass(frozen=True)
class FileRecord:
    """The size and checksum of a file according to the manifest."""

    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint by name, and its facts."""

    files: dict[str, FileRecord]
    facts: dict[str, Any]


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint and verify its own checksum; no other file is read.

    Raises:
        CheckpointError: It is missing, damaged or of another format.
    """
    path = Path(folder) / MANIFEST
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is not a folder", "pass the folder that save_state wrote")
    try:
        if path.is_symlink() or not path.is_file():
            raise _not_a_checkpoint(Path(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}", _OLDER) from error
    value, raw = _read_object(path)
    if value.get("format") != _FORMAT:
        old = ", which has no checksums" if value.get("format") == 1 else ""
        raise CheckpointError(
            f"{folder} has checkpoint format {value.get('format')}{old}; this version reads {_FORMAT}",
            f"use the trimtab that wrote it ({value.get('trimtab', 'version unknown')})",
        )
    if not isinstance(value.get("files"), dict):
        raise CheckpointError(f"{path} lists no files", _OLDER)
    signature = str(value.get("checksum")).encode()
    head, _, tail = raw.rpartition(signature)
    if checksum_text(zlib.crc32(head + _NO_CHECKSUM.encode() + tail)).encode() != signature:
        raise CheckpointError(f"{path} is damaged: its checksum does not match", _OLDER)
    try:
        files = {name: FileRecord(record["bytes"], record["checksum"]) for name, record in value["files"].items()}
        facts = decode(value["facts"], _refuse_tensor)
        if not isinstance(facts, dict):
            raise TypeError("the metadata is not an object")
    except (LookupError, TypeError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}", _OLDER) from error
    return Manifest(files, facts)


def _refuse_tensor(name: str) -> torch.Tensor:
    raise LookupError(f"the metadata contains the tensor {name!r}")


def _not_a_checkpoint(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.iterdir())
    found = f"it contains {', '.join(names[:4])}" if names else "it is empty"
    cure = "pass the folder that save_state wrote"
    if any(name.endswith(_PICKLES) for name in names):
        cure += "; checkpoints of other tools are pickled, and trimtab never unpickles"
    return CheckpointError(f"{folder} is not a trimtab checkpoint: {found}", cure)


def verify(folder: str | os.PathLike[str], *, checksums: bool = True) -> Manifest:
    """Check that a checkpoint is complete and intact, and contains no unexpected file.

    Args:
        folder: The checkpoint.
        checksums: Whether to read every file and compare its checksum; otherwise only sizes are compared, which is
            fast.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: It is not valid; the message names the file and its problem.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
        _refuse_foreign_files(folder, manifest)
        for name, record in manifest.files.items():
            _check_file(folder, name, record, checksums)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}", _OLDER) from error
    return manifest


def find_checkpoint_problem(folder: str | os.PathLike[str], *, checksums: bool = True) -> str:
    """Return the problem that `verify` finds with a checkpoint; empty if it is valid."""
    try:
        verify(folder, checksums=checksums)
    except CheckpointError as error:
        return error.problem
    return ""


def _refuse_foreign_files(folder: Path, manifest: Manifest) -> None:
    if _STATE not in manifest.files:
        raise CheckpointError(f"{folder / MANIFEST} does not list {_STATE}", _OLDER)
    for name in manifest.files:
        if not _is_plain(name):
            raise CheckpointError(f"{folder / MANIFEST} lists {name!r}, which is outside the folder", _OLDER)
        if not name.endswith((".json", ".safetensors")):
            raise CheckpointError(
                f"{folder / MANIFEST} lists {name}, which is neither JSON nor safetensors",
                "do not trust this folder: a trimtab checkpoint contains nothing else, and nothing is ever unpickled",
            )
    # hidden files come from the operating system, and no file that the manifest does not list is ever opened
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    foreign = sorted(found - manifest.files.keys() - {MANIFEST})
    if foreign:
        pickled = " (a pickle, by its extension)" if foreign[0].endswith(_PICKLES) else ""
        raise CheckpointError(
            f"{folder} contains {foreign[0]}{pickled}, which its manifest does not list",
            f"move {foreign[0]} elsewhere if you put it there; otherwise do not trust this folder",
        )


def _check_file(folder: Path, name: str, record: FileRecord, checksums: bool) -> None:
    path = folder / name
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which may point outside the folder", "replace the link with the file"
        )
    if not path.is_file():
        raise CheckpointError(f"{folder} is incomplete: {name} is missing", _OLDER)
    found = path.stat().st_size
    if found != record.num_bytes:
        raise CheckpointError(f"{path} is damaged: it has {found} bytes instead of {record.num_bytes}", _OLDER)
    if checksums and checksum_of(path) != record.checksum:
        raise CheckpointError(f"{path} is damaged: its checksum is not {record.checksum}", _OLDER)


class StoredCheckpoint:
    """A checkpoint folder whose files were all verified by size and checksum.

    Args:
        folder: The folder that `write_checkpoint` wrote.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        restore_interrupted(self.folder)
        self.facts = verify(self.folder).facts
        self.trees, _ = _read_object(self.folder / _STATE)

    def tensor_reader(self, part: str) -> "TensorReader":
        """Return a reader for the tensors of a part."""
        return TensorReader(self.folder / f"{part}.safetensors")


def _read_object(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the object in a JSON file, and the file's bytes."""
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, found {str(value)[:20]!r}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", _OLDER) from error
    return value, raw


class TensorReader:
    """Reads the tensors of one safetensors file, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def __call__(self, name: str) -> torch.Tensor:
        """Return the tensor of that name, on the host."""
        tensor: torch.Tensor = self._read("get_tensor", name)
        return tensor

    def check(self, tree: Tree) -> None:
        """Raise an error unless the file contains every tensor that a tree refers to; reads only its header."""
        for name, shape in stored_shapes(tree):
            found = self._read("get_slice", name).get_shape()
            if shape is not None and found != shape:
                raise CheckpointError(f"{self._path} contains {name} as {found} instead of {shape}", _OLDER)

    def _read(self, method: str, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            if self._file is None:
                self._file = safe_open(self._path, framework="pt")
            return getattr(self._file, method)(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}", _OLDER) from error
