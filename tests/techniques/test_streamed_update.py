"""Weights on the device whose gradients and state are on the host: the numbers of a plain step, and predictions."""

import pytest
import torch

from tiny_runs import Watch, reproducible_lines, same_bits, saved_tensors
from trimtab import Recipe, predict_step_memory
from trimtab.errors import RecipeError
from trimtab.optim import host_update, offloaded_state
from trimtab.optim.build import build_optimizer
from trimtab.optim.host_update import optimized
from trimtab.optim.in_backward import updates_of
from trimtab.optim.streamed_update import build_streamed
from trimtab.planner.host import TracedTensors, predict_host
from trimtab.planner.shapes import BatchShape, named_task
from trimtab.planner.survey import survey
from trimtab.planner.target import known_target
from trimtab.planner.time import step_seconds
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.techniques.apply import host_use, plain_spec

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**16)
    monkeypatch.setattr(offloaded_state, "NUM_SLOTS", 3)


EQUAL = {
    "adamw": {},
    "micro-batches": {"memory": {"micro_batch": 3}},
    "adagrad": {"train": {"optimizer": "adagrad"}},
    "sgd": {"train": {"optimizer": "sgd", "momentum": 0.9}},
    "8-bit": {"train": {"optimizer": "adamw8bit"}},
    "not clipped": {"train": {"max_grad_norm": None}},
    "cosine, warmup": {"train": {"schedule": "cosine", "warmup": 2}},
    "unfrozen later": {"train": {"freeze": {"*.layer.0": "2 steps"}}},
    "fp16": {"train": {"precision": "fp16"}, "memory": {"micro_batch": 3}},
    "fp16, one micro-batch": {"train": {"precision": "fp16"}},
    "bf16": {"train": {"precision": "bf16"}, "memory": {"micro_batch": 3}},
    "skips": {"train": {"on_nan": "skip"}},
    "recomputed": {"memory": {"gradient_checkpointing": "all"}},
    "rehearsed": {"memory": {"budget": "8GiB"}},
    "lora": {"adapter": "lora"},
}
QUICK = ("adamw", "fp16")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in EQUAL])
def test_weights_and_metrics_are_equal_to_the_bit(train, case):
    ours, theirs = Watch(), Watch()
    runs = [train(how, [watch], **EQUAL[case]) for how, watch in (("streamed", ours), ("device", theirs))]
    assert runs[0].plan.update == "streamed"
    assert len(ours.weights) == 4
    one, other = (reproducible_lines(run.folder, "predicted_peak_bytes") for run in runs)
    assert one == other
    assert all(same_bits(*pair) for pair in zip(ours.weights, theirs.weights, strict=True))
    one, other = (saved_tensors(run.folder / "best") for run in runs)
    assert same_bits(one, other)


@pytest.mark.parametrize(("before", "after"), [("streamed", "device"), ("device", "streamed")])
def test_a_checkpoint_resumes_with_another_value(train, before, after):
    whole, ours = Watch(), Watch()
    run = train(before, [whole])
    train(after, [ours], resume="step-2", out=str(run.folder))
    assert len(ours.weights) == 2
    assert all(same_bits(*pair) for pair in zip(ours.weights, whole.weights[2:], strict=True))


def test_gradients_leave_the_device_and_are_clipped_there_only_if_nobody_changed_them():
    torch.manual_seed(0)
    model, other = (torch.nn.Sequential(torch.nn.Linear(80, 60), torch.nn.Linear(60, 3)) for _ in range(2))
    other.load_state_dict(model.state_dict())

    def plain(groups, device):
        return build_optimizer("adamw", groups, lr=0.1, device=device)

    groups = [[{"params": list(one.parameters()), "weight_decay": 0.1}] for one in (model, other)]
    optimizer = build_streamed(plain, groups[0], torch.device("cpu"), model)
    reference = plain(groups[1], torch.device("cpu"))
    for step in range(4):
        rows = torch.randn(5, 80)
        updates_of(model).begin_window(1, 0.5)
        for one in (model, other):
            one(rows).square().sum().backward()
        held = [optimized(p) for p in model.parameters()]
        assert all(p.grad is None for p in model.parameters())
        if step == 2:  # somebody else changes them
            torch._foreach_mul_([h.grad for h in held] + [p.grad for p in other.parameters()], 0.5)
        norm = updates_of(model).clip(0.5)
        assert (norm is None) is (step == 2)
        expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        if norm is None:
            torch.nn.utils.clip_grad_norm_(held, 0.5)
        else:
            assert torch.equal(norm, expected)
            assert not torch.equal(held[0].grad, next(other.parameters()).grad), "they are clipped in the slices"
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


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
NUM_WEIGHTS = 2 * 8192 * 512 + 8 * (4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512) + 512


