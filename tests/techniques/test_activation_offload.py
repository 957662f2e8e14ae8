"""Activation offload: the bits of the plain step, pages that are used again, and nothing left behind."""

import copy
import gc

import pytest
import torch
from torch import nn

from kept_bytes import Births
from techniques.test_gradient_checkpointing import (
    CONFIGS,
    OTHERS,
    assert_same,
    deep,
    forward,
    quantize,
    rows,
    step,
)
from tiny_models import TEXTS
from trimtab import Recipe
from trimtab.errors import RecipeError
from trimtab.hardware.catalog import CATALOG
from trimtab.model import host_pages
from trimtab.model.blocks import blocks_of
from trimtab.model.compiled_blocks import compile_blocks
from trimtab.model.host_pages import HostLink, HostPages, HostRoom
from trimtab.model.offloaded_blocks import offload_blocks
from trimtab.planner.host import activations_on_host
from trimtab.planner.memory import predict
from trimtab.planner.shapes import BatchShape, named_task
from trimtab.planner.time import step_seconds
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.techniques.activation_offload import ActivationOffload
from trimtab.techniques.apply import plain_spec, refusal
from trimtab.techniques.base import FROM_HOST, TO_HOST, Accelerator, Case
from trimtab.techniques.recomputation import checkpoint_layers

RECOMPUTED = ["none", "all", {"every": 2}, {"layers": [-1]}]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def offloaded(model, **options):
    return offload_blocks(
        model, [block for _, block in blocks_of(model)], pins=False, **{"min_bytes": 64, "page_bytes": 4096, **options}
    )


QUICK = {("bert", "fp32"), ("gpt2", "bf16"), ("llama", "fp32"), ("t5", "fp32")}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=() if (name, precision) in QUICK else pytest.mark.slow)
        for name in [*CONFIGS, *OTHERS]
        for precision in ("fp32", "bf16")
    ],
)
def test_the_step_is_the_plain_one_to_the_bit(name, precision):
    """With dropout where the family has it by default, and one window of two micro-batches."""
    dtype = torch.bfloat16 if precision == "bf16" else None
    model = deep(name)
    batches = [rows(), rows(TEXTS[:2])]
    plain = step(model, dtype=dtype, batches=batches)
    for which in RECOMPUTED:
        checkpoint_layers(model, which)
        found = offloaded(model)
        assert_same(step(model, dtype=dtype, batches=batches), plain)
        num_pages = found.pages.num_pages
        assert num_pages > 0
        assert found.pages.num_free == num_pages, "every page is free after backward"
        assert_same(step(model, dtype=dtype, batches=batches), plain)
        assert found.pages.num_pages == num_pages, "the second step uses the pages of the first"
    offload_blocks(model, [], pins=False)
    checkpoint_layers(model, "none")
    assert_same(step(model, dtype=dtype, batches=batches), plain)


@pytest.mark.parametrize(("is_quantized", "dropout"), [(False, 0.1), (True, 0.0)])
@pytest.mark.parametrize("which", RECOMPUTED, ids=str)
def test_adapters(is_quantized, dropout, which):
    from trimtab.model.adapters import LoraSpec, add_adapter

    model = deep("llama")
    if is_quantized:
        quantize(model)
    add_adapter(model, LoraSpec(rank=2, dropout=dropout))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    plain = step(model)
    checkpoint_layers(model, which)
    found = offloaded(model)
    assert_same(step(model), plain)
    assert found.pages.num_free == found.pages.num_pages > 0


def test_of_recomputed_blocks_the_input_leaves_and_of_others_everything():
    model = deep("llama")
    sent = {}
    for which in ("all", "none"):
        checkpoint_layers(model, which)
        found = offloaded(model, page_bytes=16)
        loss = forward(model, rows())
        sent[which] = (found.pages.num_pages - found.pages.num_free) * 16
        del loss
        assert found.pages.num_free == found.pages.num_pages, "a graph that is dropped returns its pages"
    hidden = rows()["input_ids"].numel() * model.config.hidden_size * 4
    assert sent["all"] == 3 * hidden
    assert sent["none"] > 5 * sent["all"]


