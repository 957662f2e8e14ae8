"""A checkpoint as a folder: one safetensors file for each part that has tensors, the rest as JSON, and a manifest.

The manifest holds the size and the checksum of every file, its own checksum, and facts for people and programs that
look for a checkpoint without loading it.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from trimtab import __version__
from trimtab.checkpoint.codec import Tree, decode, encode, tensor_forms
from trimtab.checkpoint.disk_errors import cure_of
from trimtab.checkpoint.folder import put_back, whole_folder
from trimtab.checkpoint.tensor_file import (
    ChecksummedFile,
    LiveTensor,
    Staging,
    TensorBytes,
    checksum_of,
    checksum_text,
    write_tensors,
)
from trimtab.errors import CheckpointError

MANIFEST = "trimtab.json"
_FORMAT = 2
_STATE = "state.json"
_NO_CHECKSUM = checksum_text(0)  # stands in the manifest while its own is computed
_OLDER = "take an older checkpoint"


class EncodedPart(Protocol):
    """What is written of a part: a JSON tree, and the tensors that it refers to, as they are or copied already."""

    @property
    def tree(self) -> Tree:
        """The tree."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor | TensorBytes]:
        """The tensors by name."""


def write_checkpoint(
    folder: str | os.PathLike[str], parts: Mapping[str, EncodedPart], facts: Mapping[str, Any] | None = None
) -> Path:
    """Write `parts` to `folder`; a checkpoint that is there is replaced, anything else that is there is left alone.

    Args:
        folder: Where to.
        parts: What `encode` gave of each part, by the names of the parts.
        facts: Plain values to be read without loading the state: the step, metrics, the time, versions and the like.

    Returns:
        The folder.

    Raises:
        CheckpointError: It could not be written; what was there before is still there.
    """
    encoded_facts = encode(dict(facts or {}))
    if encoded_facts.tensors:
        raise CheckpointError("the facts of a checkpoint hold a tensor", "give plain numbers and text")
    try:
        with whole_folder(folder, marker=MANIFEST, what="checkpoint") as place:
            files: dict[str, dict[str, Any]] = {}
            staging = Staging()
            for name, part in parts.items():
                if part.tensors:
                    with ChecksummedFile(_file_in(place, f"{name}.safetensors")) as file:
                        write_tensors(file, {key: _to_write(tensor, staging) for key, tensor in part.tensors.items()})
                    files[f"{name}.safetensors"] = {"bytes": file.num_bytes, "checksum": file.checksum}
            with ChecksummedFile(place / _STATE) as file:
                file.write(json.dumps({name: part.tree for name, part in parts.items()}, allow_nan=False).encode())
            files[_STATE] = {"bytes": file.num_bytes, "checksum": file.checksum}
            manifest = {"format": _FORMAT, "trimtab": __version__, "torch": torch.__version__}
            (place / MANIFEST).write_bytes(_signed({**manifest, "facts": encoded_facts.tree, "files": files}))
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written: {error.strerror or error}", cure_of(error, less=_FEWER)
        ) from error
    return Path(folder)


_FEWER = "keep fewer checkpoints; those written before are whole"


def _to_write(tensor: torch.Tensor | TensorBytes, staging: Staging) -> TensorBytes:
    return LiveTensor(tensor, staging) if isinstance(tensor, torch.Tensor) else tensor


def _file_in(place: Path, name: str) -> Path:
    if not _is_plain(name):
        raise CheckpointError(f"{name!r} cannot be the name of a file in a checkpoint", "give the part another name")
    return place / name


