"""Compiled blocks in a trace: what they keep is what AOTAutograd's partition keeps, and kernels are fused."""

from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import trimtab
from trimtab import Recipe, log
from trimtab.model import compiled_blocks, fp8
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.compiled_blocks import compile_blocks
from trimtab.model.load import load_model
from trimtab.planner.predict_step import predict_step_memory
from trimtab.planner.trace import compiled
from trimtab.planner.trace.cuda import CudaRules, Gpu
from trimtab.planner.trace.fused_kernels import FUSED, FusedGraph
from trimtab.planner.trace.recorder import Recorder
from trimtab.planner.trace.shortened_model import shorten

ROWS, LENGTH = 2, 32
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "vocab_size": 100}
BERT = {"model_type": "bert", "attention_probs_dropout_prob": 0.0, **SIZES}
LLAMA = {"model_type": "llama", "num_key_value_heads": 4, "use_cache": False, **SIZES}
MODELS = {"bert": (BERT, "classify", "sequence-classification"), "llama": (LLAMA, "causal-lm", "causal-lm")}
SEEDS = 32  # bytes: the state of random numbers that attention kernels of a GPU keep


def config_of(name, num_blocks):
    return MODELS[name][0] | {"num_hidden_layers": num_blocks}


def predict(name, num_blocks=6, rows=ROWS, length=LENGTH, **options):
    options = {"precision": "fp32", "compile": "blocks"} | options
    return predict_step_memory(config_of(name, num_blocks), MODELS[name][1], rows, length, **options)


def kept_in(trace):
    """Bytes of tensors that forward made and that exist when backward begins."""
    begin = next(mark.event for mark in trace.marks if mark.name == "backward begins")
    living = {}
    for storage, size in trace.events[:begin]:
        if size:
            living[storage] = size
        else:
            del living[storage]
    return sum(size for storage, size in living.items() if trace.births[storage].part == "forward")


def kept_by_a_block(name, **options):
    """The difference between two models of which one has one block more."""
    return kept_in(predict(name, 7, **options).trace) - kept_in(predict(name, 6, **options).trace)


def saved_by_a_compiled_block(make):
    """The same on real tensors, with a compiler that traces and partitions like inductor and generates no code."""
    return saved_by_compiled(make(3)) - saved_by_compiled(make(2))


def saved_by_compiled(model):
    blocks = compile_blocks(model.train(), backend="aot_eager_decomp_partition")
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage
        return tensor

    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=model.dtype is torch.bfloat16),
    ):
        output = model(input_ids=ids)
    assert blocks.failure is None
    del output
    return sum(storage.nbytes() for storage in saved.values())


def full_model(name, num_blocks):
    return load_model(config_of(name, num_blocks), MODELS[name][2], {}, None)


def fp8_model(num_blocks):
    model = load_model(
        config_of("llama", num_blocks), "causal-lm", {}, None, dtype=torch.bfloat16, quantization=fp8.Fp8()
    )
    add_adapter(model, LoraSpec(rank=4))
    return model


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------------- what is kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_block_keeps_what_a_compiled_one_saves(name, monkeypatch):
    """With inductor's own random numbers: on a CPU, torch's dropout keeps another mask than on a GPU."""
    monkeypatch.setattr(compiled, "_graphs", {})
    monkeypatch.setattr(compiled_blocks, "inductor_options", dict)
    saved = saved_by_a_compiled_block(partial(full_model, name))
    assert kept_by_a_block(name) == pytest.approx(saved, abs=SEEDS)


