"""The recorder: when storages are born and die, what it says of operations; and that nothing of a trace is left."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from trimtab.model import fp8, linear_cross_entropy, lora_product, nf4, precision, token_cross_entropy
from trimtab.optim import quantized, stochastic_rounding
from trimtab.planner.trace.cuda import MIB, CudaRules, Gpu, as_on_cuda
from trimtab.planner.trace.plain_step import trace_plain_step
from trimtab.planner.trace.recorder import Owner, Recorder
from trimtab.planner.trace.thread_patches import stand_ins_on_this_thread
from trimtab.techniques.apply import trace_patches

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}


def empty(*shape, dtype=torch.float32, **more):
    return torch.empty(shape, dtype=dtype, device="meta", **more)


@pytest.fixture
def recorder():
    return Recorder(CudaRules(Gpu()), lambda tensor: tensor.dtype is torch.bool)


def living(recorder):
    """Bytes in use after all events."""
    sizes = {}
    for storage, size in recorder.trace().events:
        if size:
            assert storage not in sizes, "born twice"
            sizes[storage] = size
        else:
            del sizes[storage]
    return sum(sizes.values())


# ---------------------------------------------------------------------- births and deaths


def test_a_storage_lives_as_long_as_the_last_view_of_it(recorder):
    with recorder:
        matrix = empty(10, 10)
        row = matrix[3]
        del matrix
        assert living(recorder) == 400
        del row
    assert [event.size for event in recorder.events] == [400, 0]


def test_what_was_there_before_is_born_when_it_is_adopted_and_only_once(recorder):
    weight = empty(8)
    recorder.adopt([weight, weight.view(2, 4), torch.zeros(5)], "weights")
    assert [(birth.size, birth.part) for birth in recorder.births.values()] == [(32, "weights")]
    del weight
    assert living(recorder) == 0


def test_an_operation_in_place_takes_nothing_and_still_counts_as_one(recorder):
    tensor = empty(8)
    recorder.adopt([tensor], "weights")
    with recorder:
        tensor.add_(1.0)
    assert len(recorder.events) == 1
    assert [op.name for op in recorder.ops] == ["aten.add_"]


def test_views_are_no_operations(recorder):
    with recorder:
        empty(4, 4).t().reshape(2, 8).unsqueeze(0)
    assert [op.name for op in recorder.ops] == ["aten.empty", "aten.clone"], "the reshape of what is transposed copies"


def test_activations_die_in_backward_in_the_order_of_the_layers(recorder):
    weights = [nn.Parameter(empty(16, 16)) for _ in range(3)]
    recorder.adopt(weights, "weights")
    with recorder:
        x = empty(4, 16)
        for weight in weights:
            x = torch.tanh(x @ weight)
        before = living(recorder)
        with recorder.during("backward"):
            x.sum().backward()
        recorder.adopt_gradients(weights)
        del x
    gradients = 3 * 16 * 16 * 4
    assert len(recorder.gradients) == 3
    assert before > gradients  # so that something had to die
    assert living(recorder) == 3 * 16 * 16 * 4 + gradients + 2 * 32 * MIB, "weights, gradients and cuBLAS"


def test_what_is_on_the_host_takes_nothing_nor_do_its_views_but_what_is_made_from_it_does(recorder):
    with recorder:
        with recorder.on_host():
            kept = empty(1000)
        part = kept[:10]
        assert not recorder.events
        made = part + 1
    assert [event.size for event in recorder.events] == [40]
    del kept, part, made
    assert living(recorder) == 0


def test_parts_and_owners_are_noted(recorder):
    recorder.enter("weights", Owner(0, 3))
    weight = empty(4)
    recorder.adopt([weight], "weights")
    recorder.enter("", None)
    with recorder:
        with recorder.born_as("state"):
            state = empty(6)
        with recorder.during("optimizer"):
            results = torch._foreach_add([weight, state], 1.0)
    seen = [(birth.size, birth.part, birth.owner) for birth in recorder.births.values()]
    assert seen == [
        (16, "weights", Owner(0, 3)),
        (24, "state", None),
        (16, "optimizer", Owner(0, 3)),  # of a list, each result belongs to whom its item belongs
        (24, "optimizer", None),
    ]
    del results


# ---------------------------------------------------------------------- sums of gradients


def _uses(name, device):
    """A weight that is used twice, and a sum that its gradient is taken of."""
    if name == "embedding and head":
        weight = nn.Parameter(torch.ones(50, 20, device=device))
        numbers = torch.ones(7, dtype=torch.long, device=device)
        return weight, lambda: functional.linear(functional.embedding(numbers, weight), weight)
    weight = nn.Parameter(torch.ones(20, 20, device=device))
    x = torch.ones(4, 20, device=device)
    return weight, {
        "product after product": lambda: x @ weight @ weight,
        "transposed": lambda: x @ weight @ weight.t(),
        "cast": lambda: x.bfloat16() @ weight.bfloat16() @ weight.bfloat16(),
        "branches": lambda: torch.tanh(x @ weight) * torch.sigmoid(x @ weight) + x @ weight,
        "residuals": lambda: (y := x @ weight) + torch.tanh(y) @ weight + y,
    }[name]


@pytest.mark.parametrize(
    "name", ["product after product", "transposed", "cast", "branches", "residuals", "embedding and head"]
)
def test_gradients_are_added_up_in_place_where_autograd_does_so(recorder, name):
    weight, forward = _uses(name, "cpu")
    loss = forward().float().square().sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss.backward()
    really = [event.name.replace("::", ".") for event in profiler.events() if event.name in ("aten::add", "aten::add_")]
    weight, forward = _uses(name, "meta")
    with recorder:
        loss = forward().float().square().sum()
        with recorder.during("backward"):
            loss.backward()
    traced = [op.name for op in recorder.ops if op.stage == "backward" and op.name in ("aten.add", "aten.add_")]
    assert traced == really
    assert traced


def test_a_gradient_that_somebody_else_holds_is_not_written_into(recorder):
    kept = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return empty(*x.shape)

        @staticmethod
        def backward(ctx, gradient):
            result = empty(*gradient.shape)
            kept.append(result)
            return result

    weight = nn.Parameter(empty(30, 30))
    recorder.adopt([weight], "weights")
    with recorder:
        loss = Doubled.apply(weight).sum() + Doubled.apply(weight).sum()
        with recorder.during("backward"):
            loss.backward()
    in_backward = [birth for birth in recorder.births.values() if birth.part == "backward" and birth.size == 3600]
    assert len(kept) == 2
    assert len(in_backward) == 3, "both, and their sum"


def test_gradients_of_a_second_micro_batch_are_added_to_those_of_the_first(recorder):
    weight = nn.Parameter(empty(20, 20))
    recorder.adopt([weight], "weights")
    with recorder:
        for _ in range(2):
            loss = (empty(4, 20) @ weight).sum()
            with recorder.during("backward"):
                loss.backward()
            del loss
        recorder.adopt_gradients([weight])
    assert len(recorder.gradients) == 1
    assert living(recorder) == 2 * 1600 + 2 * 32 * MIB


# ---------------------------------------------------------------------- questions, kernels, operations


def test_questions_to_the_device_are_answered_and_those_to_the_host_are_not(recorder):
    with recorder:
        assert bool(empty(3).isfinite().all()) is True
        assert empty(1).item() is False
        assert torch.tensor(3.5).item() == 3.5
        assert not torch.tensor([True, False]).all()


def test_cublas_keeps_work_memory_once_for_each_thread_that_calls_it(recorder):
    weight = nn.Parameter(empty(8, 8))
    recorder.adopt([weight], "weights")
    with recorder:
        for _ in range(2):
            loss = (empty(2, 8) @ weight).sum()
            with recorder.during("backward"):
                loss.backward()
        functional.linear(empty(2, 8), weight, empty(8))
    library = [(birth.op, birth.size) for birth in recorder.births.values() if birth.part == "library"]
    assert library == [("cublas main", 32 * MIB), ("cublas autograd", 32 * MIB), ("cublaslt main", MIB)]
    assert living(recorder) >= 65 * MIB, "and it stays"


def test_older_gpus_have_smaller_workspaces():
    assert Gpu(capability=(7, 5)).workspace_bytes == 8320 * 1024 < Gpu().workspace_bytes


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (":4096:8", 32 * MIB),
        (":16:8", MIB // 8),
        (":4096:2:16:8", 8320 * 1024),
        ("nonsense", 8320 * 1024),
        (None, 8320 * 1024),
    ],
)
def test_work_memory_is_what_is_configured(config, num_bytes):
    assert Gpu(capability=(8, 0), workspace_config=config).workspace_bytes == num_bytes


@pytest.mark.parametrize(("num_indices", "num_temporaries"), [(3072, 0), (3073, 5)])
def test_temporaries_of_a_kernel_live_only_while_it_runs(recorder, num_indices, num_temporaries):
    weight = nn.Parameter(empty(5000, 64))
    recorder.adopt([weight], "weights")
    with recorder:
        made = functional.embedding(empty(num_indices, dtype=torch.long), weight).sum()
        with recorder.during("backward"):
            made.backward()
    inside = [number for number, birth in recorder.births.items() if birth.op == "aten.embedding_dense_backward"]
    gradient = max(inside, key=lambda number: recorder.births[number].size)
    inside.remove(gradient)
    assert len(inside) == num_temporaries
    ended = {storage for storage, size in recorder.events if not size}
    assert set(inside) <= ended
    assert gradient not in ended


# Measured on an H200 with torch 2.11, in MiB, beside the gradients that backward returns; the allocator rounds large
# ones up to 2 MiB. Sizes: rows, heads of queries, heads of keys, tokens, width of a head.
BACKWARDS = [
    ("flash", (4, 32, 32, 2048, 128), 130.0),  # cuDNN, as all of "flash" here
    ("flash", (1, 32, 32, 16300, 128), 258.646),
    ("flash", (4, 32, 32, 2048, 64), 66.0),
    ("flash", (32, 12, 12, 512, 64), 48.75),
    ("flash", (3, 12, 12, 500, 64), 4.464),
    ("flash", (1, 32, 32, 120_000, 128), 1891.5),
    ("flash", (1, 32, 8, 16384, 128), 514.0),
    ("efficient", (4, 32, 32, 2048, 128), 129.031),
    ("efficient", (32, 12, 12, 512, 64), 48.797),
    ("efficient", (1, 32, 32, 120_000, 128), 1892.606),
]


@pytest.mark.parametrize(("kernel", "sizes", "measured"), BACKWARDS, ids=str)
def test_attention_needs_what_was_measured_in_backward(kernel, sizes, measured):
    """The fp32 sums of the gradient of queries: what long rows need most memory for, once layers are tiled."""
    num_rows, num_heads, num_key_heads, length, width = sizes
    recorder = Recorder(CudaRules(Gpu()), lambda _: 0)
    query, key, value = (  # in the layout that linear layers make
        empty(num_rows, length, heads, width, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (num_heads, num_key_heads, num_key_heads)
    )
    with recorder, as_on_cuda(Gpu(flash=kernel == "flash")):
        result = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=num_heads != num_key_heads
        )
        with recorder.during("backward"):
            result.sum().backward()
    inside = {number for number, birth in recorder.births.items() if birth.op.endswith("attention_backward")}
    ended = {storage for storage, size in recorder.events if not size}
    assert len(inside - ended) == 3, "the gradients"
    needed = sum(recorder.births[number].size for number in inside & ended) / MIB
    assert needed == pytest.approx(measured, abs=4)


def test_deterministic_attention_has_several_sums():
    """As many as can be computed at the same time, by the source of the kernel."""
    sizes = []
    for is_deterministic in (False, True):
        rules = CudaRules(Gpu(is_deterministic=is_deterministic))
        query = empty(1, 32, 4096, 128, dtype=torch.bfloat16)
        func = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        sizes.append(sum(rules.workspaces(func, (None, query, query))))
    assert sizes[1] - sizes[0] == 4 * (4 * query.numel())  # 132 multiprocessors for 32 heads: 5 instead of 1


def test_operations_say_their_work(recorder):
    with recorder:
        product = empty(6, 8, dtype=torch.bfloat16) @ empty(8, 10, dtype=torch.bfloat16)
        with recorder.during("optimizer"):
            product.float()
        recorder.is_timing = False
        product.float()
    ops = [op for op in recorder.ops if op.name != "aten.empty"]
    assert [(op.name, op.stage, op.flops, op.dtype) for op in ops] == [
        ("aten.mm", "forward", 2 * 6 * 8 * 10, "bf16"),
        ("aten._to_copy", "optimizer", 0, "bf16"),
    ]
    assert [op.moved for op in ops] == [2 * (48 + 80 + 60), 60 * (2 + 4)]


def test_what_is_changed_in_place_is_read_and_written(recorder):
    tensors = [empty(6), empty(8)]
    with recorder:
        tensors[0].add_(empty(6))
        torch._foreach_mul_(tensors, 2.0)
        torch._foreach_norm(tensors)
    moved = {op.name: op.moved for op in recorder.ops if op.name != "aten.empty"}
    assert moved == {"aten.add_": 3 * 24, "aten._foreach_mul_": 2 * 56, "aten._foreach_norm": 56 + 8}


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_causal_attention_is_half_of_the_work(kernel):
    flops = []
    for is_causal in (False, True):
        recorder = Recorder(CudaRules(Gpu()), lambda _: 0)
        query, key, value = (empty(2, 4, 64, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        with recorder, as_on_cuda(Gpu(flash=kernel == "flash")):
            result = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            with recorder.during("backward"):
                result.sum().backward()
        flops.append([op.flops for op in recorder.ops if kernel in op.name])
    assert flops[0] == [2 * 2 * (2 * 4) * 64 * 64 * 32, 5 * 2 * (2 * 4) * 64 * 64 * 32]
    assert flops[1] == [number // 2 for number in flops[0]]


def test_what_is_computed_again_is_known_from_what_is_backward(recorder):
    from torch.utils.checkpoint import checkpoint

    weight = nn.Parameter(empty(8, 8))
    recorder.adopt([weight], "weights")
    with recorder:
        loss = checkpoint(lambda x: torch.tanh(x @ weight), empty(4, 8), use_reentrant=False).sum()
        with recorder.during("backward"):
            loss.backward()
    stages = [op.stage for op in recorder.ops if op.name == "aten.tanh"]
    assert stages == ["forward", "recompute"]
    assert {op.stage for op in recorder.ops if op.name == "aten.tanh_backward"} == {"backward"}


def test_marks_stand_between_the_events_of_their_stages(recorder):
    with recorder:
        first = empty(4)
        with recorder.during("backward"):
            second = empty(4)
        recorder.mark("end")
        third = empty(4)
    assert [(mark.name, mark.event) for mark in recorder.marks] == [
        ("backward begins", 1),
        ("backward ends", 2),
        ("end", 2),
    ]
    del first, second, third


def test_a_fused_step_takes_nothing_and_foreach_takes_copies():
    found = {}
    for implementation in ("fused", "foreach"):
        trace = trace_plain_step(LLAMA, "AutoModelForCausalLM", 1, 8, implementation=implementation)
        begins = [mark.event for mark in trace.marks if mark.name == "optimizer begins"][-1]
        ends = [mark.event for mark in trace.marks if mark.name == "optimizer ends"][-1]
        found[implementation] = sum(event.size for event in trace.events[begins:ends])
    weights = sum(birth.size for birth in trace.births.values() if birth.part == "weights")
    assert found["fused"] == 0
    assert found["foreach"] >= 0.9 * weights


def test_a_padded_batch_takes_another_attention():
    masks = ("none", "full", "padded")
    traces = {
        mask: trace_plain_step(LLAMA, "AutoModelForCausalLM", 2, 16, precision="bf16", mask=mask) for mask in masks
    }
    taken = {mask: {op.name for op in trace.ops if "attention" in op.name} for mask, trace in traces.items()}
    assert taken["none"] == taken["full"]
    assert all("flash" in name for name in taken["none"])
    assert all("efficient" in name for name in taken["padded"])


# ---------------------------------------------------------------------- nothing stays


def _replaced():
    """What a trace puts something else in the place of."""
    optim = [sys.modules[f"torch.optim.{name}"] for name in ("adam", "adamw", "sgd", "adagrad", "optimizer")]
    places = [
        *((torch, name) for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype")),
        *((torch.amp, name) for name in ("autocast", "is_autocast_available")),
        *((torch.amp.autocast_mode, name) for name in ("autocast", "is_autocast_available")),
        *((functional, name) for name in ("dropout", "scaled_dot_product_attention")),
        (torch.Tensor, "backward"),
        *((module, "_get_fused_kernels_supported_devices") for module in (*optim, torch.utils._foreach_utils)),
        *((module, "_get_foreach_kernels_supported_devices") for module in (*optim, torch.utils._foreach_utils)),
        *((quantized, name) for name in ("require_extra", "bitsandbytes_functions", "_kernel_for")),
        *((quantized.Quantized, name) for name in ("_buffer", "_maps_on", "_call")),
        *((stochastic_rounding, name) for name in ("_kernel_for", "has_fused")),
        (stochastic_rounding.RoundingNoise, "_generator_for"),
        *((torch.autocast, name) for name in ("__init__", "__enter__", "__exit__")),
        (torch, "set_rng_state"),
        *((linear_cross_entropy, name) for name in ("_sums_half_in_fp32", "_slices")),
        (token_cross_entropy, "kernels_for"),
        (precision, "_use_tf32"),
        (lora_product, "dequantized"),
        (nf4, "dequantized"),
        (fp8, "quantized_rows"),
    ]
    return {(str(place), name): getattr(place, name) for place, name in places if hasattr(place, name)}


def test_everything_that_a_trace_replaces_is_put_back():
    before = _replaced()
    assert len(before) > 20
    trace_plain_step(LLAMA, "AutoModelForCausalLM", 1, 8, precision="bf16", recomputes=True)
    assert _replaced() == before


def test_and_also_where_a_trace_fails(recorder):
    before = _replaced()
    inside = {}

    def fail():
        with as_on_cuda(Gpu()), stand_ins_on_this_thread(trace_patches(recorder, Gpu().accelerator)), recorder:
            inside.update(_replaced())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    changed = {name for _, name in (key for key in before if inside[key] is not before[key])}
    assert {"__enter__", "dropout", "scaled_dot_product_attention", "_call", "dequantized"} <= changed
    assert _replaced() == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_trace_draws_no_random_numbers():
    before = torch.get_rng_state()
    trace_plain_step(LLAMA, "AutoModelForCausalLM", 1, 8)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_real_step_gives_the_same_bits_before_and_after_a_trace(optimizer):
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in LLAMA.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", attention_dropout=0.2, **values)).train()
    ids = torch.randint(0, 96, (2, 12))

    def weights_after_a_step():
        own = copy.deepcopy(model)
        steps = optimizer(own.parameters(), lr=0.1)
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.dropout(own(input_ids=ids, labels=ids).logits, 0.3).float().square().mean()
        loss.backward()
        steps.step()
        return [parameter.detach().clone() for parameter in own.parameters()]

    before = weights_after_a_step()
    trace_plain_step(LLAMA, "AutoModelForCausalLM", 2, 12, precision="bf16", implementation="foreach")
    after = weights_after_a_step()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
