"""What the planner predicts for adapters is what a real step on the CPU keeps."""

import copy
import gc

import pytest
import torch

from kept_bytes import Births
from trimtab import Recipe, predict_step_memory
from trimtab.model.adapter_configs import Ia3Spec, LoraSpec
from trimtab.model.adapters import add_adapter
from trimtab.model.load import load_model
from trimtab.model.prefix_tuning import PrefixSpec
from trimtab.model.side_network import SideSpec
from trimtab.model.virtual_tokens import PromptSpec
from trimtab.planner.shapes import BatchShape
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.techniques.apply import plain_spec

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 200,
    "_attn_implementation": "eager",  # kernels of attention keep other tensors on a CPU and on a GPU
}
ADAPTERS = {
    "dora": ({"kind": "lora", "rank": 4, "dora": True}, LoraSpec(rank=4, dora=True)),
    "ia3": ({"kind": "ia3"}, Ia3Spec()),
    "side": ({"kind": "side", "reduction": 4}, SideSpec(reduction=4)),
    "prompt": ({"kind": "prompt", "tokens": 8}, PromptSpec(tokens=8)),
    "prefix": ({"kind": "prefix", "tokens": 8}, PrefixSpec(tokens=8)),
    "side, every 2": ({"kind": "side", "every": 2, "dropout": 0.1}, SideSpec(every=2, dropout=0.1)),
}
ROWS, LENGTH = 4, 32


class Causal:
    loss_kind, shifts_labels, model_kind, name = "token-cross-entropy", True, "causal-lm", "causal-lm"
    head = dict


def predicted(adapter):
    """Bytes of activations that are alive when backward begins."""
    recipe = Recipe(
        model={"config": LLAMA, "tokenizer": "train"}, task="causal-lm", data={"train": "no.csv"}, adapter=adapter
    )
    spec = plain_spec(ROWS, "fp32", adapter=adapter["kind"], optimizer="adamw")
    trace = StepTracer(recipe, Causal, Gpu()).trace(spec, BatchShape(ROWS, LENGTH))
    end = next(mark.event for mark in trace.marks if mark.name == "backward begins")
    alive = {}
    for storage, size in trace.events[:end]:
        if size:
            alive[storage] = size
        else:
            del alive[storage]
    births = {storage: trace.births[storage] for storage in alive}
    return sum(alive[storage] for storage, birth in births.items() if birth.part == "forward" and not birth.is_wide)


def kept(spec):
    """The same of a real forward, without logits and loss, which are other parts of a plan, and the head's input."""
    model = load_model(copy.deepcopy(LLAMA), "causal-lm", {}, None)
    add_adapter(model, spec)
    model.train()
    ids = torch.zeros((ROWS, LENGTH), dtype=torch.long)
    gc.collect()
    with Births() as births:
        hidden = model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    gc.collect()
    assert hidden.requires_grad
    return births.alive_bytes(but=[*model.parameters(), *model.buffers(), hidden])


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_activations_are_those_of_a_real_step(name):
    adapter, spec = ADAPTERS[name]
    assert predicted(adapter) == pytest.approx(kept(spec), rel=0.02)


def test_each_adapter_has_its_price():
    config = {**LLAMA, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    del config["_attn_implementation"]

    def parts(adapter):
        return predict_step_memory(config, "causal-lm", 4, 512, precision="bf16", adapter=adapter)

    lora, dora, ia3, side = (parts(each) for each in ("lora", {"kind": "lora", "dora": True}, "ia3", "side"))
    assert dora.allocated > lora.allocated
    assert ia3.parts["optimizer state"] < lora.parts["optimizer state"]
    assert side.parts["activations"] < lora.parts["activations"] / 3


def test_the_memory_of_a_side_network_does_not_grow_with_the_depth_of_the_base():
    """What grows is the weights; as many blocks are read."""
    config = {**LLAMA, "hidden_size": 512, "intermediate_size": 1408, "vocab_size": 500}
    del config["_attn_implementation"]
    found = [
        predict_step_memory(
            {**config, "num_hidden_layers": depth},
            "causal-lm",
            4,
            512,
            precision="bf16",
            adapter={"kind": "side", "every": depth // 2},
        )
        for depth in (2, 8)
    ]
    assert found[0].parts["activations"] == found[1].parts["activations"]
    assert found[0].parts["weights"] < found[1].parts["weights"]
