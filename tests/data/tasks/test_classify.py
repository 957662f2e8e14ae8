"""Classification: labels of every kind, sentence pairs, batches, and rows that cannot be used."""

import pytest
import torch
from task_tokenizers import make_rows
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

from trimtab.data.rows import Rows
from trimtab.data.tasks.build import build_task
from trimtab.errors import DataError, ModelError

TEXTS = ["a good film", "a bad film and a dull plot", "great cast", "dull"]


def encoded(task, rows, tokenizer, max_length=32):
    dataset = task.encode(rows, tokenizer, max_length)
    return dataset, task.collate([dataset[i] for i in range(len(dataset))])


def test_batches_are_those_of_transformers(bert):
    rows = make_rows(text=TEXTS, label=["pos", "neg", "pos", "neg"])
    _, batch = encoded(build_task("classify", rows), rows, bert)
    reference = DataCollatorWithPadding(bert)([bert(text) for text in TEXTS])
    assert torch.equal(batch["input_ids"], reference["input_ids"])
    assert torch.equal(batch["attention_mask"], reference["attention_mask"])
    assert batch["labels"].tolist() == [1, 0, 1, 0]
    assert {values.dtype for values in batch.values()} == {torch.int64}
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["pos", "neg", "pos", "neg"], ["neg", "pos"], [1, 0, 1, 0]),
        ([0, 1, 1, 0], ["0", "1"], [0, 1, 1, 0]),
        (["10", "9", "10", " 1 "], ["1", "9", "10"], [2, 1, 2, 0]),
        ([5, 1, 3, 1], ["1", "3", "5"], [2, 0, 1, 0]),
        ([True, False, True, False], ["false", "true"], [1, 0, 1, 0]),
        ([1.0, 0.0, 2.0, 0.0], ["0", "1", "2"], [1, 0, 2, 0]),
        ([-1, 1, 1, -1], ["-1", "1"], [0, 1, 1, 0]),
    ],
)
def test_one_label_of_every_kind(bert, labels, names, numbers):
    rows = make_rows(text=TEXTS, label=labels)
    task = build_task(None, rows)
    assert (task.name, task.loss_kind, task.default_metric) == ("classify", "cross-entropy", "accuracy")
    assert task.head() == {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "single_label_classification",
    }
    assert encoded(task, rows, bert)[1]["labels"].tolist() == numbers


@pytest.mark.parametrize(
    ("train", "labels", "numbers"),
    [
        ([1, 5, 3, 1], ["5", 3.0, " 1"], [2, 1, 0]),  # the same label in files of other formats
        (["pos", "neg", "pos", "neg"], [1, "0", "pos"], [1, 0, 1]),  # indices of labels that have names
    ],
)
def test_other_ways_to_write_a_label(bert, train, labels, numbers):
    task = build_task("classify", make_rows(text=TEXTS, label=train))
    assert encoded(task, make_rows(text=TEXTS[:3], label=labels), bert)[1]["labels"].tolist() == numbers


def test_class_numbers_of_the_hub_are_positions(bert):
    """Also where the names are numbers themselves, and for a class that no training row has."""
    rows = Rows({"text": TEXTS, "stars": [0, 4, 1, 0]}, "hub", {"stars": ["1", "2", "3", "4", "5"]})
    task = build_task("classify", rows)
    assert task.head()["id2label"] == {0: "1", 1: "2", 2: "3", 3: "4", 4: "5"}
    assert encoded(task, rows, bert)[1]["labels"].tolist() == [0, 4, 1, 0]
    with pytest.raises(DataError, match="row 2.*label 5 in column 'stars' is not one of the 5 labels"):
        task.usable(Rows({"text": TEXTS[:2], "stars": [3, 5]}, "eval.csv"))
    rows = Rows({"text": TEXTS, "labels": [[2], [0, 1], [], [2, 0]]}, "hub", {"labels": ["joy", "fear", "calm"]})
    task = build_task(None, rows)
    assert list(task.head()["label2id"]) == ["joy", "fear", "calm"]
    assert encoded(task, rows, bert)[1]["labels"].tolist() == [[0, 0, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    ("columns", "label", "names"),
    [
        ({"label": [["b", "a"], [], ["c"], ["a"]]}, None, ["a", "b", "c"]),
        ({"label": [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]}, None, ["0", "1", "2"]),
        ({"a": [1, 0, "no", True], "b": ["1", 0.0, False, "0"], "c": [0, 0, 1, 0]}, ["a", "b", "c"], ["a", "b", "c"]),
    ],
)
def test_several_labels(bert, columns, label, names):
    rows = make_rows(text=TEXTS, **columns)
    task = build_task(None, rows, label=label)
    assert (task.loss_kind, task.default_metric) == ("binary-cross-entropy", "f1")
    assert task.head()["problem_type"] == "multi_label_classification"
    assert list(task.head()["label2id"]) == names
    labels = encoded(task, rows, bert)[1]["labels"]
    assert labels.dtype == torch.float32
    assert labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]


