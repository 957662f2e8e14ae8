"""4-bit base models: which modules are quantized, that gradients are correct, and that adapters train on them."""

import copy
import importlib.util

import pytest
import torch

from tiny_gguf import write_gguf
from tiny_models import KINDS, TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import MissingDependency, RecipeError
from trimtab.model import nf4, quantization
from trimtab.model.adapters import LoraSpec, adapter_of, add_adapter, load_adapter
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model, newly_initialized
from trimtab.model.nf4 import Nf4, dequantized, is_nf4
from trimtab.model.quantization import num_weights
from trimtab.techniques.recomputation import checkpoint_layers
from trimtab.units import format_bytes

pytest.importorskip("bitsandbytes", reason="an nf4 base needs bitsandbytes")

IN_FP32 = Nf4(torch.float32)


def loaded(source, name, nf4=None, **settings):
    head = {"num_labels": 3} if KINDS[name] == "sequence-classification" else {}
    return load_model(source, KINDS[name], head, tokenizer(), quantization=nf4, **settings)


def inputs(name):
    found = batch_of(TEXTS)
    is_pair = KINDS[name] == "seq2seq-lm"
    return {**found, "decoder_input_ids": found["input_ids"]} if is_pair else found


def quantized_names(model):
    return {name for name, module in model.named_modules() if is_nf4(module)}


def matrix(module):
    """The weight as (out, in), of any of the three kinds of linear modules."""
    if is_nf4(module):
        return dequantized(module.weight, torch.float32)
    return module.weight if isinstance(module, torch.nn.Linear) else module.weight.t()


def plain_twin(model, plain):
    """`plain` with the values that the 4 bits of `model` stand for."""
    twin = copy.deepcopy(plain)
    with torch.no_grad():
        for name in quantized_names(model):
            plainly = name.removesuffix(".base_layer")  # below an adapter
            matrix(twin.get_submodule(plainly)).copy_(matrix(model.get_submodule(name)))
    return twin


def saved(name, folder, **settings):
    plain = loaded({**config_of(name), **settings}, name)
    with quiet_transformers():
        plain.save_pretrained(folder)
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 64, 96, 160, 172, 7])
def test_quantization_error_is_small_for_every_width(width, dtype):
    """On the CPU bitsandbytes takes the scales of other blocks where rows are no multiple of 64 wide."""
    weight = torch.randn(40, width) * 0.02
    error = (Nf4(dtype).rounded(weight).float() - weight).square().mean().sqrt() / weight.std()
    assert 0.03 < error < 0.11


