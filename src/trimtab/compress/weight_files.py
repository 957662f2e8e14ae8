"""Safetensors files of a model that is larger than memory: weights are read one at a time and written in shards.

Files are mapped, so a weight takes memory only when it is converted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import CheckpointError, ModelError

SHARD_BYTES = 2**30


def can_read_files(files: Sequence[Path], skeleton: nn.Module) -> bool:
    """Whether files contain all parameters of a model under their names in the model."""
    found: set[str] = set()
    for path in files:
        with _opened(path) as file:
            found |= set(file.keys())
    return bool(files) and {name for name, _ in skeleton.named_parameters()} <= found


def stored_tensors(files: Sequence[Path], skeleton: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model from its files, one at a time.

    Args:
        files: The files; their tensors have the names of the model's parameters and buffers.
        skeleton: The model on the meta device. Tensors that it does not have are left out, such as a second name of a
            shared weight.

    Raises:
        ModelError: A file is damaged, or a tensor has another shape than in the model.
    """
    expected = {name: tensor.shape for name, tensor in model_tensors(skeleton)}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                if name not in expected:
                    continue
                tensor = file.get_tensor(name)
                if tensor.shape != expected[name]:
                    found, wanted = list(tensor.shape), list(expected[name])
                    raise ModelError(
                        f"{path}: {name} is {found} in the file but {wanted} in config.json",
                        "the files do not match each other: download or save them again",
                    )
                yield name, tensor


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, shared ones once, and the buffers that a state_dict contains."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, FileNotFoundError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "download or save the model again") from error


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file.

    Raises:
        CheckpointError: The disk is full, or cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **metadata})
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} could not be written: {error}", "free space on that disk") from error


class WeightShards:
    """Write the weights of a model like `save_pretrained`; at most one file's worth is in memory.

    Args:
        folder: The folder.
        shard_bytes: Largest size of a file; one weight alone may be larger.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._metadata: dict[str, str] = {}
        self._total_bytes = 0

    def add(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Add the tensors of one weight, which are stored in the same file.

        Args:
            tensors: The tensors, on any device.
            metadata: Torchao's description of the weight; empty for other packages.
        """
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._tensors and size + _num_bytes(self._tensors) > self._shard_bytes:
            self._flush()
        self._tensors |= {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._metadata |= metadata
        self._total_bytes += size

    def finish(self, num_parameters: int) -> None:
        """Write the last file; give files their names and, if there are several, an index."""
        self._flush()
        count = len(self._files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        names = names if count > 1 else ["model.safetensors"]
        for number, name in enumerate(names, 1):
            self._unnamed(number).rename(self._folder / name)
        if count > 1:
            index = {
                "metadata": {"total_parameters": num_parameters, "total_size": self._total_bytes},
                "weight_map": {key: name for name, keys in zip(names, self._files, strict=True) for key in keys},
            }
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if not self._tensors:
            return
        self._files.append(list(self._tensors))
        # Each file describes all weights so far: transformers reads the names of all weights from the last file.
        names = {"tensor_names": json.dumps(list(self._metadata))} if self._metadata else {}
        save_tensors(self._tensors, self._unnamed(len(self._files)), self._metadata | names)
        self._tensors = {}

    def _unnamed(self, number: int) -> Path:
        """Return the path of a file while the number of files is unknown."""
        return self._folder / f"shard-{number:05d}.safetensors"


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor in another dtype if it has floating-point values; None keeps its dtype."""
    return tensor.detach().to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.detach()
