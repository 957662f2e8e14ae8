"""Adapters from untrusted sources: regular expressions have a time limit, pickled code is not executed."""

import json
import os
import pickle
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tiny_adapters import adapted
from trimtab.errors import ModelError
from trimtab.inference.load import load
from trimtab.model import adapter_patterns
from trimtab.model.adapters import LoraSpec, add_adapter, load_adapter
from trimtab.model.load import load_model, load_tokenizer

ENDLESS = r"(\w|\w\w|.)*(?<=\W)"  # each name is tried in more than 2^n ways


@pytest.fixture
def adapter_folder(tiny, tmp_path):
    model, _ = adapted(tiny.folder("llama"), "causal-lm", spec=LoraSpec(rank=4, targets=["q_proj", "v_proj"]))
    folder = tmp_path / "adapter"
    model._trimtab_adapter.save(folder)
    return folder


def changed(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def base(tiny):
    return load_model(tiny.folder("llama"), "causal-lm", {}, load_tokenizer(tiny.folder("llama")))


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_regular_expression_with_catastrophic_backtracking_is_refused(adapter_folder, monkeypatch, key):
    monkeypatch.setattr(adapter_patterns, "_TIMEOUT_S", 0.05)
    changed(adapter_folder, **{key: {ENDLESS: 8} if key.endswith("_pattern") else ENDLESS})
    with pytest.raises(ModelError, match=rf"adapter_config.json: {key}: the regular expression .* takes too long") as e:
        load(adapter_folder, device="cpu")
    assert '["q_proj", "v_proj"]' in e.value.cure


def test_a_pattern_that_only_pythons_re_cannot_handle_is_matched(adapter_folder):
    load(changed(adapter_folder, exclude_modules=r"(([\w.])+)+!"), device="cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_modules": "(q_proj"}, r"target_modules: '\(q_proj' is not a regular expression"),
        ({"target_modules": "(" * 3000 + "a" + ")" * 3000}, "is not a regular expression"),
        ({"layers_to_transform": [0], "layers_pattern": "(l+)+ayers!"}, "layers_pattern is the regular expression"),
        ({"rank_pattern": ["x"]}, "rank_pattern is a list"),
        ({"alpha_pattern": "abc"}, "alpha_pattern is a str"),
    ],
)
def test_an_invalid_config_is_refused(adapter_folder, tiny, changes, words):
    with pytest.raises(ModelError, match=words):
        load_adapter(base(tiny), changed(adapter_folder, **changes))


@pytest.mark.parametrize(
    "pattern",
    [r".*\.(q|v)_proj", r"model\.layers\.\d+\.self_attn\.(?:q_proj|v_proj)", r".*(?<!k)(?<!o)_proj(?<!\w{7})"],
)
def test_regular_expressions_match_the_same_modules_as_in_peft(adapter_folder, tiny, pattern):
    plain = load_adapter(base(tiny), adapter_folder)
    model = base(tiny)
    names = [name for name, _ in model.named_modules() if re.fullmatch(pattern, name)]
    found = load_adapter(model, changed(adapter_folder, target_modules=pattern))
    assert list(found.targets) == list(plain.targets) == names
    assert all(torch.equal(found.tensors()[name], tensor) for name, tensor in plain.tensors().items())


def test_saving_keeps_the_regular_expression(adapter_folder, tiny, tmp_path):
    pattern = r".*\.(q|v)_proj"
    load_adapter(base(tiny), changed(adapter_folder, target_modules=pattern)).save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["target_modules"] == pattern


def test_ranks_by_regular_expression(tiny, tmp_path):
    model = base(tiny)
    add_adapter(model, LoraSpec(rank=4, targets=["q_proj", "v_proj"], ranks={"q_proj": 2})).save(tmp_path)
    again = load_adapter(base(tiny), changed(tmp_path, r=4, rank_pattern={r"self_attn\.[pq]_proj": 2, r"[q]\w+": 9}))
    sizes = {name.split(".")[-4]: tensor.shape[0] for name, tensor in again.tensors().items() if "lora_A" in name}
    assert sizes == {"q_proj": 2, "v_proj": 4}


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("it-was-run",)


def test_code_in_a_pickled_adapter_is_not_executed(adapter_folder, own_folder):
    (adapter_folder / "adapter_model.safetensors").unlink()
    (adapter_folder / "adapter_model.bin").write_bytes(pickle.dumps({"weight": Harmful()}))
    with pytest.raises(ModelError, match="a pickle with more than tensors.*\n.*adapter_model.safetensors") as e:
        load(adapter_folder, device="cpu")
    assert "weights_only" not in str(e.value)
    assert os.listdir() == []
    torch.save({"weight": Harmful()}, adapter_folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="a pickle with more than tensors"):
        load(adapter_folder, device="cpu")
    assert os.listdir() == []


def test_tensors_in_a_pickle_are_loaded(adapter_folder):
    reference = load(adapter_folder, device="cpu").model.state_dict()
    torch.save(load_file(adapter_folder / "adapter_model.safetensors"), adapter_folder / "adapter_model.bin")
    (adapter_folder / "adapter_model.safetensors").unlink()
    found = load(adapter_folder, device="cpu").model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.items())


@pytest.mark.parametrize("content", [b"", b"cut off", b"PK\x03\x04"])
@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_weights_that_are_damaged(adapter_folder, name, content):
    (adapter_folder / "adapter_model.safetensors").unlink()
    (adapter_folder / name).write_bytes(content)
    with pytest.raises(ModelError) as e:
        load(adapter_folder, device="cpu")
    assert "weights_only" not in str(e.value)


@pytest.mark.parametrize("content", ["[]", "[" * 50_000, "{"])
def test_a_config_that_is_damaged(adapter_folder, content):
    (adapter_folder / "adapter_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"adapter_config.json cannot be read"):
        load(adapter_folder, device="cpu")


def test_code_in_a_pickled_model_is_not_executed(tiny, tmp_path, own_folder):
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder("llama"), folder)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle with more than tensors") as e:
        load(folder, device="cpu")
    assert "weights_only" not in str(e.value)
    assert os.listdir() == []
