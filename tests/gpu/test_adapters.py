"""Adapters and 4-bit bases on an accelerator: formats, memory, and numbers against the plain computation."""

import gc

import pytest
import torch

from tiny_adapters import packed_bytes
from tiny_models import config_of, tokenizer
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.load import load_model
from trimtab.model.nf4 import Nf4, dequantized, is_nf4
from trimtab.techniques.recomputation import checkpoint_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 4}
DTYPES = [torch.bfloat16, torch.float16]


def llama(**settings):
    config = {**config_of("llama"), "num_key_value_heads": 4, "max_position_embeddings": 512, **WIDE}
    return load_model(config, "causal-lm", {}, tokenizer(), device="cuda", **settings)


def inputs(num_rows=4, length=256):
    generator = torch.Generator().manual_seed(2)
    return {"input_ids": torch.randint(0, 250, (num_rows, length), generator=generator).cuda()}


def stirred(model):
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape) * 0.02).to(parameter.device))
    return model


def gradients(model, dtype):
    model.zero_grad()
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
        loss = model(**inputs(), use_cache=False).logits.float().square().mean()
    scale = 2.0**12 if dtype is torch.float16 else 1.0  # small gradients would vanish in fp16
    (loss * scale).backward()
    return loss.detach(), {name: p.grad / scale for name, p in model.named_parameters() if p.requires_grad}


def assert_near(ours, exact, bound):
    torch.testing.assert_close(ours[0], exact[0], rtol=bound, atol=0)
    for name, gradient in ours[1].items():
        assert gradient.dtype is torch.float32
        error = (gradient - exact[1][name]).norm() / exact[1][name].norm()
        assert error < bound, (name, error)


def quantized(model):
    return {name: module for name, module in model.named_modules() if is_nf4(module)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_base_against_fp32(dtype):
    torch.manual_seed(0)
    exact = llama()
    half = llama(dtype=dtype)
    half.load_state_dict(exact.state_dict())
    outcomes = []
    for model, compute in ((exact, torch.float32), (half, dtype)):
        torch.manual_seed(1)
        add_adapter(model, LoraSpec(rank=8))
        outcomes.append(gradients(stirred(model), compute))
    assert_near(outcomes[1], outcomes[0], 0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpointing", ["none", "all", "ops"])
def test_nf4_against_its_own_values_in_fp32(dtype, checkpointing):
    model = llama(dtype=dtype, quantization=Nf4(dtype))
    exact = llama()
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            part = name.removesuffix(".weight")
            is_packed = part in quantized(model)
            values = (
                dequantized(model.get_submodule(part).weight, torch.float32) if is_packed else model.get_parameter(name)
            )
            parameter.copy_(values)
    outcomes = []
    for other, compute in ((exact, torch.float32), (model, dtype)):
        torch.manual_seed(1)
        add_adapter(other, LoraSpec(rank=8))
        stirred(other).train()
        checkpoint_layers(other, checkpointing if other is model else "none")
        outcomes.append(gradients(other, compute))
    assert_near(outcomes[1], outcomes[0], 0.05)


def test_random_nf4_depends_on_the_seed_alone():
    states = []
    for _ in range(2):
        torch.manual_seed(9)
        states.append(llama(dtype=torch.bfloat16, quantization=Nf4()).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def asked_for():
    """Bytes in use as they were asked for: the allocator may hand out a block that is larger by up to a MiB."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_memory_of_an_nf4_base():
    """Afterwards codes, scales and tables are held; on the way there was room for one block and no more."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, asked_before = torch.cuda.memory_allocated(), asked_for()
    model = llama(dtype=torch.bfloat16, quantization=Nf4())
    held = asked_for() - asked_before
    peak = torch.cuda.max_memory_allocated() - before
    packed = quantized(model)
    shapes = [tuple(module.weight.quant_state.shape) for module in packed.values()]
    exact = sum(packed_bytes(module.weight) for module in packed.values())
    rest = sum(p.nbytes for name, p in model.named_parameters() if name.removesuffix(".weight") not in packed)
    assert exact + rest <= held < exact + rest + 2**16  # buffers
    unquantized = 2 * sum(rows * columns for rows, columns in shapes)
    assert peak < held + 0.75 * unquantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_files_on_the_device(dtype, tmp_path):
    plain = llama(dtype=dtype)
    plain.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "causal-lm", {}, tokenizer(), dtype=dtype, quantization=Nf4(dtype), device="cuda")
    assert len(quantized(model)) == 7 * 4
    for name, module in quantized(model).items():
        weight = plain.get_submodule(name).weight.float()
        error = (dequantized(module.weight, torch.float32) - weight).square().mean().sqrt() / weight.std()
        assert error < 0.11
        assert module.weight.is_cuda


def test_what_is_kept_for_backward():
    """In a half base: of each input one copy, in its format, and the small images; far less than PEFT's own forward."""
    model = llama(dtype=torch.bfloat16)
    adapter = add_adapter(model, LoraSpec(rank=8))
    model.train()

    def kept():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(**inputs(), use_cache=False).logits
        held = torch.cuda.memory_allocated() - before
        del output
        return held

    kept()  # the first call also makes cuBLAS's workspace
    ours = kept()
    for name in adapter.targets:
        layer = model.get_submodule(name)
        del layer.__dict__["forward"]
    assert ours < kept()
