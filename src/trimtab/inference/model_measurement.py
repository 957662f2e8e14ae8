"""The cost and quality of a model: size, memory, latency, throughput, quality, closeness to an original."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trimtab.engine.placement import to_device
from trimtab.inference.comparison import ModelComparison, OutputDivergence
from trimtab.inference.held_out import HeldOut, quality_of
from trimtab.inference.load import LoadedModel
from trimtab.inference.onnx_model import OnnxModel

_WEIGHT_FILES = (".safetensors", ".gguf", ".onnx", ".data", ".bin")
_MAX_REPEATS = 20
_MAX_SECONDS = 5.0  # calls per latency measurement


@dataclass(frozen=True)
class ModelMeasurement:
    """Measurements of one model.

    Args:
        name: Name of the row in a table.
        disk_bytes: Size of its weight files; None if it has no folder.
        memory_bytes: Size of its parameters and buffers in memory.
        latency_1_s: Median time of a forward pass of one row of median length.
        latency_32_s: Median time of a forward pass of 32 such rows.
        quality: Metrics of the task on the held-out rows.
        divergence: Closeness to the original model; None for the original.
    """

    name: str
    disk_bytes: int | None
    memory_bytes: int
    latency_1_s: float
    latency_32_s: float
    quality: dict[str, float]
    divergence: OutputDivergence | None = None

    @property
    def rows_per_s(self) -> float:
        """Throughput with batches of 32 rows."""
        return 32 / self.latency_32_s


def measure(
    name: str,
    loaded: LoadedModel,
    held_out: HeldOut,
    *,
    folder: str | Path | None = None,
    comparison: ModelComparison | None = None,
) -> ModelMeasurement:
    """Measure a model.

    Args:
        name: Name for tables.
        loaded: The model.
        held_out: Rows to evaluate it on.
        folder: Folder, or file, of its weights.
        comparison: Comparison with the original, whose outputs have been recorded.
    """
    return ModelMeasurement(
        name,
        None if folder is None else weight_bytes(folder),
        memory_bytes(loaded.model),
        latency(loaded, held_out, 1),
        latency(loaded, held_out, 32),
        quality_of(loaded, held_out),
        None if comparison is None else comparison.compare(loaded.model),
    )


def weight_bytes(folder: str | Path) -> int:
    """Return the size of the weight files of a folder, or of one file."""
    path = Path(folder)
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in _WEIGHT_FILES]
    return sum(file.stat().st_size for file in files)


def memory_bytes(model: torch.nn.Module) -> int:
    """Return the memory of all parameters and buffers; shared storage counts once."""
    if isinstance(model, OnnxModel):  # onnxruntime holds the weights in the form of the file
        return model.file_bytes
    sizes: dict[int, int] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        for part in _plain_tensors(tensor):
            storage = part.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _plain_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that a tensor consists of: parts of torchao's subclasses, scales of bitsandbytes' tensors."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        of_scales = getattr(state, "state2", None)  # without double quantization there are none
        parts = [*vars(state).values(), *(vars(of_scales).values() if of_scales is not None else ())]
        return [tensor, *(part for part in parts if isinstance(part, torch.Tensor))]
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain_tensors(getattr(tensor, name))]


@torch.inference_mode()
def latency(loaded: LoadedModel, held_out: HeldOut, num_rows: int) -> float:
    """Return the median time of a forward pass of `num_rows` rows of median length."""
    lengths = sorted(range(len(held_out)), key=lambda row: len(held_out.tokens[row]["input_ids"]))
    example = held_out.tokens[lengths[len(lengths) // 2]]
    batch = to_device(held_out.task.collate([example] * num_rows), loaded.device)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    loaded.model.eval()
    return time_of(lambda: loaded.model(**inputs), loaded.device)


def time_of(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median duration of a call, after a warm-up call."""

    def once() -> float:
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    times: list[float] = []
    while len(times) < _MAX_REPEATS and (len(times) < 3 or sum(times) < _MAX_SECONDS):
        times.append(once())
    return median(times)