def _is_plain(name: str) -> bool:
    """Whether this names a file in the folder itself: no path, and nothing that only looks like a name."""
    return Path(name).name == name and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _signed(manifest: dict[str, Any]) -> bytes:
    """A manifest as it is written: with a checksum of its own bytes, of which the checksum itself counts as zeros."""
    blank = json.dumps({**manifest, "checksum": _NO_CHECKSUM}, indent=1, allow_nan=False).encode()
    head, _, tail = blank.rpartition(_NO_CHECKSUM.encode())
    return head + checksum_text(zlib.crc32(blank)).encode() + tail


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    files: dict[str, FileRecord]
    facts: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(record.num_bytes for record in self.files.values())


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of a checkpoint, whose own checksum has been checked; nothing else of the folder is read.

    Raises:
        CheckpointError: There is none, or it is damaged or of another format.
    """
    path = Path(folder) / MANIFEST
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is no folder", "pass the folder that save_state wrote")
    try:
        if path.is_symlink() or not path.is_file():
            raise _not_ours(Path(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}", _OLDER) from error
    value, raw = _object(path)
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
        raise CheckpointError(f"{path} was changed: its checksum is another one", _OLDER)
    try:
        files = {name: FileRecord(record["bytes"], record["checksum"]) for name, record in value["files"].items()}
        facts = decode(value["facts"], _no_tensor)
        if not isinstance(facts, dict):
            raise TypeError("facts are no object")
    except (LookupError, TypeError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}", _OLDER) from error
    return Manifest(files, facts)


def _no_tensor(name: str) -> torch.Tensor:
    raise LookupError(f"the tensor {name!r} among the facts")


def _not_ours(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.iterdir())
    found = f"it holds {', '.join(names[:4])}" if names else "it is empty"
    cure = "pass the folder that save_state wrote"
    if any(name.endswith(_PICKLES) for name in names):
        cure += "; checkpoints of other tools are pickled, and trimtab never unpickles"
    return CheckpointError(f"{folder} is no checkpoint of trimtab: {found}", cure)


_PICKLES = (".bin", ".pkl", ".pickle", ".pt", ".pth", ".ckpt")


def verify(folder: str | os.PathLike[str], *, checksums: bool = True) -> Manifest:
    """Check that a checkpoint is whole, and holds nothing that does not belong into one.

    Args:
        folder: The checkpoint.
        checksums: Whether to read every file and compare its checksum; else sizes have to do, which is quick.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: It is not valid; the message names the file and what is wrong with it.
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


def why_invalid(folder: str | os.PathLike[str], *, checksums: bool = True) -> str:
    """What `verify` finds wrong with a checkpoint, in words; empty if it is valid."""
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
            raise CheckpointError(f"{folder / MANIFEST} lists {name!r}, which is outside of the folder", _OLDER)
        if not name.endswith((".json", ".safetensors")):
            raise CheckpointError(
                f"{folder / MANIFEST} lists {name}, which is neither JSON nor safetensors",
                "do not trust this folder: a checkpoint of trimtab holds nothing else, and nothing is ever unpickled",
            )
    # what systems put into any folder is hidden, and nothing that the manifest does not list is ever opened
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    foreign = sorted(found - manifest.files.keys() - {MANIFEST})
    if foreign:
        pickled = ", a pickle by its name" if foreign[0].endswith(_PICKLES) else ""
        raise CheckpointError(
            f"{folder} holds {foreign[0]}{pickled}, which its manifest does not list",
            f"move {foreign[0]} elsewhere if you put it there; otherwise do not trust this folder",
        )


def _check_file(folder: Path, name: str, record: FileRecord, checksums: bool) -> None:
    path = folder / name
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, perhaps to the outside of the folder", "copy the file itself there")
    if not path.is_file():
        raise CheckpointError(f"{folder} is not whole: {name} is missing", _OLDER)
    found = path.stat().st_size
    if found != record.num_bytes:
        raise CheckpointError(
            f"{path} was cut off or changed: {found} bytes instead of {record.num_bytes}", "take an older checkpoint"
        )
    if checksums and checksum_of(path) != record.checksum:
        raise CheckpointError(f"{path} was changed: its checksum is not {record.checksum}", _OLDER)


class StoredCheckpoint:
    """A checkpoint folder that was found whole: every file is there, and has its size and its checksum.

    Args:
        folder: Where `write_checkpoint` put it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        put_back(self.folder)
        self.manifest = verify(self.folder)
        self.facts = self.manifest.facts
        self.trees, _ = _object(self.folder / _STATE)

    def tensor_reader(self, part: str) -> "TensorReader":
        """Gives the tensors of a part by name."""
        return TensorReader(self.folder / f"{part}.safetensors")


def _object(path: Path) -> tuple[dict[str, Any], bytes]:
    """What a JSON file says, and the bytes in which it does."""
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
        if not isinstance(value, dict):
            raise ValueError(f"a JSON object was expected, not {str(value)[:20]!r}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", _OLDER) from error
    return value, raw


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
            raise CheckpointError(f"{self._path} cannot be read: {error}", _OLDER) from error
        return tensor

    def check(self, tree: Tree) -> None:
        """Raise unless the file holds what a tree refers to; reads its header only."""
        from safetensors import SafetensorError

        for name, shape in tensor_forms(tree):
            try:
                found = self._opened().get_slice(name).get_shape()
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._path} cannot be read: {error}", _OLDER) from error
            if shape is not None and found != shape:
                raise CheckpointError(f"{self._path} holds {name} as {found} instead of {shape}", _OLDER)

    def _opened(self) -> Any:
        from safetensors import safe_open

        if self._file is None:
            self._file = safe_open(self._path, framework="pt")
        return self._file
