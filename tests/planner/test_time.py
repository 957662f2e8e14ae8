"""Predicted times rank as real ones do: by batch, by number format, by device, and by what holds a step up."""

from dataclasses import replace

import pytest

from trimtab.hardware.catalog import CATALOG
from trimtab.planner.time import CALIBRATION, Calibration, captured_ops, op_seconds, step_seconds
from trimtab.planner.trace.recorder import Op

H200, T4 = CATALOG["h200"], CATALOG["t4"]
EXACT = Calibration(
    product=1.0, fp32_product=1.0, attention=0.5, traffic=1.0, kernel_s=0.0, forward_host=1.0, backward_host=1.0
)


def product(rows, inner, columns, dtype="bf16", stage="forward", name="aten.mm"):
    width = 4 if dtype == "fp32" else 2
    moved = width * (rows * inner + inner * columns + rows * columns)
    return Op(name, stage, 2 * rows * inner * columns, moved, dtype)


def elementwise(num_elements, dtype="bf16", stage="forward"):
    return Op("aten.add", stage, 0, 3 * num_elements * (4 if dtype == "fp32" else 2), dtype)


def step_of(num_tokens, hidden, num_layers, dtype="bf16", length=2048):
    """The operations of a step of a decoder of that shape, roughly: 12 matrices a layer, some passes, AdamW."""
    layer = []
    for _ in range(6):
        layer.append(product(num_tokens, hidden, 2 * hidden, dtype))
        layer.append(elementwise(num_tokens * hidden, dtype))
    attention = product(num_tokens, length, 2 * hidden, dtype, name="aten._scaled_dot_product_flash_attention")
    forward = [*layer, attention] * num_layers
    backward = [op._replace(stage="backward", flops=2 * op.flops, moved=2 * op.moved) for op in reversed(forward)]
    num_parameters = 12 * hidden * hidden * num_layers
    return [*forward, *backward, Op("fused_adamw", "optimizer", 0, 28 * num_parameters, "fp32")]


def test_an_operation_by_hand():
    """An H200: 989e12 multiplications and additions, 4.8e12 bytes a second."""
    op = Op("aten.mm", "forward", 989 * 10**9, 48 * 10**8, "bf16")
    assert op_seconds(op, H200, calibration=EXACT) == pytest.approx((1e-3, 1e-3))
    assert op_seconds(op._replace(name="aten._flash_attention_forward"), H200, calibration=EXACT)[0] == 2e-3
    assert op_seconds(op, H200) == pytest.approx((1e-3 / CALIBRATION.product, 1e-3 / CALIBRATION.traffic))


def test_whichever_is_slower_counts_and_is_named():
    ops = [Op("aten.mm", "forward", 989 * 10**9, 1, "bf16")] * 10
    took = step_seconds(ops, H200, calibration=EXACT)
    assert took.seconds == pytest.approx(10e-3)  # the first launch overlaps with the step before
    assert took.gpu_seconds == pytest.approx(10e-3)
    assert took.bound == "compute"
    took = step_seconds([op._replace(moved=2 * 48 * 10**8) for op in ops], H200, calibration=EXACT)
    assert took.gpu_seconds == pytest.approx(20e-3)
    assert took.bound == "bandwidth"


def test_many_small_operations_are_bound_by_the_host():
    ops = [elementwise(1000)] * 5000
    took = step_seconds(ops, H200)
    assert took.bound == "host"
    assert took.host_seconds == pytest.approx(5000 * CALIBRATION.forward_host * H200.host_op_s)
    assert took.seconds == pytest.approx(took.host_seconds)


def test_a_captured_micro_batch_is_one_launch():
    ops, step = [elementwise(1000)] * 5000, Op("fused_adamw", "optimizer", 0, 10**6, "fp32")
    took, captured = step_seconds(ops, H200), step_seconds(captured_ops(ops, 1000), H200)
    assert captured.host_seconds == pytest.approx(CALIBRATION.replay_host * H200.host_op_s)
    assert captured.seconds == pytest.approx(captured.gpu_seconds)
    assert captured.seconds < took.seconds / 2
    # what follows is launched by the host, while the device computes
    followed = step_seconds([*captured_ops(ops, 1000), *[step] * 10], H200)
    launches = 10 * CALIBRATION.optimizer_host * H200.host_op_s
    assert followed.host_seconds - captured.host_seconds == pytest.approx(launches)
    assert followed.seconds == pytest.approx(followed.gpu_seconds)


