"""Which task and which columns are meant: what is clear is guessed and said, what is not is asked for."""

import pytest
from task_tokenizers import make_bert, make_rows

from trimtab.data.rows import Rows
from trimtab.data.tasks.build import TASK_NAMES, build_task
from trimtab.errors import DataError

WORDS = ["a good film", "a bad film", "dull", "great"]
MESSAGES = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 4


@pytest.mark.parametrize(
    ("columns", "task", "roles"),
    [
        ({"text": WORDS, "label": [0, 1, 0, 1]}, "classify", {"text": "text", "label": "label"}),
        ({"Review": WORDS, "Sentiment": list("abab")}, "classify", {"text": "Review", "label": "Sentiment"}),
        (
            {"text": WORDS, "label": [0, 1, 1, 0], "rating": [1, 9, 8, 2]},
            "classify",
            {"text": "text", "label": "label"},
        ),
        ({"text": WORDS, "target": [0, 1, 1, 0]}, "classify", {"text": "text", "label": "target"}),
        ({"text": WORDS, "stars": [5, 1, 2, 5]}, "classify", {"text": "text", "label": "stars"}),
        ({"text": WORDS, "labels": [["a"], ["b"], [], ["a"]]}, "classify", {"text": "text", "label": "labels"}),
        (
            {"question": WORDS, "answer": WORDS, "label": [0, 1, 1, 0]},
            "classify",
            {"text": ["question", "answer"], "label": "label"},
        ),
        (
            {"sentence1": WORDS, "sentence2": WORDS, "idx": [0, 1, 2, 3], "label": [1, 0, 1, 0]},
            "classify",
            {"text": ["sentence1", "sentence2"], "label": "label"},
        ),
        (
            {"sentence1": WORDS, "sentence2": WORDS, "score": [0.5, 4.2, 1.0, 5.0]},
            "regress",
            {"text": ["sentence1", "sentence2"], "label": "score"},
        ),
        ({"text": WORDS, "label": ["0.5", "4.25", "1", "5"]}, "regress", {"text": "text", "label": "label"}),
        ({"text": WORDS}, "causal-lm", {"text": "text"}),
        ({"passages": WORDS, "url": WORDS}, "causal-lm", {"text": "passages"}),
        ({"messages": MESSAGES}, "chat", {"messages": "messages"}),
        ({"messages": MESSAGES, "label": [0, 1, 0, 1]}, "chat", {"messages": "messages"}),
        (
            {"instruction": WORDS, "input": WORDS, "output": WORDS},
            "chat",
            {"prompt": ["instruction", "input"], "answer": "output"},
        ),
        ({"question": WORDS, "answer": WORDS}, "chat", {"prompt": "question", "answer": "answer"}),
        ({"article": WORDS, "highlights": WORDS, "id": WORDS}, "seq2seq", {"text": "article", "target": "highlights"}),
        ({"source": WORDS, "target": WORDS}, "seq2seq", {"text": "source", "target": "target"}),
    ],
)
def test_guessed_where_clear(columns, task, roles):
    built = build_task(None, make_rows(**columns))
    assert (built.name, built.columns) == (task, roles)
    assert built.notes[0].startswith(f"task {task}: ")
    assert built.notes[0].endswith("(guessed; set task to change it)")
    assert all("guessed" in line or "labels (" in line for line in built.notes)
    assert len(built.notes) >= 2


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"a": WORDS, "b": WORDS}, "cannot tell the task from the columns 'a', 'b'"),
        ({"text": WORDS, "kind": WORDS}, "cannot tell the task from the columns 'text', 'kind'"),
        ({"text": WORDS, "sentiment": [0, 1, 0, 1], "topic": [0, 1, 0, 1]}, "cannot tell the task"),
        ({"a": WORDS, "b": WORDS, "label": [0, 1, 0, 1]}, "cannot tell which column is the text; the columns are"),
        ({"review": WORDS, "comment": WORDS, "label": [0, 1, 0, 1]}, "cannot tell which column is the text"),
    ],
)
def test_asked_for_where_not_clear(columns, problem):
    with pytest.raises(DataError) as caught:
        build_task(None, make_rows(**columns))
    assert problem in caught.value.problem
    assert "set data.text" in caught.value.cure or "set task" in caught.value.cure


@pytest.mark.parametrize("columns", [{"messages": MESSAGES}, {"prompt": WORDS, "completion": WORDS}])
def test_a_boolean_label_beside_answers_is_asked_about(columns):
    rows = make_rows(**columns, label=[True, False, False, True])
    with pytest.raises(DataError, match="column 'label' is false in 2 of 4 rows with answers") as caught:
        build_task(None, rows)
    assert "set task: chat" in caught.value.cure
    assert build_task("chat", rows).name == "chat"


@pytest.mark.parametrize("task", [None, "chat"])
def test_images_are_refused(task):
    with pytest.raises(DataError, match="column 'images' belongs to the conversations") as caught:
        build_task(task, make_rows(messages=MESSAGES, images=[["a.png"]] * 4))
    assert "remove the column 'images'" in caught.value.cure
    assert build_task(task, make_rows(messages=MESSAGES, images=[[], None, [], []])).name == "chat"


