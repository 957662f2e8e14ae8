"""Streamed weights: the bits of the plain step, two blocks on the device, and host memory that is always right."""

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from techniques.test_gradient_checkpointing import CONFIGS, OTHERS, assert_same, deep, forward, quantize, rows, step
from tiny_models import TEXTS
from tiny_runs import lines_of, reproducible_lines, reviews, saved_tensors
from trimtab import Recipe, fit
from trimtab.errors import DoesNotFit, RecipeError
from trimtab.hardware.catalog import CATALOG
from trimtab.model import host_areas, streamed_blocks
from trimtab.model.blocks import blocks_of
from trimtab.model.compiled_blocks import compile_blocks
from trimtab.model.device_visits import Visits
from trimtab.model.streamed_blocks import stream_blocks, streamable, streamed_blocks_of
from trimtab.optim import host_update
from trimtab.optim.build import build_optimizer
from trimtab.optim.in_backward import InBackward, update_in_backward, updates_of
from trimtab.optim.preallocation import preallocate_state
from trimtab.optim.streamed_state import stream_state
from trimtab.planner.host import activations_on_host, state_on_host, weights_on_host
from trimtab.planner.memory import predict
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.shapes import BatchShape, OneLength, named_task
from trimtab.planner.survey import survey
from trimtab.planner.target import known_target
from trimtab.planner.time import step_seconds
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.techniques import apply, streamed_weights
from trimtab.techniques.apply import plain_spec
from trimtab.techniques.base import WEIGHTS_FROM_HOST, WEIGHTS_TO_HOST, Accelerator, Case
from trimtab.techniques.recomputation import checkpoint_layers
from trimtab.techniques.streamed_weights import StreamedWeights

pytestmark = pytest.mark.usefixtures("own_folder")
CPU = torch.device("cpu")
RECOMPUTED = ["none", "all", {"every": 2}]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch):
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 64)


@pytest.fixture(autouse=True)
def _nothing_survives_in_a_buffer(monkeypatch):
    """What leaves the device is overwritten with NaN: whatever reads a buffer too late or too early shows it."""
    leave, begin = Visits.leave, Visits.begin

    def leave_and_poison(self, *, has_changed):
        number = self.visiting
        leave(self, has_changed=has_changed)
        if number is not None and self._device.type != "meta":
            self._buffers[number % 2].fill_(255)
            self._held[number % 2] = None

    def begin_with_poison(self, tensors):
        begin(self, tensors)
        for buffer in self._buffers:
            buffer.fill_(255)

    monkeypatch.setattr(Visits, "leave", leave_and_poison)
    monkeypatch.setattr(Visits, "begin", begin_with_poison)


def streamed(model, *, trains=False, which=slice(None)):
    blocks = [block for _, block in blocks_of(model)][which]
    return stream_blocks(model, blocks, [streamable(block, trains=trains) for block in blocks], CPU)


# ---------------------------------------------------------------------- a step

QUICK = ("llama",)


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*CONFIGS, *OTHERS) if n != "albert"],
)
def test_the_step_is_the_plain_one_to_the_bit(name):
    """With dropout where the family has it by default, and one window of two micro-batches."""
    model = deep(name)
    batches = [rows(), rows(TEXTS[:2])]
    plain = step(model, batches=batches)
    streamed(model, trains=True)
    for which in RECOMPUTED:
        checkpoint_layers(model, which)
        assert_same(step(model, batches=batches), plain)


@pytest.mark.parametrize(
    ("quantized", "dropout"), [(False, 0.1), pytest.param(True, 0.0, marks=pytest.mark.slow)], ids=["lora", "nf4"]
)
@pytest.mark.parametrize("which", [slice(None), slice(0, None, 2)], ids=["all", "every 2"])
def test_adapters(quantized, dropout, which):
    from trimtab.model.adapters import LoraSpec, add_adapter

    model = deep("llama")
    if quantized:
        quantize(model)
    add_adapter(model, LoraSpec(rank=2, dropout=dropout, targets=["q_proj", "down_proj"]))  # others have none
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    plain = step(model)
    found = streamed(model, which=which)
    assert all(not parameter.requires_grad for unit in found.units for parameter in unit)
    for recomputed in RECOMPUTED:
        checkpoint_layers(model, recomputed)
        assert_same(step(model), plain)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "lora"])
