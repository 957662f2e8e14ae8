"""Gradient checkpointing on an accelerator: the gradients of the plain step, its random numbers, and less memory."""

import pytest
import torch

from trimtab.hardware.extras import has_package
from trimtab.model.blocks import blocks_of
from trimtab.techniques.kernels import use_liger
from trimtab.techniques.recomputation import checkpoint_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

KINDS = ["all", "ops", {"every": 2}]


def a_llama(attention="sdpa", dropout=0.0, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, num_key_value_heads=2, attention_dropout=dropout, **(sizes | options))
    config._attn_implementation = attention
    return LlamaForCausalLM(config).cuda().train()


def a_bert(dropout=0.1):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = BertConfig(vocab_size=512, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes)
    return BertForMaskedLM(config).cuda().train()


def rows(count=4, length=128):
    ids = torch.randint(0, 512, (count, length), generator=torch.Generator().manual_seed(1)).cuda()
    return {"input_ids": ids, "labels": ids}


def loss_of(model, dtype, batch=None):
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        return model(**(batch or rows()), **({"use_cache": False} if "Llama" in type(model).__name__ else {})).loss


def step(model, dtype):
    model.zero_grad()
    torch.manual_seed(3)
    torch.cuda.manual_seed_all(3)
    loss = loss_of(model, dtype)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return loss.detach(), gradient, torch.cuda.get_rng_state()


def kept_bytes(model, dtype):
    """What is allocated after the forward for backward alone."""
    loss_of(model, dtype)  # cuBLAS takes its memory with the first products
    before = torch.cuda.memory_allocated()
    loss = loss_of(model, dtype)
    now = torch.cuda.memory_allocated()
    del loss
    return now - before


def assert_same(model, dtype):
    plain = step(model, dtype)
    again = step(model, dtype)
    # some backward kernels add up in no fixed order; other dropout masks would differ by far more
    noise = float((again[1] - plain[1]).norm() / plain[1].norm())
    bound = max(10 * noise, 1e-6 if dtype is None else 1e-3)
    assert bound < 0.02
    for which in KINDS:
        checkpoint_layers(model, which)
        found = step(model, dtype)
        assert torch.equal(found[0], plain[0]), which
        assert float((found[1] - plain[1]).norm() / plain[1].norm()) <= bound, which
        assert torch.equal(found[2], plain[2]), which
    checkpoint_layers(model, "none")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama(attention, dtype):
    assert_same(a_llama(attention), dtype)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_dropout_everywhere(dtype):
    """Fused attention draws its own masks: where its result is kept, the generator has to move on all the same."""
    model = a_bert()
    assert not torch.equal(step(model, dtype)[0], step(model.eval(), dtype)[0])
    assert_same(model.train(), dtype)


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_each_attention_kernel_with_dropout(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = a_llama(dropout=0.2)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            loss_of(model, torch.bfloat16)
        except RuntimeError as failure:
            pytest.skip(f"{backend} does not take these shapes here: {str(failure)[:80]}")
        assert_same(model, torch.bfloat16)


@pytest.mark.skipif(not has_package("liger_kernel"), reason="needs liger-kernel")
def test_fused_kernels():
    """Their backward overwrites the results of products, which selective recomputation has handed out."""
    model = a_llama()
    use_liger(model)
    assert_same(model, torch.bfloat16)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_memory(dtype, is_fused):
    """With fused kernels less is saved in the first place; what `ops` saves is the same."""
    model = a_llama()
    if is_fused:
        if not has_package("liger_kernel"):
            pytest.skip("needs liger-kernel")
        use_liger(model)
    sizes = {}
    for which in ("none", "ops", {"every": 2}, "all"):
        checkpoint_layers(model, which)
        sizes[str(which)] = kept_bytes(model, dtype)
    none, ops, every, whole = sizes.values()
    assert none > every > whole
    # at least gate, up, query, and the result of attention, of each of the 4 blocks
    assert ops - whole >= 4 * (2 * 512 + 2 * 256) * 4 * 128 * (4 if dtype is None else 2)
    if not is_fused:
        assert none > ops
        assert ops < 0.75 * none
        assert whole < 0.4 * none


def test_four_bits_and_adapters():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from trimtab.model.adapters import LoraSpec, add_adapter

    model = a_llama()
    for _, block in blocks_of(model):
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    new = bitsandbytes.nn.Linear4bit(
                        child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16
                    )
                    new.weight = bitsandbytes.nn.Params4bit(
                        child.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
                    )
                    setattr(parent, name, new.cuda())
    add_adapter(model, LoraSpec(rank=8, dropout=0.1))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert_same(model.cuda(), torch.bfloat16)
    plain = kept_bytes(model, torch.bfloat16)
    checkpoint_layers(model, "ops")
    assert kept_bytes(model, torch.bfloat16) < 0.75 * plain
