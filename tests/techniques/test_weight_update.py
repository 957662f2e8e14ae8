"""Weights that are updated in backward: the numbers of a step after backward, without all gradients at once."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from tiny_runs import NO_DROPOUT, Watch, lines_of, reviews, same_bits
from trimtab import Recipe, predict_step_memory
from trimtab.errors import DoesNotFit, RecipeError
from trimtab.model.load import load_model, load_tokenizer
from trimtab.optim.build import build_optimizer
from trimtab.optim.in_backward import InBackward, update_in_backward, updates_of
from trimtab.planner.shapes import BatchShape, named_task
from trimtab.planner.survey import survey
from trimtab.planner.target import known_target
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.techniques.apply import plain_spec

pytestmark = pytest.mark.usefixtures("own_folder")
ROWS = reviews(32)


@pytest.fixture
def train(train):
    """Trains without clipping, unless a section says otherwise."""

    def unclipped(update, callbacks=(), resume=False, **sections):
        sections["train"] = {"max_grad_norm": None} | sections.get("train", {})
        return train(update, callbacks, resume, **sections)

    return unclipped


# ---------------------------------------------------------------------- numbers

EQUAL = {
    "adamw": {},
    "adam": {"train": {"optimizer": "adam"}},
    "adagrad": {"train": {"optimizer": "adagrad"}},
    "sgd": {"train": {"optimizer": "sgd", "momentum": 0.9}},
    "adafactor": {"train": {"optimizer": "adafactor", "lr": 1e-2}},
    "8-bit": {"train": {"optimizer": "adamw8bit"}},
    "cosine, warmup": {"train": {"schedule": "cosine", "warmup": 2}},
    "unfrozen later": {"train": {"freeze": {"*.layer.0": "2 steps"}}},
    "recomputed": {"memory": {"gradient_checkpointing": "all"}},
    "lora": {"adapter": "lora"},
    "bf16": {"train": {"precision": "bf16"}},
}
QUICK = ("8-bit", "unfrozen later", "recomputed")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in EQUAL])
def test_weights_and_metrics_are_equal_to_the_bit(train, case):
    ours, theirs = Watch(), Watch()
    runs = [train(how, [watch], **EQUAL[case]) for how, watch in (("in-backward", ours), ("device", theirs))]
    assert runs[0].plan.update == "in-backward"
    assert len(ours.weights) == 4
    assert all(same_bits(*pair) for pair in zip(ours.weights, theirs.weights, strict=True))
    one, other = ([line.get("loss") for line in lines_of(run.folder)] for run in runs)
    assert one == other


def test_stochastic_rounding_draws_numbers_per_parameter():
    """The means are those of a step after backward, no parameter repeats another one's numbers, and steps differ."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(1.0)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    optimizer = build_optimizer("sgd", groups, lr=2**-10, rounds_stochastically=True)
    update_in_backward(model, optimizer)
    seen = []
    for _ in range(8):
        updates_of(model).begin_window(1)
        sum(weight.sum() for weight in model.parameters()).backward()  # every gradient is 1
        optimizer.step()
        assert all(weight.grad is None for weight in model.parameters())
        seen.append([weight.detach().clone() for weight in model.parameters()])
    assert not torch.equal(*seen[0]), "parameters have their own random numbers"
    assert torch.tensor([weight.float().mean() for weight in seen[-1]]).sub(1 - 8 * 2**-10).abs().max() < 4e-4
    assert optimizer.param_groups[0]["num_roundings"] == 8


def test_tied_weights_are_updated_once_with_the_gradient_of_all_uses(train, tiny):
    ours, theirs = Watch(), Watch()
    sections = {"model": tiny.folder("gpt2"), "task": "causal-lm", "data": {"train": ROWS, "text": "text"}}
    for how, watch in (("in-backward", ours), ("device", theirs)):
        train(how, [watch], memory={"loss": "chunked"}, **sections)
    assert all(same_bits(*pair) for pair in zip(ours.weights, theirs.weights, strict=True))


# ---------------------------------------------------------------------- memory


class Alive:
    """Counts the gradients that exist at once, while weights are updated."""

    def __init__(self, model):
        self.most, self._model = 0, model

    def __call__(self, *_):
        self.most = max(self.most, sum(weight.grad is not None for weight in self._model.parameters()))


