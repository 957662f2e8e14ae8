"""Seconds of a training step, from the operations that were traced and what a device can do.

Each operation takes as long as the slower of its arithmetic and its memory traffic, and a little for being started. The
host launches operations one after the other and the device runs them in that order: a step ends when the last one has
run, so that whichever of the two is slower at a time sets the pace, and what cannot overlap is counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.hardware.catalog import Device
from trimtab.planner.trace.recorder import Op


@dataclass(frozen=True)
class Calibration:
    """How far real steps stay behind what a device could do. Each number can be fitted to measured steps by itself.

    The defaults were fitted to 29 steps of plain transformers code (BERT to a Llama of 1B) and to 18 steps of trimtab
    (Llamas of 1B and 8B), measured on H200s with torch 2.11; docs/planner.md says how close they come.

    Attributes:
        product: Share of a data sheet's rate that large matrix products reach. Clocks drop under load, and tiles do not
            fill the processors evenly: three quarters is usual.
        fp32_product: The same for fp32 without tensor cores.
        tf32_product: The same for tf32.
        measured_product: Share of a rate that was measured on the device: products of a step are less even than the
            large square one that was measured.
        attention: Share of the rate that attention kernels reach: between its products they compute exponentials, and
            backward recomputes what forward did not keep.
        traffic: Share of the bandwidth that operations reach which only move memory. A copy reaches 0.8 to 0.9; steps
            are full of small tensors and of strides.
        measured_traffic: Share of a bandwidth that was measured on the device.
        kernel_s: Seconds from the start of a kernel to the first of its work, which nothing hides.
        forward_host: How many times `Device.host_op_s` the host takes for an operation of the forward: Python of the
            model, dispatch, what autograd notes down, and the views in between, which are no operations of their own.
        backward_host: The same in backward, which is C++ alone.
        recompute_host: The same for what backward computes again: a forward, with Python's hooks for each tensor kept.
        optimizer_host: The same in the optimizer; fused and foreach forms launch few operations for many tensors.
        bitsandbytes_host: The same in an optimizer of bitsandbytes, which takes parameters one by one in Python.
    """

    product: float = 0.78
    fp32_product: float = 0.70
    tf32_product: float = 0.39
    measured_product: float = 0.92
    attention: float = 0.45
    traffic: float = 0.70
    measured_traffic: float = 0.80
    kernel_s: float = 3e-6
    forward_host: float = 8.0
    backward_host: float = 1.3
    recompute_host: float = 19.0
    optimizer_host: float = 5.0
    bitsandbytes_host: float = 47.0

    def host_ops(self, op: Op) -> float:
        """How many times `Device.host_op_s` an operation takes the host."""
        if op.name.startswith("bitsandbytes"):
            return self.bitsandbytes_host
        return {
            "forward": self.forward_host,
            "backward": self.backward_host,
            "recompute": self.recompute_host,
            "optimizer": self.optimizer_host,
        }[op.stage]


CALIBRATION = Calibration()


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, and why.

    Attributes:
        seconds: From the first launch to the end of the last operation.
        gpu_seconds: In which the device is at work.
        host_seconds: In which the host launches.
        by_stage: `seconds` by the stage of the operations.
        bound: What takes most of it: "compute", "bandwidth", or "host" where the device waits to be given work.
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
    captured: bool = False,
    calibration: Calibration = CALIBRATION,
) -> StepTime:
    """How long a device takes for the operations of a step.

    Args:
        ops: In the order in which they are launched.
        device: What runs them.
        tf32: fp32 products run as tf32 where the device has it.
        captured: The step is replayed as a CUDA graph: the host launches nothing.
        calibration: How far real steps stay behind.
    """
    launched = finished = 0.0
    by_stage: dict[str, float] = {}
    busy = {"compute": 0.0, "bandwidth": 0.0}
    is_cpu, kernel_s = device.is_cpu, 0.0 if device.is_cpu else calibration.kernel_s
    known: dict[int, tuple[float, float, str]] = {}  # blocks that repeat share their operations
    for op in ops:
        costs = known.get(id(op))
        if costs is None:
            compute, traffic = op_seconds(op, device, tf32=tf32, calibration=calibration)
            launch = 0.0 if captured else calibration.host_ops(op) * device.host_op_s
            bound = "compute" if compute > traffic else "bandwidth"
            costs = known[id(op)] = max(compute, traffic) + kernel_s, launch, bound
        work, launch, bound = costs
        launched += launch
        began = finished
        # a CPU launches and computes by turns; the queue of any other device is filled while it works
        if is_cpu:
            finished += launch + work
        else:
            finished = (launched if launched > finished else finished) + work
        busy[bound] += work
        by_stage[op.stage] = by_stage.get(op.stage, 0.0) + finished - began
    gpu_seconds = sum(busy.values())
    shares = {**busy, "host": finished - gpu_seconds}
    return StepTime(finished, gpu_seconds, launched, by_stage, max(shares, key=lambda name: shares[name]))


def op_seconds(
    op: Op, device: Device, *, tf32: bool = False, calibration: Calibration = CALIBRATION
) -> tuple[float, float]:
    """Seconds of one operation if its arithmetic alone counted, and if its memory traffic alone did."""
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
