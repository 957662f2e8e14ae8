"""Compiled blocks: one graph for a whole stack, the results of the plain model, and a way back.

Most tests use the backend "aot_eager", which traces like inductor and generates no code: seconds instead of a minute.
"""

import copy
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

import packed_rows
from tiny_adapters import shake
from tiny_models import KINDS, config_of, tokenizer
from trimtab.model import padding_free
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.attention_kernels import use_attention
from trimtab.model.compiled_blocks import compile_blocks, compiled_blocks_of
from trimtab.model.load import load_model
from trimtab.model.packed_attention import Kernel
from trimtab.techniques.recomputation import checkpoint_layers

SLOW = pytest.mark.slow
FP32_EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _fresh_counters():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def tiny_model(name="llama", num_blocks=3, **changes):
    torch.manual_seed(0)
    depth = "n_layer" if name == "gpt2" else "num_hidden_layers"
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if name == "bert" else {}
    if name == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = config_of(name) | {depth: num_blocks, "use_cache": False} | no_dropout | changes
    return load_model(config, KINDS[name], {}, tokenizer()).train()


def with_compiled(model, **options):
    other = copy.deepcopy(model)
    return model, other, compile_blocks(other, **({"backend": "aot_eager"} | options))


def gradients(model, length, num_rows=2):
    inputs = torch.arange(1, num_rows * length + 1).view(num_rows, length) % 50
    mask = torch.ones_like(inputs)
    mask[0, -2:] = 0
    model.zero_grad()
    loss = model(input_ids=inputs, attention_mask=mask).logits.float().pow(2).mean()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(plain, compiled, length, eps=FP32_EPS):
    """To a few roundings: the same sums in another order."""
    expected, found = gradients(plain, length), gradients(compiled, length)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 64 * eps * gradient.norm() + eps, name


# ---------------------------------------------------------------------- one graph for a stack


@pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=SLOW), pytest.param("gpt2", marks=SLOW)])
def test_all_blocks_and_sizes_share_one_graph(name):
    plain, compiled, blocks = with_compiled(tiny_model(name, num_blocks=4))
    for length in (8, 12, 5, 31, 8):
        assert_same_gradients(plain, compiled, length)
    assert counters["stats"]["unique_graphs"] == 1
    assert blocks.failure is None
    assert not counters["graph_break"]
    assert not counters["recompiles"]


def test_names_and_saved_weights_do_not_change():
    plain, compiled, _ = with_compiled(tiny_model())
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in compiled.named_modules()] == [name for name, _ in plain.named_modules()]


@pytest.mark.slow
def test_a_copy_of_the_model_has_weights_of_its_own():
    _, compiled, _ = with_compiled(tiny_model())
    copied = copy.deepcopy(compiled)
    before = gradients(compiled, 8)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2.0)
    again = gradients(compiled, 8)
    assert all(torch.equal(before[name], again[name]) for name in before)
    assert any(not torch.equal(gradient, before[name]) for name, gradient in gradients(copied, 8).items())


def test_evaluation_is_not_compiled():
    plain, compiled, blocks = with_compiled(tiny_model())
    inputs = torch.arange(1, 17).view(2, 8)
    with torch.no_grad():
        compiled(input_ids=inputs)
        assert torch.equal(compiled.eval()(input_ids=inputs).logits, plain.eval()(input_ids=inputs).logits)
    assert not counters["stats"]


def test_a_model_without_blocks_is_left_alone():
    model = torch.nn.Linear(4, 4)
    assert compile_blocks(model) is None
    assert compiled_blocks_of(model) is None
    assert "forward" not in model.__dict__


# ---------------------------------------------------------------------- with other techniques


@pytest.mark.slow
@pytest.mark.parametrize("which", ["all", {"every": 2}])
def test_a_recomputed_block_calls_its_graph_again(which):
    plain, compiled, _ = with_compiled(tiny_model())
    checkpoint_layers(compiled, which)
    assert_same_gradients(plain, compiled, 8)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_recomputed_block_of_a_packed_batch_calls_its_graph_again():
    """After the forward, the model has another attention implementation: the one for padded batches."""
    rows = packed_rows.packed_batch(packed_rows.some_rows())
    found, num_graphs = [], []
    for recomputed in ("none", "all"):
        torch._dynamo.reset()
        counters.clear()
        model = tiny_model()
        padding_free.enable(model, "causal-lm", Kernel.ROWS)
        blocks = compile_blocks(model, backend="aot_eager")
        checkpoint_layers(model, recomputed)
        model(**rows).logits.float().pow(2).mean().backward()
        assert blocks.failure is None
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))
    assert num_graphs[0] == num_graphs[1]


@pytest.mark.slow
def test_recomputed_dropout_draws_the_same_numbers():
    """A second mask in the recomputation would make the gradient of a sum depend on two masks."""
    model = tiny_model("bert", hidden_dropout_prob=0.5)
    _, compiled, _ = with_compiled(model)
    recomputed = copy.deepcopy(compiled)
    checkpoint_layers(recomputed, "all")
    found = []
    for one in (compiled, recomputed):
        torch.manual_seed(3)
        found.append(gradients(one, 8))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=SLOW)])
