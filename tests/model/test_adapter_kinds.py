"""DoRA, IA3, PiSSA and OLoRA: agreement with PEFT, initial values, saving, loading and merging."""

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from rounding import assert_same_up_to_rounding
from tiny_models import KINDS, TEXTS, batch_of, config_of, tokenizer
from trimtab.commands.merge import merge_in_place
from trimtab.errors import ModelError, RecipeError
from trimtab.model.adapter_configs import Ia3Spec, LoraSpec
from trimtab.model.adapters import add_adapter, load_adapter
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model
from trimtab.model.nf4 import Nf4, dequantized

SPECS = {
    "dora": LoraSpec(rank=3, alpha=5, dora=True),
    "ia3": Ia3Spec(),
    "pissa": LoraSpec(rank=3, init="pissa"),
    "pissa-fast": LoraSpec(rank=3, init="pissa-fast", rslora=True),
    "olora": LoraSpec(rank=3, alpha=5, ranks={"*.0.*": 2}, init="olora"),
    "pissa and dora": LoraSpec(rank=3, init="pissa", dora=True),
}
FAMILIES = ("bert", "gpt2", "llama", "t5")
# quick: every kind in one family, and another kind in each of the others
QUICK = {*(("llama", spec) for spec in SPECS), ("bert", "dora"), ("gpt2", "ia3"), ("t5", "pissa")}
CASES = [
    pytest.param(name, spec, marks=() if (name, spec) in QUICK else pytest.mark.slow)
    for name in FAMILIES
    for spec in SPECS
    if (name, spec) != ("gpt2", "olora")
]


def plain(name, **settings):
    torch.manual_seed(1)
    head = {"num_labels": 3} if KINDS[name] == "sequence-classification" else {}
    return load_model({**config_of(name), **settings}, KINDS[name], head, tokenizer()).eval()


def batch(name):
    found = batch_of(TEXTS)
    labels = torch.tensor([0, 1, 2, 0, 1]) if KINDS[name] == "sequence-classification" else found["input_ids"]
    return {**found, "labels": labels}


def logits(model, name):
    with torch.no_grad():
        return model(**batch(name)).logits


