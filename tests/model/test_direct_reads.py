"""Linear modules whose weight other code reads directly get no adapter, and are not quantized."""

import logging
import operator

import pytest
import torch

from tiny_models import TEXTS, batch_of, tokenizer
from trimtab.errors import RecipeError
from trimtab.model.adapter_configs import LoraSpec
from trimtab.model.adapters import add_adapter
from trimtab.model.direct_reads import _Guard, directly_read
from trimtab.model.load import load_model
from trimtab.model.nf4 import Nf4, is_nf4
from trimtab.model.quantization import quantizable

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
CONFIGS = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 300, "time_step_rank": 4},
    "jamba": {
        **_SMALL,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "deberta": {
        **_SMALL,
        "intermediate_size": 48,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300},
}
READ = {"mamba": {"x_proj", "dt_proj", "out_proj"}, "jamba": {"dt_proj"}, "deberta": set(), "bloom": set()}


def model_of(name, **changes):
    kind = "masked-lm" if name == "deberta" else "causal-lm"
    return load_model({"model_type": name, **CONFIGS[name], **changes}, kind, {}, tokenizer())


def last_names(names):
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_adapter_of_all_linear_has_a_gradient(name, caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    model = model_of(name)
    assert last_names(directly_read(model)) == READ[name]
    assert not READ[name] & last_names(quantizable(model))
    adapter = add_adapter(model, LoraSpec(rank=2))
    assert adapter.targets
    assert not READ[name] & last_names(adapter.targets)
    assert ("may read the weight directly" in caplog.text) == bool(READ[name])
    batch = batch_of(TEXTS)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    unused = {
        key
        for key, tensor in adapter.tensors().items()
        if key.endswith("lora_B.default.weight") and not tensor.grad.any()
    }
    assert not unused


def test_a_quantized_mamba_trains():
    pytest.importorskip("bitsandbytes", reason="an nf4 base needs bitsandbytes")
    config = {"model_type": "mamba", **CONFIGS["mamba"]}
    model = load_model(config, "causal-lm", {}, tokenizer(), quantization=Nf4(torch.float32))
    assert last_names(name for name, module in model.named_modules() if is_nf4(module)) == {"in_proj"}
    adapter = add_adapter(model, LoraSpec(rank=2))
    batch = batch_of(TEXTS)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(tensor.grad is not None for tensor in adapter.tensors().values())


def test_weights_behind_a_condition_that_does_not_hold_are_not_read():
    assert last_names(directly_read(model_of("bloom", pretraining_tp=2))) == {"dense", "dense_4h_to_h"}


def test_a_named_module_that_is_read_directly_is_refused():
    with pytest.raises(RecipeError, match=r"dt_proj, whose weight MambaMixer reads directly") as refused:
        add_adapter(model_of("mamba"), LoraSpec(rank=2, targets=["dt_proj"]))
    assert "adapter.trains: ['dt_proj']" in str(refused.value)


def test_a_pattern_that_matches_others_too_leaves_it_out(caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    adapter = add_adapter(model_of("mamba"), LoraSpec(rank=2, targets=["*_proj"]))
    assert last_names(adapter.targets) == {"in_proj"}
    assert "no adapter on dt_proj, out_proj, x_proj" in caplog.text


class Reads(torch.nn.Module):
    """Reads one weight, and only asks others for their dtypes."""

    def __init__(self):
        super().__init__()
        self.used, self.asked, self.called = (torch.nn.Linear(2, 2) for _ in range(3))
        self.inner = torch.nn.ModuleDict({"deep": torch.nn.Linear(2, 2)})
        torch.nn.init.zeros_(self.asked.weight)

    def forward(self, x):
        if isinstance(self.asked.weight, torch.Tensor) and self.asked.weight.dtype is torch.float32:
            x = self.called(x)
        return x @ self.used.weight.t() + self.inner.deep.weight.sum() + len(self.called.weight.shape)


def test_only_values_count():
    assert directly_read(Reads()) == {"used": "Reads", "inner.deep": "Reads"}


def test_modules_of_torch_count():
    model = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(8, 2)})
    assert directly_read(model) == {"attention.out_proj": "MultiheadAttention"}


def test_conditions_that_cannot_be_compared_may_hold():
    module = torch.nn.Module()
    module.several, module.text, module.number = torch.ones(3), "a", 0.5
    guards = [_Guard(name, operator.gt, 0) for name in ("several", "text", "number", "nowhere")]
    assert all(guard.holds(module) for guard in guards)
    assert not _Guard("number", operator.gt, 1).holds(module)