def test_compiled_blocks(adapter):
    """Weights are fetched around compiled code: one graph for all blocks, and its results with weights that stay."""
    from trimtab.model.adapters import LoraSpec, add_adapter

    model = deep("llama")
    if adapter:
        add_adapter(model, LoraSpec(rank=2, dropout=0.0))
    plain = copy.deepcopy(model)
    compile_blocks(plain, "aot_eager")
    expected = step(plain)
    streamed(model, trains=not adapter)
    torch._dynamo.reset()
    counters.clear()
    blocks = compile_blocks(model, "aot_eager")
    for recomputed in RECOMPUTED:
        checkpoint_layers(model, recomputed)
        assert_same(step(model), expected)
    assert blocks.failure is None
    assert counters["stats"]["unique_graphs"] == 1


# ---------------------------------------------------------------------- runs


@pytest.fixture
def train(tiny, tmp_path):
    """Trains a tiny Llama of four blocks for four steps; keywords are sections of the recipe."""
    numbers = itertools.count()

    def train(value, callbacks=(), resume=False, memory=None, **sections):
        settings = {"max_steps": 4, "lr": 1e-2, "log_every": 1, "weight_decay": 0.1, "batch_size": 8}
        usual = {
            "model": tiny.folder("llama", num_hidden_layers=4, hidden_size=64, intermediate_size=96),
            "task": "causal-lm",
            "data": {"train": reviews(32), "eval": reviews(24, first=1000), "text": "text"},
            "evaluate": {"every": "2 steps"},
            "checkpoint": {"every": "1 steps", "keep": 9},
            "out": str(tmp_path / f"run-{next(numbers)}"),
            "memory": {"stream_weights": value, **(memory or {})},
        }
        sections["train"] = settings | sections.get("train", {})
        options = {"callbacks": callbacks, "progress": "quiet", "device": "cpu", "resume": resume}
        return fit(Recipe(**usual | sections), **options)

    return train


IN_BACKWARD, HOST = {"update": "in-backward"}, {"update": "host"}
UNCLIPPED = {"max_grad_norm": None}
EQUAL = {
    "lora": {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.1}, "memory": {"micro_batch": 3}},
    "lora, recomputed": {"adapter": "lora", "memory": {"gradient_checkpointing": "all", "offload_activations": "all"}},
    "qlora": {"adapter": {"kind": "qlora", "rank": 4}, "memory": {"gradient_checkpointing": "all"}},
    "qlora, every": {"adapter": {"kind": "qlora", "rank": 4}, "memory": {"micro_batch": 3}},
    "fp8": {"adapter": {"kind": "lora", "base": "fp8", "rank": 4}, "memory": {"micro_batch": 3}},
    "side": {"adapter": {"kind": "side", "reduction": 4}},
    "dora": {"adapter": {"kind": "lora", "rank": 4, "dora": True}},
    "in backward": {"train": UNCLIPPED, "memory": IN_BACKWARD},
    "in backward, recomputed": {"train": UNCLIPPED, "memory": IN_BACKWARD | {"gradient_checkpointing": "all"}},
    "in backward, 8 bits": {"train": UNCLIPPED | {"optimizer": "adamw8bit"}, "memory": IN_BACKWARD},
    "in backward, sgd": {"train": UNCLIPPED | {"optimizer": "sgd", "momentum": 0.9}, "memory": IN_BACKWARD},
    "in backward, adafactor": {"train": UNCLIPPED | {"optimizer": "adafactor"}, "memory": IN_BACKWARD},
    "in backward, unfrozen later": {
        "train": UNCLIPPED | {"freeze": {"*.layers.0": "2 steps"}},
        "memory": IN_BACKWARD,
    },
    "in backward, bf16": {"train": UNCLIPPED | {"precision": "bf16"}, "memory": IN_BACKWARD},
    "in backward, bf16-pure in 8 bits": {
        "train": UNCLIPPED | {"precision": "bf16-pure", "optimizer": "adamw8bit"},
        "memory": IN_BACKWARD | {"gradient_checkpointing": "all"},
    },
    "host": {"memory": HOST | {"micro_batch": 3, "gradient_checkpointing": {"every": 2}}},
    "host, bf16": {"train": {"precision": "bf16"}, "memory": HOST | {"micro_batch": 3}},
    "host, unfrozen later": {"train": {"freeze": {"*.layers.0": "2 steps"}}, "memory": HOST},
}
QUICK_RUNS = ("lora", "in backward")


