"""The record of a predicted step, its names, and the file for torch's memory viewer."""

import pickle
import pickletools
from dataclasses import replace

import pytest
from torch.cuda import _memory_viz

from trimtab.commands.memory import write_snapshot
from trimtab.hardware.catalog import find
from trimtab.planner.memory_picture import page_of, predicted_record, predicted_snapshot
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.shapes import OneLength, named_task
from trimtab.planner.target import known_target
from trimtab.planner.timeline import event_times, step_record
from trimtab.planner.torch_snapshot import torch_snapshot
from trimtab.recipe.schema import Recipe

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
# what the unpickler of torch's viewer knows
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def planner_of(**sections):
    usual = {
        "model": {"config": CONFIG, "tokenizer": "train"},
        "task": "causal-lm",
        "data": {"train": "rows.jsonl"},
        "train": {"batch_size": 4, "compile": "off"},
        "memory": {"micro_batch": 4, "padding": "longest", "loss": "plain"},
    }
    recipe = Recipe.model_validate(usual | sections)
    return RecipePlanner(recipe, named_task(recipe), known_target("t4", None), OneLength(128))


@pytest.fixture(scope="module")
def planner():
    return planner_of()


@pytest.fixture(scope="module")
def spec(planner):
    return planner.space.reference()


def test_the_record_has_the_predicted_peak(planner, spec):
    prediction, record = planner.prediction(spec), predicted_record(planner, spec)
    peak = record.peak()
    assert peak.num_bytes == prediction.allocated
    assert peak.parts == prediction.parts
    assert peak.stage == prediction.stage
    assert [name for name, _, _ in record.stage_spans()] == ["forward", "backward", "optimizer"]
    assert min(size for moment in record.moments() for size in moment.parts.values()) >= 0


def test_tensors_are_named_by_module_and_parameter(planner, spec):
    record = predicted_record(planner, spec)
    named = {(one.part, one.name) for one in record.allocations}
    for block in range(CONFIG["num_hidden_layers"]):  # most of which were not traced
        for part in ("weights", "gradients", "optimizer state"):
            assert (part, f"model.layers.{block}.mlp.down_proj.weight") in named
        assert ("activations", f"model.layers.{block}.mlp.act_fn") in named
        assert ("temporaries", f"model.layers.{block}.mlp.down_proj") in named, "in backward"
    assert not [name for _, name in named if f"layers.{CONFIG['num_hidden_layers']}" in name]
    assert ("logits and loss", "lm_head") in named
    nameless = sum(one.num_bytes for one in record.allocations if not one.name)
    assert nameless < 0.2 * sum(one.num_bytes for one in record.allocations)


@pytest.mark.slow
def test_recomputed_blocks_leave_no_name_behind():
    """Recomputation stops in the middle of a module, by an exception."""
    planner = planner_of(memory={"micro_batch": 2, "gradient_checkpointing": "all", "padding": "longest"})
    record = predicted_record(planner, planner.space.reference())
    names = {one.name for one in record.allocations if one.op in ("_log_softmax", "nll_loss_backward")}
    assert names == {""}
    assert {one.name.partition(".")[0] for one in record.allocations} <= {
        "model",
        "lm_head",
        "batch",
        "",
        "cublas main workspace",
        "cublas autograd workspace",
    }
    assert [name for name, _, _ in record.stage_spans()] == ["forward", "backward"] * 2 + ["optimizer"]


def test_the_page_tells_the_plan(planner, spec):
    page = page_of(planner, spec, [predicted_record(planner, spec)])
    assert page.facts["micro-batch"] == "4 × 128 tokens"
    assert page.limit_bytes == planner.target.budget_bytes - planner.prediction(spec).outside


@pytest.mark.parametrize("expandable", [True, False])
def test_torch_reads_the_snapshot(planner, spec, expandable):
    """With its own code: the summary, the flame graphs, the trace and both pages."""
    prediction = replace(planner.prediction(spec), expandable=expandable)
    snapshot = torch_snapshot(prediction, event_times(prediction.trace, find("t4")))
    summary = _memory_viz.segsum(snapshot)  # which raises if sizes do not add up
    assert f"segments: {len(snapshot['segments'])}" in summary
    lines = _memory_viz.memory(snapshot, format_flamegraph=str).splitlines()
    assert any("model.layers.7.mlp.down_proj.weight" in line for line in lines)
    assert _memory_viz.segments(snapshot, format_flamegraph=str)
    assert _memory_viz.trace(snapshot).count("free completed") > 100
    for draw in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in draw(snapshot)


def test_the_snapshot_has_the_predicted_peak(planner, spec):
    snapshot = predicted_snapshot(planner, spec)
    living, in_use, peak = {}, 0, 0
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in living
            living[entry["addr"]] = -(-entry["size"] // 512) * 512
            in_use += living[entry["addr"]]
        elif entry["action"] == "free_completed":
            in_use -= living.pop(entry["addr"])
        peak = max(peak, in_use)
    assert peak == planner.prediction(spec).allocated
    used = {
        block["address"]: block["size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert used == living


def test_the_file_is_one_that_the_viewer_can_read(planner, spec, tmp_path):
    write_snapshot(predicted_snapshot(planner, spec), tmp_path / "snapshot.pickle")
    contents = (tmp_path / "snapshot.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(contents)} <= OPCODES
    assert contents[:2] == b"\x80\x04"
    assert set(pickle.loads(contents)) >= {"segments", "device_traces"}


def test_without_a_device_changes_are_evenly_spaced(planner, spec):
    record = step_record(planner.prediction(spec).trace, None)
    assert not record.is_timed
    assert record.times[:3] == (0.0, 1.0, 2.0)
