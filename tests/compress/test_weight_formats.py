"""Formats of weights: which shapes they store, what they refuse, and what a module is afterwards."""

import pytest
import torch

from trimtab.compress.quantized_layers import QuantizedLayers
from trimtab.compress.weight_formats import FORMATS
from trimtab.errors import MissingDependency, ModelError
from trimtab.model.load import load_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "suited", "not_suited"),
    [
        ("int8", [(3, 5)], []),
        ("nf4", [(3, 64), (8, 128)], [(64, 48)]),
        ("int4", [(8, 1024), (16, 768)], [(8, 384), (8, 1000), (7, 1024)]),  # 384 would be padded to 1024
        ("fp8-dynamic", [(16, 32)], [(16, 40), (8, 32)]),
    ],
)
def test_shapes(name, suited, not_suited):
    for expected, shapes in ((True, suited), (False, not_suited)):
        for num_out, num_in in shapes:
            assert FORMATS[name].suits(torch.nn.Linear(num_in, num_out)) is expected


@pytest.mark.parametrize("name", ["int8-dynamic", "int8", "fp8", "nf4", "bnb-int8"])
def test_the_module_itself_is_not_changed(name):
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 32).eval()
    weight = module.weight.detach().clone()
    new = FORMATS[name].quantized(module)
    assert torch.equal(module.weight, weight)
    assert type(module.weight) is torch.nn.Parameter
    assert not any(parameter.requires_grad for parameter in new.parameters())
    x = torch.randn(4, 64)
    # 4 bits round by up to 14% of the largest weight, on average by far less
    torch.testing.assert_close(new(x), module(x), rtol=0, atol=0.5 * module(x).std().item())
    assert not new.training


def test_what_a_machine_lacks_is_refused(monkeypatch):
    with pytest.raises(ModelError, match=r"int4 needs a CUDA device of compute capability 8\.0[\s\S]*nf4"):
        FORMATS["int4"].check(CPU, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    cuda = torch.device("cuda", 0)
    with pytest.raises(ModelError, match=r"fp8-dynamic needs a CUDA device of compute capability 8\.9"):
        FORMATS["fp8-dynamic"].check(cuda, torch.bfloat16)
    FORMATS["int4"].check(cuda, torch.bfloat16)
    with pytest.raises(ModelError, match=r"multiplies in bf16[\s\S]*--dtype bf16"):
        FORMATS["int4"].check(cuda, torch.float32)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("trimtab.hardware.extras.has_package", lambda name: name != "torchao")
    with pytest.raises(MissingDependency, match=r"int8[\s\S]*pip install 'trimtab\[torchao\]'"):
        FORMATS["int8"].check(CPU, torch.float32)
    monkeypatch.setattr("trimtab.compress.weight_formats.has_package", lambda name: name != "accelerate")
    with pytest.raises(MissingDependency, match="pip install accelerate"):
        FORMATS["nf4"].check(CPU, torch.float32)


def test_layers_are_switched_and_restored():
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = load_model(config | {"intermediate_size": 48, "vocab_size": 50}, "sequence-classification", {}, None)
    layers = QuantizedLayers(model)
    before = {name: model.get_submodule(name) for name in layers.names}
    assert len(before) == 7
    assert "classifier" not in before
    int8, fp8 = FORMATS["int8"], FORMATS["fp8"]
    first, second, *_ = layers.names
    layers.apply({first: int8, second: fp8})
    assert [type(model.get_submodule(name).weight).__name__ for name in (first, second)] == [
        "Int8Tensor",
        "Float8Tensor",
    ]
    assert layers.num_bytes(first, int8) < layers.num_bytes(first, None)
    layers.apply({second: int8})
    assert model.get_submodule(first) is before[first]
    assert type(model.get_submodule(second).weight).__name__ == "Int8Tensor"
    layers.apply({})
    assert all(model.get_submodule(name) is module for name, module in before.items())
