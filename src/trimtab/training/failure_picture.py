"""A picture of memory at the time it ran out: the interface that the memory guard uses; a higher layer draws it."""

from typing import Any, Protocol

import torch


class FailurePicture(Protocol):
    """Draw the memory of a step that ran out of memory."""

    def capture(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Record what is in memory now, while the failed step still holds its tensors."""

    def write(self, title: str, micro_batch: int) -> str:
        """Write the picture after the step was undone.

        Args:
            title: What happened, and when.
            micro_batch: Rows of the micro-batch in this process.

        Returns:
            The file; empty if nothing could be drawn.
        """


class NoPicture:
    """Draw nothing."""

    def capture(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Record nothing."""

    def write(self, title: str, micro_batch: int) -> str:
        """Write nothing."""
        return ""