def test_weights_masks_and_positions_stay_and_equal_memory_is_sent_once(monkeypatch):
    model = deep("llama").to(torch.bfloat16)
    seen = []
    send = HostLink.send

    def watched(link, source, room):
        seen.append((source.data_ptr(), source.numel()))
        return send(link, source, room)

    monkeypatch.setattr(HostLink, "send", watched)
    offloaded(model, min_bytes=1)
    loss = forward(model, rows())
    weights = {weight.data_ptr() for weight in (*model.parameters(), *model.buffers())}
    assert seen
    assert not weights & {address for address, _ in seen}
    tokens = rows()["input_ids"].numel()
    head = model.config.hidden_size // model.config.num_attention_heads
    assert all(size != tokens // len(TEXTS) * head * 2 for _, size in seen), "cos and sin belong to all blocks"
    del loss


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_nothing_is_left_and_the_next_step_is_right(where):
    model = deep("bert")
    plain = step(model)
    checkpoint_layers(model, {"every": 2})
    found = offloaded(model)
    last = blocks_of(model)[-1][1] if where == "forward" else blocks_of(model)[0][1]

    def fail(*_):
        raise torch.OutOfMemoryError("a test")

    if where == "forward":
        handle = next(module for module in last.modules() if isinstance(module, nn.Linear)).register_forward_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            step(model)
    else:
        handle = last.register_full_backward_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            step(model)
    handle.remove()
    gc.collect()
    assert not found._running
    assert found.pages.num_free == found.pages.num_pages > 0
    assert_same(step(model), plain)


@pytest.mark.parametrize("which", RECOMPUTED, ids=str)
def test_nothing_is_left_after_backward_even_without_a_garbage_collector(which):
    model = deep("llama")
    checkpoint_layers(model, which)
    found = offloaded(model)
    batch = rows()
    forward(model, batch).backward()  # allocates the pages
    model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with Births() as births:
            loss = forward(model, batch)
        loss.backward()
        del loss
        model.zero_grad()
        assert births.alive_bytes(but=[*model.parameters(), *model.buffers(), *found.pages._free]) == 0
        assert found.pages.num_free == found.pages.num_pages
    finally:
        gc.enable()


def test_outside_of_training_nothing_leaves():
    model = deep("bert")
    found = offloaded(model)
    model.eval()
    forward(model, rows()).backward()
    model.train()
    with torch.no_grad():
        forward(model, rows())
    assert not found.pages.num_pages


def test_a_copied_model_shares_the_pages():
    model = deep("llama")
    found = offloaded(model)
    plain = step(model)
    other = copy.deepcopy(model)
    assert_same(step(other), plain)
    assert found.pages.num_free == found.pages.num_pages


@pytest.mark.slow
@pytest.mark.parametrize("which", ["none", "all"])
def test_compiled_blocks(which):
    model = deep("llama")
    compile_blocks(model, backend="aot_eager")
    checkpoint_layers(model, which)
    compiled = step(model)
    found = offloaded(model)
    assert_same(step(model), compiled)
    assert found.pages.num_free == found.pages.num_pages > 0


# ---------------------------------------------------------------------- pages


def test_a_room_spreads_tensors_over_pages():
    pool = HostPages(pins=False, page_bytes=64)
    room, link = HostRoom(pool), HostLink()
    sources = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (200, 8, 24, 0, 63)]
    sent = [link.send(source, room)[0] for source in sources]
    assert all(
        torch.equal(link.fetch(spans, torch.device("cpu"))[0], s) for spans, s in zip(sent, sources, strict=True)
    )
    assert pool.num_pages == 5
    del room
    assert pool.num_free == 5


def test_memory_that_cannot_be_pinned_is_ordinary_memory_with_one_message(monkeypatch):
    said, empty = [], torch.empty

    def without_pins(*args, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(host_pages, "say", said.append)
    monkeypatch.setattr(torch, "empty", without_pins)
    pool = HostPages(pins=True, page_bytes=64)
    assert [pool.take().numel() for _ in range(3)] == [64] * 3
    assert len(said) == 1
    assert "out of memory" in said[0]
    assert "ulimit -l" in said[0]


# ---------------------------------------------------------------------- plans

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "max_position_embeddings": 8192,
}


def recipe(**memory):
    return Recipe(
        model={"config": LLAMA, "tokenizer": "train"},
        task="causal-lm",
        data={"train": "nowhere"},
        train={"batch_size": 1, "precision": "bf16", "compile": "off"},
        memory={"loss": "chunked", **memory},
    )


def traced(whole=False, **values):
    asked = recipe()
    tracer = StepTracer(asked, named_task(asked), Gpu())
    spec = plain_spec(1, "bf16", loss="chunked", optimizer="adamw", **values)
    return tracer.trace(spec, BatchShape(1, 8192), whole=whole)


@pytest.mark.parametrize(
    ("recomputed", "which"),
    [
        ("none", "all"),
        ("{all_but_every: 4}", "{every: 2}"),
        pytest.param("none", "{every: 2}", marks=pytest.mark.slow),
        pytest.param("{all_but_every: 4}", "all", marks=pytest.mark.slow),
        pytest.param("all", "all", marks=pytest.mark.slow),
        pytest.param("all", "{every: 2}", marks=pytest.mark.slow),
    ],
)
def test_the_derived_trace_is_the_traced_one(recomputed, which):
    from planner.test_blocks import assert_same as assert_same_trace

    values = {"gradient_checkpointing": recomputed, "offload_activations": which}
    assert_same_trace(traced(**values), traced(whole=True, **values))


