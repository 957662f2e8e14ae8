"""Sequence to sequence: what the decoder reads is what it is to write, one step later."""

import pytest
import torch
from task_tokenizers import make_rows
from transformers import T5Config, T5ForConditionalGeneration

from trimtab.data.tasks.build import build_task
from trimtab.errors import DataError

COLUMNS = {"document": ["a good film with a great cast", "dull plot"], "summary": ["good", "a dull film"]}


def small_t5(tokenizer):
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def test_columns_are_guessed_and_said():
    task = build_task(None, make_rows(**COLUMNS))
    assert (task.name, task.model_kind, task.shifts_labels) == ("seq2seq", "seq2seq-lm", False)
    assert task.columns == {"text": "document", "target": "summary"}
    assert task.said[1] == "reads 'document', writes 'summary' (guessed; data.text, data.target say otherwise)"


def test_decoder_inputs_are_those_of_the_model(bert):
    rows = make_rows(**COLUMNS)
    task = build_task("seq2seq", rows)
    dataset = task.encode(rows, bert, 32)
    batch = task.collate([dataset[0], dataset[1]])
    model = small_t5(bert)
    task.bind(bert, model.config)
    assert batch["labels"].tolist()[0] == [*bert("good")["input_ids"], -100, -100]
    assert torch.equal(batch["decoder_input_ids"], model.prepare_decoder_input_ids_from_labels(batch["labels"]))
    by_labels = model(**{key: batch[key] for key in ("input_ids", "attention_mask", "labels")}).logits
    by_inputs = model(**{key: batch[key] for key in ("input_ids", "attention_mask", "decoder_input_ids")}).logits
    assert torch.equal(by_labels, by_inputs)


def test_the_config_says_how_the_decoder_starts(bert):
    rows = make_rows(**COLUMNS)
    task = build_task("seq2seq", rows)
    dataset = task.encode(rows, bert, 32)
    assert task.collate([dataset[0]])["decoder_input_ids"][0, 0] == bert.pad_token_id
    task.bind(bert, T5Config(decoder_start_token_id=2))
    assert task.collate([dataset[0]])["decoder_input_ids"][0, 0] == 2
    task.bind(bert)
    assert task.collate([dataset[0]])["decoder_input_ids"][0, 0] == 2


def test_cut_rows_count_once(bert):
    long = "one two three four five six"
    rows = make_rows(source=[long, "one", "one", long], target=["one", long, "one", long])
    dataset = build_task("seq2seq", rows).encode(rows, bert, 5)
    assert dataset.num_truncated == 3
    assert dataset.lengths == [5, 3, 3, 5]
    assert [len(dataset[i]["labels"]) for i in range(4)] == [3, 5, 3, 5]


@pytest.mark.parametrize("column", ["document", "summary"])
def test_empty_texts(bert, column):
    rows = make_rows(**{**COLUMNS, column: ["film", ""]})
    with pytest.raises(DataError, match=f"mine.csv, row 2: column '{column}' is empty"):
        build_task("seq2seq", rows).encode(rows, bert, 32)


def test_unclear_columns():
    with pytest.raises(DataError, match="not clear what is read and what is written; there are 'a', 'b'"):
        build_task("seq2seq", make_rows(a=["x"], b=["y"]))
    task = build_task(None, make_rows(a=["x"], b=["y"]), text="a", target="b")
    assert task.columns == {"text": "a", "target": "b"}


def test_example_text(bert):
    rows = make_rows(**COLUMNS)
    task = build_task(None, rows)
    assert task.example_text(task.encode(rows, bert, 32)[1], bert) == "[CLS] dull plot [SEP] → [CLS] a dull film [SEP]"