@pytest.mark.parametrize("case", [c if c in QUICK_RUNS else pytest.param(c, marks=pytest.mark.slow) for c in EQUAL])
def test_models_and_metrics_are_equal_to_the_bit(train, case):
    value = {"every": 2} if "every" in case else "all"
    ours, theirs = (train(how, **EQUAL[case]) for how in (value, "none"))
    assert ours.plan.stream_weights != theirs.plan.stream_weights
    assert ours.fit.step == 4
    assert reproducible_lines(ours.folder) == reproducible_lines(theirs.folder)
    for name in ("best", "checkpoints/step-2", "checkpoints/step-4"):
        one, other = (saved_tensors(Path(run.folder) / name) for run in (ours, theirs))
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []


# ---------------------------------------------------------------------- what is where


def test_two_buffers_are_used_in_turn_and_weights_are_in_host_memory_at_rest():
    model = deep("llama")
    blocks = [block for _, block in blocks_of(model)]
    homes = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found = streamed(model, trains=True)
    weights = [block.mlp.down_proj.weight for block in blocks]
    at_rest = [weight.data_ptr() for weight in weights]
    seen = []
    for block in blocks:
        block.mlp.down_proj.register_forward_hook(lambda module, *_: seen.append(module.weight.data_ptr()))
    loss = forward(model, rows())
    assert [weight.data_ptr() for weight in weights] == at_rest
    assert seen[0] == seen[2] != seen[1]
    assert not {*seen} & {*at_rest}
    loss.backward()
    assert [weight.data_ptr() for weight in weights] == at_rest
    assert all(torch.equal(parameter, homes[name]) for name, parameter in model.named_parameters())
    per_block = sum(host_areas.aligned(tensor.nbytes) for tensor in found.units[0])
    assert found.weights.num_bytes == 2 * per_block


def test_small_tensors_stay_on_the_device(monkeypatch):
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 2**12)
    block = blocks_of(deep("llama"))[0][1]
    found = streamable(block, trains=True)
    assert {tensor.dim() for tensor in found} == {2}
    assert len(found) < len(list(block.parameters()))


def test_moving_and_converting_a_model_leaves_streamed_weights_alone():
    model = deep("llama")
    found = streamed(model, trains=True)
    names, before = list(model.state_dict()), [tensor.data_ptr() for unit in found.units for tensor in unit]
    model.to("cpu", torch.bfloat16)
    assert list(model.state_dict()) == names
    assert [tensor.data_ptr() for unit in found.units for tensor in unit] == before
    assert {tensor.dtype for unit in found.units for tensor in unit} == {torch.float32}
    assert model.lm_head.weight.dtype is torch.bfloat16


def test_weights_that_change_at_rest_are_fetched_again():
    model, other = deep("llama"), deep("llama")
    streamed(model, trains=True)
    for one in (model, other):
        forward(one, rows()).backward()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.data.mul_(1.5)
    assert_same(step(model), step(other))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("recomputed", ["none", "all"])
def test_after_an_exception_the_next_step_is_right(where, recomputed):
    model = deep("bert")
    plain = step(model)
    streamed(model, trains=True)
    checkpoint_layers(model, recomputed)
    block = blocks_of(model)[1][1]

    def fail(*_):
        raise torch.OutOfMemoryError("a test")

    linear = next(module for module in block.modules() if isinstance(module, nn.Linear))
    handle = linear.register_forward_hook(fail) if where == "forward" else block.register_full_backward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        step(model)
    handle.remove()
    assert_same(step(model), plain)


