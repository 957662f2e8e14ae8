"""Cluster a model block by block.

Without calibration rows, weights are read from the files of the model one at a time: at most one weight and one output
file are in memory. With calibration rows the model is in memory, but measurements are kept for one block at a time. The
inputs of a block are computed by the already clustered blocks before it, whose errors it can then compensate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.compress.calibration import Batch, input_moments, squared_gradients
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.clustering import ClusterSettings, cluster_weight, clusterable, is_transposed
from trimtab.compress.weight_files import converted, model_tensors, stored_tensors
from trimtab.errors import ModelError
from trimtab.model.blocks import blocks_of
from trimtab.training.work_progress import tracked, working

Weights = Iterator[tuple[str, ClusteredWeight | Tensor]]
LossOf = Callable[[Any, Batch], Tensor]


def cluster_model(
    model: Any, settings: ClusterSettings, batches: Sequence[Batch] = (), loss_of: LossOf | None = None
) -> Weights:
    """Cluster the weights of a model in memory, block by block, and yield all of its weights.

    The parameters of the model are replaced by the decoded values.

    Args:
        model: The model, on its device, in eval mode.
        settings: The cluster settings.
        batches: Batches of calibration rows, if the settings need them.
        loss_of: The loss of a batch, for squared gradients.
    """
    targets = clusterable(model, settings)
    parts = _parts(model, targets)
    with working("cluster weights", len(targets)) as work:
        for names in parts:
            measured = _Measured.of(model, {name: targets[name] for name in names}, settings, batches, loss_of)
            for name in names:
                module = model.get_submodule(targets[name])
                weight = _clustered(model.get_parameter(name), module, name, settings, measured)
                with torch.no_grad():
                    model.get_parameter(name).copy_(weight.decoded(torch.float32))
                yield name, weight
                work.advance()
    rest = ((name, tensor) for name, tensor in model_tensors(model) if name not in targets)
    yield from ((name, converted(tensor, settings.rest_dtype)) for name, tensor in rest)


def cluster_files(files: Sequence[Path], skeleton: Any, settings: ClusterSettings) -> Weights:
    """Cluster the weights in the safetensors files of a model, reading one at a time, and yield all of them.

    Args:
        files: The files; their tensors have the names of the model's parameters and buffers.
        skeleton: The model on the meta device.
        settings: The cluster settings, without calibration.
    """
    targets = clusterable(skeleton, settings)
    total = len(list(model_tensors(skeleton)))
    for name, tensor in tracked(stored_tensors(files, skeleton), "cluster weights", total):
        if name in targets:
            module = skeleton.get_submodule(targets[name])
            yield name, _clustered(tensor, module, name, settings, _Measured({}, {}))
        else:
            yield name, converted(tensor, settings.rest_dtype)


class _Measured:
    """Second moments of inputs and squared gradients, of the weights of one block."""

    def __init__(self, moments: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        self.moments, self.gradients = moments, gradients

    @classmethod
    def of(
        cls,
        model: Any,
        targets: Mapping[str, str],
        settings: ClusterSettings,
        batches: Sequence[Batch],
        loss_of: LossOf | None,
    ) -> "_Measured":
        moments, gradients = {}, {}
        if settings.compensate or settings.importance == "activations":
            paths = {path: name for name, path in targets.items() if not _is_embedding(model.get_submodule(path))}
            found = input_moments(model, paths, batches) if paths else {}
            moments = {paths[path]: moment for path, moment in found.items()}
        if settings.importance == "gradients" and loss_of is not None:
            gradients = squared_gradients(model, targets, batches, loss_of)
        return cls(moments, gradients)


def _clustered(
    parameter: Tensor, module: nn.Module, name: str, settings: ClusterSettings, measured: _Measured
) -> ClusteredWeight:
    if not bool(parameter.isfinite().all()):
        raise ModelError(f"{name} contains values that are not finite", "choose another checkpoint of the model")
    transposed = is_transposed(module)
    gradients = measured.gradients.get(name)
    return cluster_weight(
        parameter.detach().T if transposed else parameter.detach(),
        settings,
        hessian_II=measured.moments.get(name),
        gradients_OI=gradients.T if transposed and gradients is not None else gradients,
        transposed=transposed,
    )


def _parts(model: nn.Module, targets: Mapping[str, str]) -> list[list[str]]:
    """Return the names of weights to cluster together: embeddings, then each block, then the rest."""
    blocks = [f"{name}." for name, _ in blocks_of(model)]
    first = [name for name, path in targets.items() if _is_embedding(model.get_submodule(path))]
    parts = [first, *([name for name in targets if name.startswith(block)] for block in blocks)]
    taken = {name for part in parts for name in part}
    parts.append([name for name in targets if name not in taken])
    return [part for part in parts if part]


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)
