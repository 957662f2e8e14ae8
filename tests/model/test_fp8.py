"""fp8 base models: rounding, products against the dequantized weights, which modules are quantized, and training.

On a CPU products are emulated: the same rounded values are multiplied in fp32.
"""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from tiny_gguf import write_gguf
from tiny_models import KINDS, TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import RecipeError
from trimtab.model import fp8, quantization
from trimtab.model.adapters import LoraSpec, adapter_of, add_adapter, load_adapter
from trimtab.model.fp8 import FP8, Fp8, Fp8Linear, is_supported, quantized_rows
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model, newly_initialized
from trimtab.model.lora_product import bind_product
from trimtab.model.quantization import num_weights, quantizable
from trimtab.techniques.recomputation import checkpoint_layers

IN_FP32 = Fp8(torch.float32)
HALF_STEP = torch.finfo(FP8).eps / 2  # relative error of rounding
HALF_SMALLEST = torch.finfo(FP8).smallest_normal * torch.finfo(FP8).eps / 2  # absolute error below normal numbers
EPS = torch.finfo(torch.float32).eps


def loaded(source, name, how=None, **settings):
    head = {"num_labels": 3} if KINDS[name] == "sequence-classification" else {}
    return load_model(source, KINDS[name], head, tokenizer(), quantization=how, **settings)


def inputs(name):
    found = batch_of(TEXTS)
    is_pair = KINDS[name] == "seq2seq-lm"
    return {**found, "decoder_input_ids": found["input_ids"]} if is_pair else found


def saved(name, folder, **settings):
    plain = loaded({**config_of(name), **settings}, name)
    with quiet_transformers():
        plain.save_pretrained(folder)
    return plain


def quantized_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


def matrix(module):
    """The weight as (out, in)."""
    if isinstance(module, Fp8Linear):
        return module.dequantized(torch.float32)
    return module.weight if isinstance(module, torch.nn.Linear) else module.weight.t()


def rounding_bound(x):
    """The largest possible error of each element in `quantized_rows`."""
    scales = x.abs().amax(-1, keepdim=True) / torch.finfo(FP8).max
    return torch.maximum(x.abs() * HALF_STEP, scales * HALF_SMALLEST) * (1 + 1e-5)


def linear(num_in, num_out, has_bias=False, how=IN_FP32):
    torch.manual_seed(num_in + num_out)
    plain = torch.nn.Linear(num_in, num_out, has_bias)
    return how.quantize(plain.requires_grad_(False)), plain


# ---------------------------------------------------------------------- rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6])
def test_rounding_error(size, dtype):
    x = (torch.randn(40, 96) * torch.logspace(-4, 4, 40)[:, None] * size).to(dtype)
    codes, scales = quantized_rows(x)
    assert codes.dtype is FP8
    assert (codes.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (40, 1))
    error = (codes.float() * scales - x.float()).abs()
    assert bool((error <= rounding_bound(x.float())).all())
    assert bool((codes.float().abs().amax(-1) == torch.finfo(FP8).max).all()), "all of the range is used"


def test_factors_are_part_of_what_is_rounded():
    x, factors = torch.randn(8, 32).bfloat16(), torch.rand(32, 1)
    assert [t.tolist() for t in quantized_rows(x, factors)] == [
        t.tolist() for t in quantized_rows(x.float() * factors.t())
    ]


