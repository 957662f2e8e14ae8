"""Steps whose micro-batches are CUDA graphs: a memory pool of their own, one launch each, and time to start."""

from dataclasses import replace
from functools import cache

import pytest

from trimtab import Recipe
from trimtab.model.compile_time import capture_seconds, compile_seconds
from trimtab.planner.allocator import CAP_STEP, LARGE_SEGMENT, peaks, round_size
from trimtab.planner.decide import choose_row
from trimtab.planner.graph_memory import graph_memory, with_graph_workspaces
from trimtab.planner.memory import predict_captured
from trimtab.planner.predict_step import predict_step_memory
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.search import ranked_seconds
from trimtab.planner.shapes import OneLength, named_task
from trimtab.planner.target import known_target
from trimtab.planner.trace.recorder import Birth, Event, Mark, Trace

BERT = {"model_type": "bert", "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
BERT |= {"num_hidden_layers": 6, "vocab_size": 8000}
MIB = 2**20
START_S = 20.0


@cache  # a prediction traces a step; a planner remembers those that it has made
def planner_of(value="graphs", *, batch=8, micro_batch=8, target=None, length=128, **train):
    recipe = Recipe(
        model={"config": BERT, "tokenizer": "train"},
        task="classify",
        data={"train": "rows.jsonl"},
        train={"batch_size": batch, "compile": value, "precision": "bf16", **train},
        memory={"gradient_checkpointing": "none", "micro_batch": micro_batch, "padding": "none", "kernels": "plain"},
    )
    return RecipePlanner(recipe, named_task(recipe), target or known_target("h200", None), OneLength(length))


def prediction_of(planner):
    return planner.prediction(planner.space.reference())


def evaluation_of(planner):
    return planner.evaluation(planner.space.reference())[1]


def workspaces(trace):
    return sum(birth.size for birth in trace.births.values() if birth.part == "library")


def gradient_bytes(trace):
    return sum(round_size(trace.births[storage].size) for storage in trace.gradients)


def pool_bytes(prediction):
    return peaks(prediction.graphs.pool)[1]


# ---------------------------------------------------------------------- memory


def made_trace(sizes, parts, events, marks, gradients=()):
    births = {storage: Birth(sizes[storage], parts[storage], "", False, None) for storage in sizes}
    found = tuple(Event(storage, size and sizes[storage]) for storage, size in events)
    return Trace(found, births, (), tuple(Mark(*mark) for mark in marks), frozenset(gradients), (), {})


def test_what_a_capture_allocates_is_separated():
    """A weight, a workspace; a micro-batch that makes a gradient; one that adds to it; an optimizer's temporary."""
    names = ["weight", "workspace", "inputs", "first", "gradient", "inputs2", "second", "added", "temporary"]
    sizes = {number: (number + 1) * MIB for number in range(len(names))}
    kinds = ["weights", "library", "inputs", "forward", "backward", "inputs", "forward", "backward", "optimizer"]
    parts = dict(enumerate(kinds))
    order = ["workspace", "weight", "inputs", "first", "gradient", "-first", "-inputs", "inputs2", "second", "added"]
    order += ["-second", "-added", "-inputs2", "temporary", "-temporary", "-gradient"]
    events = [(names.index(name.removeprefix("-")), 0 if name.startswith("-") else 1) for name in order]
    marks = [("step", 2), ("backward begins", 4), ("backward ends", 6), ("backward begins", 9), ("backward ends", 11)]
    trace = made_trace(sizes, parts, events, marks, gradients=[names.index("gradient")])
    found = graph_memory(with_graph_workspaces(trace))
    pool = [event for event in found.pool if event.size]
    assert [event.size // MIB for event in pool] == [2, 7, 8]  # a second workspace, activations, the new gradients
    outside = {event.storage for event in (*found.before, *found.after)}
    assert {names[storage] for storage in outside} == set(names) - {"second", "added"}
    assert not outside & {event.storage for event in found.pool}
    peak = (1 + 2 + 5 + 2 + 6 + 7 + 8) * MIB  # as torch counts it: while the second micro-batch is captured
    assert predict_captured(trace).allocated == peak
    held = peaks(found.events())[0]
    assert held == (1 + 2 + 5 + 9) * MIB + peaks(found.pool)[1]  # the pool is still held when the optimizer runs


def test_gradients_exist_in_every_captured_micro_batch_and_workspaces_twice():
    captured = prediction_of(planner_of())
    plain, second = prediction_of(planner_of("blocks")), prediction_of(planner_of("blocks", batch=16))
    assert captured.allocated == second.allocated + workspaces(second.trace) > plain.allocated
    assert workspaces(captured.trace) == 2 * workspaces(plain.trace) > 0
    assert captured.parts["gradients"] == gradient_bytes(plain.trace)
    assert sum(captured.parts.values()) == captured.allocated


def test_the_pool_is_held_beside_the_optimizer():
    captured = prediction_of(planner_of())
    kept = captured.parts["weights"] + captured.parts["gradients"] + captured.parts["optimizer state"]
    pool = pool_bytes(captured)
    assert captured.parts["activations"] < pool < captured.allocated - kept + LARGE_SEGMENT
    outside_pool = kept + workspaces(captured.trace) // 2
    assert outside_pool + pool <= captured.needed <= outside_pool + pool + CAP_STEP + 3 * LARGE_SEGMENT
    assert captured.needed <= captured.reserved + CAP_STEP
    assert captured.fits(captured.total)
    assert not captured.fits(captured.total - CAP_STEP)


@pytest.mark.slow
def test_an_evaluation_needs_memory_beside_the_pool():
    large = {"batch": 64, "micro_batch": 64}
    planner = planner_of(**large)
    captured, evaluation = prediction_of(planner), evaluation_of(planner)
    plain = evaluation_of(planner_of("blocks", **large))
    added = evaluation.allocated - plain.allocated  # gradients stay, and so do the workspaces of captures
    assert added == gradient_bytes(captured.trace) + workspaces(captured.trace) // 2
    outside_pool = evaluation.allocated - workspaces(captured.trace) // 2
    assert pool_bytes(captured) > plain.needed
    assert evaluation.needed == pytest.approx(outside_pool + pool_bytes(captured), abs=CAP_STEP + 3 * LARGE_SEGMENT)
    assert evaluation.parts["gradients"] == captured.parts["gradients"]


@pytest.mark.slow
def test_fixed_segments():
    target = known_target("mi300x", None)
    assert not target.expandable
    found = prediction_of(planner_of(target=target))
    assert found.allocated == sum(found.parts.values())
    assert found.needed >= found.parts["weights"] + peaks(found.graphs.pool, expandable=False)[1]


@pytest.mark.slow
def test_other_devices_capture_nothing():
    captured = prediction_of(planner_of(target=known_target("cpu", None)))
    assert captured.graphs is None


def test_one_step_from_its_settings():
    options = {"precision": "bf16", "compile": "graphs", "padding": "none"}
    captured = predict_step_memory(BERT, "classify", 8, 128, **options)
    assert captured.allocated == prediction_of(planner_of()).allocated
    assert captured == predict_step_memory(BERT, "classify", 8, 128, num_micro_batches=4, **options)


# ---------------------------------------------------------------------- time


def seconds_of(**options):
    planner = planner_of(**options)
    return planner.estimate(planner.space.reference()).step_s


def test_a_captured_step_does_not_wait_for_the_host():
    captured, twice = seconds_of(), seconds_of(batch=16)
    plain = seconds_of(value="blocks")
    assert captured < plain / 2
    assert captured < twice < 2 * captured  # the optimizer runs once


@pytest.mark.slow
def test_micro_batches_take_equally_long():
    one, two, three, five = (seconds_of(batch=8 * number) for number in (1, 2, 3, 5))
    assert three - two == pytest.approx(two - one, rel=1e-6)
    assert five - one == pytest.approx(4 * (two - one), rel=1e-6)


# ---------------------------------------------------------------------- what is worth its start


def test_without_a_start_only_steps_count():
    assert ranked_seconds(0.5, 0.0, 10) == 0.5


@pytest.mark.parametrize(
    ("num_steps", "before", "after", "is_worth_it"),
    [
        (100, 0.5, 0.25, False),  # saves 25 s of 50, and starts 20 s later
        (100, 2.0, 0.5, True),  # saves 150 s of 200
        (10_000, 0.040, 0.020, True),
        (10_000, 0.040, 0.039, False),  # a gain that may be an error of the prediction
        (10_000, 0.040, 0.050, False),
        (500, 0.040, 0.020, False),  # saves 10 s
    ],
)
def test_a_start_has_to_be_worth_it(num_steps, before, after, is_worth_it):
    plain, compiled = ranked_seconds(before, 0.0, num_steps), ranked_seconds(after, START_S, num_steps)
    assert (compiled < plain) is is_worth_it


@pytest.mark.parametrize(("num_steps", "expected"), [(300, "capture"), (1_000_000, "graphs")])
def test_a_plan_compiles_for_long_runs_and_captures_for_shorter_ones(num_steps, expected):
    planner = planner_of("auto", max_steps=num_steps)
    assert {axis.technique.key: axis.values for axis in planner.space.axes}["compile"] == ("off", "capture", "graphs")
    ladder = planner.choose()
    assert ladder.chosen.spec["compile"] == expected
    assert ladder.chosen.estimate.num_steps == num_steps
    assert {row.spec["compile"] for row in ladder.rows} == {expected}, "only the better value is searched"
    reference = planner.space.reference()
    values = ("off", "capture", "graphs")
    off, capture, graphs = (planner.estimate(reference.having({"compile": value})) for value in values)
    assert graphs.step_s < capture.step_s < off.step_s
    assert off.start_s == 0.0
    assert capture.start_s == capture_seconds(planner.case.model, 1)  # rows of one length
    assert graphs.start_s == capture.start_s + compile_seconds(planner.case.model)


def test_the_rules_know_the_length_of_the_run():
    assert planner_of("auto", max_steps=70).case.num_steps == 70
    assert planner_of("auto").case.num_steps is None
    planner = planner_of("auto", epochs=2.5, batch=8)
    planner.lengths = OneLength(128, num_rows=33)
    assert planner.case.num_steps == 13  # 2.5 epochs of five steps


def test_a_plan_that_leaves_little_free_says_so(caplog):
    """A run may take the smallest plan if it fits without the share that others leave free."""
    roomy = planner_of("off")
    ladder = roomy.choose()
    row = ladder.smallest
    needed = roomy.needed_bytes(row) + row.estimate.outside_bytes
    for share, warns in ((1.01, True), (1.05, False)):
        target = known_target("h200", f"{int(share * needed)}B")
        planner = planner_of("off", target=target)
        found = replace(ladder, chosen=None if warns else row)
        caplog.clear()
        with caplog.at_level("INFO", "trimtab"):
            assert choose_row(planner, found) == row
        assert any("so memory may run out" in record.message for record in caplog.records) is warns