@pytest.mark.parametrize("name", KINDS)
def test_from_files(name, tmp_path):
    """The same modules as from a config, close to the weights in the files; everything else is unchanged."""
    plain = saved(name, tmp_path)
    model = loaded(str(tmp_path), name, IN_FP32)
    names = quantized_names(model)
    assert names == quantized_names(loaded(config_of(name), name, IN_FP32))
    assert len(names) > 7
    for part in names:
        exact, found = matrix(plain.get_submodule(part)), matrix(model.get_submodule(part))
        assert ((found - exact).square().mean().sqrt() / exact.std()) < 0.11, part
    others = {n: p for n, p in model.named_parameters() if n.removesuffix(".weight") not in names}
    assert all(torch.equal(parameter, plain.get_parameter(n)) for n, parameter in others.items())
    twin = plain_twin(model, plain)
    with torch.no_grad():
        logits, expected = model(**inputs(name)).logits, twin(**inputs(name)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert sum(map(num_weights, model.parameters())) == sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("name", KINDS)
def test_heads_are_not_quantized(name):
    model = loaded(config_of(name), name, IN_FP32)
    output = model.get_output_embeddings()
    assert output is None or not is_nf4(output)
    heads = ("classifier", "lm_head", "cls.", "decoder.cls")
    assert not [part for part in quantized_names(model) if part.startswith(heads)]
    assert is_nf4(model.get_submodule("bert.pooler.dense")) if name == "bert" else True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_from_a_config(name, dtype):
    """Buffers, ties, dtypes and standard deviations are those of an unquantized model."""
    torch.manual_seed(1)
    model = loaded(config_of(name), name, Nf4(dtype), dtype=dtype)
    plain = loaded(config_of(name), name, dtype=dtype)
    assert not [key for key, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    for (key, buffer), (other_key, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert key == other_key
        assert buffer.dtype is expected.dtype
        assert torch.equal(buffer, expected), key
    names = [[key for key, _ in m.named_parameters(remove_duplicate=False)] for m in (model, plain)]
    assert names[0] == names[1]
    ties = [
        {key for key, p in m.named_parameters(remove_duplicate=False)} - {key for key, _ in m.named_parameters()}
        for m in (model, plain)
    ]
    assert ties[0] == ties[1]
    for key, expected in plain.named_parameters():
        part = key.removesuffix(".weight")
        parameter = model.get_parameter(key)
        values = matrix(model.get_submodule(part)) if part in quantized_names(model) else parameter.float()
        assert values.std().item() == pytest.approx(expected.float().std().item(), rel=0.5, abs=1e-6), key
    with torch.no_grad():
        assert model(**inputs(name)).logits.isfinite().all()
    assert newly_initialized(model) == newly_initialized(plain)


def test_random_weights_depend_on_the_seed_alone():
    def built(seed):
        torch.manual_seed(seed)
        return loaded(config_of("llama"), "llama", IN_FP32).state_dict()

    one, other, another = built(3), built(3), built(4)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], another["model.layers.0.mlp.up_proj.weight"])


def test_never_the_whole_model_unquantized(monkeypatch):
    """At any moment at most one block is there in full."""
    most = 0
    quantize = Nf4.quantize

    def watched(how, module):
        nonlocal most
        linear = [m.weight for m in model[0].modules() if type(m) is torch.nn.Linear and not m.weight.is_meta]
        most = max(most, sum(weight.numel() for weight in linear))
        return quantize(how, module)

    model = []
    skeleton = quantization.skeleton
    monkeypatch.setattr(quantization, "skeleton", lambda *args: model.append(skeleton(*args)) or model[-1])
    monkeypatch.setattr(Nf4, "quantize", watched)
    loaded({**config_of("llama"), "num_hidden_layers": 5}, "llama", IN_FP32)
    assert most == 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        pytest.param(name, which, marks=() if which == "none" or name == "llama" else pytest.mark.slow)
        for name in KINDS
        for which in ("none", "all", "ops")
    ],
)
def test_gradients_are_those_of_the_dequantized_model(name, checkpointing, tmp_path):
    saved(name, tmp_path)
    model = loaded(str(tmp_path), name, IN_FP32)
    twin = plain_twin(model, loaded(str(tmp_path), name))
    gradients = []
    for other in (model, twin):
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
    ours, expected = gradients
    assert ours.keys() == expected.keys()
    for key, gradient in ours.items():
        if gradient is None:  # a pooler that the model does not use
            assert expected[key] is None
        else:
            torch.testing.assert_close(gradient, expected[key], rtol=1e-3, atol=1e-6)


def test_evaluation_between_steps_changes_nothing():
    model = loaded(config_of("llama"), "llama", IN_FP32)
    add_adapter(model, LoraSpec(rank=2))

    def gradients():
        model.zero_grad()
        model.train()
        model(**inputs("llama")).logits.square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}

    before = gradients()
    with torch.no_grad():
        model.eval()(**inputs("llama"))
    after = gradients()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(gradient.any() for gradient in after.values())


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(autocast):
    model = loaded(config_of("llama"), "llama", Nf4(torch.bfloat16), dtype=torch.bfloat16)
    add_adapter(model, LoraSpec(rank=2))
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(**inputs("llama")).logits
    logits.float().square().mean().backward()
    assert logits.dtype is torch.bfloat16
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    state = model.model.layers[0].mlp.up_proj.base_layer.weight.quant_state
    assert state.dtype is torch.bfloat16


def test_newly_initialized_modules_are_not_quantized(tmp_path):
    """A pooler that the files lack is random: in 4 bits it could not train."""
    with quiet_transformers():
        load_model(config_of("bert"), "masked-lm", {}, tokenizer()).save_pretrained(tmp_path)
    model = loaded(str(tmp_path), "bert", Nf4(torch.bfloat16), dtype=torch.bfloat16)
    assert type(model.bert.pooler.dense) is torch.nn.Linear
    assert model.bert.pooler.dense.weight.std() > 0
    adapter = add_adapter(model, LoraSpec(rank=2))
    assert adapter.trains == ("bert.pooler", "classifier")
    assert model.classifier.weight.dtype is model.bert.pooler.dense.weight.dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**inputs("bert"), labels=torch.tensor([0, 1, 2, 0, 1])).loss
    loss.backward()
    assert model.bert.pooler.dense.weight.grad.any()


def test_an_adapter_fits_the_quantized_and_the_plain_base(tmp_path):
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
    twin = plain_twin(model, loaded(str(tmp_path / "base"), "gpt2"))
    load_adapter(twin, tmp_path / "adapter")
    torch.testing.assert_close(model(**inputs("gpt2")).logits, twin(**inputs("gpt2")).logits, rtol=1e-3, atol=1e-4)