@pytest.fixture
def traces(monkeypatch):
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**20)
    recipe = Recipe(model={"config": LLAMA, "tokenizer": "train"}, task="causal-lm", data={"train": "nowhere"})
    target = known_target("a100", None)
    tracer = StepTracer(recipe, named_task(recipe), target.gpu)
    spec = plain_spec(1, "fp32", update="streamed")
    found = [tracer.trace(spec, BatchShape(1, 16), whole=is_whole) for is_whole in (False, True)]
    return found, target, host_use(spec, tracer.skeleton(), 4)


def test_a_prediction_contains_neither_state_nor_all_gradients(monkeypatch):
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**20)
    monkeypatch.setattr(host_update, "MOST_IN_FLIGHT", 2**22)
    options = {"optimizer": "adamw", "precision": "fp32", "gpu": "a100"}
    before, after = (
        predict_step_memory(LLAMA, "causal-lm", 1, 16, update=value, **options) for value in ("device", "streamed")
    )
    assert before.parts["optimizer state"] == pytest.approx(8 * NUM_WEIGHTS, rel=0.01)
    assert after.parts["optimizer state"] == pytest.approx(3 * 2**20, rel=0.01)
    assert after.allocated < before.allocated - 10 * NUM_WEIGHTS


def test_time_and_host_memory_are_those_of_all_copies(traces):
    (short, whole), target, use = traces
    for name, num_bytes in (("host_link.weights_out", 8), ("host_link.weights_in", 12), ("transfer", 4)):
        moved = [sum(op.moved for op in trace.ops if op.name == name) for trace in (short, whole)]
        assert moved[0] == pytest.approx(moved[1], rel=0.02), name
        assert moved[1] == pytest.approx(num_bytes * NUM_WEIGHTS, rel=0.02), name
    times = [step_seconds(trace.ops, target.device).seconds for trace in (short, whole)]
    assert times[0] == pytest.approx(times[1], rel=0.1)
    assert times[1] > 12 * NUM_WEIGHTS / target.device.host_link
    host = predict_host(TracedTensors.of(short), loaded_bytes=4 * NUM_WEIGHTS, use=use)
    assert host.kept == pytest.approx(12 * NUM_WEIGHTS, rel=0.02)


# ---------------------------------------------------------------------- what is refused, and what auto does


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"optimizer": "adafactor", "lr": 1e-2}}, "does not work with adafactor"),
        ({"memory": {"offload_state": "host"}}, "memory.update: streamed has all state in host memory"),
    ],
)
def test_what_does_not_go_together(train, sections, words):
    with pytest.raises(RecipeError, match=words):
        train("streamed", **sections)


@pytest.mark.slow
def test_auto_streams_with_clipping_if_nothing_else_fits(monkeypatch):
    """The CPU has no fused kernel for 8-bit state."""
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**22)
    monkeypatch.setattr(host_update, "MOST_IN_FLIGHT", 2**22)

    def chosen(memory):
        recipe = Recipe(
            model={"config": {**LLAMA, "hidden_size": 1024}, "tokenizer": "train"},
            task="causal-lm",
            data={"train": "nowhere"},
            train={"batch_size": 1, "precision": "bf16-pure", "optimizer": "adamw8bit", "compile": "off"},
            memory={"gradient_checkpointing": "none", "loss": "plain", "stream_weights": "none"},
        )
        return next((r for r in survey(recipe, gpu="a100", length=16, memory=memory).rungs if r.is_chosen), None)

    plenty = chosen("8GiB")
    assert plenty.spec["update"] == "device"
    assert chosen(f"{plenty.total_bytes // 2**20 - 150}MiB").spec["update"] == "streamed"
