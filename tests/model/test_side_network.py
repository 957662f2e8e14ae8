"""Side networks: training starts at the base, backward never enters it, tokens stay alone, files load again."""

import copy
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from kept_bytes import kept_bytes
from rounding import assert_same_up_to_rounding
from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import ModelError, RecipeError
from trimtab.model.adapters import adapter_of, add_adapter, load_adapter
from trimtab.model.load import load_model
from trimtab.model.side_network import SideConfig, SideSpec

KINDS = {
    "bert": "sequence-classification",
    "roberta": "masked-lm",
    "gpt2": "causal-lm",
    "llama": "causal-lm",
}


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


def shaken(model):
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def with_side(name, *, size=None, **spec):
    model = plain(name, **(size or {}))
    add_adapter(model, SideSpec(**({"reduction": 4} | spec)))
    return model


@pytest.mark.parametrize("name", KINDS)
def test_training_starts_at_the_base(name):
    base, model = plain(name), with_side(name)
    assert torch.equal(logits(model, name), logits(base, name))
    assert type(model) is type(base)
    shaken(model)
    assert not torch.allclose(logits(model, name), logits(base, name), atol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_only_the_side_network_and_a_new_head_have_gradients(name):
    model = shaken(with_side(name))
    model(**batch(name)).loss.backward()
    trained = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert {key.split(".")[0] for key in trained} == {"side_network", *(["classifier"] if name == "bert" else [])}
    assert all(bool(parameter.grad.any()) for parameter in model.side_network.parameters())


def test_the_first_step_moves_the_output():
    """Zero is the last projection alone: nothing else would ever learn otherwise."""
    model = with_side("llama")
    model(**batch("llama")).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.side_network.named_parameters()}
    assert bool(gradients["up.weight"].any())


