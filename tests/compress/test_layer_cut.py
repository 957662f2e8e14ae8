"""A model without some of its layers: saved, loaded and generating like any other."""

import pytest
import torch

from tiny_models import KINDS, TEXTS, batch_of, config_of, same_weights, tokenizer
from trimtab.compress.layer_cut import choose_layers, cut_layers, evenly_spaced
from trimtab.errors import ModelError, RecipeError
from trimtab.model.load import load_model, load_skeleton

SIZES = ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers")


def config_with(name, num_layers):
    config = config_of(name)
    for part in (config, config.get("encoder", {})):
        part.update({key: num_layers for key in SIZES if key in part})
    return config


def test_evenly_spaced():
    assert evenly_spaced(12, 6) == [0, 2, 4, 7, 9, 11]
    assert evenly_spaced(6, 3) == [0, 2, 5]
    assert choose_layers(5, "half") == [0, 4]
    assert choose_layers(1, "half") == [0]
    assert choose_layers(4, [1, 3]) == [1, 3]
    for asked in (5, [0, 4]):
        with pytest.raises(RecipeError, match=r"distill\.student"):
            choose_layers(4, asked)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_left_is_a_plain_model(name, tmp_path):
    model = load_model(config_with(name, 4), KINDS[name], {}, tokenizer())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kept = cut_layers(model, "half")
    assert kept[0] == [0, 3]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert same_weights(model, again)
    names = set(model.state_dict())
    assert names < set(before)
    moved = [key for key in names if not torch.equal(model.state_dict()[key], before[key])]
    assert all(".1." in key for key in moved)  # layer 3 is layer 1 now
    batch = batch_of(TEXTS[:2], side="left")
    batch.pop("token_type_ids", None)
    if KINDS[name] in ("causal-lm", "seq2seq-lm"):  # with a key-value cache, which finds layers by their numbers
        texts = [one.generate(**batch, max_new_tokens=4, do_sample=False) for one in (model, again)]
        plain = model.generate(**batch, max_new_tokens=4, do_sample=False, use_cache=False)
        assert torch.equal(*texts)
        assert torch.equal(texts[0], plain)


def test_layers_keep_their_own_settings():
    config = config_with("llama", 4) | {"model_type": "qwen2", "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}
    model = load_model(config | {"use_sliding_window": True, "sliding_window": 4}, "causal-lm", {}, tokenizer())
    cut_layers(model, [0, 3])
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    assert [module.layer_idx for module in model.modules() if hasattr(module, "layer_idx")] == [0, 1]


def test_a_skeleton_is_cut_alike():
    model = load_skeleton(config_with("bert", 4), "masked-lm", {}, tokenizer())
    cut_layers(model, [0, 1, 3])
    assert model.config.num_hidden_layers == len(model.bert.encoder.layer) == 3


def test_a_rest_that_no_config_describes_is_refused():
    model = load_model(config_with("t5", 4), "seq2seq-lm", {}, tokenizer())
    with pytest.raises(ModelError, match="keep the first layer"):
        cut_layers(model, [1, 3])  # only the first layer of T5 has position biases