def test_a_copied_model_streams_its_own_weights():
    model = deep("llama")
    found = streamed(model, trains=True)
    plain = step(model)
    other = copy.deepcopy(model)
    own = streamed_blocks_of(other)
    assert not {id(t) for unit in own.units for t in unit} & {id(t) for unit in found.units for t in unit}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(step(other), plain)


@pytest.mark.parametrize("recomputed", ["none", "all"])
@pytest.mark.parametrize("update", ["in-backward", "host"])
def test_gradients_arrive_although_autograd_forgets_where_to_add_them(monkeypatch, update, recomputed):
    """On a GPU the data of a weight changes its device between forward and backward; here it changes its dtype.

    Either way autograd drops its reference to the node that accumulates the gradient, and makes another one.
    """
    enter, fetch, leave = Visits.enter, Visits.fetch, Visits.leave
    homes = {}

    def restored(unit):
        for tensor in unit.tensors:
            if id(tensor) in homes:
                tensor.data = homes.pop(id(tensor))

    def leave_in_another_dtype(self, *, has_changed):
        number = self.visiting
        leave(self, has_changed=has_changed)
        if number is not None and self._part == "weights":
            for tensor in self._units[number].tensors:
                homes[id(tensor)], tensor.data = tensor.data, tensor.data.double()

    def restore_first(do):
        def done(self, number):
            if 0 <= number < len(self._units):
                restored(self._units[number])
            do(self, number)

        return done

    model, other = deep("llama"), deep("llama")
    found = streamed(model, trains=True)
    checkpoint_layers(model, recomputed)

    def build(groups, device):
        return build_optimizer("adamw", groups, lr=1e-2, device=device)

    groups = [{"params": list(model.parameters())}]
    optimizer = build(groups, CPU) if update == "in-backward" else host_update.build_on_host(build, groups)
    reference = build([{"params": list(other.parameters())}], CPU)
    if update == "in-backward":
        update_in_backward(model, optimizer)
        stream_state(model, found, optimizer)
        preallocate_state(optimizer, model.parameters())
    monkeypatch.setattr(Visits, "leave", leave_in_another_dtype)
    monkeypatch.setattr(Visits, "enter", restore_first(enter))
    monkeypatch.setattr(Visits, "fetch", restore_first(fetch))
    for _ in range(2):
        for one, stepper in ((model, optimizer), (other, reference)):
            torch.manual_seed(0)
            updates_of(one).begin_window(1)
            forward(one, rows()).backward()
            for unit in found.weights._units:
                restored(unit)
            stepper.step()
            stepper.zero_grad()
    assert [n for n, p in model.named_parameters() if not torch.equal(p, other.get_parameter(n))] == []


# ---------------------------------------------------------------------- memory that runs out, and resuming


def test_memory_that_runs_out_is_undone_and_retried(train, monkeypatch):
    enter, calls = Visits.enter, itertools.count(1)

    def enter_or_fail(self, number):
        if next(calls) == 14:  # in the backward of the second step
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …")
        enter(self, number)

    monkeypatch.setattr(Visits, "enter", enter_or_fail)
    ours = train("all", adapter="lora", checkpoint={"every": None})
    assert any("at step 2: micro-batch size" in line.get("note", "") for line in lines_of(ours.folder))
    assert ours.fit.step == 4