def test_a_step_overlaps_with_the_next_one():
    """Only the host has work, then only the device: the host prepares a step while the device computes the last one."""
    small, large = [elementwise(1)] * 1000, [Op("aten.mm", "forward", 989 * 10**11, 1, "bf16")]
    for ops in ([*small, *large], [*large, *small]):
        assert step_seconds(ops, H200, calibration=EXACT).seconds == pytest.approx(0.1, rel=1e-3)
    # a device that is done early waits
    slow = replace(H200, host_op_s=1e-3)
    assert step_seconds([*small, *large], slow, calibration=EXACT).seconds == pytest.approx(1.001, rel=1e-3)


def test_stages_add_up():
    took = step_seconds(step_of(8192, 2048, 16), H200)
    assert set(took.by_stage) == {"forward", "backward", "optimizer"}
    assert sum(took.by_stage.values()) == pytest.approx(took.seconds)
    assert took.by_stage["backward"] > took.by_stage["forward"]


@pytest.mark.parametrize("name", ["h200", "t4", "rtx-4090", "cpu"])
def test_more_tokens_take_longer_and_large_batches_are_no_worse_per_token(name):
    sizes = [512, 1024, 2048, 4096, 8192]
    seconds = [step_seconds(step_of(size, 2048, 16, "fp16"), CATALOG[name]).seconds for size in sizes]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]
    assert seconds[-1] / sizes[-1] < seconds[0] / sizes[0]


def test_fp32_is_slower_than_tf32_and_that_than_bf16():
    fp32, tf32 = (step_seconds(step_of(4096, 2048, 16, "fp32"), H200, tf32=on).seconds for on in (False, True))
    bf16 = step_seconds(step_of(4096, 2048, 16), H200).seconds
    assert fp32 > 2 * tf32 > 2 * bf16
    t4 = [step_seconds(step_of(4096, 2048, 16, "fp32"), T4, tf32=on).seconds for on in (False, True)]
    assert t4[0] == t4[1]  # it has no tf32


def test_bf16_on_a_t4_is_slower_than_fp16():
    fp16, bf16 = (step_seconds(step_of(4096, 1024, 8, dtype), T4).seconds for dtype in ("fp16", "bf16"))
    assert bf16 > 5 * fp16


def test_devices_rank_by_what_they_can_do():
    names = ["cpu", "t4", "a10", "a100", "h100", "h200"]
    seconds = [step_seconds(step_of(8192, 2048, 16, "fp16"), CATALOG[name]).seconds for name in names]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == len(names)


def test_recomputing_costs_the_host_more_than_the_forward_did():
    ops = [elementwise(1000)] * 1000
    again = [op._replace(stage="recompute") for op in ops]
    assert step_seconds(again, H200).seconds > step_seconds(ops, H200).seconds


def test_a_measured_rate_is_nearly_reached():
    op = product(8192, 8192, 8192)
    sheet = op_seconds(op, H200)[0]
    measured = op_seconds(op, replace(H200, is_measured=True))[0]
    assert measured == pytest.approx(sheet * CALIBRATION.product / CALIBRATION.measured_product)


def test_a_cpu_launches_and_computes_by_turns():
    cpu = CATALOG["cpu"]
    op = product(64, 64, 64, "fp32")
    took = step_seconds([op] * 100, cpu)
    assert took.gpu_seconds == pytest.approx(100 * max(op_seconds(op, cpu)))
    assert took.seconds == pytest.approx(took.gpu_seconds + took.host_seconds)


def test_no_operations_take_no_time():
    took = step_seconds([], H200)
    assert (took.seconds, took.gpu_seconds, took.host_seconds) == (0, 0, 0)
    assert took.by_stage == {}