def test_one_gradient_exists_at_a_time():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    optimizer = build_optimizer("adamw", [{"params": list(model.parameters())}], lr=1e-3)
    alive = Alive(model)
    optimizer.register_step_pre_hook(alive)
    update_in_backward(model, optimizer)
    updates_of(model).begin_window(1)
    model(torch.ones(2, 8)).sum().backward()
    assert alive.most == 1
    updates_of(model).begin_window(2)
    model(torch.ones(2, 8)).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters()), "gradients of several backwards are added up"


LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_a_prediction_contains_no_gradients_but_those_in_use(optimizer, precision):
    """By hand: gradients of all weights after backward; in backward at most two of the largest, and nothing more."""
    each = 2 if precision == "bf16-pure" else 4
    options = {"optimizer": optimizer, "precision": precision, "gpu": "a100", "max_grad_norm": None}
    before, after = (
        predict_step_memory(LLAMA, "causal-lm", 1, 16, update=value, **options) for value in ("device", "in-backward")
    )
    largest = 1024 * 256
    num_weights = 2 * largest + 8 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256
    assert before.parts["gradients"] == pytest.approx(each * num_weights, rel=0.01)
    assert after.parts["gradients"] <= 2 * each * largest
    for part in ("weights", "optimizer state"):
        assert after.parts[part] == before.parts[part]
    assert after.allocated < before.allocated - 0.75 * each * num_weights, "the peak is where activations are"
    assert sum(after.trace.births[storage].size for storage in after.trace.gradients) == each * num_weights


def test_a_prediction_from_few_blocks_is_that_of_all():
    recipe = Recipe(
        model={"config": LLAMA, "tokenizer": "train"},
        task="causal-lm",
        data={"train": "nowhere"},
        train={"max_grad_norm": None},
    )
    tracer = StepTracer(recipe, named_task(recipe), known_target("a100", None).gpu)
    spec = plain_spec(1, "fp32", update="in-backward")
    short, whole = (tracer.trace(spec, BatchShape(1, 16), whole=is_whole) for is_whole in (False, True))
    assert [event.size for event in short.events] == [event.size for event in whole.events]
    assert Counter(short.ops) == Counter(whole.ops)
    assert len([op for op in short.ops if op.name == "aten._fused_adamw_" and op.stage == "update"]) == 2 + 8 * 9 + 1, (
        "one for each parameter"
    )
    assert len(short.gradients) == len(whole.gradients) == 2 + 8 * 9 + 1


# ---------------------------------------------------------------------- memory that runs out


@pytest.fixture
def runs_out(monkeypatch):
    """Raises in the given updates of the run, as an allocator would; returns the list of their numbers."""
    update, calls, at = InBackward._update, itertools.count(1), []

    def update_or_fail(self, parameter, group, number):
        if next(calls) in at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …")
        update(self, parameter, group, number)

    monkeypatch.setattr(InBackward, "_update", update_or_fail)
    return at


def num_trained(tiny):
    folder = tiny.folder("bert")
    model = load_model(folder, "sequence-classification", {"num_labels": 2}, load_tokenizer(folder))
    return len(list(model.parameters()))


def test_a_step_that_runs_out_half_way_restarts_from_the_last_checkpoint(train, tiny, runs_out):
    expected, ours = Watch(), Watch()
    runs_out.append(2 * num_trained(tiny) + 7)  # in the third step
    model = {"model": tiny.folder("bert", **NO_DROPOUT["bert"])}
    run = train("in-backward", [ours], **model)
    notes = [line["note"] for line in lines_of(run.folder) if "note" in line]
    assert len(notes) == 1
    assert "in backward at step 3: micro-batch size 8 → 4; weights change after backward from now on" in notes[0]
    assert "restarted from the checkpoint of step 2" in notes[0]
    assert run.fit.micro_batch_size == 4
    train("device", [expected], **model)
    for one, other in zip(ours.weights, expected.weights, strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)
    assert all(same_bits(*pair) for pair in zip(ours.weights[:2], expected.weights[:2], strict=True))


def test_without_a_checkpoint_it_ends_with_a_message_and_saves_nothing(train, runs_out):
    runs_out.append(7)
    with pytest.raises(DoesNotFit, match="in backward at step 1, with some of the weights already updated") as caught:
        train("in-backward", out="run")
    assert "memory.gradient_checkpointing: all" in str(caught.value)
    assert not list(Path("run/checkpoints").glob("step-*"))


