"""Prompt tuning: agreement with PEFT, generation with a cache, saving and loading, models that are refused."""

import copy

import pytest
import torch

from rounding import assert_same_up_to_rounding
from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import ModelError, RecipeError
from trimtab.model.adapters import adapter_of, add_adapter, load_adapter
from trimtab.model.load import load_model
from trimtab.model.virtual_tokens import PromptSpec

NAMES = ("gpt2", "llama")


def plain(name, kind="causal-lm"):
    torch.manual_seed(1)
    return load_model(config_of(name), kind, {}, tokenizer()).eval()


def tuned(name):
    model = plain(name)
    add_adapter(model, PromptSpec(tokens=5))
    with torch.no_grad():
        model.virtual_tokens.weight.add_(torch.randn_like(model.virtual_tokens.weight), alpha=0.5)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_peft_gives_the_same_logits_and_gradients(name, tmp_path):
    import peft

    model = tuned(name)
    adapter_of(model).save(tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain(name), tmp_path).eval()
    theirs.prompt_encoder.requires_grad_(True)
    batch = batch_of(TEXTS)
    batch.pop("token_type_ids", None)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    ours, other = model(**batch, labels=labels), theirs(**batch, labels=labels)
    assert_same_up_to_rounding(ours.logits, other.logits[:, 5:], num_roundings=64)
    assert not torch.allclose(ours.logits, plain(name)(**batch).logits, atol=1e-3)
    # theirs also predicts each first token, from the last virtual one
    targets = labels[:, 1:]
    ours_loss, other_loss = (
        torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets)
        for logits in (ours.logits, other.logits[:, 5:])
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


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load(name, tmp_path):
    model = tuned(name)
    adapter_of(model).save(tmp_path)
    again = plain(name)
    load_adapter(again, tmp_path)
    assert torch.equal(again(**batch_of(TEXTS)).logits, model(**batch_of(TEXTS)).logits)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.virtual_tokens.weight.zero_()
    assert not torch.allclose(twin(**batch_of(TEXTS)).logits, model(**batch_of(TEXTS)).logits, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_generation_with_a_cache_and_padding_gives_the_same_text(name):
    model = tuned(name)
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
    with pytest.raises(RecipeError, match="adapter: prompt is for decoders that generate text"):
        add_adapter(plain(name, kind), PromptSpec())


def test_another_base_is_refused(tmp_path):
    adapter_of(tuned("llama")).save(tmp_path)
    other = load_model({**config_of("llama"), "hidden_size": 64}, "causal-lm", {}, tokenizer())
    with pytest.raises(ModelError, match="does not hold 5 virtual tokens of width 64"):
        load_adapter(other, tmp_path)