def test_copies_share_no_memory():
    model = loaded(config_of("llama"), "llama", IN_FP32)
    add_adapter(model, LoraSpec(rank=2))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(**inputs("llama")).logits, model(**inputs("llama")).logits)
    weights = [m.model.layers[0].mlp.up_proj.base_layer.weight for m in (model, copied)]
    assert weights[0].data_ptr() != weights[1].data_ptr()
    assert weights[1].module is None  # which would keep the other model alive


def test_quantized_weights_cannot_be_trained_in_full():
    model = loaded(config_of("llama"), "llama", IN_FP32)
    with pytest.raises(RecipeError, match=r"up_proj.weight is quantized"):
        add_adapter(model, LoraSpec(rank=2, trains=["model.layers.0.mlp.up_proj"]))


def test_gguf(tmp_path):
    pytest.importorskip("gguf")
    original = load_model({**config_of("llama"), "num_key_value_heads": 2}, "causal-lm", {}, tokenizer())
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original)
    plain = load_model(str(path), "causal-lm", {}, None)
    model = load_model(str(path), "causal-lm", {}, None, quantization=IN_FP32)
    assert len(quantized_names(model)) == 14
    expected = IN_FP32.rounded(plain.model.layers[1].mlp.up_proj.weight)
    assert torch.equal(matrix(model.model.layers[1].mlp.up_proj), expected)
    assert add_adapter(model, LoraSpec(rank=2)).base.name == str(path)


EXPERTS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS |= {"intermediate_size": 256, "vocab_size": 300}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8, **EXPERTS}, "model.layers.*.mlp.experts (MixtralExperts)"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 128, **EXPERTS},
            "model.layers.*.mlp.experts (Qwen3MoeExperts)",
        ),
    ],
)
def test_unquantized_experts_are_reported(caplog, config, name):
    """Of experts in one tensor none is quantized: the word "nf4" would promise what is not there."""
    import logging

    caplog.set_level(logging.INFO, logger="trimtab")
    model = load_model(config, "causal-lm", {}, None, quantization=Nf4(torch.bfloat16), dtype=torch.bfloat16)
    quantized = sum(num_weights(module.weight) for module in model.modules() if is_nf4(module))
    experts = sum(p.numel() for part, p in model.named_parameters() if ".experts." in part)
    total = sum(map(num_weights, model.parameters()))
    loaded_line, warning = [record.getMessage() for record in caplog.records if record.name == "trimtab"]
    assert f"{quantized / total:.1%} in nf4" in loaded_line
    assert f"({quantized / total:.0%}) are in 4 bits" in warning
    assert f"the largest others: {name} with {experts / total:.0%}, {format_bytes(2 * experts)}" in warning
    assert "adapter: lora" in warning


def test_a_base_that_is_mostly_in_4_bits_needs_no_warning(caplog):
    import logging

    caplog.set_level(logging.INFO, logger="trimtab")
    config = {"model_type": "llama", **EXPERTS}
    load_model(config, "causal-lm", {}, None, quantization=Nf4(torch.bfloat16), dtype=torch.bfloat16)
    assert len(caplog.messages) == 1


def test_the_log_message(caplog):
    import logging

    caplog.set_level(logging.INFO, logger="trimtab")
    model = loaded(config_of("llama"), "llama", Nf4(torch.bfloat16), dtype=torch.bfloat16)
    plain = loaded(config_of("llama"), "llama")
    count = sum(p.numel() for p in plain.parameters())
    share = sum(num_weights(module.weight) for module in model.modules() if is_nf4(module)) / count
    assert f"{count:,} parameters, {share:.1%} in nf4 and the rest in bf16" in caplog.messages[0]
    add_adapter(model, LoraSpec(rank=2))
    assert "LoRA of rank 2 on 14 modules" in caplog.messages[-1]


def test_without_bitsandbytes(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    nf4._bitsandbytes.cache_clear()
    with pytest.raises(MissingDependency, match="needs bitsandbytes") as failure:
        loaded(config_of("llama"), "llama", IN_FP32)
    assert failure.value.cure == "pip install 'trimtab[bitsandbytes]'"


def test_a_compiler_makes_one_graph():
    """Of bitsandbytes' module and its autograd function, forward and backward."""
    how = Nf4(torch.bfloat16)
    model = torch.nn.Sequential(*(how.quantize(torch.nn.Linear(64, 64).requires_grad_(False)) for _ in range(2)))
    how.finish(model)
    for module in model:
        module.bias.data = module.bias.data.bfloat16()  # as `finish_quantized` does
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True, dynamic=True)
    x, grad = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(5, 64).bfloat16()
    results = []
    for function in (compiled, model):
        result = function(x)
        results.append((result.detach(), *torch.autograd.grad(result, x, grad)))
    torch._dynamo.reset()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
