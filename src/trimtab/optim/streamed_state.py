"""The state of an optimizer that updates streamed weights in backward: it moves between host and device with them.

The optimizer is an ordinary one. Its state is allocated while the weights are in host memory, so it is there as well,
and `trimtab.model.streamed_blocks` moves it in the same way as the weights.
"""

from collections.abc import Sequence

import torch

from trimtab.model.host_areas import HostArea, move_to_area
from trimtab.model.streamed_blocks import KEY, StreamedBlocks, is_streamed, mark_streamed
from trimtab.optim.in_backward import updates_of


def stream_state(model: torch.nn.Module, blocks: StreamedBlocks, optimizer: torch.optim.Optimizer) -> None:
    """Copy the state of streamed weights to the device in backward, and copy weights and state back.

    Args:
        model: The model, whose weights are updated in backward.
        blocks: Its streamed blocks.
        optimizer: The optimizer of its weights.
    """
    updates_of(
        model
    ).words_against_dividing = (
        f"{KEY} with memory.update: in-backward needs the whole batch in one micro-batch; memory.update: host does not"
    )
    pins, is_traced = blocks.device.type == "cuda", blocks.device.type == "meta"
    is_fused = bool(optimizer.defaults.get("fused"))

    def find(unit: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], HostArea | None]:
        values = [value for parameter in unit for value in optimizer.state.get(parameter, {}).values()]
        # fused kernels count steps on the device, others on the host
        tensors = [value for value in values if isinstance(value, torch.Tensor) and (value.dim() or is_fused)]
        if all(map(is_streamed, tensors)):
            return tensors, None
        # including tensors that are already in an area, which is then freed
        area = None if is_traced else move_to_area(tensors, pins=pins, key=KEY)
        for tensor in tensors:
            mark_streamed(tensor, blocks.device)
        return tensors, area

    blocks.stream_state(find)