@pytest.mark.slow
def test_updates_in_backward_that_run_out_end_with_a_reason_and_the_last_checkpoint_is_right(train, monkeypatch):
    update, calls = InBackward._update, itertools.count(1)

    def update_or_fail(self, parameter, group, number):
        if next(calls) == 90:  # of 39 in a step
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …")
        update(self, parameter, group, number)

    sections = EQUAL["in backward"] | {"out": "run"}
    with monkeypatch.context() as patched:
        patched.setattr(InBackward, "_update", update_or_fail)
        with pytest.raises(DoesNotFit, match="the batch cannot be divided: memory.stream_weights with memory.update"):
            train("all", **sections)
    resumed = train("all", resume=True, **sections)
    assert resumed.fit.step == 4
    expected = train("none", **EQUAL["in backward"])
    one, other = (saved_tensors(Path(run.folder) / "best") for run in (resumed, expected))
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lora", "in backward", "host"])
def test_a_run_may_begin_with_streamed_weights_and_end_without(train, case):
    sections = EQUAL[case]
    expected = saved_tensors(Path(train("none", **sections).folder) / "best")
    for first, second in (("all", "none"), ("none", "all")):
        out = {"out": f"{first}-{case}"}
        train(first, **out, **sections)
        resumed = train(second, resume="step-2", **out, **sections)
        assert resumed.plan.stream_weights == second
        found = saved_tensors(Path(resumed.folder) / "best")
        assert [key for key in found if not torch.equal(found[key], expected[key])] == []


# ---------------------------------------------------------------------- plans

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
LINEAR = 4 * 256 * 256 + 3 * 256 * 512  # weights of a block; its norms are too small


def recipe(train=None, adapter="none", **memory):
    return Recipe(
        model={"config": LLAMA, "tokenizer": "train"},
        task="causal-lm",
        data={"train": "nowhere"},
        train={"batch_size": 1, "precision": "bf16", "compile": "off", "max_grad_norm": None, **(train or {})},
        adapter=adapter,
        memory={"loss": "chunked", "kernels": "plain", **memory},
    )


def traced(asked, precision="bf16", whole=False, rows=1, **values):
    tracer = StepTracer(asked, named_task(asked), Gpu())
    spec = plain_spec(rows, precision, **{"loss": "chunked", "optimizer": "adamw", **values})
    return tracer.trace(spec, BatchShape(rows, 256), whole=whole)


TRACES = {
    "lora": ({"adapter": "lora"}, {"adapter": "lora"}),
    "lora, every 2": ({"adapter": "lora"}, {"adapter": "lora", "stream_weights": "{every: 2}"}),
    "qlora": ({"adapter": "qlora"}, {"adapter": "qlora", "gradient_checkpointing": "all"}),
    "fp8": ({"adapter": {"kind": "lora", "base": "fp8"}}, {"adapter": "lora-fp8", "gradient_checkpointing": "all"}),
    "in backward": ({}, {"update": "in-backward"}),
    "in backward, recomputed": ({}, {"update": "in-backward", "gradient_checkpointing": "all"}),
    "host": ({}, {"update": "host", "gradient_checkpointing": "all"}),
    "lora, compiled": ({"adapter": "lora"}, {"adapter": "lora", "compile": "blocks"}),
    "compiled": ({}, {"update": "in-backward", "gradient_checkpointing": "all", "compile": "blocks"}),
    "offloaded": ({"adapter": "lora"}, {"adapter": "lora", "offload_activations": "all"}),
}


@pytest.mark.parametrize("case", [c if c == "in backward" else pytest.param(c, marks=pytest.mark.slow) for c in TRACES])
def test_the_derived_trace_is_the_traced_one(monkeypatch, case):
    from planner.test_blocks import assert_same as assert_same_trace

    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 2**12)
    asked, values = TRACES[case]
    values = {"stream_weights": "all"} | values
    assert_same_trace(traced(recipe(**asked), **values), traced(recipe(**asked), whole=True, **values))


@pytest.mark.parametrize("recomputed", ["none", pytest.param("all", marks=pytest.mark.slow)])
def test_two_blocks_are_on_the_device_and_all_on_the_host(monkeypatch, recomputed):
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 2**12)
    values = {"adapter": "lora", "gradient_checkpointing": recomputed}
    asked = recipe(adapter="lora")
    plain, found = (traced(asked, stream_weights=value, **values) for value in ("none", "all"))
    parts = [predict(trace).parts["weights"] for trace in (plain, found)]
    assert parts[0] - parts[1] == 10 * LINEAR * 2
    assert weights_on_host(plain) == state_on_host(found) == activations_on_host(found) == 0
    assert weights_on_host(found) == 12 * LINEAR * 2
    fetched = [op.moved for op in found.ops if op.name == WEIGHTS_FROM_HOST]
    assert fetched == [LINEAR * 2] * 22, "12 in forward, and in backward all but the two that are there"
    assert predict(plain).allocated - predict(found).allocated == pytest.approx(10 * LINEAR * 2, rel=0.01)