def test_adapters_are_inside_the_graph(dropout):
    model = tiny_model()
    shake(add_adapter(model, LoraSpec(rank=4, dropout=dropout)))
    plain, compiled, _ = with_compiled(model)
    if dropout:
        for module in (*plain.modules(), *compiled.modules()):
            if isinstance(module, torch.nn.Dropout):
                module.eval()
    assert_same_gradients(plain, compiled, 8)
    assert counters["stats"]["unique_graphs"] == 1  # although the input of the first block needs no gradient
    assert not counters["graph_break"]


@pytest.mark.slow
def test_the_scaling_of_an_adapter_is_a_constant():
    """As a symbol it would be a scalar on the host, for which inductor compiles C++ code."""
    model = tiny_model(num_blocks=2)
    shake(add_adapter(model, LoraSpec(rank=4, alpha=12)))
    graphs = []

    def look(graph, inputs):
        graphs.append((graph, inputs))
        return graph.forward

    _, compiled, blocks = with_compiled(model, backend=look)
    gradients(compiled, 8)
    assert blocks.failure is None
    ((graph, inputs),) = graphs
    assert not any(isinstance(value, float | torch.SymFloat) for value in inputs)
    assert 3.0 in {value for node in graph.graph.nodes for value in node.args if isinstance(value, float)}


@pytest.mark.slow
def test_adapters_in_bf16_round_like_the_plain_product():
    model = tiny_model(num_blocks=2)
    shake(add_adapter(model, LoraSpec(rank=4)))
    exact = gradients(copy.deepcopy(model), 8)
    plain, compiled, _ = with_compiled(model)
    errors = []
    for one in (plain, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(one, 8)
        errors.append(max(((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact))
    assert errors[1] <= 2 * errors[0], errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "cudnn",
        pytest.param("math", marks=SLOW),
        pytest.param("flash", marks=SLOW),
        pytest.param("efficient", marks=SLOW),
    ],
)
def test_the_choice_of_an_attention_kernel_is_traced(backend):
    model = tiny_model()
    use_attention(model, backend, repeats_heads=backend == "math")
    found = []

    def compiler(graph, inputs):
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    boxed = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(compiler(graph, inputs)),
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
    )
    flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    plain, compiled, _ = with_compiled(model, backend=boxed)
    assert_same_gradients(plain, compiled, 8)
    assert not counters["graph_break"]
    assert any("flash_attention_for_cpu" in name for name in found) is (backend in ("flash", "cudnn"))
    assert flags == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled())


# ---------------------------------------------------------------------- a way back


def broken(graph, inputs):
    raise NotImplementedError("no code for this machine")


def test_a_failure_leads_back_to_the_plain_blocks(caplog):
    plain, compiled, blocks = with_compiled(tiny_model(), backend=broken)
    with caplog.at_level("INFO", "trimtab"):
        for length in (8, 12):
            expected, found = gradients(plain, length), gradients(compiled, length)
            assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [record.message for record in caplog.records if "could not be compiled" in record.message] == [
        f"blocks could not be compiled, and the run continues without compilation: {blocks.failure}"
    ]
    assert "no code for this machine" in blocks.failure


def test_a_failure_that_is_not_the_compilers_is_raised():
    _, compiled, blocks = with_compiled(tiny_model())
    with pytest.raises((RuntimeError, IndexError)):
        compiled(inputs_embeds=torch.ones(2, 8, 7))
    assert "could not" not in str(blocks.failure)


def test_a_failure_is_kept_on_resume():
    _, compiled, blocks = with_compiled(tiny_model(), backend=broken)
    gradients(compiled, 8)
    _, resumed, other = with_compiled(tiny_model())
    other.load_state_dict(blocks.state_dict())
    gradients(resumed, 8)
    assert other.failure == blocks.failure
    assert not counters["stats"]["unique_graphs"]


def test_a_number_among_the_inputs_needs_no_other_graph():
    """Such as the length of the longest row, which differs in every step."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x, longest):
            return self.inner(x) * longest

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block(), Block()])

        def forward(self, x, longest):
            for block in self.blocks:
                x = block(x, longest)
            return x

    model = Model().train()
    blocks = compile_blocks(model, "aot_eager")
    for longest in range(3, 9):
        assert torch.equal(model(torch.ones(2, 4), longest), model.eval()(torch.ones(2, 4), longest))
        model.train()
    assert counters["stats"]["unique_graphs"] == 1
    assert blocks.failure is None


# ---------------------------------------------------------------------- with generated code


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_generated_code_computes_the_same(name):
    plain, compiled, blocks = with_compiled(tiny_model(name), backend="inductor")
    assert_same_gradients(plain, compiled, 8)
    assert blocks.failure is None
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"] == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
@pytest.mark.slow
def test_generated_code_draws_the_same_numbers():
    plain, compiled, _ = with_compiled(tiny_model("bert", hidden_dropout_prob=0.5), backend="inductor")
    found = []
    for model in (plain, compiled):
        torch.manual_seed(3)
        found.append(gradients(model, 8))
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 64 * FP32_EPS * gradient.norm() + FP32_EPS, name
