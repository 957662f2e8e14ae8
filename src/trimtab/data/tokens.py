"""Tokenized examples in flat tensors, and the cache that keeps them on disk between runs.

One flat tensor per field and the offsets of the examples: an example is a view without a copy, worker processes share
the memory, and the file has the same layout.
"""

import json
import os
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trimtab.data.cache_folder import cache_folder
from trimtab.data.fingerprint import FingerprintError, fingerprint
from trimtab.errors import DataError, as_argument
from trimtab.log import log_info_once, say

_FORMAT = "2"
_SEQUENCES = (list, tuple, array)
_NUM_EXAMPLES_DIGESTED = 64


class _Column:
    """One field while examples are collected: integers until the first float."""

    def __init__(self, is_ragged: bool) -> None:
        self.values: array[Any] = array("i")
        self.offsets = array("q", [0]) if is_ragged else None

    def add(self, value: Any) -> None:
        items = value if self.offsets is not None else (value,)
        if isinstance(items, array) and items.typecode != self.values.typecode:
            items = items.tolist()
        before = len(self.values)
        try:
            self.values.extend(items)
        except TypeError:  # a float among integers: drop the value that was just appended, and convert
            self.values = array("f", self.values[:before])
            self.values.extend(items)
        if self.offsets is not None:
            self.offsets.append(len(self.values))

    def tensor(self) -> torch.Tensor:
        dtype = torch.int32 if self.values.typecode == "i" else torch.float32
        return torch.frombuffer(self.values, dtype=dtype).clone() if self.values else torch.empty(0, dtype=dtype)


class TokenDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Examples whose fields are sequences or single numbers, stored as int32 and float32.

    `dataset[i]` is a dict of views (int32 or float32; zero-dimensional for a single number), with the index of the
    example as `row`.

    Args:
        fields: Name to a flat tensor with the values of all examples.
        offsets: For sequence fields: the start of each example, and the total at the end.
        num_truncated: Number of truncated examples.
    """

    def __init__(
        self, fields: Mapping[str, torch.Tensor], offsets: Mapping[str, Sequence[int]], num_truncated: int = 0
    ) -> None:
        self.fields = dict(fields)
        self.offsets = {
            name: values if isinstance(values, array) else array("q", values) for name, values in offsets.items()
        }
        self.num_truncated = num_truncated
        sizes = {
            len(self.offsets[name]) - 1 if name in self.offsets else len(values) for name, values in self.fields.items()
        }
        if len(sizes) > 1:
            raise ValueError(f"fields of different numbers of examples: {sorted(sizes)}")
        self._num_examples = sizes.pop() if sizes else 0
        self._ragged = [(name, self.fields[name], values) for name, values in self.offsets.items()]
        self._single = [(name, values) for name, values in self.fields.items() if name not in self.offsets]

    @classmethod
    def from_examples(cls, examples: Iterable[Mapping[str, Any]], *, num_truncated: int = 0) -> "TokenDataset":
        """Collect examples one at a time; an iterator of them is never in memory as a whole.

        Args:
            examples: Each a mapping of the same names to a list of numbers or a single number.
            num_truncated: Number of truncated examples.

        Raises:
            ValueError: If the fields of an example differ from those of the first, or a field changes its type.
        """
        columns: dict[str, _Column] = {}
        for index, example in enumerate(examples):
            values = {name: _plain(value) for name, value in example.items()}
            if index == 0:
                columns = {name: _Column(isinstance(value, _SEQUENCES)) for name, value in values.items()}
            if values.keys() != columns.keys():
                raise ValueError(f"example {index} has the fields {sorted(values)}, the first one {sorted(columns)}")
            for name, value in values.items():
                if isinstance(value, _SEQUENCES) != (columns[name].offsets is not None):
                    raise ValueError(f"example {index}: {name!r} is a list in some examples and a number in others")
                columns[name].add(value)
        offsets = {name: column.offsets for name, column in columns.items() if column.offsets is not None}
        return cls({name: column.tensor() for name, column in columns.items()}, _shared(offsets), num_truncated)

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._num_examples:
            index = range(self._num_examples)[index]
        example: dict[str, Any] = {name: flat[at[index] : at[index + 1]] for name, flat, at in self._ragged}
        for name, flat in self._single:
            example[name] = flat[index]
        example["row"] = index
        return example

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each example."""
        at = self.offsets["input_ids"]
        return [end - start for start, end in zip(at, at[1:], strict=False)]

    def content_digest(self) -> str:
        """Return a digest of all lengths and of up to 127 whole examples, cheap enough for every start of a run."""
        crc = zlib.crc32(bytes(self.offsets["input_ids"]))
        for row in range(0, len(self), max(1, len(self) // _NUM_EXAMPLES_DIGESTED)):
            for name, value in sorted(self[row].items()):
                crc = zlib.crc32(f"{name} {value.tolist() if isinstance(value, torch.Tensor) else value}".encode(), crc)
        return f"{len(self)} rows, crc32:{crc:08x}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the dataset to one safetensors file; an existing file is replaced atomically."""
        tensors = {f"field.{name}": values.contiguous() for name, values in self.fields.items()}
        for name, values in self.offsets.items():  # cloned: safetensors rejects tensors that share memory
            tensors[f"offsets.{name}"] = torch.frombuffer(values, dtype=torch.int64).clone()
        metadata = {
            "format": _FORMAT,
            "num_truncated": str(self.num_truncated),
            "fields": json.dumps(list(self.fields)),
            "offsets": json.dumps(list(self.offsets)),
            "checksum": _checksum(tensors),
        }
        _write(Path(path), tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TokenDataset":
        """Read a file of `save`.

        Raises:
            DataError: If the file is not one, or is damaged.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("format") != _FORMAT or metadata["checksum"] != _checksum(tensors):
                raise ValueError("checksum or version do not match")
            fields = {name: tensors[f"field.{name}"] for name in json.loads(metadata["fields"])}
            offsets = {
                name: array("q", tensors[f"offsets.{name}"].numpy().tobytes())
                for name in json.loads(metadata["offsets"])
            }
            return cls(fields, _shared(offsets), int(metadata["num_truncated"]))
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} is not a readable token file: {error}", f"delete it: rm {as_argument(path)}"
            ) from error


def _plain(value: Any) -> Any:
    """Convert tensors and NumPy arrays to lists or numbers; return other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, array) else value


def _shared(offsets: dict[str, "array[int]"]) -> dict[str, "array[int]"]:
    """Make fields with the same lengths (input_ids, labels) share one array of offsets."""
    distinct: list[array[int]] = []
    for name, values in offsets.items():
        same = next((other for other in distinct if other == values), None)
        if same is None:
            distinct.append(values)
        offsets[name] = values if same is None else same
    return offsets


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    value = 0
    for name in sorted(tensors):
        content: Any = tensors[name].contiguous().numpy()
        value = zlib.crc32(content, zlib.crc32(name.encode(), value))
    return str(value)


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write to a temporary file and rename it, so that a file with the final name is always complete."""
    from safetensors.torch import save_file

    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        save_file(tensors, temporary, metadata)
        os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def cached(key_parts: Sequence[Any], build: Callable[[], TokenDataset]) -> TokenDataset:
    """Return the dataset of `build` from the cache, or build and cache it.

    The folder is $TRIMTAB_CACHE, by default ~/.cache/trimtab; TRIMTAB_CACHE=off disables the cache. A damaged file is
    rebuilt, and a folder that is not writable disables the cache but does not fail the run.

    Args:
        key_parts: Everything that changes the tokens: rows, tokenizer, settings of the task. The versions of the code
            are added.
        build: Tokenizes on a cache miss.
    """
    folder = cache_folder()
    if folder is None:
        return build()
    try:
        key = fingerprint(key_parts)
    except FingerprintError as error:
        log_info_once(f"tokens are not cached: {error}")
        return build()
    path = folder / "tokens" / key[:2] / f"{key}.safetensors"
    if os.path.isfile(path):  # also False if the folder is not readable
        try:
            return TokenDataset.load(path)
        except DataError as error:
            say(f"tokenizing again: {error.problem}")
    dataset = build()
    from safetensors import SafetensorError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dataset.save(path)
    except (OSError, SafetensorError) as error:  # safetensors raises its own error on a full disk
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        log_info_once(f"tokens are not cached in {path.parents[2]}: {why}; set TRIMTAB_CACHE to another folder")
    return dataset
