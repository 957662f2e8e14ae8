"""Classification: what each text alone would get, in the order of the texts."""

import logging

import pytest
import torch

from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import DataError, ModelError
from trimtab.inference.classify import classify_texts, regress_texts
from trimtab.inference.load import LoadedModel
from trimtab.model.load import load_model

NAMES = {0: "bad", 1: "fair", 2: "good"}


def loaded_of(name="bert", task="classify", facts=None, **head):
    tok = tokenizer()
    head = {"num_labels": 3, "id2label": NAMES} | head
    model = load_model(config_of(name), "sequence-classification", head, tok)
    for parameter in model.parameters():  # random weights of the usual size say the same of every text
        parameter.data *= 5
    return LoadedModel(model, tok, task, facts or {})


def many_texts():
    return [" ".join([TEXTS[i % 5]] * (1 + i * 7 % 2)) for i in range(23)]


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama"])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_order_and_padding_change_nothing(name, batch_size):
    loaded, texts = loaded_of(name), many_texts()
    predictions = classify_texts(loaded, texts, batch_size)
    with torch.no_grad():
        alone = torch.cat([loaded.model(**batch_of([text])).logits for text in texts]).softmax(-1)
    scores = torch.tensor([[p.scores[name] for name in NAMES.values()] for p in predictions])
    torch.testing.assert_close(scores, alone, atol=2e-5, rtol=0)
    assert len({p.label for p in predictions}) > 1
    for prediction, row in zip(predictions, alone, strict=True):
        assert prediction.label == NAMES[int(row.argmax())]
        assert prediction.score == prediction.scores[prediction.label] == max(prediction.scores.values())


def test_pairs():
    loaded = loaded_of()
    pairs = [(TEXTS[0], TEXTS[1]), [TEXTS[1], TEXTS[0]], (TEXTS[2], "a")]
    predictions = classify_texts(loaded, pairs, 2)
    with torch.no_grad():
        encoded = [dict(loaded.tokenizer(*pair, return_tensors="pt")) for pair in pairs]
        alone = torch.cat([loaded.model(**batch).logits for batch in encoded]).softmax(-1)
    scores = torch.tensor([list(p.scores.values()) for p in predictions])
    torch.testing.assert_close(scores, alone, atol=2e-5, rtol=0)


def test_token_types_tell_the_texts_of_a_pair_apart():
    """BERT has types for them; GPT-2 would take them for tokens."""
    seen = []
    for name in ("bert", "gpt2"):
        loaded = loaded_of(name)
        loaded.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        loaded.model.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs), with_kwargs=True)
        classify_texts(loaded, [(TEXTS[0], TEXTS[1]), ("a", "b")])
    assert "token_type_ids" not in seen[1]
    assert seen[0]["token_type_ids"].unique().tolist() == [0, 1]
    first = loaded.tokenizer(TEXTS[0])["input_ids"]
    assert int(seen[0]["token_type_ids"][0].argmax()) == len(first)


def test_several_labels():
    loaded = loaded_of(problem_type="multi_label_classification")
    predictions = classify_texts(loaded, TEXTS, 2)
    with torch.no_grad():
        wanted = loaded.model(**batch_of(TEXTS)).logits.sigmoid().tolist()
    for prediction, scores in zip(predictions, wanted, strict=True):
        assert set(prediction.label) == {NAMES[i] for i, score in enumerate(scores) if score >= 0.5}
        assert prediction.score == pytest.approx(max(scores), abs=2e-5)
    assert {len(prediction.label) for prediction in predictions} != {1}


def test_regression():
    loaded = loaded_of(task="regress", num_labels=1, id2label={0: "x"}, problem_type="regression")
    values = regress_texts(loaded, TEXTS, 2)
    with torch.no_grad():
        wanted = loaded.model(**batch_of(TEXTS)).logits.squeeze(1)
    torch.testing.assert_close(torch.tensor(values), wanted, atol=2e-5, rtol=0)
    with pytest.raises(ModelError, match="not a classifier: its task is regress"):
        classify_texts(loaded, TEXTS)
    with pytest.raises(ModelError, match="not a regression model"):
        regress_texts(loaded_of(), TEXTS)


def test_long_texts_are_cut_as_in_training_and_counted(caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    long = "the cat sat on the mat " * 30
    loaded = loaded_of(facts={"max_length": 16})
    cut = classify_texts(loaded, [long, "the cat"])
    assert "1 of 2 texts are longer than 16 tokens and were truncated" in caplog.messages[-1]
    with torch.no_grad():
        batch = loaded.tokenizer(long, truncation=True, max_length=16, return_tensors="pt")
        wanted = loaded.model(**batch).logits.softmax(-1)[0].tolist()
    assert list(cut[0].scores.values()) == pytest.approx(wanted, abs=2e-5)
    classify_texts(loaded_of(), [long, "the cat"])
    assert "longer than 64 tokens" in caplog.messages[-1]
    classify_texts(loaded_of(), ["the cat", "a dog"], max_length=3)
    assert "2 of 2 texts are longer than 3 tokens" in caplog.messages[-1]


def test_a_model_left_in_training_mode_does_not_drop_out():
    loaded = loaded_of()
    loaded.model.train()
    assert classify_texts(loaded, TEXTS) == classify_texts(loaded, TEXTS)


def test_inputs_that_make_no_sense():
    loaded = loaded_of()
    assert classify_texts(loaded, []) == []
    with pytest.raises(DataError, match="texts or pairs, not both"):
        classify_texts(loaded, ["one", ("a", "b")])
    with pytest.raises(DataError, match=r"pass \[text\]"):
        classify_texts(loaded, "one text")
    with pytest.raises(DataError, match="None was passed, expected a list of texts"):
        classify_texts(loaded, None)
    for wrong in (None, 5, (), ("a", "b", "c"), ("a", None)):
        with pytest.raises(DataError, match="text 2 is"):
            classify_texts(loaded, ["fine", wrong])
    bare = loaded_of("gpt2")
    bare.tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(DataError, match="text 1 is empty"):
        classify_texts(bare, [""])
