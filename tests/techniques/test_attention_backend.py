"""The attention backend: repeated heads, the rule for `auto`, torch's switches, and the trace."""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rounding import assert_same_up_to_rounding
from tiny_runs import reviews, write_csv
from trimtab import Recipe, fit, predict_step_memory
from trimtab.model.attention_kernels import _CONTEXTS, has_grouped_heads, use_attention
from trimtab.techniques.apply import plain_spec, values_without_plan
from trimtab.techniques.attention_backend import AttentionBackend, supports_flash_attention
from trimtab.techniques.base import Accelerator, Case, Site
from trimtab.techniques.recomputation import checkpoint_layers

RECIPE = {"model": "nowhere", "data": {"train": "nowhere"}}
SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def small(kind: str = "llama", key_value_heads: int = 2, **more) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        vocab_size=100,
        **more,
    )
    return AutoModelForCausalLM.from_config(config)


def results(model, padded: bool):
    ids = torch.arange(24).view(2, 12) % 90
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
    output = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    model.zero_grad()
    output.loss.backward()
    return output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_repeated_heads_give_the_same_results(kind, padded):
    model = small(kind)
    repeated = copy.deepcopy(model)
    use_attention(repeated, "torch", repeats_heads=True)
    wanted, wanted_gradients = results(model, padded)
    found, gradients = results(repeated, padded)
    assert torch.allclose(found, wanted, atol=1e-6)
    for name, gradient in wanted_gradients.items():
        assert torch.allclose(gradients[name], gradient, atol=1e-6), name


def test_torch_is_given_as_many_key_heads_as_query_heads(monkeypatch):
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watching(query, key, value, **kwargs):
        seen.append((query.shape[1], key.shape[1], value.shape[1], kwargs.get("enable_gqa", False)))
        return real(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watching)
    model = small()
    results(model, False)
    assert seen
    assert all(keys == 2 and grouped for _, keys, _, grouped in seen)
    seen.clear()
    use_attention(model, "torch", repeats_heads=True)
    results(model, False)
    assert seen
    assert all(found == (4, 4, 4, False) for found in seen)


@pytest.mark.parametrize(
    ("heads", "capability", "dtype", "changed"),
    [
        (4, (7, 5), torch.float16, False),
        (2, (7, 5), torch.float16, True),
        (2, (9, 0), None, True),
        (2, (9, 0), torch.bfloat16, False),
    ],
)
def test_heads_are_repeated_only_where_it_helps(heads, capability, dtype, changed):
    model = small(key_value_heads=heads)
    assert has_grouped_heads(model) is (heads == 2)
    AttentionBackend().change_model(model, "torch", site(capability, dtype))
    assert (model.config._attn_implementation != "sdpa") is changed


@pytest.mark.parametrize(
    ("type_", "reason"), [("cpu", "on this device (cpu)"), ("cuda", "on FalconForCausalLM, which has its own")]
)
def test_a_setting_without_effect_is_reported(type_, reason, caplog):
    caplog.set_level("INFO", "trimtab")
    device, recipe = Accelerator(type_, (9, 0)), Recipe(model="m", data={"train": "rows.csv"})
    with torch.device("meta"):
        falcon = AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon", num_hidden_layers=1))
    for value in ("torch", "flash"):
        AttentionBackend().change_model(falcon, value, Site(torch.device(type_), device, torch.bfloat16, recipe))
    (line,) = caplog.messages
    assert line.startswith("memory.attention_backend: flash has no effect")
    assert reason in line


def test_nothing_of_it_is_written_with_the_model(tmp_path):
    model = small()
    use_attention(model, "flash", repeats_heads=True)
    model.save_pretrained(tmp_path)
    assert "trimtab" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"


def test_flash_needs_half_precision_and_ampere():
    def on(*capability):
        return Accelerator("cuda", capability)

    assert supports_flash_attention(on(8, 0), torch.bfloat16)
    assert supports_flash_attention(on(9, 0), torch.float16)
    assert not supports_flash_attention(on(7, 5), torch.float16)
    assert not supports_flash_attention(on(9, 0), None)
    assert not supports_flash_attention(replace(on(9, 0), has_flash=False), torch.bfloat16)


# ---------------------------------------------------------------------- the choice of a kernel


def site(capability=(9, 0), dtype=torch.bfloat16, device="meta"):
    recipe = Recipe(model="nowhere", data={"train": "nowhere"})
    return Site(torch.device(device), Accelerator("cuda", capability), dtype, recipe)


def auto(model, capability, num_shapes, precision="bf16", kind="cuda", **memory):
    recipe = Recipe(model="nowhere", data={"train": "nowhere"}, memory=memory)
    case = Case(model, Accelerator(kind, capability), precision, recipe, count_shapes=lambda: num_shapes)
    return AttentionBackend().values(case)


