"""Fused operations of encoder blocks: the plain step up to rounding, for one model only.

The kernels are replaced by the same operations in torch; tests/gpu/test_fused_encoder.py compares these with Triton's.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.fused_encoder import _norm_backward, _norm_forward, has_encoder_blocks, kept, use_fused_encoder
from trimtab.optim.build import build_optimizer
from trimtab.techniques.recomputation import checkpoint_layers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
NUM_BLOCKS = SIZES["num_hidden_layers"]
FAMILIES = ("bert", "roberta", "electra", "xlm-roberta", "camembert")
EPS = {None: torch.finfo(torch.float32).eps, torch.bfloat16: torch.finfo(torch.bfloat16).eps}


def a_model(family="bert", dropout=0.0, **changes):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    config = AutoConfig.for_model(family, **SIZES, **rates, pad_token_id=1, **changes)
    return AutoModelForSequenceClassification.from_config(config).train()


def step(model, dtype=None, seed=0):
    ids = torch.randint(5, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(seed)
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(input_ids=ids, labels=torch.tensor([0, 1, 0])).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach().float(), gradients


def assert_close(found, expected, dtype):
    assert found[1].keys() == expected[1].keys()
    mine, other = (torch.cat([g.flatten().float() for g in result[1].values()]) for result in (found, expected))
    torch.testing.assert_close(found[0], expected[0], rtol=8 * EPS[dtype], atol=0)
    assert (mine - other).norm() <= 64 * EPS[dtype] * other.norm()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_is_the_plain_one(family, dtype):
    model = a_model(family)
    fused = copy.deepcopy(model)
    assert has_encoder_blocks(model)
    assert use_fused_encoder(fused) == 4 * NUM_BLOCKS
    assert list(fused.state_dict()) == list(model.state_dict())
    assert_close(step(fused, dtype), step(model, dtype), dtype)


def test_weights_in_bf16():
    model = a_model().to(torch.bfloat16)
    fused = copy.deepcopy(model)
    use_fused_encoder(fused)
    found, expected = step(fused), step(model)
    assert {gradient.dtype for gradient in found[1].values()} == {torch.bfloat16}
    assert_close(found, expected, torch.bfloat16)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_optimizers_take_the_gradients(name):
    model = a_model()
    use_fused_encoder(model)
    optimizer = build_optimizer(name, [{"params": list(model.parameters())}], lr=1e-2)
    losses = []
    for _ in range(8):
        loss, gradients = step(model)
        assert all(gradient.is_contiguous() for gradient in gradients.values())
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("family", ["albert", "distilbert"])
def test_other_blocks_are_not_changed(family):
    model = a_model(family)
    assert not has_encoder_blocks(model)
    assert use_fused_encoder(model) == 0


def test_another_activation_is_kept():
    model = a_model(hidden_act="relu")
    assert use_fused_encoder(copy.deepcopy(model)) == 3 * NUM_BLOCKS


def test_evaluation_drops_nothing():
    model = a_model(dropout=0.5).eval()
    fused = copy.deepcopy(model)
    use_fused_encoder(fused)
    assert_close(step(fused), step(model), None)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("which", ["all", "ops"])
def test_recomputed_blocks_give_the_same_bits(which, dtype):
    """They draw the same numbers again; results in half precision that went with a tensor are computed again."""
    model = a_model(dropout=0.2)
    use_fused_encoder(model)
    expected = step(model, dtype)
    checkpoint_layers(model, which)
    found = step(model, dtype)
    assert torch.equal(found[0], expected[0])
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name
    assert not torch.equal(step(model, dtype, seed=1)[0], expected[0])


@pytest.mark.parametrize("targets", [["query", "value"], ["dense"], "all-linear"])
def test_adapters(targets):
    model = a_model()
    add_adapter(model, LoraSpec(rank=2, targets=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    fused = copy.deepcopy(model)
    assert use_fused_encoder(fused) > 0
    assert_close(step(fused), step(model), None)


def test_models_of_the_same_class_and_copies():
    model, other = a_model(), a_model()
    use_fused_encoder(model)
    assert "forward" not in other.bert.encoder.layer[0].intermediate.__dict__
    again = copy.deepcopy(model)
    again.bert.encoder.layer[0].attention.self.key.weight.data.zero_()
    assert not torch.equal(step(again)[0], step(model)[0]), "a copy computes with its own weights"


def test_dropout_is_fair_and_independent():
    size, rate = (3000, 768), 0.1
    found = kept(torch.tensor([2**61 + 12345]), torch.Size(size), rate).double()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(float(found.mean()) - (1 - rate)) < 5 * deviation / (size[0] * size[1]) ** 0.5
    centered = (found - (1 - rate)) / deviation
    for dim, other in ((0, 1), (1, 0)):
        means = centered.mean(dim) * size[dim] ** 0.5  # of columns, then of rows: standard normal if fair
        assert abs(float(means.square().mean()) - 1) < 5 * (2 / size[other]) ** 0.5
    neighbours = [(centered[1:] * centered[:-1]).mean(), (centered[:, 1:] * centered[:, :-1]).mean()]
    assert max(map(abs, map(float, neighbours))) < 5 / (size[0] * size[1]) ** 0.5
    another = kept(torch.tensor([2**61 + 12346]), torch.Size(size), rate).double()
    assert abs(float(((another - (1 - rate)) / deviation * centered).mean())) < 5 / (size[0] * size[1]) ** 0.5


def test_gradients_with_dropout_are_those_of_autograd():
    draw = torch.Generator().manual_seed(0)
    x, residual, grad, grad_half = (torch.randn(6, 16, generator=draw, dtype=torch.double) for _ in range(4))
    bias, gain, offset = (torch.randn(16, generator=draw, dtype=torch.double) for _ in range(3))
    seed, rate = torch.tensor([77]), 0.3
    leaves = [tensor.clone().requires_grad_() for tensor in (x, residual, gain, offset, bias)]
    dropped = (leaves[0] + leaves[4]) * kept(seed, x.shape, rate) / (1 - rate)
    expected = torch.nn.functional.layer_norm(dropped + leaves[1], (16,), leaves[2], leaves[3], 1e-5)
    expected.backward(grad + grad_half)
    single = [tensor.float() for tensor in (x, bias, residual, gain, offset)]
    result, _, *saved = _norm_forward(*single, seed, rate, 1e-5, torch.float32, torch.float32, None)
    found = _norm_backward(
        grad.float(), grad_half.float(), *saved, gain.float(), seed, rate, torch.float32, torch.float32
    )
    eps = torch.finfo(torch.float32).eps
    for one, other in zip(
        (result, *found[:2], *found[2].unbind()), (expected, *(leaf.grad for leaf in leaves)), strict=True
    ):
        assert (one.double() - other).norm() <= 32 * eps * other.norm()


def test_a_module_that_is_observed_is_called():
    model = a_model()
    fused, seen = copy.deepcopy(model), []
    use_fused_encoder(fused)
    block = fused.bert.encoder.layer[0]
    observed = (block.intermediate.dense, block.output.LayerNorm, block.attention.output.dense, block.output.dropout)
    for module in observed:
        module.register_forward_hook(lambda *_: seen.append(1))
    assert_close(step(fused), step(model), None)
    assert len(seen) == len(observed)


def test_dropout_follows_its_own_mode():
    model = a_model(dropout=0.5)
    use_fused_encoder(model)
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()
    assert not torch.equal(step(model)[0], step(model, seed=1)[0])


def test_inference_mode():
    model = a_model().eval()
    fused = copy.deepcopy(model)
    use_fused_encoder(fused)
    ids = torch.randint(5, 64, (2, 5))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found, expected = fused(input_ids=ids).logits.float(), model(input_ids=ids).logits.float()
    torch.testing.assert_close(found, expected, rtol=8 * EPS[torch.bfloat16], atol=8 * EPS[torch.bfloat16])


def test_a_hidden_state_that_keeps_its_gradient_gets_all_of_it():
    gradients = []
    model = a_model(initializer_range=0.3)
    for one in (model, copy.deepcopy(model)):
        if one is not model:
            use_fused_encoder(one)
        kept_states = []

        def keep(module, args, output, kept_states=kept_states):
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.retain_grad()
            kept_states.append(hidden)

        handle = one.bert.encoder.layer[0].register_forward_hook(keep)
        step(one, torch.bfloat16)
        handle.remove()
        gradients.append(kept_states[0].grad.float())
    assert (gradients[0] - gradients[1]).norm() <= 64 * EPS[torch.bfloat16] * gradients[0].norm()


def test_a_failed_forward_leaves_nothing_behind():
    model = a_model()
    use_fused_encoder(model)
    expected = step(model)
    attention = model.bert.encoder.layer[1].attention.self

    def fail(*_):
        raise KeyboardInterrupt

    handle = attention.key.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step(model)
    handle.remove()
    x = torch.randn(2, 3, 32)
    assert torch.equal(attention.key(x), torch.nn.functional.linear(x, attention.key.weight, attention.key.bias))
    found = step(model)
    assert torch.equal(found[0], expected[0])


def test_threads_do_not_share_projections():
    model = a_model().eval()
    use_fused_encoder(model)
    rows = [torch.randint(5, 64, (1, 7), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    with torch.no_grad():
        expected = [model(input_ids=row).logits for row in rows]

    def predict(row):
        with torch.no_grad():
            return [model(input_ids=row).logits for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for found, one in zip(pool.map(predict, rows), expected, strict=True):
            assert all(torch.equal(logits, one) for logits in found)