def test_state_is_streamed_with_weights_that_train(monkeypatch):
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 2**12)
    plain, found = (traced(recipe(), update="in-backward", stream_weights=value) for value in ("none", "all"))
    state = [predict(trace).parts["optimizer state"] for trace in (plain, found)]
    assert state[0] - state[1] == pytest.approx(9 * LINEAR * 8, rel=0.001), "of 12 blocks, 3 are on the device"
    # at the end of forward the state of the last block is fetched, and counts as weights
    assert weights_on_host(found) == pytest.approx(12 * LINEAR * 4 + LINEAR * 8, rel=0.001)
    assert state_on_host(found) == pytest.approx(11 * LINEAR * 8, rel=0.001)
    sent = sum(op.moved for op in found.ops if op.name == WEIGHTS_TO_HOST)
    assert sent == weights_on_host(found) + state_on_host(found)


def test_copies_in_both_directions_overlap(monkeypatch):
    """What was changed leaves while the next block comes: a step takes as long as the copies of one direction."""
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 2**12)
    ops = traced(recipe(), update="in-backward", stream_weights="all").ops
    coming, leaving = (sum(op.moved for op in ops if op.name == name) for name in (WEIGHTS_FROM_HOST, WEIGHTS_TO_HOST))
    slow = step_seconds(ops, replace(CATALOG["h200"], host_op_s=0.0, host_link=1e7)).seconds
    assert coming / 1e7 < slow < (coming + leaving / 4) / 1e7


def test_copies_overlap_with_computation():
    ops = {value: traced(recipe(adapter="lora"), adapter="lora", stream_weights=value).ops for value in ("none", "all")}
    gpu = replace(CATALOG["h200"], host_op_s=0.0)
    plain = step_seconds(ops["none"], gpu).seconds
    assert step_seconds(ops["all"], replace(gpu, host_link=1e15)).seconds == pytest.approx(plain, rel=0.02)
    moved = sum(op.moved for op in ops["all"] if op.name == WEIGHTS_FROM_HOST)
    slow = step_seconds(ops["all"], replace(gpu, host_link=1e9))
    assert slow.bound == "host link"
    assert moved / 1e9 <= slow.seconds < moved / 1e9 + plain
    link = moved / plain  # as long as the computation: one hides the other, but for the first block
    assert step_seconds(ops["all"], replace(gpu, host_link=link)).seconds < 1.4 * plain


@pytest.mark.slow
def test_auto_uses_it_only_where_nothing_else_fits(monkeypatch):
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 2**12)
    asked = recipe(adapter="lora", gradient_checkpointing="all", offload="none", tile_tokens="none")
    config = LLAMA | {"hidden_size": 1024, "num_hidden_layers": 40}
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"config": config})})
    enough = survey(asked, gpu="h200", length=64, memory="24GiB", thorough=False)
    assert enough.plan.stream_weights == "none"
    assert {rung.spec["stream_weights"] for rung in enough.rungs} == {"none"}
    small = min(rung.total_bytes for rung in enough.rungs)
    short = survey(asked, gpu="h200", length=64, memory=f"{(small - 2**24) // 2**20}MiB", thorough=False)
    assert short.plan.stream_weights == "all"
    assert short.plan.outlook.predicted_host_bytes > 40 * 4 * 1024**2 * 2
    tiny = survey(asked, gpu="h200", length=64, memory="1200MiB", thorough=False)
    assert tiny.plan.stream_weights == "all"
    pairs = [{(r.spec["stream_weights"], r.spec["offload_activations"]) for r in one.rungs} for one in (short, tiny)]
    assert ("none", "all") in pairs[0]
    assert ("none", "all") not in pairs[1], "where weights alone do not fit, other last resorts are tried with it"