@pytest.mark.slow
def test_a_block_with_an_fp8_base_keeps_what_a_compiled_one_saves(monkeypatch, caplog):
    """Torch multiplies in fp8 on a CPU, too, so that the graph is that of a GPU. No transposed weight is kept."""

    def has_units(device):
        return True

    has_units._dynamo_marked_constant = True
    monkeypatch.setattr(fp8, "_has_units", has_units)
    options = {"precision": "bf16", "adapter": {"kind": "lora", "base": "fp8", "rank": 4}}
    with caplog.at_level("INFO"):
        kept = kept_by_a_block("llama", **options)
    assert "if it were not compiled" not in caplog.text
    assert kept == pytest.approx(saved_by_a_compiled_block(fp8_model), abs=SEEDS)
    assert {op.name for op in predict("llama", **options).trace.ops} >= {FUSED, "aten._scaled_mm"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_recomputed_block_keeps_what_an_uncompiled_one_keeps(name):
    options = {"gradient_checkpointing": "all"}
    kept = kept_by_a_block(name, **options)
    assert kept == kept_by_a_block(name, compile="off", **options) > 0
    assert kept < kept_by_a_block(name)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("llama", "padded"),
        pytest.param("bert", "none", marks=pytest.mark.slow),
        pytest.param("llama", "none", marks=pytest.mark.slow),
        pytest.param("bert", "padded", marks=pytest.mark.slow),
    ],
)
def test_less_is_kept_and_fewer_kernels_run(name, mask):
    fused, plain = (predict(name, precision="bf16", mask=mask, compile=value) for value in ("blocks", "off"))
    assert kept_in(fused.trace) < kept_in(plain.trace)
    assert fused.allocated < plain.allocated
    assert len(fused.trace.ops) < len(plain.trace.ops)
    assert sum(op.moved for op in fused.trace.ops) < sum(op.moved for op in plain.trace.ops)
    assert sum(op.flops for op in fused.trace.ops) == sum(op.flops for op in plain.trace.ops)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_packed_batches(name, caplog):
    with caplog.at_level("INFO"):
        packed = predict(name, precision="bf16", padding="none", length=64)
    padded = predict(name, precision="bf16", length=64)
    assert "if it were not compiled" not in caplog.text
    assert FUSED in {op.name for op in packed.trace.ops}
    assert kept_in(packed.trace) == pytest.approx(kept_in(padded.trace), rel=0.02)


@pytest.mark.slow
def test_adapters_are_traced_as_a_compiler_sees_them(caplog):
    adapter = {"kind": "lora", "rank": 4}
    with caplog.at_level("INFO"):
        fused, plain = (predict("llama", precision="bf16", adapter=adapter, compile=v) for v in ("blocks", "off"))
    assert "if it were not compiled" not in caplog.text
    assert kept_in(fused.trace) < kept_in(plain.trace)


@pytest.mark.slow
def test_the_trace_of_a_few_blocks_gives_that_of_all(monkeypatch):
    from trimtab.planner.trace import model_trace

    short = predict("llama", 8, precision="bf16")
    monkeypatch.setattr(model_trace, "shorten", lambda skeleton, *_, **__: shorten(skeleton, allowed=False))
    whole = predict("llama", 8, precision="bf16")
    assert short.allocated == whole.allocated
    assert kept_in(short.trace) == kept_in(whole.trace)
    found, expected = ([op for op in p.trace.ops if op.stage != "optimizer"] for p in (short, whole))
    clip = ("aten._foreach_norm", "aten.stack", "aten.linalg_vector_norm")  # lists as long as there are tensors
    assert [op for op in found if op.name not in clip] == [op for op in expected if op.name not in clip]


# ---------------------------------------------------------------------- graphs


@pytest.mark.slow
def test_specifications_that_do_not_change_a_block_share_its_graph(monkeypatch):
    monkeypatch.setattr(compiled, "_graphs", {})
    predict("llama")
    known = dict(compiled._graphs)
    assert len(known) == 1
    for options in ({"gradient_checkpointing": "all"}, {"optimizer": "sgd"}, {"num_blocks": 7}):
        predict("llama", **options)
    assert compiled._graphs == known
    predict("llama", rows=ROWS + 1)
    assert len(compiled._graphs) == 2