def test_what_leaves_takes_no_device_memory():
    hidden = 8192 * 128 * 4  # the residual stream is in fp32
    plain, offload = (traced(gradient_checkpointing="all", offload_activations=value) for value in ("none", "all"))
    assert activations_on_host(plain) == 0
    assert activations_on_host(offload) == 12 * hidden
    saved = predict(plain).allocated - predict(offload).allocated
    assert 8 * hidden <= saved <= 12 * hidden
    everything = traced(gradient_checkpointing="none", offload_activations="all")
    assert predict(everything).allocated < 0.6 * predict(traced(gradient_checkpointing="none")).allocated
    assert activations_on_host(everything) > 3 * activations_on_host(offload)
    copies = {name: [op.moved for op in offload.ops if op.name == name] for name in (TO_HOST, FROM_HOST)}
    assert copies[TO_HOST] == copies[FROM_HOST] == [hidden] * 12


def test_a_slow_link_is_waited_for_and_a_fast_one_is_not():
    from dataclasses import replace

    ops = {value: traced(gradient_checkpointing="all", offload_activations=value).ops for value in ("none", "all")}
    gpu = replace(CATALOG["h200"], host_op_s=0.0)
    plain = step_seconds(ops["none"], gpu).seconds
    assert step_seconds(ops["all"], replace(gpu, host_link=1e15)).seconds == pytest.approx(plain, rel=0.02)
    slow = step_seconds(ops["all"], replace(gpu, host_link=1e9))
    assert slow.bound == "host link"
    moved = sum(op.moved for op in ops["all"] if op.name in (TO_HOST, FROM_HOST))
    assert moved / 1e9 * 0.8 < slow.seconds < moved / 1e9 + plain


@pytest.mark.slow
def test_auto_uses_it_only_where_nothing_else_fits():
    from trimtab.planner.survey import survey

    asked = recipe(gradient_checkpointing="all", update="device")
    enough = survey(asked, gpu="h200", length=8192, memory="24GiB", thorough=False)
    assert enough.plan.offload_activations == "none"
    assert {rung.spec["offload_activations"] for rung in enough.rungs} == {"none"}
    small = min(rung.total_bytes for rung in enough.rungs)
    short = survey(asked, gpu="h200", length=8192, memory=f"{(small - 2**23) // 2**20}MiB", thorough=False)
    assert short.plan.offload_activations == "all"
    assert short.plan.outlook.predicted_host_bytes > 12 * 8192 * 128 * 4


def test_a_host_that_is_too_small_is_not_planned_for(monkeypatch):
    from dataclasses import replace

    from trimtab.planner.recipe_planner import RecipePlanner
    from trimtab.planner.shapes import OneLength
    from trimtab.planner.target import known_target

    asked = recipe(gradient_checkpointing="all", offload_activations="all")
    target = known_target("h200", None)
    for host, fits in ((2**40, True), (2**31, False), (None, True)):
        planner = RecipePlanner(asked, named_task(asked), replace(target, host_bytes=host), OneLength(2048))
        assert planner.estimate(planner.space.reference()).fits is fits


def case_of(asked, model=None):
    return Case(model, Accelerator("cuda", (9, 0)), "bf16", asked)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"compile": "graphs"}, "train.compile: graphs"),
        ({"gradient_checkpointing": "ops"}, "gradient_checkpointing: ops"),
        ({"compile": "blocks", "gradient_checkpointing": "all"}, None),
    ],
)
def test_conflicts(values, words):
    spec = plain_spec(1, "bf16", offload_activations="all", **values)
    asked = Recipe(model="nowhere", data={"train": "nowhere"}, train={"compile": values.get("compile", "off")})
    found = refusal(spec, case_of(asked))
    assert (found is None) if words is None else (words in found)


def test_values():
    technique = ActivationOffload()
    model = deep("llama")
    assert technique.values(case_of(recipe(), model)) == ("none", "all")
    assert technique.values(Case(model, Accelerator("cpu"), "fp32", recipe())) == ("none",)
    assert technique.values(case_of(recipe(offload_activations={"every": 2}), model)) == ("{every: 2}",)
    with pytest.raises(RecipeError, match="no repeated blocks"):
        technique.values(case_of(recipe(offload_activations="all"), nn.Linear(2, 2)))
    with pytest.raises(Exception, match="offload_activations"):
        recipe(offload_activations="ops")
    assert technique.describe("all") == "activations on host"
    assert technique.describe("{every: 2}") == "activations of every 2nd on host"
