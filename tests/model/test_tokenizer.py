"""Trained tokenizers: lossless, reproducible, with every special token."""

import shutil
from pathlib import Path

import pytest

from tiny_models import TEXTS
from trimtab.errors import DataError, ModelError, RecipeError
from trimtab.model.hub import explained, quiet_transformers
from trimtab.model.load import load_tokenizer, train_tokenizer


def test_byte_level_is_lossless():
    tok = train_tokenizer(TEXTS, 300)
    text = "Grüße, 漢字 \U0001f600\n\ttabs  and   spaces"
    assert tok.decode(tok(text)["input_ids"], skip_special_tokens=True) == text
    assert len(tok) <= 300


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_special_tokens_are_where_models_expect_them(kind):
    tok = train_tokenizer(TEXTS, 300, kind)
    roles = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
    assert None not in [getattr(tok, f"{role}_token_id") for role in roles]
    ids = tok("the cat")["input_ids"]
    assert (ids[0], ids[-1]) == (tok.cls_token_id, tok.sep_token_id)
    assert tok.unk_token_id not in ids
    pair = tok("the cat", "a dog")["input_ids"]
    assert pair[: len(ids)] == ids
    assert pair.count(tok.sep_token_id) == 2
    assert tok.decode(ids, skip_special_tokens=True).strip() == "the cat"


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_same_texts_give_the_same_tokenizer(kind):
    first, second = (train_tokenizer(iter(TEXTS), 290, kind).get_vocab() for _ in range(2))
    assert first == second
    assert len(first) > 60


def test_wordpiece_does_not_split_at_continuation_pieces():
    """Text that looks like a piece of the vocabulary is text."""
    tok = train_tokenizer(TEXTS * 3, 300, "wordpiece")
    assert tok.tokenize("cat") == ["cat"]
    assert "##a" in tok.get_vocab()
    assert tok.tokenize("c##a")[0] == "c"
    assert "##a" not in tok.tokenize("c ##a")
    assert tok.tokenize("Zürich 漢")[-1] == tok.unk_token


def test_a_trained_tokenizer_can_be_saved_and_loaded(tmp_path):
    tok = train_tokenizer(TEXTS, 300)
    with quiet_transformers():
        tok.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    again = load_tokenizer(str(tmp_path))
    assert again("the cat", "a dög")["input_ids"] == tok("the cat", "a dög")["input_ids"]
    assert again.pad_token == tok.pad_token


def test_mistakes():
    with pytest.raises(RecipeError, match="vocab_size 200 leaves no room"):
        train_tokenizer(TEXTS, 200)
    with pytest.raises(RecipeError, match="kind of tokenizer: 'unigram'"):
        train_tokenizer(TEXTS, 300, "unigram")
    with pytest.raises(DataError, match="no text"):
        train_tokenizer([], 300)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_a_folder_without_a_tokenizer_names_the_key(tiny, tmp_path, name):
    """transformers fails for one, and makes a tokenizer of special tokens alone of the others."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(Path(tiny.folder(name)) / "config.json", folder)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(folder))
    assert caught.value.problem == f"{folder} contains no tokenizer"
    assert "--set model.tokenizer=NAME_OR_FOLDER" in caught.value.cure


def test_a_tokenizer_that_cannot_be_read_says_why(tiny, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(Path(tiny.folder("llama")) / "config.json", folder)
    (folder / "tokenizer.json").write_text("{ broken")
    with pytest.raises(ModelError, match=r"model/tokenizer\.json is damaged: \w"):
        load_tokenizer(str(folder))


def test_a_reason_is_not_cut_off_after_its_first_line():
    error = ValueError("Couldn't instantiate the backend tokenizer from one of:\n(1) a file\n(2) a slow tokenizer.")
    assert explained("m", error).problem.endswith("from one of: (1) a file (2) a slow tokenizer.")
