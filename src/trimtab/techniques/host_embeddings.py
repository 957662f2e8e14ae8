"""Keep frozen token embeddings in host memory; the device reads the few rows that a batch needs.

The embeddings of a large vocabulary take a gigabyte, of which a step uses a few thousand rows. CUDA kernels can read
pinned host memory directly. The parameter remains an ordinary CUDA tensor for all other code, without copies and
without host-device syncs, and results are bit-identical.
"""

from collections.abc import Iterable
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.recipe.schema import AdapterSettings
from trimtab.techniques.base import Case, HostUse, Phase, Site, Technique


class HostEmbeddings(Technique):
    """Keep the input embeddings in host memory."""

    key = "offload"
    setting = "memory.offload"
    phase = Phase.PLACEMENT
    is_slower_with_each_value = True

    def values(self, case: Case) -> tuple[str, ...]:
        """Offer it on a GPU with an adapter, if the embeddings are frozen and not tied to the output layer."""
        asked = str(self.asked(case.recipe))
        if asked != "auto":
            return (asked,)
        adapter = None if case.recipe is None else case.recipe.adapter
        trains_more = isinstance(adapter, AdapterSettings) and bool(adapter.trains)
        if adapter in (None, "none") or trains_more or not case.accelerator.is_cuda or _is_tied(case.model):
            return ("none",)
        return ("none", "embeddings")

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Move the embeddings; in a trace, only record that they take no device memory."""
        if site.is_traced:
            check_embeddings_can_leave(model)
            bare: Any = model
            bare.get_input_embeddings().weight.is_in_host_memory = True
        else:
            keep_embeddings_on_host(model, site.device, trained_later=site.unfrozen_later)

    def host_use(self, value: str, model: Any, weight_bytes: int) -> HostUse:
        """Count the table as host memory."""
        num_weights = model.get_input_embeddings().weight.numel() if value == "embeddings" else 0
        return HostUse(kept_bytes=num_weights * weight_bytes)

    def describe(self, value: str) -> str:
        """Return a text such as "embeddings on host"."""
        return f"{value} on host"


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head is not None and getattr(head, "weight", None) is model.get_input_embeddings().weight


def keep_embeddings_on_host(
    model: torch.nn.Module, device: torch.device, trained_later: Iterable[torch.nn.Parameter] = ()
) -> int:
    """Move the input embeddings from the device to pinned host memory.

    Args:
        model: A transformers model, its embeddings on the host or on the device.
        device: The device of the model; on a CPU nothing is done.
        trained_later: Parameters that are frozen now and become trainable later.

    Returns:
        The device memory saved, in bytes.

    Raises:
        RecipeError: The embeddings are trainable or tied to the output layer.
    """
    bare: Any = model
    table: torch.nn.Embedding = bare.get_input_embeddings()
    check_embeddings_can_leave(model, trained_later)
    if device.type == "cpu":
        say("memory.offload: embeddings has no effect on a CPU: the model is already in host memory")
        return 0
    if device.type != "cuda":
        raise RecipeError(f"memory.offload is not supported on {device.type}", "memory.offload: none")
    num_bytes = table.weight.numel() * table.weight.element_size()
    pinned = table.weight.detach().cpu().pin_memory()
    table.weight.data = _seen_from(device, pinned)
    table._host_memory = pinned  # keeps the pinned memory alive
    table.weight.is_in_host_memory = True  # type: ignore[attr-defined]  # for code that counts device memory
    return num_bytes


def check_embeddings_can_leave(model: torch.nn.Module, trained_later: Iterable[torch.nn.Parameter] = ()) -> None:
    """Check that no step needs the input embeddings on the device.

    Raises:
        RecipeError: The embeddings are trainable or tied to the output layer.
    """
    bare: Any = model
    table, head = bare.get_input_embeddings(), bare.get_output_embeddings()
    if table.weight.requires_grad or any(parameter is table.weight for parameter in trained_later):
        raise RecipeError(
            "memory.offload: embeddings: the embeddings are trainable; only frozen ones can stay in host memory",
            "memory.offload: none, or freeze them (adapter, train.freeze)",
        )
    if head is not None and getattr(head, "weight", None) is table.weight:
        raise RecipeError(
            f"memory.offload: embeddings: the embeddings of {type(model).__name__} are tied to its output layer, "
            "which reads all of them in every step",
            "memory.offload: none",
        )


class _Foreign:
    """Memory described to torch through CUDA's array interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _seen_from(device: torch.device, pinned: torch.Tensor) -> torch.Tensor:
    """Return pinned host memory as a tensor of the device: the same memory, read over the bus."""
    with torch.cuda.device(device):
        raw = torch.as_tensor(_Foreign(pinned), device=device)
    return raw.view(pinned.dtype).view(pinned.shape)
