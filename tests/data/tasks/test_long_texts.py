"""Texts that would take gigabytes to tokenize: refused with their place, and never many of them in one call."""

import pytest
from task_tokenizers import make_rows

from trimtab.data.tasks import messages, texts, tokenizing
from trimtab.data.tasks.build import build_task
from trimtab.data.tasks.tokenizing import slices_of_calls, tokenize
from trimtab.errors import DataError

SHORT, LONG = "a good film", "a good film " * 40


@pytest.fixture
def small_limit(monkeypatch):
    """So that the test itself needs no gigabytes."""
    monkeypatch.setattr(texts, "MOST_CHARACTERS", 200)
    monkeypatch.setattr(messages, "MOST_CHARACTERS", 200)


def chat(content):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": SHORT}]


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("classify", {"text": [SHORT, LONG], "label": ["x", "y"]}),
        ("classify", {"text1": [SHORT, SHORT], "text2": [SHORT, LONG], "label": ["x", "y"]}),
        ("regress", {"text": [SHORT, LONG], "label": [0.5, 1.5]}),
        ("causal-lm", {"text": [SHORT, LONG]}),
        ("masked-lm", {"text": [SHORT, LONG]}),
        ("seq2seq", {"source": [SHORT, SHORT], "target": [SHORT, LONG]}),
        ("chat", {"messages": [chat(SHORT), chat(LONG)]}),
        ("chat", {"prompt": [SHORT, SHORT], "answer": [SHORT, LONG]}),
    ],
)
def test_a_text_that_is_too_long_is_a_bad_row(small_limit, task, columns):
    rows = make_rows(**columns)
    with pytest.raises(DataError, match=r"row 2: column '\w+' holds \d+ characters, more than 200\n.*split it into"):
        build_task(task, rows).usable(rows)
    assert len(build_task(task, rows, on_bad_rows="skip").usable(rows)) == 1


def test_the_limit_is_far_above_a_book():
    assert texts.MOST_CHARACTERS == 10_000_000


def test_a_call_has_few_long_texts(monkeypatch, bert):
    monkeypatch.setattr(tokenizing, "ROWS_PER_CALL", 3)
    monkeypatch.setattr(tokenizing, "CHARACTERS_PER_CALL", 10)
    given = ["aa"] * 4 + ["a" * 30] + ["a" * 5] * 3
    slices = [(part.start, part.stop) for part in slices_of_calls(given)]
    assert slices == [(0, 3), (3, 4), (4, 5), (5, 7), (7, 8)]
    assert [(part.start, part.stop) for part in slices_of_calls(given, given)][:2] == [(0, 2), (2, 4)]
    assert list(slices_of_calls([])) == []
    whole = [bert(text)["input_ids"] for text in given]
    assert [list(ids) for ids in tokenize(bert, given, max_length=None).input_ids] == whole