def test_zeros_stay_zeros_and_nan_stays_nan():
    x = torch.zeros(3, 16)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    codes, scales = quantized_rows(x)
    values = codes.float() * scales
    assert not values[0].any()
    assert values[1].isnan().any()
    assert values[2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_is_what_a_module_computes_with(dtype):
    module, plain = linear(48, 32, how=Fp8(dtype))
    assert torch.equal(Fp8(dtype).rounded(plain.weight), module.dequantized(dtype))


# ---------------------------------------------------------------------- products


@pytest.mark.parametrize("has_bias", [True, False])
def test_product_against_the_dequantized_weight(has_bias):
    """The difference is what the rounding of inputs and of gradients explains."""
    module, plain = linear(96, 64, has_bias)
    weight = module.dequantized(torch.float32)
    x = torch.randn(5, 7, 96).requires_grad_()
    grad = torch.randn(5, 7, 64)
    found = module(x)
    found.backward(grad)
    expected = torch.nn.functional.linear(x, weight, plain.bias).detach()
    bound = rounding_bound(x.detach()) @ weight.abs().t()
    difference = (found - expected).abs()
    assert bool((difference <= bound + 96 * EPS).all())
    assert difference.max() > 100 * EPS, "the input is rounded"
    scaled = grad * module.scales.t()
    bound = rounding_bound(scaled.view(-1, 64)) @ module.codes.float().abs()
    difference = (x.grad - grad @ weight).abs().view(-1, 96)
    assert bool((difference <= bound + 96 * EPS).all())
    assert difference.max() > 100 * EPS, "the gradient is rounded"


@pytest.mark.parametrize("sizes", [(172, 64), (64, 172), (7, 5)])
def test_sizes_that_fp8_units_do_not_take_are_dequantized(sizes):
    module, _ = linear(*sizes)
    x, weight = torch.randn(6, sizes[0], requires_grad=True), module.dequantized(torch.float32)
    module(x).square().sum().backward()
    found, x.grad = x.grad, None
    (x @ weight.t()).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_no_rows():
    module, _ = linear(32, 16)
    x = torch.zeros(0, 32, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.shape == (0, 32)


@pytest.mark.parametrize(("autocast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_dtype_of_the_result_is_that_of_a_plain_module(autocast, expected):
    module, plain = linear(32, 16, how=Fp8(torch.bfloat16))
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = module(x)
        assert found.dtype is plain(x).dtype is expected
    found.sum().backward()
    assert x.grad.dtype is torch.float32


def test_an_operation_of_the_gpu_has_a_meta_kernel():
    """A trace runs the products that a GPU would run."""
    module = linear(32, 48, True)[0].to("meta")
    product = module.multiply(torch.empty(5, 32, device="meta"), torch.bfloat16)
    assert product.shape == (5, 48)
    assert module.input_gradient(product, torch.bfloat16).shape == (5, 32)


@pytest.mark.parametrize("has_units", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_compiler_makes_one_graph(has_units, monkeypatch):
    """Also of products of a GPU: torch multiplies in fp8 on a CPU, too. As in compiled blocks, sizes are symbols."""

    def units(device):
        return has_units

    units._dynamo_marked_constant = True
    monkeypatch.setattr(fp8, "_has_units", units)
    model = torch.nn.Sequential(linear(64, 48, True)[0], torch.nn.GELU(), linear(48, 32)[0])
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: model(x), backend=aot_autograd(fw_compiler=count, bw_compiler=count), fullgraph=True, dynamic=True
    )
    for num_rows in (5, 7):
        x, grad = torch.randn(num_rows, 64, requires_grad=True), torch.randn(num_rows, 32)
        results = []
        for function in (compiled, model):
            result = function(x)
            results.append((result.detach(), *torch.autograd.grad(result, x, grad)))
        for found, expected in zip(*results, strict=True):
            # a value between two codes may become the other one, because a compiler divides in another order
            torch.testing.assert_close(found, expected, rtol=0, atol=2 * HALF_STEP * expected.abs().max().item())
    torch._dynamo.reset()
    assert len(graphs) == 2, "a forward and a backward, for all sizes"
    products = [node for graph in graphs for node in graph.graph.nodes if "_scaled_mm" in str(node.target)]
    assert len(products) == 4 * has_units


def test_capabilities():
    known = {(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (9, 4), (10, 0), (12, 0)}
    assert {capability for capability in known if is_supported(capability)} == {(8, 9), (9, 0), (10, 0), (12, 0)}
    assert not is_supported(None)


# ---------------------------------------------------------------------- adapters


def test_gradients_of_an_adapter():
    """The adapter sees the unrounded input; only the gradient of the input has rounding errors of the base."""
    base, plain = linear(64, 48)
    plain.weight.copy_(base.dequantized(torch.float32))
    outcomes = []
    for module in (base, plain):
        model = torch.nn.Sequential(module)
        torch.manual_seed(1)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["0"], init_lora_weights=False), model)
        assert bind_product(model[0])
        torch.manual_seed(2)
        x, grad = torch.randn(9, 64, requires_grad=True), torch.randn(9, 48)
        model(x).backward(grad)
        outcomes.append((x.grad, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    (grad_x, ours), (expected_x, theirs) = outcomes
    assert len(ours) == 2
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], msg=name)
    bound = rounding_bound(grad * base.scales.t()) @ base.codes.float().abs()
    assert bool(((grad_x - expected_x).abs() <= bound + 64 * EPS).all())


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        pytest.param(name, which, marks=() if which == "none" or name == "llama" else pytest.mark.slow)
        for name in ("bert", "gpt2", "llama", "t5")
        for which in ("none", "all", "ops")
    ],
)
def test_gradients_are_near_those_of_the_dequantized_model(name, checkpointing, tmp_path):
    """And the same bits with and without recomputation."""
    saved(name, tmp_path)
    model, again, twin = (loaded(str(tmp_path), name, how) for how in (IN_FP32, IN_FP32, None))
    with torch.no_grad():
        for part in quantized_names(model):
            matrix(twin.get_submodule(part)).copy_(matrix(model.get_submodule(part)))
    gradients = []
    for other in (model, again, twin):
        torch.manual_seed(5)
        add_adapter(other, LoraSpec(rank=2))
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn(parameter.shape) * 0.1
        checkpoint_layers(other, checkpointing if other is model else "none")
        other.train()
        for module in other.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        other(**inputs(name)).logits.square().mean().backward()
        gradients.append({n: p.grad for n, p in other.named_parameters() if p.requires_grad})
    ours, plainly, expected = gradients
    assert all(torch.equal(ours[key], plainly[key]) for key in ours)
    found, exact = (torch.cat([gradient.flatten() for gradient in group.values()]) for group in (ours, expected))
    error = (found - exact).norm() / exact.norm()
    assert 0 < error < 2 * HALF_STEP


def test_adapters_on_both_bases(tmp_path):
    """An adapter is loaded in fp32 onto a quantized base."""
    saved("gpt2", tmp_path / "base")
    model = loaded(str(tmp_path / "base"), "gpt2", IN_FP32)
    adapter = add_adapter(model, LoraSpec(rank=2))
    for parameter in adapter.tensors().values():
        parameter.data.normal_()
    adapter.save(tmp_path / "adapter")
    for how in (IN_FP32, None):
        again = loaded(str(tmp_path / "base"), "gpt2", how)
        load_adapter(again, tmp_path / "adapter")
        assert all(torch.equal(t, adapter.tensors()[n]) for n, t in adapter_of(again).tensors().items())


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize("name", KINDS)
def test_from_files(name, tmp_path):
    """The same modules as from a config, rounded from the weights in the files; everything else is unchanged."""
    plain = saved(name, tmp_path)
    model = loaded(str(tmp_path), name, IN_FP32)
    names = quantized_names(model)
    assert names == set(quantizable(plain)) == quantized_names(loaded(config_of(name), name, IN_FP32))
    assert len(names) > 7
    for part in names:
        assert torch.equal(matrix(model.get_submodule(part)), IN_FP32.rounded(matrix(plain.get_submodule(part)))), part
    others = {n: p for n, p in model.named_parameters() if n.rpartition(".")[0] not in names}
    assert others
    assert all(model.get_submodule(part).weight.is_contiguous() for part in names), "as the units take them"
    assert all(torch.equal(parameter, plain.get_parameter(n)) for n, parameter in others.items())
    assert not [n for n, p in model.named_parameters() if n.rpartition(".")[0] in names and p.requires_grad]
    assert sum(map(num_weights, model.parameters())) == sum(p.numel() for p in plain.parameters())
    with torch.no_grad():
        logits, expected = model(**inputs(name)).logits, plain(**inputs(name)).logits
    error = (logits - expected).norm() / expected.norm()
    assert 0 < error < 2 * HALF_STEP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_a_config(dtype):
    torch.manual_seed(1)
    model = loaded(config_of("llama"), "llama", Fp8(dtype), dtype=dtype)
    plain = loaded(config_of("llama"), "llama", dtype=dtype)
    assert not [key for key, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    for part in quantized_names(model):
        found, expected = matrix(model.get_submodule(part)), plain.get_submodule(part).weight.float()
        assert found.std().item() == pytest.approx(expected.std().item(), rel=0.5), part
    assert newly_initialized(model) == newly_initialized(plain)
    with torch.no_grad():
        assert model(**inputs("llama")).logits.isfinite().all()


def test_gguf(tmp_path):
    pytest.importorskip("gguf")
    original = load_model({**config_of("llama"), "num_key_value_heads": 2}, "causal-lm", {}, tokenizer())
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original)
    plain, model = (load_model(str(path), "causal-lm", {}, None, quantization=how) for how in (None, IN_FP32))
    weights = [m.model.layers[1].mlp.up_proj for m in (plain, model)]
    assert torch.equal(matrix(weights[1]), IN_FP32.rounded(weights[0].weight))


def test_never_the_whole_model_unquantized(monkeypatch):
    """At any moment at most one block is there in full."""
    most, model, quantize, skeleton = 0, [], Fp8.quantize, quantization.skeleton

    def watched(how, module):
        nonlocal most
        plain = [m.weight for m in model[0].modules() if type(m) is torch.nn.Linear and not m.weight.is_meta]
        most = max(most, sum(weight.numel() for weight in plain))
        return quantize(how, module)

    monkeypatch.setattr(quantization, "skeleton", lambda *args: model.append(skeleton(*args)) or model[-1])
    monkeypatch.setattr(Fp8, "quantize", watched)
    loaded({**config_of("llama"), "num_hidden_layers": 5}, "llama", IN_FP32)
    assert most == 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48


def test_files_are_quantized_tensor_by_tensor(monkeypatch, tmp_path):
    """When a weight is quantized, those before it already are: nothing but integers is in the modules before."""
    from trimtab.model import fp8_loading

    saved("llama", tmp_path)
    convert, plain = fp8_loading.Fp8Quantize.convert, []

    def watched(op, found, **context):
        done = [context["model"].get_submodule(name) for name in op._scales]
        plain.append(sum(module.weight.is_floating_point() for module in done))
        return convert(op, found, **context)

    monkeypatch.setattr(fp8_loading.Fp8Quantize, "convert", watched)
    loaded(str(tmp_path), "llama", IN_FP32)
    assert plain == [0] * 14


def test_newly_initialized_modules_are_not_quantized(tmp_path):
    with quiet_transformers():
        load_model(config_of("bert"), "masked-lm", {}, tokenizer()).save_pretrained(tmp_path)
    model = loaded(str(tmp_path), "bert", Fp8(torch.bfloat16), dtype=torch.bfloat16)
    assert type(model.bert.pooler.dense) is torch.nn.Linear
    assert model.bert.pooler.dense.weight.is_floating_point()
    assert add_adapter(model, LoraSpec(rank=2)).trains == ("bert.pooler", "classifier")


def test_quantized_weights_cannot_be_trained_in_full():
    model = loaded(config_of("llama"), "llama", IN_FP32)
    with pytest.raises(RecipeError, match=r"up_proj.weight is quantized"):
        add_adapter(model, LoraSpec(rank=2, trains=["model.layers.0.mlp.up_proj"]))


def test_copies_and_conversions():
    model = loaded(config_of("llama"), "llama", IN_FP32)
    add_adapter(model, LoraSpec(rank=2))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(**inputs("llama")).logits, model(**inputs("llama")).logits)
    ours, theirs = (m.model.layers[0].mlp.up_proj.base_layer for m in (model, copied))
    assert ours.weight.data_ptr() != theirs.weight.data_ptr()
    theirs.to(torch.bfloat16)
    assert torch.equal(ours.dequantized(torch.float32), theirs.dequantized(torch.float32)), "integers are not converted"


def test_what_was_loaded_is_logged(caplog):
    caplog.set_level("INFO", "trimtab")
    wide = {**config_of("llama"), "hidden_size": 64, "intermediate_size": 512}
    model = loaded(wide, "llama", Fp8(), dtype=torch.bfloat16)
    total = sum(map(num_weights, model.parameters()))
    share = sum(model.get_submodule(name).weight.numel() for name in quantized_names(model)) / total
    assert f"{total:,} parameters, {share:.1%} in fp8 and the rest in bf16" in caplog.messages[0]
    small = {**config_of("llama"), "vocab_size": 4000}
    loaded(small, "llama", Fp8(), dtype=torch.bfloat16)
    assert "fp8 base: only" in caplog.messages[-1]
    assert "are in 8 bits; the largest others: model.embed_tokens" in caplog.messages[-1]