def test_a_block_without_a_graph_is_predicted_uncompiled(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("an operation that nobody knows")

    monkeypatch.setattr(compiled, "_graphs", {})
    monkeypatch.setattr(compiled, "_partitioned", fail)
    monkeypatch.setattr(log, "_logged_once", set())
    with caplog.at_level("INFO"):
        found = predict("llama")
        predict("llama", rows=1)
    assert caplog.text.count("an operation that nobody knows") == 1
    assert found.trace.events == predict("llama", compile="off").trace.events


def test_kernels_that_a_compiler_cannot_see_through_are_predicted_uncompiled(caplog, monkeypatch):
    monkeypatch.setattr(log, "_logged_once", set())
    with caplog.at_level("INFO"):
        found = predict("llama", precision="bf16", kernels="liger")
    assert "as if it were not compiled" in caplog.text
    plain = predict("llama", precision="bf16", kernels="liger", compile="off")
    assert found.trace.events == plain.trace.events


@pytest.mark.slow
@pytest.mark.parametrize("draws_as_eager", [True, False])
def test_dropout_is_a_kernel_of_its_own_where_it_draws_as_without_a_compiler(draws_as_eager, monkeypatch):
    monkeypatch.setattr(compiled, "_graphs", {})
    monkeypatch.setattr(compiled_blocks, "inductor_options", lambda: {"fallback_random": draws_as_eager})
    kept, num_masks = {}, {}
    for num_blocks in (6, 7):
        trace = predict("bert", num_blocks).trace
        kept[num_blocks] = kept_in(trace)
        num_masks[num_blocks] = sum(op.name == "aten.native_dropout" for op in trace.ops)
    assert num_masks[7] - num_masks[6] == 2 * draws_as_eager
    monkeypatch.undo()
    # a mask of one byte per element in either case; the choice among statistics of norms may differ
    assert kept[7] - kept[6] == pytest.approx(kept_by_a_block("bert"), rel=0.01)


@pytest.mark.slow
def test_a_plan_of_compiled_blocks(tmp_path):
    def plan(value):
        recipe = Recipe(
            model={"config": config_of("llama", 6), "tokenizer": "train"},
            task="causal-lm",
            data={"train": str(tmp_path / "rows.jsonl")},
            train={"batch_size": 4, "compile": value},
            memory={"gradient_checkpointing": "none"},
        )
        return trimtab.plan(recipe, gpu="h200", length=128)

    assert plan("blocks").predicted_peak_bytes < plan("off").predicted_peak_bytes
    assert plan("blocks").predicted_step_s < plan("off").predicted_step_s


# ---------------------------------------------------------------------- kernels


def traced_kernels(function, *shapes):
    """The recorder after a graph of this function ran on tensors of these shapes."""
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    graph = make_fx(lambda *values: [function(*values)])(*inputs).graph
    recorder = Recorder(CudaRules(Gpu()), lambda _: 0)
    with recorder:
        recorder.adopt(inputs, "inputs")
        outputs = FusedGraph(graph)(inputs)
    return recorder, outputs


def names(recorder):
    return [op.name for op in recorder.ops]


def made(recorder):
    return [birth.size for birth in recorder.births.values() if birth.part == "forward"]


N = 256 * 256 * 4


def test_operations_on_single_numbers_are_one_kernel():
    recorder, (out,) = traced_kernels(lambda x, y: ((x * 2 + y).exp() * x).sum(1), (256, 256), (256, 256))
    assert names(recorder) == [FUSED]
    assert made(recorder) == [256 * 4]
    assert recorder.ops[0].moved == 2 * N + 256 * 4
    assert out.shape == (256,)


def test_a_sum_over_rows_reads_them_again():
    """The gradient of a bias; one without anything else in its kernel reads its input once."""

    def scaled_product(x, w):
        twice = x * 2
        return (twice @ w) * twice.sum(0)

    recorder, _ = traced_kernels(scaled_product, (256, 256), (256, 256))
    assert names(recorder) == [FUSED, FUSED, "aten.mm", FUSED]
    assert [op.moved for op in recorder.ops[:2]] == [2 * N + 256 * 4, N]
    recorder, _ = traced_kernels(lambda x, w: (x @ w).sum(0), (256, 256), (256, 256))
    assert names(recorder) == ["aten.mm", FUSED]


def test_what_a_product_reads_is_written():
    recorder, _ = traced_kernels(lambda x, w: ((x * 2 + 1) @ w).relu() * 2, (256, 256), (256, 256))
    assert names(recorder) == [FUSED, "aten.mm", FUSED]
    assert made(recorder) == [N, N, N]


def test_a_result_takes_the_place_of_an_input_that_is_not_needed_any_more():
    recorder, _ = traced_kernels(lambda x, w: (x @ w).relu(), (256, 256), (256, 256))
    living, most = 0, 0
    sizes = {}
    for storage, size in recorder.events:
        living += size or -sizes.pop(storage)
        sizes |= {storage: size} if size else {}
        most = max(most, living)
    assert most == 3 * N  # x, w and the product; workspaces of libraries are not among the events


def test_what_only_a_later_kernel_reads_is_computed_there():
    """exp(x) is needed after the product: x stays, and nothing is written for it."""
    recorder, _ = traced_kernels(lambda x, w: (x @ w) * x.exp(), (256, 256), (256, 256))
    assert names(recorder) == ["aten.mm", FUSED]
    assert made(recorder) == [N, N]


def test_two_kernels_never_wait_for_each_other():
    """A sum of the first value and of what two products make of it."""
    recorder, _ = traced_kernels(
        lambda x, w: (x * 2) + ((x * 2 @ w).relu() @ w) * (x * 2).sum(), (256, 256), (256, 256)
    )
    assert names(recorder).count("aten.mm") == 2
    assert names(recorder)[-1] == FUSED
