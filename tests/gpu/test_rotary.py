"""The kernel of rotary position embeddings against torch in fp64, and in a model."""

import copy

import pytest
import torch

from rounding import rounding_error
from trimtab.model.rotary import rotate_with_triton, use_fused_rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def reference(x, cos, sin):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(x, x, cos, sin)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "width"), [(32, 128), (8, 128), (12, 64), (3, 80), (5, 6)])
@pytest.mark.parametrize("num_angles", [1, 2])
def test_result_and_gradient(dtype, heads, width, num_angles):
    torch.manual_seed(0)
    x = torch.randn(2, 33, heads, width, device="cuda", dtype=dtype).transpose(1, 2)  # as a projection gives it
    cos, sin = (torch.randn(num_angles, 33, width, device="cuda", dtype=dtype) for _ in range(2))
    exact = x.double().detach().requires_grad_()
    expected = reference(exact, cos.double(), sin.double())
    upstream = torch.randn_like(x)
    expected.backward(upstream.double())
    found = rotate_with_triton(x, cos, sin, dtype, is_backward=False)
    gradient = rotate_with_triton(upstream, cos, sin, dtype, is_backward=True)
    for one, other in ((found, expected.detach()), (gradient, exact.grad)):
        assert one.transpose(1, 2).is_contiguous()
        # two products, their sum, and one rounding to the dtype
        bound = torch.finfo(dtype).eps * other.abs() + rounding_error(other, 8, torch.float32)
        assert bool(((one.double() - other).abs() <= bound).all())


def test_a_model_in_bf16():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **sizes)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    fused = copy.deepcopy(model)
    assert use_fused_rotary(fused, rotate_with_triton) == 2
    ids = torch.randint(0, 256, (2, 64), device="cuda")
    found = []
    for one in (model, fused):
        loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), torch.cat([p.grad.flatten().float() for p in one.parameters()])))
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found[0][0], found[1][0], rtol=eps, atol=0)
    assert (found[0][1] - found[1][1]).norm() <= 8 * eps * found[0][1].norm()
