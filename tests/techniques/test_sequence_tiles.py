"""Tiles along the sequence: outputs of the untiled step, gradients to a few roundings, and less memory at once."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.test_blocks import assert_same as assert_same_trace
from rounding import assert_same_up_to_rounding
from techniques.test_activation_offload import case_of, offloaded, recipe
from techniques.test_gradient_checkpointing import OTHERS, deep, forward, quantize, rows, step
from tiny_models import TEXTS, tokenizer
from trimtab import Recipe
from trimtab.errors import ModelError, RecipeError
from trimtab.model.adapter_configs import LoraSpec
from trimtab.model.adapters import add_adapter
from trimtab.model.load import load_model
from trimtab.model.token_tiles import compute_in_tiles, tile_modules, tiled_modules
from trimtab.planner.memory import predict
from trimtab.planner.shapes import BatchShape, named_task
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.techniques import sequence_tiles
from trimtab.techniques.apply import plain_spec, refusal
from trimtab.techniques.base import Accelerator, Case
from trimtab.techniques.recomputation import checkpoint_layers
from trimtab.techniques.sequence_tiles import SequenceTiles

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
}
MORE = {
    "qwen2": SMALL,
    "qwen3": {**SMALL, "head_dim": 16},
    "mistral": {**SMALL, "head_dim": 16},
    "gemma": {**SMALL, "head_dim": 16},
    "phi3": {**SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "falcon": {
        **{key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "intermediate_size")},
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
_OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 32}
MORE["opt"] = {**_OPT, "vocab_size": 300, "activation_function": "gelu"}
GATED = ["llama", *MORE, "gemma2", "gemma3n_text", "modernbert"]
PLAIN = ["bert", "roberta", "gpt2", "t5", "encoder-decoder", "bart", "marian"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(name):
    if name not in MORE:
        return deep(name)
    torch.manual_seed(0)
    return load_model({"model_type": name, **MORE[name]}, "causal-lm", {}, tokenizer()).train()


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def assert_close(found, plain, num_eps=64):
    """Losses are equal; gradients to a few roundings of the largest of their tensor, or of the model for those at 0."""
    assert torch.allclose(found[0], plain[0], rtol=4e-7)
    assert found[1].keys() == plain[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in plain[1].values())
    for name, gradient in plain[1].items():
        size = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((found[1][name] - gradient).abs().max()) <= num_eps * torch.finfo(torch.float32).eps * size, name
    assert torch.equal(found[2], plain[2])


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("llama", "gemma3n_text", "bert", "t5") else pytest.param(name, marks=pytest.mark.slow)
        for name in [*GATED, *PLAIN]
    ],
)
def test_the_step_is_the_untiled_one(name):
    """For padded rows, in two micro-batches, alone and inside recomputed blocks."""
    model = without_dropout(made(name))
    batches = [rows(), rows(TEXTS[:2])]
    plain = step(model, batches=batches)
    num_modules = len(tiled_modules(model))
    assert num_modules
    for tile in (1, 5, 16):
        assert tile_modules(model, tile) == num_modules
        assert_close(step(model, batches=batches), plain)
    for which in ("all", {"every": 2}):
        checkpoint_layers(model, which)
        assert_close(step(model, batches=batches), plain)
    checkpoint_layers(model, "none")
    assert tile_modules(model, None) == 0
    found = step(model, batches=batches)
    assert all(torch.equal(found[1][key], gradient) for key, gradient in plain[1].items())


def test_a_result_may_be_changed_in_place():
    """As Falcon's blocks do, which add the attention to what their MLP returns."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 3, 4)
    result = compute_in_tiles(layer, x, list(layer.parameters()), 4)
    result += x
    result.sum().backward()
    assert torch.allclose(result, layer(x) + x)
    assert torch.equal(layer.bias.grad, torch.full((4,), 6.0))


def test_an_mlp_that_takes_more_than_its_input_is_refused():
    """MPT's MLP adds the residual itself: tiles of its input alone would change nothing."""
    sizes = {"d_model": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 300}
    model = load_model({"model_type": "mpt", **sizes}, "causal-lm", {}, tokenizer())
    assert not tiled_modules(model)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt2"))])
def test_in_half_precision(name):
    """Gradients are rounded to bf16 once for each tile."""
    model = without_dropout(made(name))
    plain = step(model, dtype=torch.bfloat16)
    tile_modules(model, 16)
    for which in ("none", "all"):
        checkpoint_layers(model, which)
        found = step(model, dtype=torch.bfloat16)
        assert torch.allclose(found[0], plain[0], rtol=2e-3)
        assert found[1].keys() == plain[1].keys()
        for key, gradient in plain[1].items():
            error = (found[1][key] - gradient).norm() / (gradient.norm() + 1e-6)
            assert error < 0.02, key


