"""What a run on a GPU needs of host memory and of the disk."""

from dataclasses import dataclass

from trimtab.planner.trace.recorder import Trace
from trimtab.techniques.base import HostUse

GIB = 2**30
# Python, torch, transformers, CUDA's libraries and a loader's worker: 1.6 to 2.3 GiB were measured beside an H200.
PROCESS_BYTES = 23 * GIB // 10
_PAGED_BYTES = 2  # of 8-bit Adam for each number that trains
_SPARE_CHECKPOINTS = 1  # one is written before an old one is removed


@dataclass(frozen=True)
class HostPrediction:
    """Bytes on the host and on the disk.

    Attributes:
        process: What the process takes before it has a model.
        loading: The weights while they are on their way to the device.
        kept: What stays in host memory on purpose: embeddings, paged state.
        snapshot: A copy of what is saved, while it is written.
        checkpoint: A checkpoint on the disk.
        model: The model, or its adapter, as it is handed over.
        num_checkpoints: How many checkpoints are there at once at most.
    """

    process: int
    loading: int
    kept: int
    snapshot: int
    checkpoint: int
    model: int
    num_checkpoints: int

    @property
    def memory(self) -> int:
        """The most host memory at once: while loading, or while saving."""
        return self.process + max(self.loading, self.kept + self.snapshot)

    @property
    def disk(self) -> int:
        """The most disk space at once."""
        return self.num_checkpoints * self.checkpoint + 2 * self.model  # the best so far, and a better one


def predict_host(trace: Trace, *, loaded_bytes: int, use: HostUse, num_kept: int = 2) -> HostPrediction:
    """Read from a trace what is trained, and what is kept for it.

    Args:
        trace: The trace of a training step.
        loaded_bytes: The weights in the dtype that they are loaded in.
        use: What techniques change.
        num_kept: Checkpoints that are kept; 0 where none is written.
    """
    trained = sum(trace.births[storage].size for storage in trace.gradients)
    state = sum(birth.size for birth in trace.births.values() if birth.part == "state")
    paged = trained // 4 * _PAGED_BYTES if use.pages_state else 0
    saved = trained + state + paged
    return HostPrediction(
        process=PROCESS_BYTES,
        loading=0 if use.streams_weights else loaded_bytes,
        kept=use.kept_bytes + paged,
        snapshot=saved,
        checkpoint=saved,
        model=trained if use.exports_trainable else loaded_bytes,
        num_checkpoints=num_kept + _SPARE_CHECKPOINTS if num_kept else 0,
    )
