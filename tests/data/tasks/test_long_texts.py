"""Texts that are missing or would take gigabytes to tokenize are bad rows; calls of a tokenizer have a bounded size."""

import pytest
from task_tokenizers import make_rows

from trimtab.data.tasks import messages, texts, tokenization
from trimtab.data.tasks.build import build_task
from trimtab.data.tasks.tokenization import call_batches, tokenize
from trimtab.errors import DataError

SHORT, LONG = "a good film", "a good film " * 40


@pytest.fixture
def small_limit(monkeypatch):
    """So that the test itself needs no gigabytes."""
    monkeypatch.setattr(texts, "MAX_CHARACTERS", 200)
    monkeypatch.setattr(messages, "MAX_CHARACTERS", 200)


def chat(content):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": SHORT}]


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("classify", {"text": [SHORT, "?"], "label": ["x", "y"]}),
        ("classify", {"text1": [SHORT, SHORT], "text2": [SHORT, "?"], "label": ["x", "y"]}),
        ("regress", {"text": [SHORT, "?"], "label": [0.5, 1.5]}),
        ("causal-lm", {"text": [SHORT, "?"]}),
        ("masked-lm", {"text": [SHORT, "?"]}),
        ("seq2seq", {"source": [SHORT, "?"], "target": [SHORT, SHORT]}),
        ("seq2seq", {"source": [SHORT, SHORT], "target": [SHORT, "?"]}),
        ("chat", {"prompt": [SHORT, "?"], "answer": [SHORT, SHORT]}),
        ("chat", {"prompt": [SHORT, SHORT], "answer": [SHORT, "?"]}),
    ],
)
@pytest.mark.parametrize(
    ("bad", "problem"),
    [(" ", "is empty"), (LONG, r"contains \d+ characters, the maximum is 200\n.*split it into")],
    ids=["empty", "long"],
)
def test_texts_that_cannot_be_used(small_limit, said, bert, task, columns, bad, problem):
    rows = make_rows(**{name: [bad if value == "?" else value for value in c] for name, c in columns.items()})
    with pytest.raises(DataError, match=rf"mine.csv, row 2: column '\w+' {problem}"):
        build_task(task, rows).usable(rows)
    assert len(build_task(task, rows, on_bad_rows="skip").usable(rows)) == 1
    assert said[0].startswith("mine.csv: skipped 1 bad row(s)")


def test_a_conversation_that_is_too_long(small_limit):
    rows = make_rows(messages=[chat(SHORT), chat(LONG)])
    with pytest.raises(DataError, match="row 2: column 'messages' contains 491 characters"):
        build_task("chat", rows).usable(rows)


def test_the_limit_is_far_above_a_book():
    assert texts.MAX_CHARACTERS == 10_000_000


def test_a_call_has_few_long_texts(monkeypatch, bert):
    monkeypatch.setattr(tokenization, "ROWS_PER_CALL", 3)
    monkeypatch.setattr(tokenization, "CHARACTERS_PER_CALL", 10)
    given = ["aa"] * 4 + ["a" * 30] + ["a" * 5] * 3
    assert [len(batch) for batch in call_batches(given, len)] == [3, 1, 1, 2, 1]
    assert list(call_batches([], len)) == []
    whole = [bert(text)["input_ids"] for text in given]
    assert [list(ids) for ids in tokenize(bert, given, max_length=None).input_ids] == whole