def test_pairs_tell_first_and_second_apart(bert):
    seconds = ["bad plot", "a film", "what is the capital", "hello"]
    rows = make_rows(premise=TEXTS, hypothesis=seconds, label=[0, 1, 2, 0])
    task = build_task(None, rows)
    assert task.columns == {"text": ["premise", "hypothesis"], "label": "label"}
    _, batch = encoded(task, rows, bert)
    reference = DataCollatorWithPadding(bert)([bert(*pair) for pair in zip(TEXTS, seconds, strict=True)])
    for field in ("input_ids", "token_type_ids", "attention_mask"):
        assert torch.equal(batch[field], reference[field]), field


def test_token_types_only_for_models_that_have_them(bert):
    rows = make_rows(sentence1=TEXTS, sentence2=TEXTS, label=[0, 1, 1, 0])
    task = build_task(None, rows)
    dataset, _ = encoded(task, rows, bert)
    for num_types, expected in ((1, False), (2, True)):
        task.bind(bert, BertConfig(type_vocab_size=num_types))
        assert ("token_type_ids" in task.collate([dataset[0]])) is expected


def test_padding_does_not_change_what_the_model_says(bert):
    rows = make_rows(sentence1=TEXTS, sentence2=TEXTS[::-1], label=[0, 1, 1, 0])
    task = build_task(None, rows)
    dataset = task.encode(rows, bert, 32)
    config = BertConfig(
        vocab_size=len(bert), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = BertForSequenceClassification(config).eval()
    together = model(**task.collate([dataset[i] for i in range(4)])).logits
    alone = torch.cat([model(**task.collate([dataset[i]])).logits for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_truncated_texts_are_counted(bert):
    rows = make_rows(text=["one two three", "one two three four", "one two three four five six"], label=[0, 1, 0])
    dataset, batch = encoded(build_task(None, rows), rows, bert, max_length=6)
    assert (dataset.num_truncated, dataset.lengths) == (1, [5, 6, 6])
    assert bert.decode(batch["input_ids"][2]) == "[CLS] one two three four [SEP]"
    pairs = make_rows(sentence1=["one two three four five six"] * 2, sentence2=["seven"] * 2, label=[0, 1])
    dataset, batch = encoded(build_task(None, pairs), pairs, bert, max_length=7)
    assert dataset.num_truncated == 2
    assert bert.decode(batch["input_ids"][0]) == "[CLS] one two three [SEP] seven [SEP]"  # of the longer text


@pytest.mark.parametrize("task", ["classify", "masked-lm"])
def test_no_room_beside_special_tokens(bert, task):
    rows = make_rows(text=TEXTS, label=[0, 1, 0, 1])
    with pytest.raises(DataError, match="max_length 2 leaves no room for text: the tokenizer adds 2"):
        build_task(task, rows).encode(rows, bert, 2)


@pytest.mark.parametrize(
    ("text", "label", "problem"),
    [
        (None, 0, "column 'text' is empty"),
        ("  ", 0, "column 'text' is empty"),
        (float("nan"), 0, "column 'text' is empty"),
        (["a"], 0, "column 'text' contains a list, expected text"),
        ("film", None, "column 'label' is empty"),
        ("film", "", "column 'label' is empty"),
        ("film", 7, "label 7 in column 'label' is not one of the 2 labels of the training rows ('0', '1')"),
        ("film", 0.5, "label 0.5 in column 'label' is not one of"),
        ("film", -1, "column 'label' contains -1, which marks rows without a label"),
    ],
)
def test_bad_rows_stop_with_their_place_or_are_counted(bert, said, text, label, problem):
    train = make_rows(text=TEXTS, label=[0, 1, 1, 0])
    rows = make_rows(text=[*TEXTS, text], label=[0, 1, 1, 0, label])
    with pytest.raises(DataError) as caught:
        build_task("classify", train).encode(rows, bert, 32)
    assert str(caught.value).startswith(f"mine.csv, row 5: {problem}")
    assert "data.on_bad_rows: skip" in caught.value.cure
    dataset = build_task("classify", train, on_bad_rows="skip").encode(rows, bert, 32)
    assert len(dataset) == 4
    assert len(said) == 1
    assert said[0].startswith("mine.csv: skipped 1 bad row(s); the first: mine.csv, row 5")


def test_numbers_are_texts_too(bert):
    rows = make_rows(text=[1984, 2.5, "film", True], label=[0, 1, 1, 0])
    dataset = build_task(None, rows).encode(rows, bert, 32)
    assert dataset[0]["input_ids"].tolist() == bert("1984")["input_ids"]


def test_a_label_that_stands_in_eval_only():
    train = make_rows(text=TEXTS, label=["pos", "neg", "pos", "neg"])
    evaluation = Rows({"text": TEXTS[:2], "label": ["pos", "neutral"]}, "eval.csv")
    with pytest.raises(
        DataError, match="eval.csv, row 2: label 'neutral' in column 'label' is not one of the 2 labels"
    ):
        build_task(None, train, eval_rows=evaluation)
    task = build_task(None, train, eval_rows=evaluation, on_bad_rows="skip")
    assert task.usable(evaluation).columns["label"] == ["pos"]


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (["pos"] * 4, "column 'label' has 1 label ('pos') in 4 rows: classification needs at least two"),
        ([None] * 4, "column 'label' has no label in 4 rows: classification needs at least two"),
        ([0.5, 1.5, 2.0, 3.0], "column 'label' contains 0.5: these are not classes"),
        ([{"a": 1}] * 4, "column 'label' contains {'a': 1}: these are not classes"),
        ([f"free text {i}" for i in range(40)], "40 distinct values in 40 rows: these are not classes"),
        ([f"free text {i}" for i in range(200)], "200 distinct values in 200 rows: these are not classes"),
    ],
)
def test_columns_that_hold_no_classes(labels, problem):
    with pytest.raises(DataError) as caught:
        build_task("classify", make_rows(text=["film"] * len(labels), label=labels))
    assert problem in caught.value.problem


def test_class_weights():
    """Balanced: every label that occurs has the same total weight, and the mean weight of a row is 1."""
    rows = Rows({"text": ["film"] * 8, "label": [0] * 6 + [2] * 2}, "mine.csv", {"label": ["a", "b", "c"]})
    task = build_task("classify", rows)
    assert task.class_weights("balanced", rows) == (8 / 12, 1.0, 2.0)
    assert task.class_weights({"c": 3.0, "a": 0.5}, rows) == (0.5, 1.0, 3.0)
    with pytest.raises(DataError, match="a weight for 'd', which is not one of the labels 'a', 'b', 'c'"):
        task.class_weights({"d": 1.0}, rows)
    several = make_rows(text=TEXTS[:2], label=[["a"], ["a", "b"]])
    with pytest.raises(DataError, match="does not have exactly one label"):
        build_task("classify", several).class_weights("balanced", several)


def test_lists_that_do_not_fit_the_labels(bert):
    task = build_task(None, make_rows(text=TEXTS, label=[[0, 1], [1, 0], [1, 1], [0, 0]]))
    for bad in ([1], [0, 2], "x", None):
        with pytest.raises(DataError, match="mine.csv, row 1: column 'label' contains"):
            task.usable(make_rows(text=["film"], label=[bad]))


def test_collate_needs_a_tokenizer(bert):
    rows = make_rows(text=TEXTS, label=[0, 1, 0, 1])
    dataset = build_task(None, rows).encode(rows, bert, 32)
    fresh = build_task(None, rows)
    with pytest.raises(DataError, match="not bound to a tokenizer"):
        fresh.collate([dataset[0]])
    fresh.bind(bert)
    assert fresh.collate([dataset[0]])["input_ids"].shape == (1, 5)


def test_padding_with_eos_where_there_is_no_pad_token(gpt):
    rows = make_rows(text=["hello", "hello there how are you"], label=[0, 1])
    _, batch = encoded(build_task(None, rows), rows, gpt)
    assert gpt.pad_token_id is None
    assert batch["input_ids"][0, -1] == gpt.eos_token_id
    assert batch["attention_mask"][0].sum() == len(gpt("hello")["input_ids"])


def test_a_tokenizer_that_cannot_pad(bert):
    class Nothing:
        pad_token_id = eos_token_id = None

    with pytest.raises(ModelError, match="neither a pad token nor an EOS token"):
        build_task(None, make_rows(text=TEXTS, label=[0, 1, 0, 1])).bind(Nothing())


def test_settings_tell_tasks_apart():
    rows = make_rows(text=TEXTS, title=TEXTS, label=[0, 1, 0, 1])
    one, other = (build_task("classify", rows, text=name).settings for name in ("text", "title"))
    assert one != other
    others = make_rows(text=TEXTS, title=TEXTS, label=[0, 1, 0, 2])
    assert build_task("classify", rows, text="text").settings == one
    assert build_task("classify", others, text="text").settings != one