def test_rehearsals_change_no_weights(train):
    ours, theirs = Watch(), Watch()
    for how, watch in (("in-backward", ours), ("device", theirs)):
        train(how, [watch], memory={"budget": "8GiB"})
    assert all(same_bits(*pair) for pair in zip(ours.weights, theirs.weights, strict=True))


# ---------------------------------------------------------------------- what is refused, and what auto does


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"max_grad_norm": 1.0}}, "train.max_grad_norm: found 1.0; .* write null"),
        ({"train": {"on_nan": "skip"}}, "train.on_nan: found skip"),
        ({"train": {"precision": "fp16"}}, "train.precision: found fp16"),
        ({"train": {"compile": "graphs"}}, "train.compile: found graphs"),
        ({"memory": {"micro_batch": 4}}, "memory.micro_batch: found 4"),
        ({"memory": {"micro_batch_tokens": 64}}, "memory.micro_batch_tokens: found 64"),
    ],
)
def test_what_needs_all_gradients_first_is_refused(train, sections, words):
    with pytest.raises(RecipeError, match=words):
        train("in-backward", **sections)


def test_clipping_is_on_by_default_and_has_to_be_turned_off():
    with pytest.raises(RecipeError, match="train.max_grad_norm: found 1.0"):
        Recipe(model="nowhere", data={"train": "nowhere"}, memory={"update": "in-backward"})


@pytest.mark.slow
def test_auto_updates_in_backward_only_without_clipping_and_only_if_nothing_faster_fits():
    def chosen(memory, **settings):
        recipe = Recipe(
            model={"config": {**LLAMA, "vocab_size": 8192, "hidden_size": 1024}, "tokenizer": "train"},
            task="causal-lm",
            data={"train": "nowhere"},
            train={"batch_size": 1, "precision": "fp32", "compile": "off", **settings},
            memory={"gradient_checkpointing": "none", "loss": "plain", "offload_state": "none"},
        )
        return next((r for r in survey(recipe, gpu="a100", length=16, memory=memory).rungs if r.is_chosen), None)

    plenty = chosen("4GiB", max_grad_norm=None)
    assert plenty.spec["update"] == "device"
    little = f"{plenty.total_bytes // 2**20 - 60}MiB"
    assert chosen(little, max_grad_norm=None).spec["update"] == "in-backward"
    assert chosen(little).spec["update"] == "host"


# ---------------------------------------------------------------------- clipped by the norm of the step before


def test_gradients_are_clipped_by_the_norm_of_the_step_before():
    torch.manual_seed(0)
    model, other = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)) for _ in range(2))
    other.load_state_dict(model.state_dict())
    optimizer, reference = (
        build_optimizer("sgd", [{"params": list(one.parameters())}], lr=0.1) for one in (model, other)
    )
    update_in_backward(model, optimizer)
    last, updates = None, updates_of(model)
    for step in range(4):
        rows = torch.randn(5, 4)
        updates.begin_window(1, 0.5)
        model(rows).square().sum().backward()
        norm = updates.finish_window()
        optimizer.step()
        other(rows).square().sum().backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])
        torch.testing.assert_close(norm, expected)
        if last is not None:
            for parameter in other.parameters():
                parameter.grad.mul_((0.5 / (last + 1e-6)).clamp(max=1.0))
        reference.step()
        reference.zero_grad()
        last = expected
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=str(step))


def test_the_norm_is_a_metric_and_part_of_a_checkpoint(train):
    sections = {"train": {"max_grad_norm": 0.1, "clip_by": "previous-norm"}}
    whole, ours = Watch(), Watch()
    run = train("in-backward", [whole], **sections)
    norms = [line["grad_norm"] for line in lines_of(run.folder) if "grad_norm" in line]
    assert len(norms) == 4
    assert all(norm > 0.1 for norm in norms), "of the gradients before they are clipped"
    train("in-backward", [ours], resume="step-2", out=str(run.folder), **sections)
    assert all(same_bits(*pair) for pair in zip(ours.weights, whole.weights[2:], strict=True))


def test_clipping_by_the_step_before_is_for_updates_in_backward(train):
    with pytest.raises(RecipeError, match="train.clip_by: found previous-norm; only memory.update: in-backward"):
        train("device", train={"max_grad_norm": 1.0, "clip_by": "previous-norm"})
    with pytest.raises(RecipeError, match="train.clip_by: found previous-norm"):
        train("in-backward", train={"max_grad_norm": None, "clip_by": "previous-norm"})
