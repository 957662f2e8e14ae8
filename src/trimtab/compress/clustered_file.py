"""The format of clustered weights on disk.

A folder has config.json, the tokenizer, trimtab.json and one or more files `clustered-NNNNN.safetensors`. The name is
deliberately not `model.safetensors`: `from_pretrained` would find that file, miss the weights and start from random
ones; with this name it raises an error. A clustered weight NAME is two or three tensors:

- `NAME.indices`: uint8 of (O, ceil(I · bits / 8)), rows of packed indices (layout: `packed_indices`);
- `NAME.palettes`: fp16 or fp32 of (ceil(O / rows), 2**bits); row o uses palette o // rows;
- `NAME.scales`, if its scale_block is not 0: int8 of (O, ceil(I / scale_block)); fp16 or fp32 in version 1, fp16 in
  version 2 for weights with rows far smaller than others.

Entry (o, i) of the weight is `palettes[o // rows, indices[o, i]] * scales[o, i // scale_block]`, computed in fp32.
Other tensors are stored unchanged, under their names. A weight that several modules share is stored once, under its
first name. The metadata of each file has the key "trimtab_clustered", a JSON object: {"version": 2, "tensors": {NAME:
{"shape": [O, I], "bits": …, "rows": …, "scale_block": …, "transposed": …}}}. With "transposed" the module stores the
transpose of the matrix (transformers' Conv1D). trimtab.json has {"clustered": {"files": {FILE: CHECKSUM, …}, …}}.

Version 2 stores scales in 8 bits instead of 16; their unit is part of the palettes. Nothing else changed, and files of
version 1 are read.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.checkpoint.export import FACTS, find_export_problem, read_facts
from trimtab.compress.clustered_weight import ClusteredWeight, find_layout_problem
from trimtab.compress.weight_files import SHARD_BYTES, save_tensors
from trimtab.errors import ModelError

VERSION = 2
_READABLE = (1, 2)
_KEY = "trimtab_clustered"
_PARTS = {False: ("indices", "palettes"), True: ("indices", "palettes", "scales")}  # with and without scales
_CURE = "cluster or download the model again"


def is_clustered(folder: str | Path) -> bool:
    """Whether a folder contains a clustered model."""
    return Path(folder).is_dir() and any(Path(folder).glob("clustered-*.safetensors"))


class ClusteredWriter:
    """Write weights one after another; at most one file's worth is in memory.

    Args:
        folder: The folder.
        file_bytes: A new file is begun after this size.
    """

    def __init__(self, folder: Path, file_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._tensors: dict[str, Tensor] = {}
        self._layouts: dict[str, Any] = {}
        self._num_files = 0

    def add(self, name: str, weight: ClusteredWeight | Tensor) -> None:
        """Add a weight."""
        if isinstance(weight, ClusteredWeight):
            self._layouts[name] = weight.layout
            parts = {f"{name}.{part}": tensor for part, tensor in weight.tensors.items()}
        else:
            parts = {name: weight}
        for key, tensor in parts.items():
            self._tensors[key] = tensor.detach().cpu().contiguous()
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= self._file_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the weights added since the last file."""
        if not self._tensors:
            return
        self._num_files += 1
        about = json.dumps({"version": VERSION, "tensors": self._layouts})
        save_tensors(self._tensors, self._folder / f"clustered-{self._num_files:05d}.safetensors", {_KEY: about})
        self._tensors, self._layouts = {}, {}


def read_weights(folder: str | Path) -> Iterator[tuple[str, ClusteredWeight | Tensor]]:
    """Yield the weights of a clustered model, one at a time.

    Raises:
        ModelError: A file is missing, damaged, of another version, or was not written by trimtab.
    """
    from safetensors import SafetensorError, safe_open

    place = Path(folder)
    checksums = (read_facts(place).get("clustered") or {}).get("files")
    if not isinstance(checksums, dict):
        raise ModelError(f"{place / FACTS} does not list the files of clustered weights in {place}", _CURE)
    problem = find_export_problem(place, checksums)
    if problem:
        raise ModelError(problem, _CURE)
    for path in sorted(place / name for name in checksums):
        try:
            with safe_open(path, "pt") as file:
                yield from _read_file(path, file)
        except SafetensorError as error:
            raise ModelError(f"{path} cannot be read: {error}", _CURE) from error


def _read_file(path: Path, file: Any) -> Iterator[tuple[str, ClusteredWeight | Tensor]]:
    layouts = _read_layouts(path, file.metadata() or {})
    names = set(file.keys())
    parts = {
        f"{name}.{part}": (name, part)
        for name, layout in layouts.items()
        for part in _PARTS[bool(layout["scale_block"])]
    }
    if not parts.keys() <= names:
        raise ModelError(f"{path} has no tensor {min(parts.keys() - names)}", _CURE)
    for name in sorted(names - parts.keys()):
        yield name, file.get_tensor(name)
    for name, layout in layouts.items():
        found = {part: file.get_tensor(key) for key, (owner, part) in parts.items() if owner == name}
        problem = find_layout_problem(found, layout)
        if problem:
            raise ModelError(f"{path}: {name} cannot be decoded: {problem}", _CURE)
        (_, num_columns), bits, rows = layout["shape"], layout["bits"], layout["rows"]
        others = {"scale_block": layout["scale_block"], "transposed": layout.get("transposed") is True}
        scales = found.get("scales")
        yield name, ClusteredWeight(found["indices"], found["palettes"], bits, rows, num_columns, scales, **others)


def _read_layouts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        about = json.loads(metadata[_KEY])
        version, layouts = about["version"], about["tensors"]
        if not all(isinstance(layout, dict) and "scale_block" in layout for layout in layouts.values()):
            raise TypeError
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} has no description of clustered weights", _CURE) from error
    if version not in _READABLE:
        raise ModelError(
            f"{path} has version {version} of the clustered format; this trimtab reads {VERSION}", "upgrade trimtab"
        )
    return dict(layouts)
