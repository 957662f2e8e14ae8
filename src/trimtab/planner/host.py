"""Predict the host memory and the disk space of a run on a GPU."""

from dataclasses import dataclass

from trimtab.planner.trace.recorder import Trace
from trimtab.techniques.base import TO_HOST, WEIGHTS_FROM_HOST, WEIGHTS_TO_HOST, HostUse

GIB = 2**30
# Python, torch, transformers, CUDA's libraries and a loader's worker: 1.6 to 2.3 GiB were measured on H200 hosts.
PROCESS_BYTES = 23 * GIB // 10
_PAGED_BYTES = 2  # bytes of 8-bit Adam state per trainable parameter
_SPARE_CHECKPOINTS = 1  # a checkpoint is written before an old one is removed


@dataclass(frozen=True)
class HostPrediction:
    """Bytes on the host and on the disk.

    Attributes:
        process: The memory of the process before it loads a model.
        loading: The weights until they are on the device.
        kept: Tensors that techniques keep on the host: embeddings, optimizer state, weights, gradients, activations.
        snapshot: The copy of the state that a background save writes.
        checkpoint: One checkpoint on disk.
        model: The exported model or adapter.
        num_checkpoints: Maximum number of checkpoints on disk.
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
        """Peak host memory, either while loading or while saving."""
        return self.process + max(self.loading, self.kept + self.snapshot)

    @property
    def disk(self) -> int:
        """Peak disk space."""
        # twice the model: a better one is written before the previous best is removed
        return self.num_checkpoints * self.checkpoint + 2 * self.model


@dataclass(frozen=True)
class TracedTensors:
    """Sizes in bytes of the tensors of a traced step that determine the use of the host.

    Attributes:
        gradients: Gradients on the device.
        state: Optimizer state on the device.
        streamed_weights: Weights on the host.
        streamed_state: Optimizer state on the host.
        activations: Peak of the activations on the host.
    """

    gradients: int
    state: int
    streamed_weights: int
    streamed_state: int
    activations: int

    @classmethod
    def of(cls, trace: Trace) -> "TracedTensors":
        """Return the sizes in a trace."""
        return cls(
            gradients=sum(trace.births[storage].size for storage in trace.gradients),
            state=sum(birth.size for birth in trace.births.values() if birth.part == "state"),
            streamed_weights=weights_on_host(trace),
            streamed_state=state_on_host(trace),
            activations=activations_on_host(trace),
        )


def predict_host(
    tensors: TracedTensors,
    *,
    loaded_bytes: int,
    use: HostUse,
    num_kept: int = 2,
    trained_bytes: int | None = None,
    shares_weights: bool = False,
) -> HostPrediction:
    """Predict host memory and disk space from the trainable parameters and optimizer state in a trace.

    Args:
        tensors: Sizes of tensors in the trace of a training step.
        loaded_bytes: Bytes of the weights in the dtype that they are loaded in.
        use: The changes by techniques.
        num_kept: Number of checkpoints to keep; 0 if none is written.
        trained_bytes: Bytes of the trainable parameters in the dtype that they are updated in; None means the same
            dtype as on the device.
        shares_weights: Whether the weights that are updated on the host are also those that are streamed from it.
    """
    trained = tensors.gradients if trained_bytes is None else trained_bytes
    paged = trained // 4 * _PAGED_BYTES if use.pages_state else 0
    state = tensors.state + tensors.streamed_state
    streamed = 0 if use.updates_on_host and shares_weights else tensors.streamed_weights
    if use.updates_on_host:  # no state is on the device
        state, paged = int(trained * use.state_ratio), 0
    saved = trained + state + paged
    moved = 2 * trained + state if use.updates_on_host else 0  # weights and gradients
    return HostPrediction(
        process=PROCESS_BYTES,
        loading=0 if use.streams_weights else loaded_bytes,
        kept=use.kept_bytes + paged + moved + tensors.activations + streamed + tensors.streamed_state,
        snapshot=saved,
        checkpoint=saved,
        model=trained if use.exports_trainable else loaded_bytes,
        num_checkpoints=num_kept + _SPARE_CHECKPOINTS if num_kept else 0,
    )


def activations_on_host(trace: Trace) -> int:
    """Peak bytes of activations that a traced step has on the host: those sent in the forward of a micro-batch."""
    return _most_in_forward(trace, TO_HOST)


def weights_on_host(trace: Trace) -> int:
    """Bytes of streamed weights: those fetched in the forward of a micro-batch.

    If optimizer state is streamed, the state of the last block is fetched in forward and counted here.
    """
    return _most_in_forward(trace, WEIGHTS_FROM_HOST)


def state_on_host(trace: Trace) -> int:
    """Bytes of streamed optimizer state: backward copies streamed weights and their state back to the host."""
    sent = sum(op.moved for op in trace.ops if op.name == WEIGHTS_TO_HOST)
    return max(0, sent - weights_on_host(trace))


def _most_in_forward(trace: Trace, name: str) -> int:
    """Maximum number of bytes copied in one direction over the host link in the forward of a micro-batch."""
    most = sent = 0
    stage = ""
    for op in trace.ops:
        if op.stage == "forward" and stage != "forward":  # the start of another micro-batch
            sent = 0
        stage = op.stage
        if op.name == name and op.stage == "forward":
            sent += op.moved
            most = max(most, sent)
    return most
