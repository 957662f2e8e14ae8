"""Predict the seconds of a training step from traced operations and the rates of a device (a roofline model).

An operation takes the longer of its compute time and its memory time, plus a launch latency. The host launches
operations one after another, and the device runs them in that order. A simulation of both timelines gives the step
time: at any time the slower of the two is the limit. Copies of weights and gradients overlap with computation, in
order; operations that the host computes itself wait for both. A step does not wait for the previous one: the host
launches its first operations while the device still computes the last ones of the previous step.

Copies of activations and of streamed weights run on two more timelines, one per direction: a copy starts when the
device has reached it, and the device waits when it needs the copied data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.hardware.catalog import Device
from trimtab.planner.trace.recorder import Op
from trimtab.techniques.base import (
    FROM_HOST,
    IN_AFTER_OUT,
    TO_HOST,
    UPDATE_CALL,
    WAIT_FROM_HOST,
    WAIT_TO_HOST,
    WEIGHTS_FROM_HOST,
    WEIGHTS_TO_HOST,
)

_COPIES = {TO_HOST: TO_HOST, WEIGHTS_TO_HOST: TO_HOST, FROM_HOST: FROM_HOST, WEIGHTS_FROM_HOST: FROM_HOST}
_WAITED_FOR = {WAIT_TO_HOST: TO_HOST, WAIT_FROM_HOST: FROM_HOST}
_LINK_OPS = frozenset((*_COPIES, *_WAITED_FOR, IN_AFTER_OUT))


@dataclass(frozen=True)
class Calibration:
    """The share of a device's peak rates that real steps reach. Each number can be fitted to measurements separately.

    The defaults were fitted to 35 steps of plain transformers code (BERT to a Llama of 1B), to 28 steps of trimtab
    (Llamas of 1B and 8B), and to three more of trimtab (BERT captured and not compiled, a compiled Llama of 1B),
    measured on H200s with torch 2.11; docs/planner.md reports the errors.

    Attributes:
        product: Share of the data-sheet rate that large matrix products reach. Clocks drop under load, and tiles do not
            fill all multiprocessors evenly; three quarters is usual.
        fp32_product: The same for fp32 without tensor cores.
        tf32_product: The same for tf32.
        measured_product: Share of a rate that was measured on the device with one large square product; the products of
            a step reach less.
        attention: Share of the rate that attention kernels reach: they also compute exponentials, with dropout random
            numbers, and their backward recomputes scores that forward did not store.
        traffic: Share of the bandwidth that memory-bound operations reach. A large copy reaches 0.8 to 0.9; steps have
            many small and strided tensors.
        measured_traffic: Share of a bandwidth that was measured on the device.
        kernel_s: Latency of a kernel in seconds, which never overlaps with other work.
        forward_host: Host time of a forward operation in units of `Device.host_op_s`: Python code of the model,
            dispatch, autograd bookkeeping, and views, which are not traced as operations.
        backward_host: The same in backward, which runs in C++ only.
        recompute_host: The same for a recomputed forward, with a Python hook for every saved tensor.
        optimizer_host: The same in the optimizer; fused and foreach versions launch few operations for many tensors.
        bitsandbytes_host: The same in a bitsandbytes optimizer, which updates parameters one by one in Python.
        update_host: The same for the overhead of an optimizer that is called for a single parameter.
        copy_host: The same for one copy between host and device of tensors that belong together.
        replay_host: The same for all host work of a captured micro-batch: one launch of its graph, and small copies of
            inputs and results.
    """

    product: float = 0.75
    fp32_product: float = 0.70
    tf32_product: float = 0.39
    measured_product: float = 0.92
    attention: float = 0.225
    traffic: float = 0.70
    measured_traffic: float = 0.80
    kernel_s: float = 3e-6
    forward_host: float = 9.0
    backward_host: float = 3.0
    recompute_host: float = 15.0
    optimizer_host: float = 5.0
    bitsandbytes_host: float = 47.0
    update_host: float = 100.0  # fitted to six steps: AdamW, also in 8 bits, in the backward of Llamas of 1B and 8B
    copy_host: float = 10.0  # not fitted: events and streams around a copy, and its launch
    replay_host: float = 12.0  # not fitted: the number of launches in `trimtab.model.captured_micro_batch`

    def host_ops(self, op: Op) -> float:
        """Host time of an operation, in units of `Device.host_op_s`."""
        if op.name.startswith("bitsandbytes"):
            return self.bitsandbytes_host
        return {
            "forward": self.forward_host,
            "backward": self.backward_host,
            "recompute": self.recompute_host,
            "optimizer": self.optimizer_host,
            "update": self.update_host if op.name == UPDATE_CALL else self.optimizer_host,
            "transfer": self.backward_host,
            "host": 0.0,
            "replay": self.replay_host,
            "replayed": 0.0,
        }[op.stage]


CALIBRATION = Calibration()
_BESIDE = ("transfer", "host")  # stages that are not computed by the device


@dataclass(frozen=True)
class StepTime:
    """The duration of a step, and what limits it.

    Attributes:
        seconds: Time from the end of one step to the end of the next.
        gpu_seconds: Time in which the device computes.
        host_seconds: Time in which the host launches operations.
        by_stage: `seconds` by stage of the operations.
        bound: What limits the step: "compute", "bandwidth", "host" if the device mostly waits for launches, or "host
            link" if it mostly waits for copies from and to the host.
    """

    seconds: float
    gpu_seconds: float
    host_seconds: float
    by_stage: Mapping[str, float] = field(default_factory=dict)
    bound: str = "compute"


def step_seconds(
    ops: Sequence[Op],
    device: Device,
    *,
    tf32: bool = False,
    calibration: Calibration = CALIBRATION,
) -> StepTime:
    """Predict the time of a step on a device.

    Args:
        ops: Operations in launch order.
        device: The device that runs them.
        tf32: Whether fp32 products run as tf32 if the device supports it.
        calibration: Share of the peak rates that real steps reach.
    """
    is_cpu, kernel_s = device.is_cpu, 0.0 if device.is_cpu else calibration.kernel_s
    known: dict[int, tuple[str, float, float]] = {}  # repeated blocks share their Op objects
    busy = {"compute": 0.0, "bandwidth": 0.0}
    for op in ops:
        if id(op) not in known:
            costs = op_seconds(op, device, tf32=tf32, calibration=calibration)
            bound = "compute" if costs[0] > costs[1] else "bandwidth"
            is_copy = op.name in _LINK_OPS
            work = 0.0 if is_copy else max(costs) + kernel_s
            host = calibration.copy_host if op.name in _COPIES else 1.0
            launch = host if is_copy else calibration.host_ops(op)
            known[id(op)] = bound, work, launch * device.host_op_s
        bound, work, _ = known[id(op)]
        if op.stage not in _BESIDE:
            busy[bound] += work
    launched = finished = before = waited = copied = 0.0
    link = _Link(device)
    for _ in range(2):  # the host starts the second step before the device has finished the first
        before, waited, by_stage = finished, 0.0, dict.fromkeys((op.stage for op in ops), 0.0)
        for op in ops:
            _, work, launch = known[id(op)]
            launched += launch
            began = finished
            if op.stage == "transfer":  # starts when the device has computed the data to copy
                copied = max(copied, finished, launched) + work
                continue
            if op.stage == "host":
                launched = finished = max(copied, finished, launched) + work
                by_stage[op.stage] += finished - began
                continue
            if op.name in _LINK_OPS:
                finished = link.copy_or_wait(op, launched, finished)
                waited += finished - began
            # a CPU launches and computes in turn; other devices compute while the host fills their queue
            elif is_cpu:
                finished += launch + work
            else:
                finished = (launched if launched > finished else finished) + work
            by_stage[op.stage] += finished - began
        finished = max(finished, copied)  # the next step needs the weights
    seconds, gpu_seconds = finished - before, sum(busy.values())
    shares = {**busy, "host link": waited, "host": seconds - gpu_seconds - waited}
    return StepTime(seconds, gpu_seconds, launched / 2, by_stage, max(shares, key=lambda name: shares[name]))


class _Link:
    """The copies between host and device: one after another in each direction."""

    def __init__(self, device: Device) -> None:
        self._rate = device.bandwidth / 2 if device.is_cpu else device.host_link
        self._is_cpu = device.is_cpu
        self._free = {TO_HOST: 0.0, FROM_HOST: 0.0}  # the time at which the last copy ends

    def copy_or_wait(self, op: Op, launched: float, finished: float) -> float:
        """The time at which the device finishes a link operation, given its launch and when the device was free."""
        seconds = op.moved / self._rate
        if op.name in _WAITED_FOR:  # until this many bytes are left
            return max(finished, self._free[_WAITED_FOR[op.name]] - seconds)
        if op.name == IN_AFTER_OUT:
            self._free[FROM_HOST] = max(self._free[FROM_HOST], self._free[TO_HOST] - seconds)
            return finished
        if self._is_cpu:
            return finished + seconds
        direction = _COPIES[op.name]
        self._free[direction] = max(self._free[direction], launched, finished) + seconds
        return finished


def captured_ops(ops: Sequence[Op], input_bytes: int) -> list[Op]:
    """The operations of a micro-batch as one replay of a CUDA graph: a single launch, and copies of the inputs.

    Kernels in a graph are assumed to have the latency of other kernels; how much of it a graph saves was not measured.
    """
    known: dict[int, Op] = {}  # repeated blocks share their operations
    for op in ops:
        if id(op) not in known:
            known[id(op)] = op._replace(stage="replayed")
    return [Op("replay", "replay", 0, 2 * input_bytes, "fp32"), *(known[id(op)] for op in ops)]


def op_seconds(
    op: Op, device: Device, *, tf32: bool = False, calibration: Calibration = CALIBRATION
) -> tuple[float, float]:
    """Compute time and memory time of one operation, in seconds."""
    if op.stage in _BESIDE:
        return 0.0, op.moved / (device.host_link if op.stage == "transfer" else device.host_bandwidth)
    dtype = "tf32" if tf32 and op.dtype == "fp32" else op.dtype
    compute = op.flops / (device.rate(dtype) * _share_of_rate(op, dtype, device, calibration)) if op.flops else 0.0
    traffic = calibration.measured_traffic if device.is_measured else calibration.traffic
    return compute, op.moved / (device.bandwidth * traffic)


def _share_of_rate(op: Op, dtype: str, device: Device, calibration: Calibration) -> float:
    if "attention" in op.name:
        return calibration.attention
    is_tf32 = dtype == "tf32" and device.tf32 is not None
    if device.is_measured:
        return calibration.measured_product * (calibration.tf32_product / calibration.product if is_tf32 else 1.0)
    if is_tf32:
        return calibration.tf32_product
    return calibration.fp32_product if dtype in ("fp32", "tf32") else calibration.product
