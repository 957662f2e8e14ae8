"""Rows that commands judge models on: the labels and columns are those of the model."""

import pytest
import torch

from tiny_models import KINDS, config_of, tokenizer
from tiny_runs import reviews, write_csv, write_jsonl
from trimtab.commands.held_out import held_out_of
from trimtab.data.rows import Rows
from trimtab.errors import DataError, ModelError, RecipeError
from trimtab.inference.held_out import quality_of, read_held_out
from trimtab.inference.load import LoadedModel
from trimtab.model.load import load_model

pytestmark = pytest.mark.usefixtures("own_folder")


def loaded_of(task="classify", name="bert", facts=None, **head):
    tok = tokenizer()
    kinds = {"masked-lm": "masked-lm", "regress": "sequence-classification"}
    model = load_model(config_of(name), kinds.get(task, KINDS[name]), head, tok)
    return LoadedModel(model.eval(), tok, task, facts or {})


def classifier(*names, problem_type="single_label_classification", **options):
    head = {"num_labels": len(names), "id2label": dict(enumerate(names)), "problem_type": problem_type}
    return loaded_of(**head, label2id={name: index for index, name in enumerate(names)}, **options)


def labels(held_out):
    return [held_out.tokens[row]["labels"].tolist() for row in range(len(held_out))]


def test_labels_are_numbered_as_in_the_model():
    loaded = classifier("good", "neutral", "bad")
    rows = [{"text": "fine", "label": "bad"}, {"text": "great", "label": "good"}]
    assert labels(read_held_out(loaded, rows)) == [2, 0]
    assert labels(read_held_out(loaded, rows[:1])) == [2]  # a file with one label is enough
    assert labels(read_held_out(loaded, [{"text": "fine", "label": 1}])) == [1]  # an index
    assert set(quality_of(loaded, read_held_out(loaded, rows))) > {"accuracy", "f1", "mcc"}
    with pytest.raises(
        DataError, match=r"row 2: label 'dull' .* of the 3 labels of the model \('good', 'neutral'"
    ) as e:
        read_held_out(loaded, [rows[0], {"text": "a", "label": "dull"}])
    assert e.value.cure == "correct it or remove the row"


def test_whole_numbers_are_names_before_they_are_indices():
    stars = classifier("1", "2", "3")
    assert labels(read_held_out(stars, [{"text": "fine", "label": value} for value in (3, "1", 2.0)])) == [2, 0, 1]
    with pytest.raises(DataError, match="label 0 "):
        read_held_out(stars, [{"text": "fine", "label": 0}])
    unnamed = classifier("LABEL_0", "LABEL_1")
    assert labels(read_held_out(unnamed, [{"text": "fine", "label": "1"}])) == [1]


def test_class_indices_of_a_dataset_are_read_by_name():
    columns = {"text": ["a", "b", "c"], "label": [0, 1, 1]}
    rows = Rows(columns, "data", {"label": ["good", "bad"]})
    assert labels(read_held_out(classifier("bad", "good"), rows)) == [1, 0, 0]
    assert labels(read_held_out(classifier("LABEL_0", "LABEL_1"), rows)) == [0, 1, 1]


def test_several_labels_per_row():
    loaded = classifier("sad", "long", "new", problem_type="multi_label_classification")
    rows = [{"text": "a", "tags": ["new", "sad"]}, {"text": "b", "tags": []}]
    assert labels(read_held_out(loaded, rows, label="tags")) == [[1, 0, 1], [0, 0, 0]]
    flags = [{"text": "a", "new": 1, "sad": 0, "long": 1}]
    assert labels(read_held_out(loaded, flags)) == [[0, 1, 1]]
    with pytest.raises(DataError, match="single labels, but the model predicts several"):
        read_held_out(loaded, [{"text": "a", "label": "sad"}])
    with pytest.raises(DataError, match="lists, but the model predicts one"):
        read_held_out(classifier("sad", "new"), rows, label="tags")
    with pytest.raises(DataError, match="one column per label"):
        read_held_out(loaded, flags, label=["new", "sad"])


