"""The report shows what goes into the model: the real tokens, where the loss is, and what is wrong with the data."""

import dataclasses
import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from trimtab.data.report import describe_data
from trimtab.data.report_table import render
from trimtab.data.rows import Rows
from trimtab.data.tokens import TokenDataset

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *["a", "good", "film", "bad", "was", "it", "the", "end", "of"]]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


class FakeTask(SimpleNamespace):
    """As much of a task as the report asks for; tokens are padded to 8 so that padding has to be left out."""

    name = "classify"
    loss_kind = "cross-entropy"
    model_kind = "sequence-classification"
    shifts_labels = False
    said = ("text from the column 'text'",)

    def head(self):
        return {"id2label": {0: "bad", 1: "good"}}

    def collate(self, examples, epoch=0):
        padded = torch.zeros(len(examples), 8, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, example in enumerate(examples):
            padded[row, : len(example["input_ids"])] = example["input_ids"]
            mask[row, : len(example["input_ids"])] = 1
        return {"input_ids": padded, "attention_mask": mask, "labels": self.batch_labels(examples, padded, mask)}

    def batch_labels(self, examples, padded, mask):
        return torch.stack([example["labels"] for example in examples])

    def example_text(self, example, tokenizer):
        return tokenizer.decode(example["input_ids"].tolist())


class PaddedLabels(FakeTask):
    loss_kind = "token-cross-entropy"

    def batch_labels(self, examples, padded, mask):
        labels = torch.full_like(padded, -100)
        for row, example in enumerate(examples):
            labels[row, : len(example["labels"])] = example["labels"]
        return labels


def classify_data(tokenizer, texts, labels, **options):
    rows = Rows({"text": texts, "label": labels}, "reviews.csv")
    examples = [{"input_ids": tokenizer(t)["input_ids"], "labels": n} for t, n in zip(texts, labels, strict=True)]
    return rows, TokenDataset.from_examples(examples, **options)


def drawn(report, width=200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render(report))
    return console.file.getvalue()


def report_of(task, columns, examples, tokenizer):
    """The report of a training set alone."""
    return describe_data(task, Rows(columns, "x"), None, TokenDataset.from_examples(examples), None, tokenizer)


@pytest.fixture
def report(tokenizer):
    train = classify_data(
        tokenizer, ["a good film", "[CLS] it was bad [SEP]", "the end", "the end"], [1, 0, 1, 1], num_truncated=1
    )
    held_out = classify_data(tokenizer, ["the end", "it was", "the end", "a good film"], [1, 0, 0, 1])
    task = FakeTask(columns={"text": "text", "label": "label"})
    return describe_data(task, train[0], held_out[0], train[1], held_out[1], tokenizer, num_examples=2)


def test_examples_are_shown_as_the_model_sees_them(report):
    first, second = report.examples
    assert [token.text for token in first.tokens] == ["[CLS]", "a", "good", "film", "[SEP]"]
    assert [token.is_special for token in first.tokens] == [True, False, False, False, True]
    assert not any(token.carries_loss for token in first.tokens)
    assert (first.location, first.label, first.text) == ("reviews.csv, row 1", "good", "[CLS] a good film [SEP]")
    assert [token.text for token in second.tokens][:3] == ["[CLS]", "[CLS]", "it"]
    assert second.label == "bad"


def test_the_question_of_the_special_tokens_is_answered(report):
    assert report.special_tokens == "special tokens added by the tokenizer: [CLS] … [SEP]: do not add them yourself"
    assert report.num_texts_with_special_tokens == 1
    assert report.first_text_with_special_tokens == "reviews.csv, row 2"


def test_counts(report):
    assert report.train.num_rows == report.train.num_examples == 4
    assert report.train.num_truncated == 1
    assert (report.train.shortest, report.train.median, report.train.longest) == (4, 5, 7)
    assert report.train.num_tokens == 5 + 7 + 4 + 4
    assert report.train.num_loss_tokens is None
    assert report.eval.num_rows == 4
    assert sum(found.num_examples for found in report.histogram) == 4
    assert [(found.first, found.num_examples) for found in report.histogram][3:] == [(4, 2), (5, 1), (6, 0), (7, 1)]
    assert [(c.name, c.num_train, c.num_eval) for c in report.labels] == [("bad", 1, 2), ("good", 3, 2)]


def test_texts_in_both_sets_are_found(report):
    assert (report.num_shared_texts, report.num_shared_eval_rows) == (2, 3)
    first = report.shared_texts[0]
    assert (first.text, first.train_location, first.eval_location) == (
        "the end",
        "reviews.csv, row 3",
        "reviews.csv, row 1",
    )


def test_the_drawing_says_it_all(report):
    text = drawn(report)
    for line in (
        "task: classify",
        "columns: text from text, label from label",
        "example 1 (reviews.csv, row 1), 5 tokens",
        "tokens: [CLS] a good film [SEP]",
        "label: good",
        "special tokens added by the tokenizer: [CLS] … [SEP]: do not add them yourself",
        "1 texts contain special tokens, the first is reviews.csv, row 2",
        "the loss is on the label, not on tokens",
        "1 (25.0%)",
        "4 / 5 / 7 / 7",
        "3 (75.0%)",
        "2 texts are in both train and eval (3 eval rows)",
    ):
        assert line in text, line
    assert "[CLS]" in drawn(report, width=40)
    json.dumps(dataclasses.asdict(report))


def test_pairs_and_no_eval_set(tokenizer):
    rows = Rows({"one": ["a", "a"], "two": ["film", "end"], "label": [0, 1]}, "x")
    tokens = TokenDataset.from_examples(
        {"input_ids": tokenizer(one, two)["input_ids"], "labels": label}
        for one, two, label in zip(*rows.columns.values(), strict=True)
    )
    task = FakeTask(columns={"text": ["one", "two"], "label": "label"})
    report = describe_data(task, rows, None, tokens, None, tokenizer)
    assert "[CLS] … [SEP] … [SEP]" in report.special_tokens
    assert report.eval is None
    assert "no eval set" in drawn(report)
    other = Rows({"one": ["a", "a"], "two": ["end", "bad"]}, "y")
    found = describe_data(task, rows, other, tokens, tokens, tokenizer).shared_texts
    assert [(shared.text, shared.train_location) for shared in found] == [("a | end", "x, row 2")]
    assert "no text is in both" in drawn(describe_data(task, rows, other.select([1]), tokens, tokens, tokenizer))


def test_several_labels(tokenizer):
    examples = [{"input_ids": [5], "labels": [1.0, 1.0]}, {"input_ids": [5], "labels": [0.0, 0.0]}]
    task = FakeTask(columns={"text": "text", "label": "label"}, loss_kind="binary-cross-entropy")
    report = report_of(task, {"text": ["a", "b"], "label": [["bad", "good"], []]}, examples, tokenizer)
    assert [example.label for example in report.examples] == ["bad, good", "none of the labels"]
    assert [(count.name, count.num_train) for count in report.labels] == [("bad", 1), ("good", 1)]
    assert report.special_tokens == "no special tokens are added"


def test_numbers_as_labels(tokenizer):
    task = FakeTask(columns={"text": "text", "label": "label"}, loss_kind="mse", head=dict)
    report = report_of(task, {"text": ["a"], "label": [1.5]}, [{"input_ids": [5], "labels": 1.5}], tokenizer)
    assert report.examples[0].label == "1.5"
    assert report.labels == ()


def test_loss_on_the_answer_only(tokenizer):
    rows = Rows({"messages": [[{"role": "user", "content": "a film"}]]}, "x")
    ids = tokenizer("a film it was good")["input_ids"]
    labels = [*[-100] * 3, *ids[3:6], -100]
    tokens = TokenDataset.from_examples([{"input_ids": ids, "labels": labels}])
    task = PaddedLabels(name="chat", model_kind="causal-lm", shifts_labels=True, columns={"messages": "messages"})
    report = describe_data(task, rows, rows, tokens, tokens, tokenizer)
    (example,) = report.examples
    assert [token.text for token in example.tokens if token.carries_loss] == ["it", "was", "good"]
    assert report.train.num_loss_tokens == 3
    assert report.special_tokens.startswith("special tokens added by the chat template: [CLS] … [SEP]")
    assert report.num_shared_texts == 1
    text = drawn(report)
    assert "[CLS] a film ⟦it was good⟧ [SEP]" in text
    assert "⟦ ⟧ tokens with loss" in text


def test_the_first_token_of_a_shifted_task_carries_no_loss(tokenizer):
    """It is never predicted, whatever its label is."""
    task = PaddedLabels(name="causal-lm", model_kind="causal-lm", shifts_labels=True, columns={"text": "text"})
    report = report_of(task, {"text": ["a", "b"]}, [{"input_ids": [5, 6], "labels": [5, 6]}], tokenizer)
    assert [token.carries_loss for token in report.examples[0].tokens] == [False, True]
    assert report.examples[0].location is None  # a block of several rows


def test_masked_tokens_show_their_target(tokenizer):
    task = PaddedLabels(name="masked-lm", model_kind="masked-lm", columns={"text": "text"})
    examples = [{"input_ids": [2, 5, 4, 3], "labels": [-100, -100, 6, -100]}]
    report = report_of(task, {"text": ["a good"]}, examples, tokenizer)
    masked = report.examples[0].tokens[2]
    assert (masked.text, masked.carries_loss, masked.target) == ("[MASK]", True, "good")
    assert "[CLS] … [SEP]:" in report.special_tokens
    assert "[CLS] a ⟦[MASK]→good⟧ [SEP]" in drawn(report)


def test_a_target_sequence(tokenizer):
    task = PaddedLabels(name="seq2seq", model_kind="seq2seq-lm", columns={"text": "text", "target": "target"})
    examples = [{"input_ids": [5, 6, 3], "labels": [7, 3]}]
    report = report_of(task, {"text": ["a good"], "target": ["film"]}, examples, tokenizer)
    (example,) = report.examples
    assert not any(token.carries_loss for token in example.tokens)
    assert [(token.text, token.carries_loss) for token in example.target] == [("film", True), ("[SEP]", True)]
    assert "target: ⟦film [SEP]⟧" in drawn(report)


class Unpadded(PaddedLabels):
    def collate(self, examples, epoch=0):
        return {name: examples[0][name][None] for name in ("input_ids", "labels")}


def test_long_rows_show_their_beginning_and_end(tokenizer):
    task = Unpadded(columns={"text": "text", "label": "label"}, loss_kind="cross-entropy")
    examples = [{"input_ids": [2, *[5] * 300, 3], "labels": 0}]
    report = report_of(task, {"text": ["a"], "label": [0]}, examples, tokenizer)
    assert len(report.examples[0].tokens) == 302
    text = drawn(report, width=2000)
    for part in ("[CLS] a a", "a … 182 more … a", "a [SEP]"):
        assert part in text
    task = Unpadded(name="causal-lm", model_kind="causal-lm", shifts_labels=True, columns={"text": "text"})
    examples = [{"input_ids": [5] * 302, "labels": [-100, *[5] * 301]}]
    text = drawn(report_of(task, {"text": ["a"]}, examples, tokenizer), width=2000)
    for part in ("a⟧ … 182 more … ⟦a", "tokens: a ⟦a a"):
        assert part in text


def test_an_empty_dataset(tokenizer):
    tokens = TokenDataset(
        {"input_ids": torch.zeros(0, dtype=torch.int32), "labels": torch.zeros(0, dtype=torch.int32)},
        {"input_ids": [0]},
    )
    task = FakeTask(columns={"text": "text"})
    report = describe_data(task, Rows({"text": []}, "x"), None, tokens, None, tokenizer)
    assert report.histogram == ()
    assert "task: classify" in drawn(report)
