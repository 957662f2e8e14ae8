"""The state of an optimizer that updates streamed weights in backward: in host memory, and on the device with them.

The optimizer is an ordinary one. Its state is allocated while the weights are at rest, so it is in host memory, and
`trimtab.model.streamed_blocks` exchanges its memory as that of the weights.
"""

import torch

from trimtab.model.host_areas import empty_on_host
from trimtab.model.streamed_blocks import KEY, StreamedBlocks, is_streamed, mark_streamed
from trimtab.optim.in_backward import updates_of


def stream_state(model: torch.nn.Module, blocks: StreamedBlocks, optimizer: torch.optim.Optimizer) -> None:
    """Let the state of streamed weights visit the device in backward, and copy weights and state back.

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
    pins, is_fused = blocks.device.type == "cuda", bool(optimizer.defaults.get("fused"))

    def find(parameter: torch.Tensor) -> list[torch.Tensor]:
        values = (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor))
        # fused kernels count steps on the device, others on the host
        tensors = [value for value in values if value.dim() or is_fused]
        new = [tensor for tensor in tensors if not is_streamed(tensor)]
        if new and blocks.device.type != "meta":
            for tensor, home in zip(new, empty_on_host(new, pins=pins, key=KEY), strict=True):
                home.copy_(tensor)
                tensor.data = home
        for tensor in new:
            mark_streamed(tensor, blocks.device)
        return tensors

    blocks.stream_state(find)
