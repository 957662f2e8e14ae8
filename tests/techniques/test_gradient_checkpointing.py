"""Gradient checkpointing: the bits of the plain step in every kind of model, with less kept for backward."""

import copy
import gc
import inspect
import itertools
import logging
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kept_bytes import Births, kept_bytes
from tiny_models import CONFIGS, TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import RecipeError
from trimtab.model.blocks import blocks_of
from trimtab.model.freeze import Freezing
from trimtab.model.load import load_model
from trimtab.techniques.base import Accelerator, Case
from trimtab.techniques.recomputation import GradientCheckpointing, checkpoint_layers

KINDS = ["all", "ops", {"every": 2}, {"all_but_every": 2}, {"layers": [0, -1]}]
TASKS = {"bert": "masked-lm", "roberta": "masked-lm", "gpt2": "causal-lm", "llama": "causal-lm"}
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 300,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 1, "head_dim": 16}
OTHERS = {
    # softcapping, norms before and after, windows; eager attention with dropout
    "gemma2": ("causal-lm", {**_GROUPED, "attention_dropout": 0.1, "sliding_window": 4}),
    # writes into the results of products, shares keys between layers
    "gemma3n_text": (
        "causal-lm",
        {**_GROUPED, "intermediate_size": [48] * 4, "num_kv_shared_layers": 2, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 300, "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    ),
    "modernbert": (
        "masked-lm",
        {**_SMALL, "attention_dropout": 0.1, "mlp_dropout": 0.1, "local_attention": 4}
        | {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
    # experts chosen by the hidden states
    "mixtral": ("causal-lm", {**_GROUPED, "num_local_experts": 3}),
    # one block that is called four times, and that transformers does not mark
    "albert": ("masked-lm", {**_SMALL, "embedding_size": 16, "hidden_dropout_prob": 0.1}),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def deep(name):
    """A tiny model with three blocks in every stack, in training mode."""
    if name in OTHERS:
        task, config = OTHERS[name]
        config = {"model_type": name, **config}
    else:
        task, config = TASKS.get(name, "seq2seq-lm"), config_of(name)
        for part in (config, config.get("encoder", {}), config.get("decoder", {})):
            for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"):
                if key in part:
                    part[key] = 3
    torch.manual_seed(0)
    return load_model(config, task, {}, tokenizer()).train()


def rows(texts=TEXTS):
    batch = batch_of(list(texts))
    batch.pop("token_type_ids", None)
    return {**batch, "labels": batch["input_ids"].clone()}


def forward(model, batch, dtype=None):
    with warnings.catch_warnings(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        warnings.simplefilter("ignore", FutureWarning)  # encoder-decoder explains how its labels came to be
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        return model(**({"use_cache": False} if takes_cache else {}) | batch).loss


def step(model, *, dtype=None, batches=None, seed=3):
    """Losses, gradients, and where the generator stands afterwards."""
    model.zero_grad()
    torch.manual_seed(seed)
    losses = []
    for batch in batches or [rows()]:
        loss = forward(model, batch, dtype)
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.stack(losses), gradients, torch.get_rng_state()


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    assert [name for name in found[1] if not torch.equal(found[1][name], expected[1][name])] == []
    assert torch.equal(found[2], expected[2])


def kept(model, **options):
    torch.manual_seed(1)
    return kept_bytes(model, lambda: forward(model, rows(), **options))


def count_calls(model):
    """How often each block has computed, in a list that goes on counting."""
    counts = [0] * len(blocks_of(model))

    def counting(number):
        def count(module, args):
            counts[number] += 1

        return count

    for number, (_, block) in enumerate(blocks_of(model)):
        first = next(module for module in block.modules() if not list(module.children()))
        first.register_forward_pre_hook(counting(number))
    return counts


QUICK = {
    ("bert", "fp32"),
    ("gpt2", "bf16"),
    ("llama", "fp32"),
    ("t5", "fp32"),
    ("gemma3n_text", "bf16"),
    ("mixtral", "fp32"),
}


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
    assert len(plain[1]) > 10
    for which in KINDS:
        assert checkpoint_layers(model, which) > 0
        assert_same(step(model, dtype=dtype, batches=batches), plain)
    assert checkpoint_layers(model, "none") == 0
    assert_same(step(model, dtype=dtype, batches=batches), plain)


def test_dropout_is_on_in_what_is_compared():
    """Without the same masks the comparison above would fail."""
    model = deep("bert")
    assert not torch.equal(step(model, seed=3)[0], step(model, seed=4)[0])


@pytest.mark.parametrize(
    "name",
    [
        *("bert", "llama", "gemma3n_text"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5", "gemma2", "modernbert", "mixtral")),
    ],
)
def test_what_is_kept_for_backward(name):
    model = deep(name)
    sizes = {}
    for which in ("none", "ops", {"every": 2}, "all"):
        checkpoint_layers(model, which)
        sizes[str(which)] = kept(model)
    none, ops, every, whole = sizes.values()
    assert none > every > whole
    assert none > ops > whole
    assert ops < 0.75 * none
    assert whole < 0.4 * none


def test_half_precision_of_products_halves_what_ops_keeps():
    model = deep("llama")
    checkpoint_layers(model, "ops")
    assert kept(model, dtype=torch.bfloat16) < 0.8 * kept(model)


@pytest.mark.parametrize("which", KINDS, ids=str)
def test_nothing_is_left_after_backward_even_without_a_garbage_collector(which):
    model = deep("llama")
    checkpoint_layers(model, which)
    batch = rows()
    gc.collect()
    gc.disable()
    try:
        with Births() as births:
            loss = forward(model, batch)
        loss.backward()
        del loss
        model.zero_grad()
        assert births.alive_bytes(but=[*model.parameters(), *model.buffers()]) == 0
        with Births() as births:
            forward(model, batch)  # a forward that is never gone back through
        assert births.alive_bytes(but=[*model.parameters(), *model.buffers()]) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("quantized", "dropout", "dtype"),
    [
        (False, 0.1, None),
        (True, 0.1, torch.bfloat16),
        pytest.param(False, 0.0, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(True, 0.0, None, marks=pytest.mark.slow),
    ],
)
def test_adapters(quantized, dropout, dtype):
    """The inputs of the first block need no gradient; products of the base are added to in place."""
    from trimtab.model.adapters import LoraSpec, add_adapter

    model = deep("llama")
    if quantized:
        quantize(model)
    add_adapter(model, LoraSpec(rank=2, dropout=dropout))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    plain, plain_bytes = step(model, dtype=dtype), kept(model, dtype=dtype)
    assert len(plain[1]) == 3 * 7 * 2
    for which in KINDS:
        checkpoint_layers(model, which)
        assert_same(step(model, dtype=dtype), plain)
        assert kept(model, dtype=dtype) < plain_bytes


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_last_product_of_a_block_with_adapters_is_not_computed_again(dropout):
    """Backward needs the input of the last module and nothing of its result."""
    from trimtab.model.adapters import LoraSpec, add_adapter

    model = deep("llama")
    add_adapter(model, LoraSpec(rank=2, dropout=dropout))
    counts = Counter()
    for name, module in model.named_modules():
        if name.endswith("base_layer"):
            kind = name.split(".")[-2]
            module.register_forward_hook(lambda *_, kind=kind: counts.update([kind]))
    checkpoint_layers(model, "all")
    step(model)
    assert counts.pop("down_proj") == 3, "once for each block"
    assert set(counts.values()) == {6}


def quantize(model):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for _, block in blocks_of(model):
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    new = bitsandbytes.nn.Linear4bit(
                        child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16
                    )
                    new.weight = bitsandbytes.nn.Params4bit(
                        child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                    )
                    setattr(parent, name, new.to("cpu"))


def test_weights_of_four_bits_are_never_kept_as_full_ones():
    """More rows make more activations; with as good as none, what is left would be weights."""
    model = deep("llama")
    quantize(model)
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    checkpoint_layers(model, "ops")
    one_token = torch.full((1, 1), 5)
    batch = {"input_ids": one_token, "labels": one_token, "use_cache": False}
    size = kept_bytes(model, lambda: forward(model, batch))
    weights = sum(2 * p.numel() for _, block in blocks_of(model) for p in block.parameters() if p.dtype == torch.uint8)
    assert 0 < size < 0.5 * weights


@pytest.mark.parametrize("which", ["all", "ops"])
def test_blocks_below_which_nothing_trains_are_not_recomputed(which):
    model = deep("bert")
    Freezing(model, {"bert.embeddings": None, "bert.encoder.layer.[01]": None}).apply()
    plain, plain_bytes = step(model), kept(model)
    checkpoint_layers(model, which)
    counts = count_calls(model)
    assert_same(step(model), plain)
    assert counts == [1, 1, 2]
    assert kept(model) < plain_bytes


def test_a_frozen_block_above_one_that_trains_is_recomputed():
    model = deep("bert")
    Freezing(model, {"bert.encoder.layer.2": None}).apply()
    plain = step(model)
    checkpoint_layers(model, "all")
    counts = count_calls(model)
    assert_same(step(model), plain)
    assert counts == [2, 2, 2]


@pytest.mark.parametrize(("which", "counts"), [({"every": 2}, [2, 1, 2]), ({"layers": [-2]}, [1, 2, 1])], ids=str)
def test_chosen_blocks(which, counts):
    model = deep("gpt2")
    assert checkpoint_layers(model, "all") == 3
    assert checkpoint_layers(model, which) == sum(counts) - 3  # the earlier choice is gone
    found = count_calls(model)
    step(model)
    assert found == counts


def test_the_encoder_comes_before_the_decoder():
    for name in ("t5", "bart", "encoder-decoder"):
        names = [name for name, _ in blocks_of(deep(name))]
        assert ["decoder" in name.split(".")[:2] for name in names] == [False] * 3 + [True] * 3


def test_outside_of_training_blocks_are_plain():
    model = deep("bert")
    checkpoint_layers(model, "all")
    counts = count_calls(model)
    model.eval()
    forward(model, rows()).backward()
    model.train()
    with torch.no_grad():
        forward(model, rows())
    assert counts == [2, 2, 2]


@pytest.mark.parametrize("which", ["all", "ops"])
def test_backward_twice(which):
    model = deep("bert")
    checkpoint_layers(model, which)
    torch.manual_seed(3)
    loss = forward(model, rows())
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[name]) for name, p in model.named_parameters())


def test_a_cache_is_not_filled_twice():
    model = deep("llama")
    plain = step(model)
    checkpoint_layers(model, "all")
    assert model.config.use_cache
    output = model(**rows(), use_cache=True)
    assert output.past_key_values.get_seq_length() == 0
    assert_same(step(model, batches=[{**rows(), "use_cache": True}]), plain)
    with torch.no_grad():
        past = model.eval()(**rows(), use_cache=True).past_key_values
    assert past.get_seq_length() > 0
    with pytest.raises(RecipeError, match="got non-empty past_key_values"):
        model.train()(**{**rows(), "attention_mask": None}, past_key_values=past)


def test_a_cache_of_linear_attention_is_not_filled_twice():
    """Its layers do not count tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    sizes |= {"linear_value_head_dim": 16, "head_dim": 16, "vocab_size": 300, "num_hidden_layers": 2}
    settings = {"model_type": "qwen3_5_text", "layer_types": ["full_attention", "linear_attention"], **sizes}
    model = load_model(settings, "causal-lm", {}, tokenizer()).train()
    checkpoint_layers(model, "all")
    assert model(**rows(), use_cache=True).past_key_values.get_seq_length(0) == 0
    with torch.no_grad():
        past = model.eval()(**rows(), use_cache=True).past_key_values
    with pytest.raises(RecipeError, match="got non-empty past_key_values"):
        model.train()(**{**rows(), "attention_mask": None}, past_key_values=past)


def test_checkpointing_of_transformers_is_turned_off(caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    model = deep("bert")
    model.gradient_checkpointing_enable()
    checkpoint_layers(model, {"layers": [1]})
    assert not model.is_gradient_checkpointing
    assert "was switched off" in caplog.messages[-1]
    counts = count_calls(model)
    step(model)
    assert counts == [1, 2, 1]


def test_the_model_stays_what_it_is():
    model = deep("bert")
    block = blocks_of(model)[0][1]
    names, signature = list(model.state_dict()), inspect.signature(block.forward)
    checkpoint_layers(model, "ops")
    assert list(model.state_dict()) == names
    assert inspect.signature(block.forward) == signature
    copied = copy.deepcopy(model)
    counts, copied_counts = count_calls(model), count_calls(copied)
    assert_same(step(copied), step(model))
    assert counts == copied_counts == [2, 2, 2]
    checkpoint_layers(model, "none")
    assert "forward" not in block.__dict__
    step(model)
    step(copied)
    assert (counts, copied_counts) == ([3, 3, 3], [4, 4, 4])


class Block(nn.Module):
    """Takes tensors by keyword and gives back a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, *, hidden, scale):
        return hidden + self.second(torch.tanh(self.first(hidden)) * scale), scale * 2


class Stack(nn.Module):
    def __init__(self, block=Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, hidden, scale):
        for block in self.blocks:
            hidden, scale = block(hidden=hidden, scale=scale)
        return self.head(hidden).square().mean()


def gradients_of(model, *inputs):
    model.zero_grad()
    torch.manual_seed(2)
    model(*inputs).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("which", KINDS, ids=str)
def test_a_model_of_ones_own(which):
    model, inputs = Stack(), (torch.randn(4, 8), torch.rand(4, 1))
    plain = gradients_of(model, *inputs)
    assert [name for name, _ in blocks_of(model)] == ["blocks.0", "blocks.1", "blocks.2"]
    assert checkpoint_layers(model, which) > 0
    assert torch.equal(gradients_of(model, *inputs), plain)


class Awkward(Block):
    """Writes into the results of products: before anything has read them, afterwards, and through a view."""

    def forward(self, *, hidden, scale):
        middle = self.first(hidden).add_(1.0)
        gate = torch.matmul(hidden.view(2, 2, 8), self.first.weight.t()).view(4, 16)
        read_before = torch.sigmoid(gate.detach())
        gate[:, :8] += 3.0
        out = self.second(torch.tanh(middle) * torch.cos(gate) * read_before)
        return hidden + torch.cos(out).mul_(scale), scale.exp()


def test_results_of_products_that_are_written_into():
    model, inputs = Stack(Awkward), (torch.randn(4, 8), torch.rand(4, 1))
    plain = gradients_of(model, *inputs)
    checkpoint_layers(model, "ops")
    assert torch.equal(gradients_of(model, *inputs), plain)


class LowRank(Block):
    """Adds the product of an adapter to that of the base, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.rand(8, 1)), nn.Parameter(torch.rand(1, 16))

    def forward(self, *, hidden, scale):
        middle = hidden @ self.first.weight.t()
        middle.addmm_(hidden @ self.down, self.up)
        return hidden + self.second(torch.tanh(middle)), scale


class Products(TorchDispatchMode):
    """Counts matrix products, those in place too."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        return func(*args, **(kwargs or {}))


def test_no_product_is_made_twice():
    model, inputs = Stack(LowRank), (torch.randn(4, 8), torch.rand(4, 1))
    counts = {}
    for which in ("none", "ops", "all"):
        checkpoint_layers(model, which)
        loss = model(*inputs)
        with Products() as products:
            loss.backward()
        counts[which] = products.count
    assert counts["ops"] == counts["none"] > 0
    assert counts["all"] == counts["none"] + 3 * 3


class GivesProduct(Block):
    """Hands out the result of a product, which the model then writes into."""

    def forward(self, *, hidden, scale):
        middle = self.first(hidden)
        out = self.second(torch.tanh(middle))
        return out, torch.sigmoid(hidden.sum(-1, keepdim=True)) * torch.cos(out.sum(-1, keepdim=True))


class Writing(Stack):
    def forward(self, hidden, scale):
        for block in self.blocks:
            added, scale = block(hidden=hidden, scale=scale)
            hidden = hidden + added.add_(scale)
        return self.head(hidden).square().mean()


@pytest.mark.parametrize("which", ["all", "ops"])
def test_what_a_block_gives_away_may_be_written_into(which):
    model, inputs = Writing(GivesProduct), (torch.randn(2, 4, 8), torch.rand(2, 4, 1))
    plain = gradients_of(model, *inputs)
    checkpoint_layers(model, which)
    assert torch.equal(gradients_of(model, *inputs), plain)


class OfWeights(Block):
    """Multiplies its weights with each other first, which makes something far larger than its activations."""

    def forward(self, *, hidden, scale):
        merged = self.second.weight @ self.first.weight + torch.eye(8) @ torch.eye(8)
        return hidden + torch.tanh(torch.tanh(hidden @ merged) @ merged), scale


def test_products_of_weights_alone_are_not_kept():
    model, inputs = Stack(OfWeights), (torch.randn(1, 8), torch.rand(1, 1))
    plain = gradients_of(model, *inputs)
    checkpoint_layers(model, "ops")
    assert torch.equal(gradients_of(model, *inputs), plain)
    size = kept_bytes(model, lambda: model(*inputs))
    assert size < 3 * 8 * 8 * 4
    checkpoint_layers(model, "none")
    assert kept_bytes(model, lambda: model(*inputs)) > 3 * 8 * 8 * 4


class Unseen(torch.autograd.Function):
    """A square whose result is written by a kernel that is not dispatched, as Triton's are not."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        result = torch.empty(x.shape)
        result.numpy()[:] = x.detach().numpy() ** 2
        return result

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Fused(Block):
    def forward(self, *, hidden, scale):
        return super().forward(hidden=Unseen.apply(hidden), scale=scale)


def test_products_of_what_a_kernel_wrote_into_empty_memory_are_kept():
    model, inputs = Stack(Fused), (torch.randn(64, 8), torch.rand(64, 1))
    plain = gradients_of(model, *inputs)
    sizes = []
    for which in ("all", "ops"):
        checkpoint_layers(model, which)
        assert torch.equal(gradients_of(model, *inputs), plain)
        sizes.append(kept_bytes(model, lambda: model(*inputs)))
    assert sizes[1] - sizes[0] == 3 * 64 * 16 * 4


def test_the_product_that_ends_a_block_is_not_kept():
    """Backward needs what goes into it alone."""
    model, inputs = Stack(), (torch.randn(64, 8), torch.rand(64, 1))
    sizes = []
    for which in ("all", "ops"):
        checkpoint_layers(model, which)
        sizes.append(kept_bytes(model, lambda: model(*inputs)))
    assert sizes[1] - sizes[0] == 3 * 64 * 16 * 4  # what the first Linear of each block gives


def test_mistakes():
    model = deep("bert")
    for which in (
        "some",
        {"every": 0},
        {"every": True},
        {"layers": "0"},
        {"every": 2, "layers": [0]},
        {},
        {"layer": [0]},
    ):
        with pytest.raises(RecipeError, match="is not valid") as failure:
            checkpoint_layers(model, which)
        assert "{every: 2}" in failure.value.cure
    with pytest.raises(RecipeError, match="no block 3, -4; the model has 3 blocks"):
        checkpoint_layers(model, {"layers": [0, 3, -4]})
    with pytest.raises(RecipeError, match=r"has no list of blocks to recompute, only 0 \(Linear\)"):
        checkpoint_layers(nn.Sequential(nn.Linear(2, 2)), "all")
    assert checkpoint_layers(nn.Linear(2, 2), "none") == 0


@pytest.mark.parametrize(("num_blocks", "widths", "known"), [(8, {16}, True), (7, {16}, False), (8, {16, 32}, False)])
def test_memory_follows_the_share_of_equal_blocks_only(num_blocks, widths, known):
    """Of an odd number the last one is recomputed as well; of unequal ones small or large ones are chosen."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = itertools.cycle(sorted(widths))
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, next(sizes))) for _ in range(num_blocks))

    values = ("none", "{every: 4}", "{every: 2}", "{all_but_every: 4}", "all")
    case = Case(Model(), Accelerator("cuda"), "bf16", None)
    found = GradientCheckpointing().shares(values, case)
    assert found == (tuple(zip(values, (0.0, 0.25, 0.5, 0.75, 1.0), strict=True)) if known else ())