@pytest.mark.slow
def test_a_host_that_is_too_small_is_not_planned_for():
    asked = recipe(adapter="lora", stream_weights="all")
    for host, fits in ((2**40, True), (2**31, False), (None, True)):
        target = replace(known_target("h200", None), host_bytes=host)
        planner = RecipePlanner(asked, named_task(asked), target, OneLength(64))
        assert planner.estimate(planner.space.reference()).fits is fits


# ---------------------------------------------------------------------- what is refused


def case_of(asked, model=None, num_processes=1):
    return Case(model, Accelerator("cuda", (9, 0)), "bf16", asked, num_processes=num_processes)


@pytest.mark.parametrize(
    ("values", "num_processes", "words"),
    [
        ({"adapter": "lora", "compile": "graphs"}, 1, "train.compile: graphs"),
        ({"adapter": "lora", "compile": "blocks"}, 1, None),
        ({"adapter": "lora", "gradient_checkpointing": "ops"}, 1, "gradient_checkpointing: ops"),
        ({"update": "device"}, 1, "memory.update: host, or an adapter"),
        ({"adapter": "lora"}, 2, "one process"),
        ({"adapter": "lora", "gradient_checkpointing": "all", "offload_activations": "all"}, 1, None),
        ({"update": "in-backward"}, 1, None),
        ({"update": "host"}, 1, None),
    ],
)
def test_conflicts(values, num_processes, words):
    spec = plain_spec(1, "bf16", stream_weights="all", **values)
    found = StreamedWeights().refuse(spec, case_of(recipe(), num_processes=num_processes))
    assert (found is None) if words is None else (words in found)


def test_weights_that_are_used_elsewhere_are_refused():
    model = deep("llama")
    spec = plain_spec(1, "bf16", stream_weights="all", adapter="lora")
    assert StreamedWeights().refuse(spec, case_of(recipe(), model)) is None
    blocks = [block for _, block in blocks_of(model)]
    blocks[2].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
    assert "layers.0.mlp.up_proj.weight is used by several" in StreamedWeights().refuse(spec, case_of(recipe(), model))
    blocks[2].mlp.up_proj.weight = nn.Parameter(blocks[0].mlp.up_proj.weight.detach().clone())
    model.elsewhere = nn.Linear(1, 1)
    model.elsewhere.weight = blocks[1].mlp.up_proj.weight
    assert "outside of its block" in StreamedWeights().refuse(spec, case_of(recipe(), model))


def test_values():
    technique = StreamedWeights()
    model = deep("llama")
    assert technique.values(case_of(recipe(), model)) == ("none", "all")
    assert technique.values(case_of(recipe(), model, num_processes=2)) == ("none",)
    assert technique.values(Case(model, Accelerator("cpu"), "fp32", recipe())) == ("none",)
    assert technique.values(case_of(recipe(stream_weights={"every": 2}), model)) == ("{every: 2}",)
    with pytest.raises(RecipeError, match="BertModel has 1 repeated blocks|has 0 repeated blocks"):
        technique.values(case_of(recipe(stream_weights="all"), nn.Linear(2, 2)))
    assert technique.describe("all") == "streamed weights"
    assert technique.describe("{every: 2}") == "streamed weights of every 2nd"


def test_too_little_host_memory_is_reported_before_the_first_step(monkeypatch):
    monkeypatch.setattr(host_areas, "free_host_memory", lambda: host_areas.memory_in_use(host_areas._HOST) + 2**10)
    with pytest.raises(DoesNotFit, match="memory.stream_weights needs 2.0 KiB of host memory .* 1.0 KiB are available"):
        streamed_weights._check_host_memory([[torch.empty(256)], [torch.empty(512)]])


def test_weights_are_loaded_in_host_memory_if_they_are_streamed_or_too_large():
    def loads(value, **options):
        return apply.loads_on_host(recipe(adapter="lora", stream_weights=value), **options)

    assert loads("all")
    assert loads({"every": 2})
    assert not loads("none", is_too_large=True)
    assert not loads("auto")
    assert loads("auto", is_too_large=True)
