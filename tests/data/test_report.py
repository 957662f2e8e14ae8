"""The report shows what goes into the model: the real tokens, where the loss is, and what is wrong with the data."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console
from task_tokenizers import make_rows

from trimtab.data.report import describe_data
from trimtab.data.report_table import render
from trimtab.data.rows import Rows
from trimtab.data.tasks.build import build_task
from trimtab.data.tokens import TokenDataset

CHATML = "{% for m in messages %}[CLS]{{ m.content }}[SEP]{% endfor %}{% if add_generation_prompt %}[CLS]{% endif %}"


def report_of(name, tokenizer, rows, eval_rows=None, *, max_length=64, num_examples=3, **columns):
    task = build_task(name, rows, **columns)
    tokens = [None if r is None else task.encode(r, tokenizer, max_length) for r in (rows, eval_rows)]
    return describe_data(task, rows, eval_rows, *tokens, tokenizer, num_examples)


def drawn(report, width=200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render(report))
    return console.file.getvalue()


def with_loss(tokens):
    return [token.text for token in tokens if token.carries_loss]


@pytest.fixture
def report(bert):
    train = make_rows(text=["a good film", "[CLS] a bad cast [SEP]", "the plot", "the plot"], label=list("gbgg"))
    held_out = make_rows(text=["the plot", "a bad", "the plot", "a good film"], label=list("gbbg"))
    return report_of("classify", bert, train, held_out, max_length=6, num_examples=2)


def test_examples_are_shown_as_the_model_sees_them(report):
    first, second = report.examples
    assert [token.text for token in first.tokens] == ["[CLS]", "a", "good", "film", "[SEP]"]
    assert [token.is_special for token in first.tokens] == [True, False, False, False, True]
    assert with_loss(first.tokens) == []
    assert (first.location, first.label, first.text) == ("mine.csv, row 1", "g", "[CLS] a good film [SEP]")
    assert [token.text for token in second.tokens][:3] == ["[CLS]", "[CLS]", "a"]
    assert second.label == "b"


def test_special_tokens_of_the_tokenizer_and_of_the_texts(report):
    assert report.special_tokens == "special tokens added by the tokenizer: [CLS] … [SEP]: do not add them yourself"
    assert report.num_texts_with_special_tokens == 1
    assert report.first_text_with_special_tokens == "mine.csv, row 2"


def test_counts(report):
    sizes = report.train
    assert (sizes.num_rows, sizes.num_examples, sizes.num_truncated, sizes.num_tokens) == (4, 4, 1, 5 + 6 + 4 + 4)
    assert (sizes.shortest, sizes.median, sizes.longest, sizes.num_loss_tokens) == (4, 5, 6, None)
    assert report.eval.num_rows == 4
    assert [(found.first, found.num_examples) for found in report.histogram][3:] == [(4, 2), (5, 1), (6, 1)]
    assert [(c.name, c.num_train, c.num_eval) for c in report.labels] == [("b", 1, 2), ("g", 3, 2)]


def test_texts_in_both_sets_are_found(report):
    assert (report.num_shared_texts, report.num_shared_eval_rows) == (2, 3)
    first = report.shared_texts[0]
    assert (first.text, first.train_location, first.eval_location) == ("the plot", "mine.csv, row 3", "mine.csv, row 1")


def test_the_table_has_it_all(report):
    text = drawn(report)
    for line in (
        "task: classify",
        "columns: text from text, label from label",
        "example 1 (mine.csv, row 1), 5 tokens",
        "tokens: [CLS] a good film [SEP]",
        "label: g",
        "special tokens added by the tokenizer: [CLS] … [SEP]: do not add them yourself",
        "1 texts contain special tokens, the first is mine.csv, row 2",
        "the loss is on the label, not on tokens",
        "1 (25.0%)",
        "4 / 5 / 6 / 6",
        "3 (75.0%)",
        "2 texts are in both train and eval (3 eval rows)",
    ):
        assert line in text, line
    assert "[CLS]" in drawn(report, width=40)
    json.dumps(dataclasses.asdict(report))


def test_pairs_and_no_eval_set(bert):
    rows = make_rows(text1=["a", "a"], text2=["film", "plot"], label=[0, 1])
    report = report_of("classify", bert, rows)
    assert "[CLS] … [SEP] … [SEP]" in report.special_tokens
    assert report.eval is None
    assert "no eval set" in drawn(report)
    other = make_rows(text1=["a", "a"], text2=["plot", "bad"], label=[0, 1])
    (shared,) = report_of("classify", bert, rows, other).shared_texts
    assert (shared.text, shared.train_location) == ("a | plot", "mine.csv, row 2")
    assert "no text is in both" in drawn(report_of("classify", bert, rows, other.select([1])))


def test_several_labels_and_numbers(bert, gpt):
    report = report_of("classify", gpt, make_rows(text=["a", "b"], label=[["bad", "good"], []]))
    assert [example.label for example in report.examples] == ["bad, good", "none of the labels"]
    assert [(count.name, count.num_train) for count in report.labels] == [("bad", 1), ("good", 1)]
    assert report.special_tokens == "no special tokens are added"
    report = report_of("regress", bert, make_rows(text=["a"], label=[1.5]))
    assert report.examples[0].label == "1.5"
    assert report.labels == ()


def test_loss_on_the_answer_only(bert):
    bert.chat_template = CHATML
    try:
        messages = [{"role": "user", "content": "a film"}, {"role": "assistant", "content": "how are you"}]
        rows = make_rows(messages=[messages])
        report = report_of("chat", bert, rows, rows)
    finally:
        bert.chat_template = None
    (example,) = report.examples
    assert with_loss(example.tokens) == ["how", "are", "you", "[SEP]"]
    assert report.train.num_loss_tokens == 4
    assert report.special_tokens.startswith("special tokens added by the chat template: [CLS] … [SEP]")
    assert report.num_shared_texts == 1
    text = drawn(report)
    assert "[CLS] a film [SEP] [CLS] ⟦how are you [SEP]⟧" in text
    assert "⟦ ⟧ tokens with loss" in text


def test_the_first_token_of_a_block_carries_no_loss(gpt):
    """It is never predicted, whatever its label is."""
    report = report_of("causal-lm", gpt, make_rows(text=["a", "b"]))
    assert [token.carries_loss for token in report.examples[0].tokens] == [False, True, True, True]
    assert report.examples[0].location is None  # a block of several rows


def test_masked_tokens_show_their_target(bert):
    report = report_of("masked-lm", bert, make_rows(text=["one two three four five six seven eight nine ten " * 4]))
    (example,) = report.examples
    masked = next(token for token in example.tokens if token.text == "[MASK]")
    assert masked.carries_loss
    assert 0 < len(with_loss(example.tokens)) < 20
    assert "[CLS] … [SEP]:" in report.special_tokens
    assert f"⟦[MASK]→{masked.target}" in drawn(report)


def test_a_target_sequence(bert):
    report = report_of("seq2seq", bert, make_rows(source=["a good"], target=["film"]))
    (example,) = report.examples
    assert with_loss(example.tokens) == []
    assert with_loss(example.target) == ["[CLS]", "film", "[SEP]"]
    assert "target: ⟦[CLS] film [SEP]⟧" in drawn(report)


def test_long_rows_show_their_beginning_and_end(bert, gpt):
    report = report_of("classify", bert, make_rows(text=["a " * 300, "film"], label=[0, 1]), max_length=512)
    assert len(report.examples[0].tokens) == 302
    text = drawn(report, width=2000)
    for part in ("[CLS] a a", "a … 182 more … a", "a [SEP]"):
        assert part in text
    report = report_of("causal-lm", gpt, make_rows(text=["!" * 301]), max_length=512)
    text = drawn(report, width=2000)
    for part in ("!⟧ … 182 more … ⟦!", "tokens: ! ⟦! !"):
        assert part in text


def test_an_empty_dataset(bert):
    task = build_task("classify", make_rows(text=["a", "b"], label=[0, 1]))
    nothing = torch.zeros(0, dtype=torch.int32)
    tokens = TokenDataset({"input_ids": nothing, "labels": nothing}, {"input_ids": [0]})
    report = describe_data(task, Rows({"text": []}, "x"), None, tokens, None, bert)
    assert report.histogram == ()
    assert "task: classify" in drawn(report)
