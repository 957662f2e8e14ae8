"""Causal language modelling: the stream of tokens, its blocks, and which tokens are labels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from task_tokenizers import make_gpt, make_rows
from transformers import GPT2Config, GPT2LMHeadModel

from trimtab.data.tasks.build import build_task
from trimtab.errors import DataError

TEXTS = ["hello there", "a good film with a great cast", "dull"]
GPT = make_gpt()


def stream_of(tokenizer, texts):
    return [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]


def tokens_of(dataset):
    return [token for i in range(len(dataset)) for token in dataset[i]["input_ids"].tolist()]


@given(
    texts=st.lists(st.text(alphabet="ab c\n", min_size=1).filter(str.strip), min_size=1, max_size=8),
    block_length=st.integers(2, 12),
)
@settings(max_examples=60)
def test_blocks_hold_every_token_in_order(texts, block_length):
    rows = make_rows(text=texts)
    dataset = build_task("causal-lm", rows).encode(rows, GPT, block_length)
    stream = stream_of(GPT, texts)
    lost = len(stream) % block_length == 1  # a last block of one token would have nothing to predict
    assert tokens_of(dataset) == (stream[:-1] if lost else stream)
    assert dataset.lengths[:-1] == [block_length] * (len(dataset) - 1)
    assert 2 <= dataset.lengths[-1] <= block_length
    assert dataset.num_truncated == 0


def test_begin_of_text_stays_before_every_text(llama):
    rows = make_rows(text=TEXTS)
    tokens = tokens_of(build_task("causal-lm", rows).encode(rows, llama, 64))
    assert tokens.count(llama.bos_token_id) == tokens.count(llama.eos_token_id) == 3
    assert llama.decode(tokens) == "".join(f"<s>{text}</s>" for text in TEXTS)


def test_an_end_that_is_there_is_not_doubled(bert):
    """Where a tokenizer has no EOS, SEP ends a text; it adds it itself."""
    rows = make_rows(text=TEXTS[:2])
    tokens = tokens_of(build_task("causal-lm", rows).encode(rows, bert, 64))
    assert tokens == [token for text in TEXTS[:2] for token in bert(text)["input_ids"]]


def test_texts_beyond_one_call_of_the_tokenizer(gpt):
    texts = [f"hello {i}" for i in range(2100)]
    rows = make_rows(text=texts)
    assert tokens_of(build_task("causal-lm", rows).encode(rows, gpt, 128)) == stream_of(gpt, texts)


def test_labels_are_all_tokens_but_padding(gpt):
    """EOS is also the pad token here: what ends a text is learnt, what fills up a row is not."""
    rows = make_rows(text=["hello", "hello there how are you"])
    task = build_task("causal-lm", rows)
    dataset = task.encode(rows, gpt, 5)
    batch = task.collate([dataset[0], dataset[len(dataset) - 1]])
    real = batch["attention_mask"] == 1
    assert not real.all()
    assert torch.equal(batch["labels"][real], batch["input_ids"][real])
    assert batch["labels"][~real].unique().tolist() == [-100]
    assert (batch["input_ids"][~real] == gpt.eos_token_id).all()
    assert (batch["labels"] == gpt.eos_token_id).sum() == 2


def test_loss_of_a_padded_batch(gpt):
    rows = make_rows(text=TEXTS)
    task = build_task("causal-lm", rows)
    dataset = task.encode(rows, gpt, 5)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(gpt), n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    ).eval()
    batch = task.collate([dataset[i] for i in range(len(dataset))])
    weights = [length - 1 for length in dataset.lengths]
    alone = [model(**task.collate([dataset[i]])).loss for i in range(len(dataset))]
    expected = sum(loss * weight for loss, weight in zip(alone, weights, strict=True)) / sum(weights)
    assert len(set(weights)) == 2
    assert int((batch["labels"][:, 1:] != -100).sum()) == sum(weights)
    torch.testing.assert_close(model(**batch).loss, expected)


def test_too_little_text(bert, said):
    class WithoutEnd:
        pad_token_id = 0
        eos_token_id = sep_token_id = None

        def num_special_tokens_to_add(self, pair):
            return 0

        def __call__(self, texts, **settings):
            return {"input_ids": [[7] for _ in texts]}

    rows = make_rows(text=["hello"])
    with pytest.raises(DataError, match=r"mine.csv has 1 token\(s\): there is nothing to predict"):
        build_task("causal-lm", rows).encode(rows, WithoutEnd(), 8)
    assert said == ["the tokenizer has no EOS token: texts are concatenated without a separator"]
    with pytest.raises(DataError, match="set data.max_length to 2 or more"):
        build_task("causal-lm", rows).encode(rows, bert, 1)