@pytest.mark.parametrize(("name", "depth"), [("bert", "num_hidden_layers"), ("llama", "num_hidden_layers")])
def test_nothing_is_kept_of_the_base(name, depth):
    """What backward needs does not grow with the depth of the base, if as many of its blocks are read."""
    kept, kept_of_base = {}, {}
    for num_blocks in (2, 4, 8):
        model = with_side(name, size={depth: num_blocks}, every=num_blocks // 2).train()
        kept[num_blocks] = kept_bytes(model, lambda model=model: model(**batch(name)).loss)
        whole = plain(name, **{depth: num_blocks}).train()
        kept_of_base[num_blocks] = kept_bytes(whole, lambda whole=whole: whole(**batch(name)).loss)
    assert kept[2] == kept[4] == kept[8]
    assert kept_of_base[8] > kept_of_base[2]
    assert kept[8] < kept_of_base[8] / 3


def test_a_block_that_is_read_costs_its_output_and_the_narrow_activations():
    """No attention and no MLP of the base: saved tensors for one block more, counted by autograd itself."""
    sizes = {}
    for num_blocks in (3, 4):
        model = with_side("llama", size={"num_hidden_layers": num_blocks})
        saved = {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**batch("llama")).loss
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        sizes[num_blocks] = sum(size for key, size in saved.items() if key not in weights)
        del loss
    num_tokens, hidden, width = batch("llama")["input_ids"].numel(), 32, 8
    # the hidden states, projected and normed; the state, normed; the inside of the MLP before and after gelu
    narrow = 4 * width + 2 * 4 * width + 2 * 2  # and the mean and deviation of two norms
    assert sizes[4] - sizes[3] <= 4 * num_tokens * (hidden + narrow)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decoders_do_not_look_ahead(name):
    model = shaken(with_side(name))
    ids = batch_of(TEXTS[:1])["input_ids"]
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    with torch.no_grad():
        one, other = model(input_ids=ids).logits, model(input_ids=changed).logits
    assert_same_up_to_rounding(one[:, :-1], other[:, :-1], num_roundings=32)
    assert not torch.allclose(one[:, -1], other[:, -1], atol=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_a_cache_gives_the_same_text(name):
    model = shaken(with_side(name))
    ids = batch_of(TEXTS[:1])["input_ids"][:, :4]
    texts = [
        model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=cached, pad_token_id=0).tolist()
        for cached in (True, False)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", KINDS)
def test_save_and_load(name, tmp_path):
    model = shaken(with_side(name, every=2))
    adapter_of(model).save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"side_network.json", "side_network.safetensors"}
    for trainable in (False, True):
        again = plain(name)
        read = load_adapter(again, tmp_path, trainable=trainable)
        assert torch.equal(logits(again, name), logits(model, name))
        trained = {key for key, parameter in again.named_parameters() if parameter.requires_grad}
        assert trained == (set(read.tensors()) if trainable else set())


def test_a_copy_reads_its_own_blocks():
    model = shaken(with_side("llama"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.side_network.up.weight.zero_()
        twin.side_network.up.bias.zero_()
    assert torch.equal(logits(twin, "llama"), logits(plain("llama"), "llama"))
    assert not torch.allclose(logits(model, "llama"), logits(twin, "llama"), atol=1e-3)


def test_in_half_precision():
    """The side network stays in fp32 beside a base in bf16, with and without autocast."""
    exact = shaken(with_side("llama"))
    model = plain("llama").to(torch.bfloat16)
    add_adapter(model, SideSpec(reduction=4))
    assert {p.dtype for p in model.side_network.parameters()} == {torch.float32}
    shaken(model)
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = model(**batch("llama")).logits
        torch.testing.assert_close(found.float(), logits(exact, "llama"), rtol=0.1, atol=0.1)


def test_which_blocks_are_read():
    def taps(num_blocks, every):
        return SideConfig(None, None, 32, num_blocks, 4, every, 0.0).taps

    assert taps(6, 1) == [0, 1, 2, 3, 4, 5]
    assert taps(6, 2) == [1, 3, 5]
    assert taps(7, 3) == [2, 5, 6]
    assert taps(2, 9) == [1]


def test_a_forward_that_fails_leaves_nothing_behind():
    model = with_side("llama")
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch("llama"))
    assert model.side_network._state is None
    hook.remove()
    assert torch.equal(logits(model, "llama"), logits(plain("llama"), "llama"))


def test_it_is_reported(caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    with_side("llama", every=2)
    assert "side network of width 8 that reads 1 of 2 blocks" in caplog.text


class TestRefusals:
    """Models and modules that a side network cannot have, and files that are not what they claim."""

    def test_an_encoder_and_a_decoder(self):
        model = load_model(config_of("t5"), "seq2seq-lm", {}, tokenizer())
        with pytest.raises(RecipeError, match="needs one stack of blocks, but T5ForConditionalGeneration has 2"):
            add_adapter(model, SideSpec())

    def test_shared_blocks(self):
        albert = {"model_type": "albert", "embedding_size": 16, **config_of("bert"), "num_hidden_layers": 3}
        model = load_model({**albert, "model_type": "albert"}, "masked-lm", {}, tokenizer())
        with pytest.raises(RecipeError, match="runs 1 of them 3 times"):
            add_adapter(model, SideSpec())

    def test_layers_that_are_left_out_at_random(self):
        opt = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 48}
        opt |= {"word_embed_proj_dim": 32, "max_position_embeddings": 64, "layerdrop": 0.1}
        with pytest.raises(RecipeError, match="layerdrop"):
            add_adapter(load_model(opt, "causal-lm", {}, tokenizer()), SideSpec())

    @pytest.mark.parametrize(("name", "module"), [("llama", "embed_tokens"), ("llama", "q_proj"), ("gpt2", "lm_head")])
    def test_modules_that_backward_does_not_reach(self, name, module):
        with pytest.raises(RecipeError, match="backward of a side network does not reach"):
            add_adapter(plain(name), SideSpec(trains=[module]))

    def test_a_head_can_train(self):
        model = plain("llama")
        adapter = add_adapter(model, SideSpec(trains=["lm_head"]))
        assert adapter.trains == ("lm_head",)
        model(**batch("llama")).loss.backward()
        assert bool(model.lm_head.weight.grad.any())

    @pytest.fixture
    def folder(self, tmp_path):
        adapter_of(with_side("llama")).save(tmp_path)
        return tmp_path

    def test_another_base(self, folder):
        with pytest.raises(ModelError, match="belongs to a model with 2 blocks of width 32, and .* has 3 of width 32"):
            load_adapter(plain("llama", num_hidden_layers=3), folder)

    @pytest.mark.parametrize("change", [{"reduction": 0}, {"every": "1"}, {"dropout": 2}])
    def test_a_damaged_config(self, folder, change):
        settings = json.loads((folder / "side_network.json").read_text())
        (folder / "side_network.json").write_text(json.dumps(settings | change))
        with pytest.raises(ModelError, match=r"side_network\.json cannot be read"):
            load_adapter(plain("llama"), folder)

    def test_weights_of_another_width(self, folder):
        settings = json.loads((folder / "side_network.json").read_text())
        (folder / "side_network.json").write_text(json.dumps(settings | {"reduction": 2}))
        with pytest.raises(ModelError, match=r"does not match side_network\.json"):
            load_adapter(plain("llama"), folder)

    def test_damaged_weights(self, folder):
        (folder / "side_network.safetensors").write_bytes(b"nothing")
        with pytest.raises(ModelError, match=r"side_network\.safetensors cannot be read"):
            load_adapter(plain("llama"), folder)

    def test_a_missing_tensor(self, folder):
        tensors = load_file(folder / "side_network.safetensors")
        del tensors["side_network.up.bias"]
        save_file(tensors, folder / "side_network.safetensors")
        with pytest.raises(ModelError, match=r"side_network\.up\.bias"):
            load_adapter(plain("llama"), folder)


@pytest.mark.usefixtures("process_group")
def test_in_ddp():
    """The reducer sees every gradient of the side network, although hooks compute it."""
    model = shaken(with_side("llama"))
    twin = copy.deepcopy(model)
    twin(**batch("llama")).loss.backward()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    assert adapter_of(wrapped) is adapter_of(model)
    wrapped(**batch("llama")).loss.backward()
    for one, other in zip(model.side_network.parameters(), twin.side_network.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
