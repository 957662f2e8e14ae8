"""The time of an optimizer step from the trace of its largest micro-batches."""

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.hardware.catalog import Device
from trimtab.planner.time import captured_ops, step_seconds
from trimtab.planner.trace.recorder import Op, Trace
from trimtab.techniques.base import IN_AFTER_OUT, WEIGHTS_FROM_HOST, WEIGHTS_TO_HOST

_OF_WEIGHTS = ("update", "transfer", "host")  # stages that take the same time for any number of tokens
_COPIES_OF_WEIGHTS = (WEIGHTS_TO_HOST, WEIGHTS_FROM_HOST, IN_AFTER_OUT)


@dataclass(frozen=True)
class StepTiming:
    """The values that determine the time of a traced step.

    Attributes:
        device: The device that runs it.
        tf32: Whether fp32 products run as tf32 if the device supports it.
        num_micro: Micro-batches of the step.
        share: Mean number of tokens of a micro-batch, as a share of the traced one.
        is_packed: Whether rows are packed.
        is_captured: Whether micro-batches are replayed from CUDA graphs.
    """

    device: Device
    tf32: bool
    num_micro: int
    share: float
    is_packed: bool
    is_captured: bool

    def seconds(self, trace: Trace) -> float:
        """Seconds of the step.

        Args:
            trace: One micro-batch, or two if a step has more.
        """
        before, again, after = _split(trace.ops)
        before, again = (scaled(part, self.share, self.is_packed) for part in (before, again))
        if self.is_captured:
            before, zero = _captured(again, trace)
            again, after = before if self.num_micro > 1 else [], [*after, zero]
        if self.num_micro == 1 or not again:
            return self._seconds([*before, *again, *after])
        # the first micro-batches fill the device queue; each later one takes the same time
        once, twice = (self._seconds([*before, *again * times, *after]) for times in (1, 2))
        return once + (self.num_micro - 2) * (twice - once)

    def _seconds(self, ops: list[Op]) -> float:
        return step_seconds(ops, self.device, tf32=self.tf32).seconds


def _split(ops: Iterable[Op]) -> tuple[list[Op], list[Op], list[Op]]:
    """The operations of the first micro-batch of a step, of the second one if there is one, and of the rest."""
    everything = list(ops)
    in_backward = [op.stage in ("backward", "recompute") for op in everything]
    last = max((at for at, is_in in enumerate(in_backward) if is_in), default=-1)
    begun = next((at for at, is_in in enumerate(in_backward) if is_in), 0)
    second = next((at for at in range(begun, last) if everything[at].stage == "forward"), last + 1)
    return everything[:second], everything[second : last + 1], everything[last + 1 :]


def _captured(second: list[Op], trace: Trace) -> tuple[list[Op], Op]:
    """A captured micro-batch, and the operation that zeroes gradients in place.

    Args:
        second: The second micro-batch of a step: every captured one adds to existing gradients.
        trace: The trace of both.
    """
    inputs = sum(birth.size for birth in trace.births.values() if birth.part == "inputs")
    gradients = sum(trace.births[storage].size for storage in trace.gradients)
    return captured_ops(second, inputs // 2), Op("aten._foreach_zero_", "optimizer", 0, gradients, "fp32")


def scaled(ops: list[Op], share: float, is_packed: bool) -> list[Op]:
    """Operations on a micro-batch with fewer tokens: rows are shorter, which reduces attention quadratically.

    Packed rows are not scaled: long rows do most of the work, and kernels are less efficient on short rows.
    """
    if share == 1.0:
        return ops
    known: dict[int, Op] = {}  # repeated blocks share their operations
    for op in ops:
        if id(op) not in known and (op.stage in _OF_WEIGHTS or op.name in _COPIES_OF_WEIGHTS):
            known[id(op)] = op
        elif id(op) not in known:
            flops = op.flops * (share**2 if "attention" in op.name and not is_packed else share)
            known[id(op)] = op._replace(flops=int(flops), moved=int(op.moved * share))
    return [known[id(op)] for op in ops]