def test_columns_of_the_recipe_are_used_where_they_exist():
    facts = {"recipe": {"data": {"train": "x.csv", "text": "body", "label": "verdict"}}}
    loaded = classifier("bad", "good", facts=facts)
    row = {"text": "no", "label": "bad", "body": "a long body", "verdict": "good"}
    held_out = read_held_out(loaded, [row])
    assert held_out.task.columns == {"text": "body", "label": "verdict"}
    held_out = read_held_out(loaded, [{"text": "no", "label": "bad"}])
    assert held_out.task.columns == {"text": "text", "label": "label"}
    held_out = read_held_out(loaded, [row], text="text")
    assert held_out.task.columns == {"text": "text", "label": "verdict"}


def test_columns_that_training_has_guessed():
    facts = {"recipe": {"data": {"train": "x.csv", "text": None}}, "columns": {"text": ["a", "b"], "label": "verdict"}}
    loaded = classifier("bad", "good", facts=facts)
    row = {"a": "one", "b": "two", "c": "three", "verdict": "good"}
    assert read_held_out(loaded, [row]).task.columns == {"text": ["a", "b"], "label": "verdict"}


def test_columns_of_texts_to_generate():
    loaded = loaded_of("seq2seq", "t5")
    held_out = read_held_out(loaded, [{"en": "the cat", "de": "die Katze"}], text="en", label="de")
    assert held_out.task.columns == {"text": "en", "target": "de"}
    chat = loaded_of("chat", "gpt2")
    chat.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    held_out = read_held_out(chat, [{"q": "the cat", "a": "sat"}], text="q", label="a")
    assert held_out.task.columns["answer"] == "a"


def run_facts(path, **settings):
    data = {"train": str(path), "text": "text"} | settings
    return {"recipe": {"model": "tiny", "task": "classify", "data": data}}


def test_rows_of_the_run(own_folder):
    path = write_csv(own_folder / "reviews.csv", reviews(60))
    loaded = classifier("good", "bad", facts=run_facts(path, eval_share=0.25))  # not the order of the file
    held_out = held_out_of(loaded)
    assert len(held_out) == 15
    assert labels(held_out) == [["good", "bad"].index(name) for name in held_out.rows.columns["label"]]
    assert len(held_out_of(loaded, num_rows=4)) == 4
    other = write_jsonl(own_folder / "other.jsonl", reviews(5))
    assert len(held_out_of(loaded, other)) == 5
    assert torch.is_tensor(held_out.tokens[0]["input_ids"])


def test_no_rows_to_judge_on(own_folder):
    with pytest.raises(RecipeError, match="was not trained by trimtab") as e:
        held_out_of(classifier("good", "bad"))
    assert "pass a file" in e.value.cure
    with pytest.raises(RecipeError, match="columns were given, but no data"):
        held_out_of(classifier("good", "bad"), text="body")
    path = write_csv(own_folder / "reviews.csv", reviews(20))
    with pytest.raises(RecipeError, match="held out no rows"):
        held_out_of(classifier("good", "bad", facts=run_facts(path, eval_share=0)))
    with pytest.raises(DataError, match="held-out rows of the run cannot be read"):
        held_out_of(classifier("good", "bad", facts=run_facts("gone.csv")))


def test_an_empty_recipe_is_none_and_a_damaged_one_is_refused(own_folder):
    path = write_csv(own_folder / "reviews.csv", reviews(8))
    for facts in ({"recipe": None}, {"recipe": {"data": None}}, {"recipe": None, "columns": None}):
        assert len(held_out_of(classifier("good", "bad", facts=facts), path)) == 8
        assert len(held_out_of(loaded_of("masked-lm", facts=facts), path)) == 8
    with pytest.raises(RecipeError, match="the held-out rows of this model are unknown"):
        held_out_of(classifier("good", "bad", facts={"recipe": None}))
    for facts in ({"recipe": ["data"]}, {"recipe": {"data": "reviews.csv"}}, {"columns": "text"}):
        with pytest.raises(ModelError, match=r"trimtab.json of the model is damaged[\s\S]*restore"):
            held_out_of(classifier("good", "bad", facts=facts), path)
