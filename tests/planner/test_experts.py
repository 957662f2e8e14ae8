"""Traces of mixtures of experts: what forward keeps is what a real forward keeps, and grouped products are CUDA's."""

import pytest
import torch
from tests.allocated_bytes import peak_bytes
from tests.kept_bytes import kept_bytes
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab import Recipe
from trimtab.planner.shapes import BatchShape
from trimtab.planner.survey import named_task
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.plain_step import trace_plain_step
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.techniques.apply import plain_spec

ROWS, LENGTH = 2, 24
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_SMALL |= {"vocab_size": 64, "attn_implementation": "eager"}  # attention kernels of CPU and GPU keep other things
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
SHAPES = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 48},
    "qwen3-moe": {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16},
    "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 4, "intermediate_size": 48, "head_dim": 8},
    "deepseek": {
        "model_type": "deepseek_v3",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "intermediate_size": 48,
        "num_key_value_heads": 4,
        **MLA,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_takes_what_a_real_step_takes(name):
    config = _SMALL | SHAPES[name]
    trace = trace_plain_step(config, "AutoModelForCausalLM", ROWS, LENGTH, optimizer="sgd", whole=True)
    model = _model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    ids = torch.randint(0, _SMALL["vocab_size"], (ROWS, LENGTH))

    def forward():
        return model(input_ids=ids, labels=ids).loss

    def step():
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert _kept_in(trace) == kept_bytes(model, forward)
    assert _flops_of_experts(trace) == 3 * _flops_of_experts_by_hand(model)  # backward has two products for each
    step()
    # sorting and adding rows by index have other temporary buffers on a CPU
    assert _peak_in(trace) == pytest.approx(peak_bytes(step), rel=0.005)


def _model(config):
    values = dict(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(made).float().train()
    model.config.use_cache = False
    return model


def _flops_of_experts(trace):
    return sum(op.flops for op in trace.ops if op.name == "aten._grouped_mm")


def _flops_of_experts_by_hand(model):
    experts = [module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj")]
    weights = [(one.gate_up_proj, one.down_proj) for one in experts if one.gate_up_proj.dim() == 3]
    per_expert = sum(2 * weight[0].numel() for pair in weights for weight in pair)
    return ROWS * LENGTH * model.config.num_experts_per_tok * per_expert


def _kept_in(trace):
    """Bytes of the results of forward that are alive when the last backward begins."""
    end = [mark.event for mark in trace.marks if mark.name == "backward begins"][-1]
    alive = {}
    for storage, size in trace.events[:end]:
        if size:
            alive[storage] = size
        else:
            alive.pop(storage)
    found = [size for storage, size in alive.items() if trace.births[storage].part == "forward"]
    return sum(found) - 4  # the loss


def _peak_in(trace):
    """The largest size of all storages that the second step allocated and had not freed yet."""
    (start,) = (mark.event for mark in trace.marks if mark.name == "step 1")
    total = peak = 0
    for storage, size in trace.events[start:]:
        total += size or -trace.births[storage].size
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize("adapter", ["none", {"kind": "lora", "experts": True}])
def test_experts_of_a_run_in_mixed_precision_are_traced_in_half_precision(adapter):
    config = _SMALL | SHAPES["mixtral"]
    recipe = Recipe(
        model={"config": config, "tokenizer": "train"}, task="causal-lm", data={"train": "no.csv"}, adapter=adapter
    )
    kind = "none" if adapter == "none" else adapter["kind"]
    for precision, dtype in (("bf16", "bf16"), ("fp32", "fp32")):
        spec = plain_spec(ROWS, precision, adapter=kind, optimizer="adamw")
        trace = StepTracer(recipe, named_task(recipe), Gpu()).trace(spec, BatchShape(ROWS, LENGTH))
        assert {op.dtype for op in trace.ops if op.name == "aten._grouped_mm"} == {dtype}


def test_grouped_products_refuse_rows_that_are_not_aligned_as_the_kernel_does():
    odd = _SMALL | SHAPES["mixtral"] | {"intermediate_size": 46}
    with pytest.raises(RuntimeError, match="not a multiple of 16"):
        trace_plain_step(odd, "AutoModelForCausalLM", ROWS, LENGTH)
    model, ids = _model(odd), torch.randint(0, _SMALL["vocab_size"], (ROWS, LENGTH))
    with pytest.raises(RuntimeError, match="multiple of 16"):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize(("width", "kernel"), [(16, "flash"), (8, "efficient"), (12, "softmax")])
def test_value_heads_of_another_width_have_the_kernel_that_supports_them(width, kernel):
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": width, "num_key_value_heads": 4}
    config = _SMALL | SHAPES["deepseek"] | heads | {"attn_implementation": "sdpa"}
    trace = trace_plain_step(config, "AutoModelForCausalLM", ROWS, LENGTH, precision="bf16-pure")
    assert any(kernel in op.name for op in trace.ops)


def test_blocks_of_a_unit_may_have_buffers_or_not():
    config = {"model_type": "recurrent_gemma", "hidden_size": 32, "num_attention_heads": 4, "lru_width": 32}
    config |= {"intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 14, "head_dim": 8}
    short, whole = (
        trace_plain_step(config, "AutoModelForCausalLM", ROWS, 4, whole=is_whole) for is_whole in (False, True)
    )
    assert [event.size for event in short.events] == [event.size for event in whole.events]