def test_gradients_of_half_weights_are_summed_in_fp32():
    """Of 512 tiles with equal gradients, sums in bf16 would stop growing at 256 times the first."""
    linear = nn.Linear(4, 4, bias=True).bfloat16()
    x = torch.ones(1, 512, 4, dtype=torch.bfloat16, requires_grad=True)
    compute_in_tiles(linear, x, list(linear.parameters()), 1).sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((4, 4), 512.0, dtype=torch.bfloat16))
    assert torch.equal(linear.bias.grad, torch.full((4,), 512.0, dtype=torch.bfloat16))
    assert torch.allclose(x.grad, linear.weight.sum(0).expand_as(x), rtol=1e-2)


def test_an_autocast_copy_of_a_weight_made_in_tiles_is_not_used_outside():
    """Under autocast torch caches copies of weights, also those without a graph."""
    linear = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        long = compute_in_tiles(linear, torch.ones(8, 4), list(linear.parameters()), 2)
        short = compute_in_tiles(linear, torch.ones(2, 4), list(linear.parameters()), 2)
    (long.float().sum() + short.float().sum()).backward()
    assert torch.allclose(linear.weight.grad, torch.full((4, 4), 10.0))


@pytest.mark.parametrize("is_quantized", [False, True])
def test_adapters_on_a_frozen_base(is_quantized):
    from trimtab.model.adapters import LoraSpec, add_adapter

    model = made("llama")
    if is_quantized:
        quantize(model)
    add_adapter(model, LoraSpec(rank=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    # products with 4-bit weights are in bf16 here
    plain = step(model)
    assert tile_modules(model, 5) == 3
    found = step(model)
    if is_quantized:
        errors = [(found[1][key] - g).norm() / g.norm() for key, g in plain[1].items()]
        assert len(errors) == 3 * 7 * 2
        assert max(errors) < 0.02
    else:
        assert_close(found, plain)
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    assert step(model)[1].keys() == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("which", ["none", "all"])
def test_with_activation_offload(which):
    model = made("llama")
    plain = step(model)
    tile_modules(model, 5)
    checkpoint_layers(model, which)
    found = offloaded(model)
    assert_close(step(model), plain)
    assert found.pages.num_free == found.pages.num_pages > 0


@pytest.mark.parametrize("which", ["none", "all"])
def test_dropout_draws_the_same_masks_in_backward(which):
    """The gradient of a loss is that of a difference, only if both see one mask."""
    model = made("bert").double()
    tile_modules(model, 5)
    checkpoint_layers(model, which)
    assert not torch.equal(step(model, seed=3)[0], step(model, seed=4)[0])
    weight = model.bert.encoder.layer[1].intermediate.dense.weight
    _, gradients, _ = step(model, seed=3)
    gradient = gradients["bert.encoder.layer.1.intermediate.dense.weight"]
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * 1e-6 * gradient / gradient.norm())
        losses.append(step(model, seed=3)[0].sum())
        with torch.no_grad():
            weight.sub_(sign * 1e-6 * gradient / gradient.norm())
    assert torch.allclose((losses[0] - losses[1]) / 2e-6, gradient.norm(), rtol=1e-4)


class Widest(TorchDispatchMode):
    """The most elements of a tensor of a width, and how often a product made one."""

    def __init__(self, width):
        super().__init__()
        self.width, self.most, self.num_products = width, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self.width:
                is_weight = any(tensor.shape[-2] == size for size in (self.width, 32))
                self.most = max(self.most, 0 if is_weight else tensor.numel() // self.width)
                self.num_products += "mm" in func.__name__ and not is_weight
        return result


@pytest.mark.parametrize("which", ["none", "all"])
def test_wide_tensors_exist_for_one_tile_and_nothing_is_computed_three_times(which):
    model = made("mistral")  # 48 wide, in 2 blocks
    checkpoint_layers(model, which)
    tile_modules(model, 7)
    num_tokens = rows()["input_ids"].numel()
    with Widest(48) as widest:
        forward(model, rows()).backward()
    assert widest.most == 7
    num_tiles = -(-num_tokens // 7)
    # gate and up in forward, again in backward, and the gradient of down's input
    assert widest.num_products == 2 * num_tiles * (2 + 2 + 1)


def test_without_gradients_tiles_are_computed_too():
    model = made("llama").eval()
    with torch.no_grad():
        plain = model(**rows()).logits
        tile_modules(model, 5)
        assert torch.allclose(model(**rows()).logits, plain, rtol=1e-5, atol=1e-6)


def test_a_copied_model_is_tiled_on_its_own():
    model = made("llama")
    tile_modules(model, 5)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert any(bool(gradient.any()) for gradient in step(other)[1].values())


def test_a_second_backward_is_refused():
    linear = nn.Linear(4, 4)
    loss = compute_in_tiles(linear, torch.ones(8, 4), list(linear.parameters()), 2).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_what_returns_no_vector_per_token_is_refused():
    with pytest.raises(ModelError, match="one vector per token"):
        compute_in_tiles(lambda x: x.sum(1), torch.ones(8, 4), [], 2)


# ---------------------------------------------------------------------- plans


def test_blocks_without_a_module_around_their_layers_are_copied_with_them():
    """OPT, with LoRA: the copy computes with its own weights, in evaluation, too."""
    model = without_dropout(made("opt")).double()
    add_adapter(model, LoraSpec(rank=2, targets=["fc1", "fc2"]))
    assert tile_modules(model, 5) == 2
    twin = copy.deepcopy(model)
    ids = {name: tensor for name, tensor in rows().items() if name in ("input_ids", "attention_mask")}
    before = model(**ids).logits
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "fc1" in name:
                parameter.add_(0.5)
    assert torch.equal(model(**ids).logits, before)
    changed = twin.eval()(**ids).logits
    assert not torch.allclose(changed, before, atol=1e-3)
    tile_modules(twin, None)
    assert_same_up_to_rounding(changed, twin(**ids).logits, 64)


@pytest.mark.parametrize("name", ["mixtral", "bart", "albert"])
def test_models_without_such_a_module_are_refused(name):
    model = deep(name)
    for module in model.modules():
        if hasattr(module, "activation_dropout"):  # between the layers of BART's MLPs
            module.activation_dropout = 0.1
    technique = SequenceTiles()
    assert technique.values(case_of(recipe(), model)) == ("none",)
    with pytest.raises(RecipeError, match="have no separate MLP"):
        technique.values(case_of(recipe(tile_tokens=512), model))


def test_values_and_conflicts():
    technique = SequenceTiles()
    model = made("llama")
    assert technique.values(case_of(recipe(), model)) == ("none", "4096", "1024")
    assert technique.values(case_of(recipe(tile_tokens="512"), model)) == ("512",)
    assert technique.values(case_of(recipe(tile_tokens="none"), model)) == ("none",)
    assert technique.values(Case(model, Accelerator("cpu"), "fp32")) == ("none",)
    with pytest.raises(Exception, match="tile_tokens"):
        recipe(tile_tokens=0)
    asked = Recipe(model="nowhere", data={"train": "nowhere"}, train={"compile": "blocks"})
    spec = plain_spec(1, "bf16", tile_tokens="512")
    assert refusal(spec, case_of(asked)) is None
    assert "train.compile: blocks" in refusal(spec.having({"compile": "blocks"}), case_of(asked))
    assert "all products" in refusal(spec.having({"gradient_checkpointing": "ops"}), case_of(asked))
    assert technique.describe("4096") == "tiles of 4,096 tokens"
    assert OTHERS


def traced(whole=False, length=2000, **values):
    asked = recipe()
    tracer = StepTracer(asked, named_task(asked), Gpu())
    spec = plain_spec(1, "bf16", loss="chunked", optimizer="adamw", **values)
    return tracer.trace(spec, BatchShape(1, length), whole=whole)


@pytest.mark.parametrize("recomputed", ["none", pytest.param("all", marks=pytest.mark.slow)])
def test_the_derived_trace_is_the_traced_one(recomputed):
    values = {"gradient_checkpointing": recomputed, "offload_activations": "all", "tile_tokens": "500"}
    assert_same_trace(traced(**values), traced(whole=True, **values))


def test_the_trace_of_few_tiles_is_that_of_all(monkeypatch):
    values = {"gradient_checkpointing": "all", "tile_tokens": "300"}  # seven tiles, the last one shorter
    few = traced(**values)
    monkeypatch.setattr(SequenceTiles, "patches", lambda *_: iter(()))
    everything = traced(**values)
    assert predict(few).allocated == predict(everything).allocated
    assert predict(few).parts == predict(everything).parts
    sums = {id(trace): (sum(op.flops for op in trace.ops), len(trace.ops)) for trace in (few, everything)}
    assert sums[id(few)] == sums[id(everything)]


def test_many_tiles_are_traced_as_few_that_do_as_much(monkeypatch):
    values = {"gradient_checkpointing": "all", "tile_tokens": "50"}  # 40 tiles
    few = traced(**values)
    monkeypatch.setattr(sequence_tiles, "_MOST_COPIES", 1000)
    everything = traced(**values)
    assert len(few.ops) < 0.6 * len(everything.ops)
    for name in ("flops", "moved"):
        sums = [sum(getattr(op, name) for op in trace.ops) for trace in (few, everything)]
        assert sums[0] == pytest.approx(sums[1], rel=1e-3)


def test_tiles_need_less_memory_and_no_more_products_in_recomputed_blocks():
    plain, tiled = (traced(length=8192, gradient_checkpointing="all", tile_tokens=tile) for tile in ("none", "512"))
    assert predict(tiled).allocated < predict(plain).allocated
    assert sum(op.flops for op in tiled.ops) == pytest.approx(sum(op.flops for op in plain.ops), rel=0.02)
