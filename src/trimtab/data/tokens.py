"""Tokenized rows in flat tensors, and the cache that keeps them between runs.

One flat tensor a field and the offsets of its rows: a row is a slice without a copy, worker processes share the
memory, and a dataset is written and read as it lies.
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

from trimtab.data.fingerprint import NoFingerprint, fingerprint
from trimtab.errors import DataError
from trimtab.log import say, say_once

_FORMAT = "1"
_SEQUENCES = (list, tuple, array)


class _Column:
    """One field while it is being collected: integers until a float comes."""

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
        except TypeError:  # a float among integers; what was taken before it is taken back
            self.values = array("f", self.values[:before])
            self.values.extend(items)
        if self.offsets is not None:
            self.offsets.append(len(self.values))

    def tensor(self) -> torch.Tensor:
        dtype = torch.int32 if self.values.typecode == "i" else torch.float32
        return torch.frombuffer(self.values, dtype=dtype).clone() if self.values else torch.empty(0, dtype=dtype)


_NUM_ROWS_KNOWN_BY = 64


class TokenDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Examples whose fields are sequences or single numbers, kept as int32 and float32.

    `dataset[i]` is a dict of tensors, which are views (int32 or float32; a single number has no dimensions), and the
    number of the example as `row`.

    Args:
        fields: Name to a flat tensor with the values of all examples.
        offsets: For fields that are sequences: where each example begins, and at the end the total.
        num_truncated: How many examples were cut to fit.
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
        """Collect examples, one at a time, so that an iterator of them never stands in memory as a whole.

        Args:
            examples: Each a mapping of the same names to a list of numbers or a single number.
            num_truncated: How many of them were cut to fit.

        Raises:
            ValueError: If an example has other fields than the first, or a field changes its kind.
        """
        columns: dict[str, _Column] = {}
        for index, example in enumerate(examples):
            values = {name: _plain(value) for name, value in example.items()}
            if index == 0:
                columns = {name: _Column(isinstance(value, _SEQUENCES)) for name, value in values.items()}
            if values.keys() != columns.keys():
                raise ValueError(f"example {index} has the fields {sorted(values)}, the first has {sorted(columns)}")
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
        """The number of tokens of each example."""
        at = self.offsets["input_ids"]
        return [end - start for start, end in zip(at, at[1:], strict=False)]

    def likeness(self) -> str:
        """What these examples are known by, without reading all of them: every length, and some rows whole."""
        crc = zlib.crc32(bytes(self.offsets["input_ids"]))
        for row in range(0, len(self), max(1, len(self) // _NUM_ROWS_KNOWN_BY)):
            for name, value in sorted(self[row].items()):
                crc = zlib.crc32(f"{name} {value.tolist() if isinstance(value, torch.Tensor) else value}".encode(), crc)
        return f"{len(self)} rows, crc32:{crc:08x}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file; a file that is there is replaced at once or not at all."""
        distinct = {id(values): values for values in self.offsets.values()}
        numbers = {key: str(number) for number, key in enumerate(distinct)}
        tensors = {f"field.{name}": values.contiguous() for name, values in self.fields.items()}
        for key, values in distinct.items():
            tensors[f"offsets.{numbers[key]}"] = torch.frombuffer(values, dtype=torch.int64)
        metadata = {
            "format": _FORMAT,
            "num_truncated": str(self.num_truncated),
            "fields": json.dumps(list(self.fields)),
            "offsets": json.dumps({name: numbers[id(values)] for name, values in self.offsets.items()}),
            "checksum": _checksum(tensors),
        }
        _write(Path(path), tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TokenDataset":
        """Read what `save` wrote.

        Raises:
            DataError: If the file is not one, or not whole.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("format") != _FORMAT or metadata["checksum"] != _checksum(tensors):
                raise ValueError("its content was changed, or is of another version")
            fields = {name: tensors[f"field.{name}"] for name in json.loads(metadata["fields"])}
            stored = {
                name: array("q", tensors[name].numpy().tobytes()) for name in tensors if name.startswith("offsets.")
            }
            offsets = {name: stored[f"offsets.{number}"] for name, number in json.loads(metadata["offsets"]).items()}
            return cls(fields, offsets, int(metadata["num_truncated"]))
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} holds no tokens that can be read: {error}", "delete it; it is made again"
            ) from error


def _plain(value: Any) -> Any:
    """Tensors and NumPy arrays as lists or numbers; what is plain already stays."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, array) else value


def _shared(offsets: dict[str, "array[int]"]) -> dict[str, "array[int]"]:
    """Fields whose rows are as long as those of another (mask, labels) use its offsets."""
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
    """Write beside and rename, so that a file of that name is always whole."""
    from safetensors.torch import save_file

    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        save_file(tensors, beside, metadata)
        os.fsync(handle)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def cached(key_parts: Sequence[Any], build: Callable[[], TokenDataset]) -> TokenDataset:
    """What `build` makes, kept on disk under a digest of all that it depends on.

    The folder is $TRIMTAB_CACHE, by default ~/.cache/trimtab; TRIMTAB_CACHE=off keeps nothing. A file that is broken is
    made again, and a disk that cannot be written costs the cache, never the run.

    Args:
        key_parts: Everything that changes the tokens: rows, tokenizer, settings of the task. The versions of the code
            are added.
        build: Makes the tokens where they are not there yet.
    """
    place = os.environ.get("TRIMTAB_CACHE") or "~/.cache/trimtab"
    if place == "off":
        return build()
    try:
        key = fingerprint(key_parts)
    except NoFingerprint as error:
        say_once(f"tokens are not cached: {error}")
        return build()
    path = Path(place).expanduser() / "tokens" / key[:2] / f"{key}.safetensors"
    if os.path.isfile(path):  # False also where the folder may not be read
        try:
            return TokenDataset.load(path)
        except DataError as error:
            say(f"tokens are made again: {error.problem}")
    dataset = build()
    from safetensors import SafetensorError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dataset.save(path)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        say_once(f"tokens are not cached in {path.parents[2]}: {why}; TRIMTAB_CACHE names another folder")
    return dataset
