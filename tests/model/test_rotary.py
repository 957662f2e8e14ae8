"""Fused rotary embeddings: the model's own results, for one model only. The kernel: tests/gpu/test_rotary.py."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.model.rotary import rotate_in_trace, use_fused_rotary

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "phi")


class Calls:
    """The kernel in torch's operations; counts its calls."""

    def __init__(self):
        self.forward, self.backward = 0, 0

    def __call__(self, x, cos, sin, dtype, *, is_backward):
        self.forward += not is_backward
        self.backward += is_backward
        cos, sin = cos.unsqueeze(1).double(), sin.unsqueeze(1).double()
        x, half = x.double(), x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        if is_backward:
            sin = sin.roll(half, -1)
            result = x * cos + torch.cat((second, -first), -1) * sin
        else:
            result = x * cos + torch.cat((-second, first), -1) * sin
        return result.to(dtype)


def a_model(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)).train()


def step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.zero_grad()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_is_the_plain_one(family):
    model = a_model(family)
    fused, calls = copy.deepcopy(model), Calls()
    assert use_fused_rotary(fused, calls) == SIZES["num_hidden_layers"]
    ids = torch.randint(1, 64, (3, 7), generator=torch.Generator().manual_seed(0))
    (loss, gradients), (other_loss, other_gradients) = step(model, ids), step(fused, ids)
    assert (calls.forward, calls.backward) == (4, 4), "queries and keys of two blocks"
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(other_loss, loss, rtol=16 * eps, atol=0)
    assert (other_gradients - gradients).norm() <= 64 * eps * gradients.norm()


def test_other_models_of_the_class_keep_their_function():
    calls, model, other = Calls(), a_model("llama"), a_model("llama")
    use_fused_rotary(model, calls)
    other(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert calls.forward == 0
    copy.deepcopy(model)(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert calls.forward == 4, "a copy of a changed model is changed"


def test_a_model_that_rotates_in_another_way_is_not_changed():
    assert use_fused_rotary(a_model("olmo2"), Calls()) == 0


def test_mixed_precision_has_the_dtype_of_the_plain_function():
    """fp32 cosines and queries in bf16 have an fp32 result; its gradient is in bf16."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from trimtab.model.rotary import _fused

    q, k = (torch.randn(1, 2, 5, 8).bfloat16().requires_grad_() for _ in range(2))
    cos, sin = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    plain, fused = apply_rotary_pos_emb(q, k, cos, sin), _fused(Calls())(q, k, cos, sin)
    assert [tensor.dtype for tensor in fused] == [tensor.dtype for tensor in plain]
    sum(tensor.sum() for tensor in fused).backward()
    assert q.grad.dtype == k.grad.dtype == torch.bfloat16


def test_a_trace_allocates_one_tensor_for_each_result():
    x, cos = torch.empty(2, 4, 6, 8, device="meta", dtype=torch.bfloat16), torch.empty(1, 6, 8, device="meta")
    result = rotate_in_trace(x, cos, cos, torch.float32, is_backward=False)
    assert (result.shape, result.dtype) == (x.shape, torch.float32)
    assert result.transpose(1, 2).is_contiguous()
