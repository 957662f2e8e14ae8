"""Optimizer state in host memory as a setting of a recipe: numbers, predictions, refusals, and what `auto` does."""

from collections import Counter

import pytest

from tiny_runs import Watch, lines_of, same_bits
from trimtab import Recipe, predict_step_memory
from trimtab.errors import DoesNotFit, RecipeError
from trimtab.hardware import memory as host_memory
from trimtab.model import host_areas
from trimtab.optim import offloaded_state
from trimtab.planner.host import state_on_host
from trimtab.planner.shapes import BatchShape, named_task
from trimtab.planner.survey import survey
from trimtab.planner.target import known_target
from trimtab.planner.time import step_seconds
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.techniques.apply import plain_spec

pytestmark = pytest.mark.usefixtures("own_folder")
IN_BACKWARD = {"train": {"max_grad_norm": None}, "memory": {"update": "in-backward"}}


@pytest.fixture
def train(four_steps, monkeypatch):
    """Trains with a value of memory.offload_state, with state in slices."""
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**16)
    monkeypatch.setattr(offloaded_state, "NUM_SLOTS", 3)
    monkeypatch.setattr(offloaded_state, "MIN_ELEMENTS", 512)

    def train(offload_state, callbacks=(), memory=None, **sections):
        return four_steps(callbacks, memory={"offload_state": offload_state, **(memory or {})}, **sections)

    return train


EQUAL = {
    "in backward": IN_BACKWARD,
    "in backward, 8-bit": IN_BACKWARD | {"train": {"max_grad_norm": None, "optimizer": "adamw8bit"}},
    "in backward, recomputed": IN_BACKWARD | {"memory": {"update": "in-backward", "gradient_checkpointing": "all"}},
    "after backward, clipped, in micro-batches": {"memory": {"update": "device", "micro_batch": 3}},
    "unfrozen later": {"train": {"freeze": {"*.layer.0": "2 steps"}}, "memory": {"update": "device"}},
    "adagrad": {"train": {"optimizer": "adagrad"}},
    "sgd": {"train": {"optimizer": "sgd", "momentum": 0.9}},
    "skips": {"train": {"on_nan": "skip"}},
    "fp16": {"train": {"precision": "fp16"}, "memory": {"micro_batch": 3}},
    "bf16": {"train": {"precision": "bf16"}},
}
QUICK = ("in backward", "after backward, clipped, in micro-batches")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in EQUAL])
def test_weights_and_metrics_are_equal_to_the_bit(train, case):
    ours, theirs = Watch(), Watch()
    runs = [train(value, [watch], **EQUAL[case]) for value, watch in (("host", ours), ("none", theirs))]
    assert len(ours.weights) == 4
    assert all(same_bits(*pair) for pair in zip(ours.weights, theirs.weights, strict=True))
    one, other = ([line.get("loss") for line in lines_of(run.folder)] for run in runs)
    assert one == other


# ---------------------------------------------------------------------- predictions

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 128,
}
NUM_LARGE = 2 * 8192 * 512 + 8 * (4 * 512 * 512 + 3 * 512 * 1024)


def test_state_on_the_device_is_that_of_the_slots(monkeypatch):
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**18)
    monkeypatch.setattr(offloaded_state, "MIN_ELEMENTS", 2**16)
    options = {"optimizer": "adamw", "precision": "fp32", "gpu": "a100", "max_grad_norm": None, "update": "in-backward"}
    before, after = (
        predict_step_memory(LLAMA, "causal-lm", 1, 16, offload_state=value, **options) for value in ("none", "host")
    )
    small = 17 * 512 * 8  # of norms, which have state on the device
    assert before.parts["optimizer state"] == pytest.approx(8 * NUM_LARGE + small, rel=0.01)
    assert after.parts["optimizer state"] == pytest.approx(offloaded_state.NUM_SLOTS * 2**18 + small, rel=0.02)
    assert state_on_host(after.trace) == 8 * NUM_LARGE


@pytest.mark.parametrize("update", ["in-backward", "device"])
def test_a_prediction_from_few_blocks_is_that_of_all(monkeypatch, update):
    """What is fetched in one block and used in the next differs at the ends alone."""
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**20)
    recipe = Recipe(
        model={"config": LLAMA, "tokenizer": "train"},
        task="causal-lm",
        data={"train": "nowhere"},
        train={"max_grad_norm": None},
    )
    target = known_target("a100", None)
    tracer = StepTracer(recipe, named_task(recipe), target.gpu)
    spec = plain_spec(1, "fp32", update=update, offload_state="host")
    short, whole = (tracer.trace(spec, BatchShape(1, 16), whole=is_whole) for is_whole in (False, True))
    one, other = (Counter(event.size for event in trace.events if event.size > 512) for trace in (short, whole))
    assert one == other
    assert len([op for op in short.ops if op.name.startswith("aten._fused_adamw")]) > 2 * 8 * 7, "slices"
    for name in ("host_link.weights_out", "host_link.weights_in", "trimtab.update"):
        one, other = ([op.moved for op in trace.ops if op.name == name] for trace in (short, whole))
        assert len(one) == pytest.approx(len(other), rel=0.05), name
        assert sum(one) == pytest.approx(sum(other), rel=0.05), name
    times = [step_seconds(trace.ops, target.device).seconds for trace in (short, whole)]
    assert times[0] == pytest.approx(times[1], rel=0.1)


# ---------------------------------------------------------------------- what is refused, and what auto does


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"memory": {"update": "host"}}, "memory.update: host has all state in host memory"),
        ({"train": {"optimizer": "adafactor", "lr": 1e-2}}, "adafactor"),
    ],
)
def test_what_does_not_go_together(train, sections, words):
    with pytest.raises(RecipeError, match=words) as refused:
        train("host", **sections)
    assert refused.value.cure.startswith("memory.offload_state: none; or change one of these settings")


def test_host_memory_is_checked_before_it_is_used(train, monkeypatch):
    monkeypatch.setattr(host_areas, "free_host_memory", lambda: host_memory.memory_in_use(host_areas._HOST) + 1000)
    with pytest.raises(DoesNotFit, match="memory.offload_state needs .* of host memory for the optimizer's state"):
        train("host")


@pytest.mark.slow
def test_auto_takes_it_if_nothing_else_fits(monkeypatch):
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**24)  # the model is small

    def chosen(memory):
        recipe = Recipe(
            model={"config": {**LLAMA, "hidden_size": 1024}, "tokenizer": "train"},
            task="causal-lm",
            data={"train": "nowhere"},
            train={"batch_size": 1, "precision": "fp32", "compile": "off", "max_grad_norm": None},
            memory={"gradient_checkpointing": "none", "loss": "plain", "stream_weights": "none"},
        )
        return next((r for r in survey(recipe, gpu="a100", length=16, memory=memory).rungs if r.is_chosen), None)

    plenty = chosen("8GiB")
    assert plenty.spec["offload_state"] == "none"
    little = chosen(f"{plenty.total_bytes // 2**20 - 600}MiB")
    assert (little.spec["update"], little.spec["offload_state"]) == ("in-backward", "host")
