"""Prompt and prefix tuning: agreement with PEFT, generation, saving and loading, models that are refused."""

import copy

import pytest
import torch

from rounding import assert_same_up_to_rounding
from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import ModelError, RecipeError
from trimtab.model.adapters import adapter_of, add_adapter, load_adapter
from trimtab.model.load import load_model
from trimtab.model.prefix_tuning import PrefixSpec
from trimtab.model.virtual_tokens import PromptSpec

NAMES = ("gpt2", "llama")
SPECS = {"prompt": PromptSpec(tokens=5), "prefix": PrefixSpec(tokens=5)}
KINDS = pytest.mark.parametrize("kind", SPECS)


def plain(name, kind="causal-lm"):
    torch.manual_seed(1)
    return load_model(config_of(name), kind, {}, tokenizer()).eval()


def tuned(name, kind="prompt"):
    model = plain(name)
    add_adapter(model, SPECS[kind])
    with torch.no_grad():
        model.virtual_tokens.weight.add_(torch.randn_like(model.virtual_tokens.weight), alpha=0.5)
    return model


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_peft_gives_the_same_logits_and_gradients(name, kind, tmp_path):
    import peft

    model = tuned(name, kind)
    adapter_of(model).save(tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain(name), tmp_path).eval()
    theirs.prompt_encoder.requires_grad_(True)
    batch = batch_of(TEXTS)
    batch.pop("token_type_ids", None)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    ours, other = model(**batch, labels=labels), theirs(**batch, labels=labels)
    num_more = 5 if kind == "prompt" else 0
    assert_same_up_to_rounding(ours.logits, other.logits[:, num_more:], num_roundings=64)
    assert not torch.allclose(ours.logits, plain(name)(**batch).logits, atol=1e-3)
    # theirs also predicts each first token, from the last virtual one
    targets = labels[:, 1:]
    ours_loss, other_loss = (
        torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets)
        for logits in (ours.logits, other.logits[:, num_more:])
    )
    ours_loss.backward()
    other_loss.backward()
    gradient = next(parameter.grad for key, parameter in theirs.named_parameters() if parameter.requires_grad)
    assert_same_up_to_rounding(model.virtual_tokens.weight.grad, gradient, num_roundings=64)


def test_only_virtual_tokens_train():
    model = tuned("llama")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"virtual_tokens.weight"}
    table = model.get_input_embeddings().weight
    fresh = plain("llama")
    add_adapter(fresh, PromptSpec(tokens=7))
    assert all((table == row).all(dim=1).any() for row in fresh.virtual_tokens.weight)


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_save_and_load(name, kind, tmp_path):
    model = tuned(name, kind)
    adapter_of(model).save(tmp_path)
    again = plain(name)
    load_adapter(again, tmp_path)
    assert torch.equal(again(**batch_of(TEXTS)).logits, model(**batch_of(TEXTS)).logits)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.virtual_tokens.weight.zero_()
    assert not torch.allclose(twin(**batch_of(TEXTS)).logits, model(**batch_of(TEXTS)).logits, atol=1e-3)


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_generation_with_a_cache_and_padding_gives_the_same_text(name, kind):
    model = tuned(name, kind)
    batch = batch_of([TEXTS[0], TEXTS[1][:5]], side="left")
    batch.pop("token_type_ids", None)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    texts = [model.generate(**batch, use_cache=cached, **options).tolist() for cached in (True, False)]
    assert texts[0] == texts[1]
    length = int(batch["attention_mask"][1].sum())
    row = {name: tensor[1:, -length:] for name, tensor in batch.items()}
    alone = model.generate(**row, use_cache=True, **options)
    assert alone[0, -8:].tolist() == texts[0][1][-8:], "padding changes nothing"


@pytest.mark.parametrize(("name", "kind"), [("bert", "masked-lm"), ("t5", "seq2seq-lm")])
def test_other_models_are_refused(name, kind):
    for word, spec in SPECS.items():
        with pytest.raises(RecipeError, match=f"adapter: {word} is for decoders that generate text"):
            add_adapter(plain(name, kind), spec)


@KINDS
def test_another_base_is_refused(kind, tmp_path):
    adapter_of(tuned("llama", kind)).save(tmp_path)
    other = load_model({**config_of("llama"), "hidden_size": 64}, "causal-lm", {}, tokenizer())
    with pytest.raises(ModelError, match="does not contain 5 virtual tokens of width"):
        load_adapter(other, tmp_path)


def test_blocks_without_usual_keys_and_values_get_no_prefix():
    model = plain("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(RecipeError, match="adapter: prefix does not support blocks of type linear_attention"):
        add_adapter(model, PrefixSpec())


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_blocks_find_the_same_prefix(name):
    from trimtab.techniques.recomputation import checkpoint_layers

    gradients = []
    for recomputed in (False, True):
        model = tuned(name, "prefix").train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if recomputed:
            checkpoint_layers(model, "all")
        batch = batch_of(TEXTS)
        batch.pop("token_type_ids", None)
        model(**batch).logits.logsumexp(-1).mean().backward()
        gradients.append(model.virtual_tokens.weight.grad)
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)
