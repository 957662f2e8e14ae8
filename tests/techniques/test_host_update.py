"""Weights that are updated in host memory: the numbers of a step on the device, and nothing of it on the device."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tiny_runs import lines_of, reproducible_lines, reviews, same_bits, saved_tensors
from trimtab import Recipe, predict_step_memory
from trimtab.engine.engine import Engine
from trimtab.errors import DoesNotFit, RecipeError
from trimtab.hardware import catalog, memory
from trimtab.model import host_areas
from trimtab.model.half_weights import round_weights
from trimtab.optim import host_update
from trimtab.optim.host_update import HostWeights, master_of
from trimtab.planner.memory import predict
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.shapes import BatchShape, OneLength, named_task
from trimtab.planner.survey import survey
from trimtab.planner.target import known_target
from trimtab.planner.time import step_seconds
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.planner.trace.recorder import Op
from trimtab.techniques.apply import plain_spec
from trimtab.techniques.base import Accelerator, Case
from trimtab.techniques.weight_update import WeightUpdate

pytestmark = pytest.mark.usefixtures("own_folder")
ROWS = reviews(32)


# ---------------------------------------------------------------------- numbers

EQUAL = {
    "adamw": {},
    "micro-batches": {"memory": {"micro_batch": 3}},
    "adam": {"train": {"optimizer": "adam"}},
    "adagrad": {"train": {"optimizer": "adagrad"}},
    "sgd": {"train": {"optimizer": "sgd", "momentum": 0.9}},
    "adafactor": {"train": {"optimizer": "adafactor", "lr": 1e-2}},
    "8-bit": {"train": {"optimizer": "adamw8bit"}},
    "cosine, warmup": {"train": {"schedule": "cosine", "warmup": 2}},
    "unfrozen later": {"train": {"freeze": {"*.layer.0": "2 steps"}}},
    "fp16": {"train": {"precision": "fp16"}, "memory": {"micro_batch": 3}},
    "bf16": {"train": {"precision": "bf16"}, "memory": {"micro_batch": 3}},
    "bf16-pure": {"train": {"precision": "bf16-pure"}},
    "bf16-pure, 8-bit": {"train": {"precision": "bf16-pure", "optimizer": "adamw8bit"}},
    "skips": {"train": {"on_nan": "skip"}},
    "recomputed": {"memory": {"gradient_checkpointing": "all"}},
    "lora": {"adapter": "lora"},
    "side network, bf16": {"adapter": "side", "train": {"precision": "bf16"}},
    "IA3, bf16": {"adapter": "ia3", "train": {"precision": "bf16"}},
}
QUICK = ("unfrozen later", "fp16", "bf16", "side network, bf16")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in EQUAL])
def test_models_and_metrics_are_equal_to_the_bit(train, case):
    ours, theirs = (train(how, **EQUAL[case]) for how in ("host", "device"))
    assert ours.plan.update == "host"
    assert ours.fit.step == 4
    assert reproducible_lines(ours.folder) == reproducible_lines(theirs.folder)
    for name in ("best", "checkpoints/step-4"):
        one, other = (saved_tensors(Path(run.folder) / name) for run in (ours, theirs))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), "exported and saved are the fp32 masters"


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("gpt2", "chunked"),
        ("llama", "plain"),
        pytest.param("gpt2", "plain", marks=pytest.mark.slow),
        pytest.param("llama", "chunked", marks=pytest.mark.slow),
    ],
)
def test_a_language_model_whose_head_is_tied_or_not(train, tiny, name, loss):
    changes = {} if name == "gpt2" else {"tie_word_embeddings": False}
    sections = {"model": tiny.folder(name, **changes), "task": "causal-lm", "data": {"train": ROWS, "text": "text"}}
    sections |= {"memory": {"loss": loss, "micro_batch": 3}, "train": {"precision": "bf16"}}
    ours, theirs = (train(how, **sections) for how in ("host", "device"))
    assert reproducible_lines(ours.folder) == reproducible_lines(theirs.folder)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_run_may_change_between_host_and_device(train, precision):
    """Checkpoints have the fp32 weights, whatever is on the device."""
    sections = {"train": {"precision": precision}}
    expected = saved_tensors(Path(train("device", **sections).folder) / "best")
    for first, second in (("host", "device"), ("device", "host")):
        out = {"out": f"run-{first}"}
        train(first, **out, **sections)
        resumed = train(second, resume="step-2", **out, **sections)
        assert resumed.plan.update == second
        assert same_bits(saved_tensors(Path(resumed.folder) / "best"), expected)


def test_memory_that_runs_out_in_backward_is_undone_and_retried(train, monkeypatch):
    take, calls = HostWeights._take, itertools.count(1)

    def take_or_fail(self, parameter, index):
        if next(calls) == 50:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …")
        take(self, parameter, index)

    monkeypatch.setattr(HostWeights, "_take", take_or_fail)
    ours = train("host")
    assert ours.fit.micro_batch_size == 4
    assert any("micro-batch size 8 → 4" in line.get("note", "") for line in lines_of(ours.folder))
    assert ours.fit.step == 4


def test_a_step_that_overflows_in_fp16_is_skipped():
    engine = Engine("fp16", device="cpu")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    made = host_update.build_on_host(
        lambda groups, _: torch.optim.AdamW(groups, lr=0.1), [{"params": list(model.parameters())}]
    )
    model, optimizer = engine.prepare(model, made)
    before = model.weight.detach().clone()
    for factor, is_skipped in ((1e30, True), (0.01, False)):
        engine.backward(model(torch.ones(2, 4)).sum() * factor)
        norm = engine.clip_grad_norm_([master_of(p) for p in model.parameters()], 1.0)
        assert bool(torch.isfinite(norm)) is not is_skipped
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is is_skipped
        assert torch.equal(model.weight, before) is is_skipped
        assert all(master_of(p).grad is None for p in model.parameters())


# ---------------------------------------------------------------------- what is where


def test_gradients_are_summed_on_the_host_and_weights_are_copied_back(monkeypatch):
    monkeypatch.setattr(host_update, "SLICE", 5)  # several slices of a weight
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    other = torch.nn.Linear(4, 3)
    other.load_state_dict(model.state_dict())
    optimizer = host_update.build_on_host(
        lambda groups, _: torch.optim.AdamW(groups, lr=0.1), [{"params": list(model.parameters())}]
    )
    reference = torch.optim.AdamW(other.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            rows = torch.randn(5, 4)
            model(rows).square().sum().backward()
            other(rows).square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(master_of(ours).grad, theirs.grad)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    assert same_bits(model.state_dict(), other.state_dict())


def test_in_mixed_precision_linear_layers_have_no_fp32_weights_on_the_device():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    expected = model[0].weight.detach().clone()
    groups = [{"params": list(model.parameters())}]
    build = lambda groups, _: torch.optim.SGD(groups, lr=0.5)  # noqa: E731
    round_weights(model[0].parameters(), torch.bfloat16)
    optimizer = host_update.build_on_host(build, groups)
    assert [parameter.dtype for parameter in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert torch.equal(master_of(model[0].weight), expected)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(5, 4)).square().sum().backward()
    assert master_of(model[0].weight).grad.dtype is torch.float32
    optimizer.step()
    assert torch.equal(model[0].weight, master_of(model[0].weight).bfloat16())
    assert not torch.equal(master_of(model[0].weight), expected)


@pytest.mark.parametrize(("device", "may_return_early"), [("cuda", True), ("mps", False)])
def test_copies_of_other_devices_are_awaited(device, may_return_early):
    """Only on CUDA are copies in a stream that the end of a backward waits for."""
    seen = []
    source = SimpleNamespace(device=torch.device(device))
    target = SimpleNamespace(device=torch.device("cpu"), copy_=lambda _, non_blocking: seen.append(non_blocking))
    host_update.copy(target, source)
    assert seen == [may_return_early]


def test_masters_have_storages_of_their_own():
    made = host_update.empty_on_host(
        [torch.empty(3), torch.empty(2, 5, dtype=torch.bfloat16), torch.empty(())], pins=False
    )
    assert [(tensor.shape, tensor.dtype) for tensor in made] == [
        ((3,), torch.float32),
        ((2, 5), torch.bfloat16),
        ((), torch.float32),
    ]
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 3
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in made)


def test_too_little_host_memory_is_reported_before_the_first_step(train, monkeypatch):
    monkeypatch.setattr(memory, "free_in_cgroups", lambda: [2**10])  # the limit of a container
    with pytest.raises(DoesNotFit, match="memory.update needs .* of host memory .* are available"):
        train("host")


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch, caplog):
    class Runtime:
        def cudaHostRegister(self, *_):  # noqa: N802
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime())
    monkeypatch.setattr(host_areas, "suppress", lambda *_: pytest.raises(Exception))  # there is no GPU here
    said = []
    monkeypatch.setattr(host_areas, "log_info_once", said.append)
    host_areas._pin(torch.empty(8, dtype=torch.uint8), "memory.update: host")
    assert "cannot be pinned (CUDA error 2)" in said[0]
    assert "ulimit -l" in said[0]


# ---------------------------------------------------------------------- predictions

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
EMBEDDINGS, LINEAR = 2 * 1024 * 256, 8 * (4 * 256 * 256 + 3 * 256 * 512)  # with the output layer, and without
NORMS = 8 * 2 * 256 + 256
NUM_WEIGHTS = EMBEDDINGS + LINEAR + NORMS


@pytest.mark.parametrize(("precision", "linear_bytes"), [("fp32", 4), ("bf16", 2), ("bf16-pure", 2)])
@pytest.mark.parametrize("num_micro", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_prediction_has_no_state_and_few_gradients_on_the_device(precision, linear_bytes, num_micro, monkeypatch):
    """By hand: weights, in mixed precision those of inner linear layers in half; gradients until they are copied."""
    monkeypatch.setattr(host_update, "MOST_IN_FLIGHT", 2**20)
    monkeypatch.setattr(host_update, "SLICE", 2**16)
    options = {"precision": precision, "gpu": "a100", "num_micro_batches": num_micro}
    found = predict_step_memory(LLAMA, "causal-lm", 1, 16, update="host", **options)
    rest = 2 if precision == "bf16-pure" else 4
    weights = linear_bytes * LINEAR + rest * (EMBEDDINGS + NORMS)
    assert found.parts["weights"] == pytest.approx(weights, rel=0.01)
    assert found.parts["optimizer state"] == 0
    assert found.parts["gradients"] <= 2**20 + 4 * EMBEDDINGS + 4096
    before = predict_step_memory(LLAMA, "causal-lm", 1, 16, update="device", **options)
    assert found.allocated < before.allocated / 2


@pytest.fixture
def tracer():
    recipe = Recipe(
        model={"config": LLAMA, "tokenizer": "train"}, task="causal-lm", data={"train": "nowhere"}, train={"lr": 1e-3}
    )
    return StepTracer(recipe, named_task(recipe), known_target("a100", None).gpu)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_prediction_from_few_blocks_is_that_of_all(tracer, precision):
    spec = plain_spec(1, precision, update="host")
    short, whole = (tracer.trace(spec, BatchShape(1, 16), 2, whole=is_whole) for is_whole in (False, True))
    one, other = predict(short), predict(whole)
    assert (one.allocated, one.parts, one.stage) == (other.allocated, other.parts, other.stage)
    moved = [
        {stage: sum(op.moved for op in trace.ops if op.stage == stage) for stage in ("transfer", "host", "optimizer")}
        for trace in (short, whole)
    ]
    assert moved[0]["transfer"] == moved[1]["transfer"] == 4 * 4 * NUM_WEIGHTS, "out; in and out again; and back"
    # the norm and its factor, and AdamW: weights, gradient and two moments are read and written
    assert moved[1]["host"] == pytest.approx(4 * NUM_WEIGHTS * (1 + 3 + 8), rel=0.1)
    assert moved[0]["host"] == pytest.approx(moved[1]["host"], rel=0.001)
    assert moved[0]["optimizer"] == pytest.approx(moved[1]["optimizer"], rel=0.001)


@pytest.mark.parametrize(("precision", "optimizer", "state"), [("bf16", "adamw", 8), ("bf16-pure", "adamw8bit", 2)])
def test_host_memory_is_that_of_weights_gradients_and_state(precision, optimizer, state):
    """In mixed precision with fp32 weights, although the device has them in half."""
    recipe = Recipe(
        model={"config": LLAMA, "tokenizer": "train"},
        task="causal-lm",
        data={"train": "nowhere"},
        train={"precision": precision, "batch_size": 2, "optimizer": optimizer},
        memory={"update": "host", "micro_batch": 1},
    )
    planner = RecipePlanner(recipe, named_task(recipe), known_target("a100", None), OneLength(16))
    found = planner.host(planner.space.reference())
    each = 4 if precision == "bf16" else 2
    assert found.kept == pytest.approx((2 * each + state) * NUM_WEIGHTS, rel=0.02)
    for host, fits in ((found.memory, True), (found.memory - 1, False), (None, True)):
        target = replace(known_target("a100", None), host_bytes=host)
        planner = RecipePlanner(recipe, named_task(recipe), target, OneLength(16))
        assert planner.estimate(planner.space.reference()).fits is fits
    assert found.checkpoint == pytest.approx((each + state) * NUM_WEIGHTS, rel=0.02)


def test_copies_run_beside_the_computation_and_the_host_waits_for_them():
    device = catalog.find("h200")
    compute = Op("aten.mm", "backward", int(989e12 * 0.75), 0, "bf16")  # a second
    small, large = (Op("transfer", "transfer", 0, int(seconds * 55e9), "fp32") for seconds in (0.5, 3.0))
    update = Op("aten._fused_adamw_", "host", 0, int(2 * 100e9), "fp32")
    assert step_seconds([compute], device).seconds == pytest.approx(1.0, rel=0.01)
    assert step_seconds([small, compute], device).seconds == pytest.approx(1.0, rel=0.01)
    assert step_seconds([large, compute], device).seconds == pytest.approx(3.0, rel=0.01)
    assert step_seconds([large, compute, update], device).seconds == pytest.approx(5.0, rel=0.01)
    assert step_seconds([compute, update, small], device).seconds == pytest.approx(3.5, rel=0.01)


def test_links_of_known_devices():
    links = {name: catalog.find(name).host_link for name in ("t4", "a100", "rtx-4090", "h200")}
    assert links == {"t4": 12e9, "a100": 25e9, "rtx-4090": 25e9, "h200": 55e9}


# ---------------------------------------------------------------------- what is refused, and what auto does


@pytest.mark.slow
def test_auto_updates_on_the_host_only_if_nothing_else_fits():
    def chosen(memory, **settings):
        recipe = Recipe(
            model={"config": {**LLAMA, "vocab_size": 8192, "hidden_size": 1024}, "tokenizer": "train"},
            task="causal-lm",
            data={"train": "nowhere"},
            train={"batch_size": 4, "precision": "fp32", "compile": "off", **settings},
            memory={"offload_state": "none"},  # which is faster where it fits
        )
        return next(r for r in survey(recipe, gpu="a100", length=16, memory=memory).rungs if r.is_chosen)

    plenty = chosen("4GiB")
    assert plenty.spec["update"] == "device"
    assert chosen("1800MiB").spec["update"] == "host"


def test_graphs_are_refused(train):
    with pytest.raises(RecipeError, match="memory.update: host does not work with CUDA graphs"):
        train("host", train={"compile": "graphs"})


def test_a_run_in_mixed_precision_trains_with_rounded_weights(train):
    seen = {}

    class Dtypes:
        def on_step(self, state):
            for name, parameter in state.model.named_parameters():
                seen[name] = (parameter.dtype, master_of(parameter).dtype)

    train("host", [Dtypes()], train={"precision": "bf16"})
    assert seen["classifier.weight"] == (torch.bfloat16, torch.float32)
    assert {dtypes for name, dtypes in seen.items() if "LayerNorm" in name or "embeddings" in name} == {
        (torch.float32, torch.float32)
    }


@pytest.mark.parametrize("update", ["in-backward", "host"])
def test_several_processes_are_refused(update):
    recipe = Recipe(
        model="nowhere", data={"train": "nowhere"}, memory={"update": update}, train={"max_grad_norm": None}
    )
    with pytest.raises(RecipeError, match=f"memory.update: {update} works with one process"):
        WeightUpdate().values(Case(None, Accelerator("cpu"), "fp32", recipe, num_processes=2))
    auto = Case(None, Accelerator("cuda"), "fp32", Recipe(model="a", data={"train": "a"}), num_processes=2)
    assert WeightUpdate().values(auto) == ("device",)
    assert not WeightUpdate().can_keep(update, auto)


def test_a_backward_that_failed_leaves_nothing_in_the_queue():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    weights = host_update.HostWeights(list(model.parameters()))
    optimizer = torch.optim.SGD(weights.masters, lr=0.1)
    handle = model[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 4)).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    assert all(master.grad is not None for master in weights.masters)
    assert not weights._queue._kept, "the copies of both backwards were waited for"