def test_a_text_is_not_its_own_label():
    with pytest.raises(DataError, match="data.text and data.label are the same column 'label'"):
        build_task(None, make_rows(text=WORDS, label=["a", "b", "a", "b"]), text="label", label="label")


def test_a_named_task_lets_more_be_guessed():
    rows = make_rows(utterances=WORDS, kind=list("abab"), id=[1, 2, 3, 4])
    with pytest.raises(DataError, match="cannot tell which column is the label"):
        build_task("classify", rows)
    task = build_task("classify", rows, text="utterances")
    assert task.columns == {"text": "utterances", "label": "kind"}
    assert task.notes == [
        "label: column 'kind' (guessed; set data.label to change it)",
        "2 labels ('a', 'b'), one label per row",
    ]


def test_nothing_is_guessed_that_was_said():
    rows = make_rows(text=WORDS, other=WORDS, label=[0, 1, 0, 1], mark=[1, 1, 0, 0])
    task = build_task("classify", rows, text="other", label="mark")
    assert task.columns == {"text": "other", "label": "mark"}
    assert not any("guessed" in line for line in task.notes)


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"text": "txt"}, "data.text"),
        ({"label": "lable"}, "data.label"),
        ({"label": ["label", "lable"]}, "data.label"),
        ({"target": "txt"}, "data.target"),
        ({"messages": "txt"}, "data.messages"),
        ({"prompt": "txt", "answer": "text"}, "data.prompt"),
        ({"prompt": "text", "answer": "txt"}, "data.answer"),
    ],
)
def test_columns_that_are_not_there(asked, key):
    with pytest.raises(DataError) as caught:
        build_task(None, make_rows(text=WORDS, label=[0, 1, 0, 1]), **asked)
    assert caught.value.problem.startswith("mine.csv has no column")
    assert "did you mean" in caught.value.problem
    assert "the columns are 'text', 'label'" in caught.value.problem
    assert key in caught.value.cure


def test_columns_that_the_eval_rows_lack():
    rows = make_rows(text=WORDS, label=[0, 1, 0, 1])
    for on_bad_rows in ("stop", "skip"):
        with pytest.raises(DataError, match="eval.csv has no column 'label'; the columns are 'text'") as caught:
            build_task(None, rows, eval_rows=Rows({"text": WORDS}, "eval.csv"), on_bad_rows=on_bad_rows)
        assert caught.value.cure.startswith("data.eval needs the columns of data.train: 'text', 'label'; leave it out")


def test_many_whole_numbers():
    """Classes are counted from 0 without gaps, however many; numbers with gaps are numbers."""
    texts = [f"film {i}" for i in range(450)]
    assert build_task(None, make_rows(text=texts, label=[i % 150 for i in range(450)])).name == "classify"
    assert build_task(None, make_rows(text=texts, label=[i % 150 * 10 for i in range(450)])).name == "regress"


def test_too_many_text_columns():
    with pytest.raises(DataError, match="data.text names 3 columns.*\n.*one column, or to a list of two"):
        build_task("classify", make_rows(text=WORDS, label=[0, 1, 0, 1]), text=["text", "text", "text"])
    with pytest.raises(DataError, match="data.text names 2 columns"):
        build_task("causal-lm", make_rows(text=WORDS), text=["text", "text"])


def test_no_rows_and_no_such_task():
    with pytest.raises(DataError, match="mine.csv has no rows"):
        build_task(None, make_rows(text=[], label=[]))
    with pytest.raises(DataError, match="unknown task 'classification'\n.*classify, regress"):
        build_task("classification", make_rows(text=WORDS))


KINDS = {  # model, loss, whether labels are shifted
    "classify": ("sequence-classification", "cross-entropy", False),
    "regress": ("sequence-classification", "mse", False),
    "causal-lm": ("causal-lm", "token-cross-entropy", True),
    "chat": ("causal-lm", "token-cross-entropy", True),
    "seq2seq": ("seq2seq-lm", "token-cross-entropy", False),
    "masked-lm": ("masked-lm", "token-cross-entropy", False),
}


@pytest.mark.parametrize("name", TASK_NAMES)
@pytest.mark.parametrize("loaded_with", [{}, {"max_length": 7}], ids=["no truncation", "truncation"])
def test_every_task(name, loaded_with):
    """And none changes the tokenizer: truncation that stays in its backend would be saved with the model."""
    columns = {"text": WORDS, "label": [0, 1, 0, 1], "target": WORDS, "messages": MESSAGES}
    rows = make_rows(**columns)
    task = build_task(name, rows, text="text", target="target")
    assert (task.name, task.model_kind, task.loss_kind, task.shifts_labels) == (name, *KINDS[name])
    assert task.default_metric in task.metrics().names
    assert bool(task.head()) == (task.model_kind == "sequence-classification")
    tokenizer = make_bert()
    if loaded_with:
        tokenizer.backend_tokenizer.enable_truncation(**loaded_with)
    before = tokenizer.backend_tokenizer.to_str()
    assert len(task.encode(rows, tokenizer, 5)) > 0
    assert tokenizer.backend_tokenizer.to_str() == before
