"""The record of a step: memory at any moment adds up, and tensors of equal blocks are one line."""

from trimtab.report.step_record import Allocation, StepRecord

RECORD = StepRecord(
    source="predicted",
    device="a device",
    allocations=(
        Allocation(100, "weights", "layers.0.up.weight"),
        Allocation(100, "weights", "layers.1.up.weight"),
        Allocation(30, "activations", "layers.0.up", "mm", 0, 5),
        Allocation(30, "activations", "layers.1.up", "mm", 1, 4),
        Allocation(50, "logits and loss", "head", "mm", 2, 6),
        Allocation(7, "gradients", "layers.1.up.weight", "mm", 3),
    ),
    times=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0),
    stages=(("forward", 0), ("backward", 3), ("optimizer", 5)),
)


def test_the_peak_is_the_sum_of_what_is_alive():
    heights = [moment.num_bytes for moment in RECORD.moments()]
    assert heights == [200, 230, 260, 310, 317, 287, 257, 207]
    peak = RECORD.peak()
    assert (peak.num_bytes, peak.change, peak.stage, peak.position) == (317, 3, "backward", 0.3)
    assert peak.parts["weights"] == 200


def test_a_short_timeline_still_has_the_peak():
    moments = RECORD.timeline(2)
    assert [moment.num_bytes for moment in moments] == [317, 257]


def test_stages_cover_the_step():
    assert RECORD.stage_spans() == [("forward", 0.0, 0.2), ("backward", 0.2, 0.4), ("optimizer", 0.4, 1.0)]


def test_tensors_of_equal_blocks_are_together():
    found = RECORD.largest(RECORD.peak().change, 3)
    assert [(one.name, one.count, one.total_bytes) for one in found] == [
        ("layers.*.up.weight", 2, 200),
        ("layers.*.up", 2, 60),
        ("head", 1, 50),
    ]
    assert RECORD.largest(4, 9)[2].name == "layers.0.up", "a single one keeps its number"