def test_on_hopper_cudnn_is_for_shapes_that_repeat():
    model = small()
    assert auto(model, (9, 0), 1) == ("cudnn",)
    assert auto(model, (9, 0), 100) == ("flash",)
    assert auto(model, (9, 0), 100, attention_backend="cudnn") == ("cudnn",), "what the recipe says is taken"


@pytest.mark.parametrize(
    ("capability", "precision", "kind"),
    [((8, 0), "bf16", "cuda"), ((10, 0), "bf16", "cuda"), ((9, 0), "fp32", "cuda"), (None, "bf16", "cpu")],
)
def test_elsewhere_the_choice_is_torchs(capability, precision, kind):
    assert auto(small(), capability, 100, precision, kind) == ("torch",)


def test_a_model_that_calls_torch_by_itself_is_left_alone():
    """Falcon compares the name of its implementation, and would compute attention by hand under another one."""
    config = AutoConfig.for_model("falcon", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    model = AutoModelForCausalLM.from_config(config)
    assert auto(model, (9, 0), 100) == ("torch",)
    use_attention(model, "flash")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_a_model_with_a_mask_for_sdpa_alone_is_left_alone(kind):
    """Sparse attention puts its choice of keys into the mask only under the names that it knows."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=1, num_local_experts=8))
    model.config._attn_implementation = "sdpa"
    assert auto(model, (9, 0), 100) == ("torch",)
    use_attention(model, "flash")
    assert model.config._attn_implementation == "sdpa"


SWITCHES = {
    "torch": (True, True, True),
    "cudnn": (True, True, True),
    "flash": (False, True, True),
    "efficient": (False, False, True),
    "math": (False, False, False),
}


def switches():
    cuda = torch.backends.cuda
    return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize("backend", SWITCHES)
def test_torch_sees_the_switches_in_forward_and_where_blocks_are_recomputed(backend, monkeypatch):
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watching(*args, **kwargs):
        seen.append((switches(), torch._C._get_sdp_priority_order()[0]))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watching)
    model, plain = small(), small()
    before = switches(), torch._C._get_sdp_priority_order()
    use_attention(model, backend)
    checkpoint_layers(model, "all")
    found, gradients = results(model, padded=True)
    assert len(seen) == 4, "two blocks, each run again in backward"
    assert {one for one, _ in seen} == {SWITCHES[backend]}
    if backend == "cudnn":
        assert {first for _, first in seen} == {int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)}
    assert (switches(), torch._C._get_sdp_priority_order()) == before
    wanted, wanted_gradients = results(plain, padded=True)
    assert_same_up_to_rounding(found, wanted, 100)
    for name, gradient in wanted_gradients.items():
        assert_same_up_to_rounding(gradients[name], gradient, 1000)


def test_switches_are_set_back_after_an_error_and_in_two_threads():
    before = switches()

    def work(number):
        for _ in range(200):
            with contextlib.suppress(ZeroDivisionError), _CONTEXTS[("flash", "math")[number]]():
                assert switches() == SWITCHES[("flash", "math")[number]]
                _ = 1 / 0

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, number) for number in range(2)]:
            done.result()
    assert switches() == before


@pytest.mark.parametrize(("backend", "kernel"), [("flash", "flash"), ("efficient", "efficient"), ("math", "softmax")])
def test_a_trace_follows_the_switches(backend, kernel):
    prediction = predict_step_memory(SMALL, "causal-lm", 1, 64, gpu="h200", attention_backend=backend)
    names = {op.name for op in prediction.trace.ops}
    assert any(kernel in name for name in names), names
    others = {"flash", "efficient"} - {kernel}
    assert not any(f"{other}_attention" in name for name in names for other in others)


def test_a_run_says_which_kernel_it_used(tiny, own_folder):
    rows = write_csv(own_folder / "reviews.csv", reviews(8))
    recipe = Recipe(
        model=tiny.folder("bert"),
        data={"train": str(rows)},
        train={"batch_size": 4, "max_steps": 1},
        memory={"attention_backend": "math"},
        out=str(own_folder / "run"),
    )
    plan = fit(recipe, progress="quiet", device="cpu").plan
    assert plan.attention_backend == "math"
    assert any("attention math" in line for line in plan.describe())


def test_a_resumed_run_keeps_its_kernel_where_nothing_is_predicted():
    case = Case(small(), Accelerator("cuda", (9, 0)), "bf16", Recipe(**RECIPE), count_shapes=lambda: 1)
    assert values_without_plan(case)["attention_backend"] == "cudnn"
    stored = plain_spec(4, "bf16", attention_backend="torch")  # of a version that did not know the technique
    assert values_without_plan(case, stored)["attention_backend"] == "torch"