def adapted(name, spec, size=0.1):
    """A base, and a copy with an adapter that was changed as training would."""
    base = plain(name)
    model = copy.deepcopy(base)
    adapter = add_adapter(model, SPECS[spec])
    torch.manual_seed(7)
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor.add_(torch.randn_like(tensor), alpha=size)
    return base, model, adapter


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_a_new_adapter_keeps_the_outputs(name, spec):
    base, model, _ = adapted(name, spec, size=0)
    assert_same_up_to_rounding(logits(model, name), logits(base, name), num_roundings=64)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_peft_reads_the_folder_onto_the_original_base(name, spec, tmp_path):
    import peft

    base, model, adapter = adapted(name, spec)
    adapter.save(tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert_same_up_to_rounding(logits(model, name), logits(theirs, name), num_roundings=256)
    assert not torch.allclose(logits(model, name), logits(base, name), atol=1e-3)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_save_and_load(name, spec, tmp_path):
    base, model, adapter = adapted(name, spec)
    adapter.save(tmp_path)
    again = copy.deepcopy(base)
    read = load_adapter(again, tmp_path, trainable=True)
    assert read.targets == adapter.targets
    assert_same_up_to_rounding(logits(again, name), logits(model, name), num_roundings=256)
    read.save(tmp_path / "second")
    first, second = (load_file(path / "adapter_model.safetensors") for path in (tmp_path, tmp_path / "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_merged_weights_give_the_same_outputs(name, spec, tmp_path):
    base, model, adapter = adapted(name, spec)
    adapter.save(tmp_path)
    again = copy.deepcopy(base)
    read = load_adapter(again, tmp_path)
    merge_in_place(again, read, torch.float32)
    assert {name for name, _ in again.named_parameters()} == {name for name, _ in base.named_parameters()}
    assert_same_up_to_rounding(logits(again, name), logits(model, name), num_roundings=256)


@pytest.mark.parametrize("spec", ["dora", "ia3"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_are_those_of_peft(name, spec, tmp_path):
    import peft

    base, model, adapter = adapted(name, spec)
    adapter.save(tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, is_trainable=True).eval()
    for one in (model, theirs):
        one(**batch(name)).loss.backward()
    other = {
        key.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): parameter.grad
        for key, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    found = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == other.keys()
    assert any("magnitude" in key or "ia3_l" in key for key in found)
    largest = max(float(gradient.abs().max()) for gradient in other.values())
    for key, gradient in found.items():
        assert_same_up_to_rounding(gradient, other[key], num_roundings=64, size=largest)


def test_trained_matrices_are_saved_as_the_difference(tmp_path):
    """The base of PiSSA is a rest; the saved adapter has twice the rank and belongs to the original base."""
    base, model, adapter = adapted("llama", "pissa")
    name = "model.layers.0.self_attn.q_proj"
    rest = model.get_submodule(name).base_layer.weight
    assert not torch.allclose(rest, base.get_submodule(name).weight, atol=1e-2)
    adapter.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == 6
    assert config["lora_alpha"] == 12
    assert config["init_lora_weights"] is True
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored[f"base_model.model.{name}.lora_A.weight"].shape[0] == 6
    assert adapter.num_parameters == sum(tensor.numel() for tensor in stored.values()) // 2


def test_pissa_takes_the_largest_singular_values():
    base, model, _ = adapted("llama", "pissa", size=0)
    name = "model.layers.1.mlp.up_proj"
    whole = torch.linalg.svdvals(base.get_submodule(name).weight)
    rest = torch.linalg.svdvals(model.get_submodule(name).base_layer.weight)
    assert_same_up_to_rounding(rest[: len(whole) - 3], whole[3:], num_roundings=64, size=whole)


def test_the_start_is_exact_in_half_precision():
    """Matrices stay in fp32, and only the rest of the base is rounded, once."""
    base = plain("llama").to(torch.bfloat16)
    model = copy.deepcopy(base)
    add_adapter(model, LoraSpec(rank=3, init="pissa"))
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        layer = model.get_submodule(name)
        assert layer.base_layer.weight.dtype is torch.bfloat16
        product = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        weight, rest = base.get_submodule(name).weight.float(), layer.base_layer.weight.float()
        assert product.dtype is torch.float32
        difference = (rest + product - weight).abs().max()
        assert difference <= torch.finfo(torch.bfloat16).eps / 2 * rest.abs().max() * 1.01


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("bert", {"key", "value", "dense"}),
        ("llama", {"k_proj", "v_proj", "down_proj"}),
        ("gpt2", {"c_attn", "c_proj"}),
    ],
)
def test_ia3_scales_the_modules_that_peft_chooses(name, ends):
    import peft

    model = plain(name)
    adapter = add_adapter(model, Ia3Spec())
    assert {target.rpartition(".")[2] for target in adapter.targets} == ends
    theirs = plain(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(peft.IA3Config(), theirs)
    found, other = (
        {key: module.is_feedforward for key, module in one.named_modules() if hasattr(module, "ia3_l")}
        for one in (model, theirs)
    )
    assert found == other
    assert True in found.values()
    assert False in found.values()


def test_ia3_of_modules_by_name(tmp_path):
    """Second layers of an MLP are found by their shape where PEFT does not know the type."""
    config = {**config_of("llama"), "model_type": "olmo2"}
    model = load_model(config, "causal-lm", {}, tokenizer())
    with pytest.raises(RecipeError, match="PEFT does not know which modules of olmo2 models IA3 scales"):
        add_adapter(model, Ia3Spec())
    adapter = add_adapter(model, Ia3Spec(targets=["v_proj", "down_proj"], layers=(1, 1)))
    scaled = {name.rpartition(".")[2]: model.get_submodule(name).is_feedforward for name in adapter.targets}
    assert scaled == {"v_proj": False, "down_proj": True} or scaled == {"v_proj": True, "down_proj": True}
    assert {name.split(".")[2] for name in adapter.targets} == {"1"}


@pytest.mark.parametrize(
    ("name", "spec", "problem"),
    [
        ("gpt2", {"init": "olora"}, "olora cannot be used with"),
        ("llama", {"rank": 17, "init": "pissa"}, "needs a rank of at most 16 in"),
        ("llama", {"init": "svd"}, "adapter.init is 'svd'"),
    ],
)
def test_mistakes(name, spec, problem):
    with pytest.raises(RecipeError, match=problem):
        add_adapter(plain(name), LoraSpec(**spec))


def test_other_adapters_are_refused(tmp_path):
    import peft

    theirs = peft.get_peft_model(plain("llama"), peft.LoHaConfig(target_modules=["q_proj"]))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="LOHA adapter"):
        load_adapter(plain("llama"), tmp_path)


@pytest.mark.parametrize("width", [48, 64])
def test_magnitudes_of_4_bit_weights(width, tmp_path):
    """Read as they are, also where bitsandbytes reads wrong scales on a CPU: rows that are no multiple of 64."""
    pytest.importorskip("bitsandbytes")
    with quiet_transformers():
        plain("llama", hidden_size=width, intermediate_size=80).save_pretrained(tmp_path)
    model = load_model(
        str(tmp_path), "causal-lm", {}, tokenizer(), quantization=Nf4(torch.float32), dtype=torch.float32, device="cpu"
    ).eval()
    before = logits(model, "llama")
    adapter = add_adapter(model, LoraSpec(rank=3, dora=True))
    assert_same_up_to_rounding(logits(model, "llama"), before, num_roundings=64)
    for name in adapter.targets:
        layer = model.get_submodule(name)
        norms = dequantized(layer.base_layer.weight, torch.float32).norm(dim=1)
        assert_same_up_to_rounding(layer.lora_magnitude_vector["default"].weight, norms, num_roundings=4)
