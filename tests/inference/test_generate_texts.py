"""Generation: batches write what single prompts would, templates are applied once, prompts are not repeated."""

import logging

import pytest
import torch

from tiny_models import STORIES, TEXTS, config_of, needs_stories, tokenizer
from trimtab.errors import DataError, ModelError, RecipeError
from trimtab.inference.generate import generate_texts
from trimtab.inference.load import LoadedModel, load
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def writer(name, task=None):
    tok = tokenizer()
    kind = "seq2seq-lm" if name in ("t5", "marian", "bart", "encoder-decoder") else "causal-lm"
    model = load_model(config_of(name), kind, {}, tok)
    for parameter in model.parameters():
        parameter.data *= 4
    if task == "chat":
        tok.chat_template = TEMPLATE
    return LoadedModel(model, tok, task or ("seq2seq" if kind == "seq2seq-lm" else "causal-lm"))


def by_hand(loaded, ids, num_new):
    """The likeliest token, one after the other, without cache or padding."""
    ids = list(ids)
    written = []
    for _ in range(num_new):
        with torch.no_grad():
            token = int(loaded.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if token == loaded.tokenizer.eos_token_id:
            break
        ids.append(token)
        written.append(token)
    return written


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_decoder_goes_on_with_the_prompt(name, batch_size):
    loaded = writer(name)
    texts = generate_texts(loaded, TEXTS, 8, batch_size=batch_size)
    tok = loaded.tokenizer
    for prompt, text in zip(TEXTS, texts, strict=True):
        ids = tok(prompt)["input_ids"][:-1]  # without the end token
        whole = tok.decode(ids + by_hand(loaded, ids, 8), skip_special_tokens=True)
        assert prompt + text == whole
    assert len(set(texts)) > 1


def test_a_template_that_rejects_a_prompt_or_fails():
    loaded = writer("llama", "chat")
    loaded.tokenizer.chat_template = "{{ raise_exception('Conversation roles must alternate') }}"
    with pytest.raises(
        DataError, match=r"^prompt 1: the chat template rejects .* \(Conversation roles must alternate\)"
    ):
        loaded.generate(["the cat?"], 3)
    loaded.tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(DataError, match=r"ZeroDivisionError(.|\n)*use another chat template"):
        loaded.generate("the cat?", 3, stream=True)


def test_a_chat_model_sees_its_template_once():
    loaded = writer("llama", "chat")
    seen = []
    loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    (answer,) = generate_texts(loaded, ["the cat?"], 6)
    tok = loaded.tokenizer
    assert tok.decode(seen[0][0]) == "<s>[user] the cat?\n[assistant] "
    written = by_hand(loaded, seen[0][0].tolist(), 6)
    assert answer == tok.decode(written, skip_special_tokens=True).strip()
    seen.clear()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat?"}]
    generate_texts(loaded, [messages], 2)
    assert tok.decode(seen[0][0]) == "<s>[system] be brief\n[user] the cat?\n[assistant] "
    loaded.tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        generate_texts(loaded, ["the cat?"], 6)


@pytest.mark.parametrize("name", ["t5", "marian", "bart", "encoder-decoder"])
def test_an_encoder_decoder_writes_the_target(name):
    loaded = writer(name)
    together = generate_texts(loaded, TEXTS, 6, batch_size=5)
    assert together == generate_texts(loaded, TEXTS, 6, batch_size=1)
    ids = loaded.tokenizer(TEXTS[0], return_tensors="pt")
    with quiet_transformers():
        wanted = loaded.model.generate(**ids, max_new_tokens=6, do_sample=False)[0]
    assert together[0] == loaded.tokenizer.decode(wanted, skip_special_tokens=True).strip()


def test_temperature_varies_with_the_seed_alone():
    loaded = writer("gpt2")
    state = torch.get_rng_state()
    sampled = [generate_texts(loaded, TEXTS, 8, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert generate_texts(loaded, TEXTS, 8) == generate_texts(loaded, TEXTS, 8, seed=5)


def test_settings_of_the_model_do_not_make_a_greedy_answer_random():
    loaded = writer("llama")
    greedy = generate_texts(loaded, TEXTS, 6)
    loaded.model.generation_config.update(do_sample=True, temperature=2.0, top_p=0.9, max_length=3)
    assert generate_texts(loaded, TEXTS, 6) == greedy
    assert loaded.model.generation_config.temperature == 2.0


def test_long_prompts_keep_their_end(caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    loaded = writer("gpt2")
    seen = []
    loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    prompt = "the cat sat on the mat " * 20 + "and then"
    generate_texts(loaded, [prompt], 10)
    assert seen[0].shape[1] == 64 - 10
    assert loaded.tokenizer.decode(seen[0][0]).endswith("and then")
    assert "1 of 1 prompts are longer than 54 tokens and were truncated" in caplog.text
    with pytest.raises(RecipeError, match="exceeds the model's 64 positions"):
        generate_texts(loaded, [prompt], 64)
    with pytest.raises(RecipeError, match="max_new_tokens is 0"):
        generate_texts(loaded, [prompt], 0)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([{"content": "x"}], "prompt 1: the conversation contains a message without a role"),
        ({"content": "x"}, "prompt 1: the conversation is empty, expected a list of messages"),
        ([{"role": "user"}], "prompt 1: the conversation contains a message without content"),
        ([{"role": "robot", "content": "x"}], "prompt 1: the chat template drops message 1 (role 'robot')"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}, "chat template drops the tools"),
        ([{"role": "user", "content": "no"}], "prompt 1: the chat template rejects the conversation (not now)"),
        ([3], "prompt 1: the conversation contains a int, expected a message"),
    ],
)
def test_conversations_that_training_refuses(prompt, problem):
    loaded = writer("gpt2")
    loaded.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not now') }}{% endif %}"
        "{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = LoadedModel(loaded.model, loaded.tokenizer, "chat")
    with pytest.raises(DataError) as caught:
        generate_texts(chat, [prompt], 3)
    assert problem in caught.value.problem
    assert len(generate_texts(chat, [[{"from": "human", "value": "x"}]], 3)) == 1


def test_inputs_that_make_no_sense():
    loaded = writer("gpt2")
    assert generate_texts(loaded, [], 3) == []
    assert len(generate_texts(loaded, [""], 3)) == 1
    with pytest.raises(DataError, match=r"pass \[prompt\]"):
        generate_texts(loaded, "one", 3)
    with pytest.raises(DataError, match="None was passed, expected a list of prompts"):
        generate_texts(loaded, None, 3)
    with pytest.raises(DataError, match="lists of messages are for chat models"):
        generate_texts(loaded, [[{"role": "user", "content": "x"}]], 3)
    with pytest.raises(ModelError, match="does not generate text: its task is masked-lm"):
        generate_texts(LoadedModel(loaded.model, loaded.tokenizer, "masked-lm"), ["x"], 3)


@needs_stories
def test_a_real_model_tells_a_story():
    loaded = load(STORIES, device="cpu")
    prompts = ["Once upon a time, there was a little", "Lily and Ben", "The dog was very happy because"]
    together = generate_texts(loaded, prompts, 20, batch_size=3)
    assert together == [generate_texts(loaded, [prompt], 20)[0] for prompt in prompts]
    assert together[0].startswith(" girl named L")
