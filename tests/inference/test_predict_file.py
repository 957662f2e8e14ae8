"""Files: every row comes back once, as it was, with its prediction; or nothing is written."""

import csv
import errno
import json
import logging
import os

import pytest
import torch
from pyarrow import parquet

from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import DataError
from trimtab.inference.classify import classify_texts, regress_texts
from trimtab.inference.generate import generate_texts
from trimtab.inference.load import LoadedModel
from trimtab.inference.predict_file import predict_file, predict_lines
from trimtab.model.load import load_model

ODD = ['with, comma and "quotes"', "two\nlines", "Grüße 漢字", "  spaces  ", "plain"]


def loaded_of(task="classify", facts=None, **head):
    tok = tokenizer()
    if task in ("causal-lm", "chat"):
        model = load_model(config_of("gpt2"), "causal-lm", {}, tok)
        tools = "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}"
        tok.chat_template = tools + "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}"
    else:
        head = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}} | head
        model = load_model(config_of("bert"), "sequence-classification", head, tok)
    for parameter in model.parameters():
        parameter.data *= 5
    if hasattr(model, "classifier"):  # so that texts get different labels
        with torch.no_grad():
            model.classifier.bias -= model(**batch_of(ODD + TEXTS, tok)).logits.mean(0)
    return LoadedModel(model, tok, task, facts or {})


def write_csv(path, rows, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def read_csv(path, delimiter=","):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_rows_come_back_as_they_were(tmp_path, suffix):
    rows = [[f"{i:03}", ODD[i % 5], "1.50", ""] for i in range(17)]
    source = write_csv(tmp_path / "in.csv", [["id", "text", "price", "note"], *rows])
    target = tmp_path / f"out.{suffix}"
    loaded = loaded_of()
    assert predict_file(loaded, source, target, batch_size=4) == 17
    found = read_jsonl(target) if suffix == "jsonl" else read_csv(target, "," if suffix == "csv" else "\t")
    assert [[row["id"], row["text"], row["price"], row["note"]] for row in found] == rows
    wanted = classify_texts(loaded, [row[1] for row in rows])
    assert [row["prediction"] for row in found] == [p.label for p in wanted]
    assert [float(row["score"]) for row in found] == pytest.approx([p.score for p in wanted], abs=1e-5)
    assert {row["prediction"] for row in found} == {"bad", "good"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", target.name]


def test_formulas_of_spreadsheets(tmp_path):
    texts = ["=1+1", "+a", "-a", "@a", "\tb", "-1.5", "a = b"]
    source = write_csv(tmp_path / "in.csv", [["text", "=x"], *([text, "1"] for text in texts)])
    loaded = loaded_of()
    predict_file(loaded, source, tmp_path / "plain.csv")
    assert [row["text"] for row in read_csv(tmp_path / "plain.csv")] == texts
    predict_file(loaded, source, tmp_path / "safe.csv", safe_csv=True)
    found = read_csv(tmp_path / "safe.csv")
    assert [row["text"] for row in found] == ["'=1+1", "'+a", "'-a", "'@a", "'\tb", "-1.5", "a = b"]
    assert "'=x" in found[0]
    with pytest.raises(DataError, match="--safe-csv has no effect on .*out.jsonl"):
        predict_file(loaded, source, tmp_path / "out.jsonl", safe_csv=True)


def test_jsonl_keeps_types(tmp_path):
    rows = [{"review": text, "n": i, "tags": ["a", i], "extra": None} for i, text in enumerate(TEXTS)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = loaded_of("regress", num_labels=1, id2label={0: "x"}, problem_type="regression")
    predict_file(loaded, source, tmp_path / "out.jsonl")
    found = read_jsonl(tmp_path / "out.jsonl")
    values = [row.pop("prediction") for row in found]
    assert found == rows
    assert values == pytest.approx(regress_texts(loaded, TEXTS), abs=1e-5)


def test_text_files_and_generation(tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("\n".join(TEXTS[:3]))
    loaded = loaded_of("causal-lm")
    predict_file(loaded, source, tmp_path / "out.csv", max_new_tokens=5)
    found = read_csv(tmp_path / "out.csv")
    assert [row["text"] for row in found] == TEXTS[:3]
    assert [row["prediction"] for row in found] == generate_texts(loaded, TEXTS[:3], 5)


def test_several_labels_and_taken_names(tmp_path):
    loaded = loaded_of(problem_type="multi_label_classification")
    source = write_csv(tmp_path / "in.csv", [["text", "prediction"], *([text, "old"] for text in TEXTS)])
    predict_file(loaded, source, tmp_path / "out.csv")
    predict_file(loaded, source, tmp_path / "out.jsonl")
    found = read_csv(tmp_path / "out.csv")
    assert {row["prediction"] for row in found} == {"old"}
    labels = [list(p.label) for p in classify_texts(loaded, TEXTS)]
    assert [row["prediction_2"] for row in found] == ["; ".join(names) for names in labels]
    assert [row["prediction_2"] for row in read_jsonl(tmp_path / "out.jsonl")] == labels


@pytest.mark.parametrize(
    ("header", "facts", "text", "columns"),
    [
        (["id", "sentence"], {}, None, ["sentence"]),
        (["id", "premise", "hypothesis"], {}, None, ["premise", "hypothesis"]),
        (["text", "body"], {"columns": {"text": "body"}}, None, ["body"]),
        (["text", "body"], {"recipe": {"data": {"text": ["body", "text"]}}}, None, ["body", "text"]),
        (["text", "body"], {"columns": {"text": "body"}}, "text", ["text"]),
        (["anything"], {}, None, ["anything"]),
    ],
)
def test_the_text_column(tmp_path, caplog, header, facts, text, columns):
    caplog.set_level(logging.INFO, logger="trimtab")
    rows = [[f"{name} {TEXTS[i]}" for name in header] for i in range(4)]
    source = write_csv(tmp_path / "in.csv", [header, *rows])
    loaded = loaded_of(facts=facts)
    predict_file(loaded, source, tmp_path / "out.csv", text=text)
    is_guess = text is None and not facts and len(header) > 1
    assert (f"text from column {' and '.join(columns)} (guessed" in caplog.text) == is_guess
    inputs = [tuple(row[header.index(name)] for name in columns) for row in rows]
    wanted = classify_texts(loaded, inputs)
    found = read_csv(tmp_path / "out.csv")
    assert [float(row["score"]) for row in found] == pytest.approx([p.score for p in wanted], abs=2e-5)


@pytest.mark.parametrize(
    ("row", "facts", "asked"),
    [
        ({"prompt": "the cat?"}, {}, "<user> the cat?"),
        ({"instruction": "sort", "input": "3 1 2", "output": "1 2 3"}, {}, "<user> sort\n\n3 1 2"),
        ({"instruction": "sort", "input": "", "output": "1"}, {}, "<user> sort"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 1},
            {},
            "<user> a",
        ),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 1}, {}, "<user> a"),
        ({"q": "a", "s": "be brief"}, {"columns": {"prompt": "q", "system": "s"}}, "<system> be brief<user> a"),
        (
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "weather"}]},
            {"columns": {"messages": "messages", "tools": "tools"}},
            "weather <user> a",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "weather"}]}, {}, "weather <user> a"),
        ({"messages": [{"role": "user", "content": "a"}], "id": 1}, {"columns": {"prompt": "question"}}, "<user> a"),
        ({"prompt": "a", "id": 1}, {"columns": {"messages": "conversations"}}, "<user> a"),
    ],
)
def test_chat_rows(tmp_path, row, facts, asked):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(row) + "\n")
    loaded = loaded_of("chat", facts)
    seen = []
    loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(loaded.tokenizer.decode(kwargs["input_ids"][0])), with_kwargs=True
    )
    predict_file(loaded, source, tmp_path / "out.jsonl", max_new_tokens=2)
    assert seen[0] == asked
    assert json.loads((tmp_path / "out.jsonl").read_text()).items() >= row.items()


def test_mistakes_name_the_place_and_write_nothing(tmp_path):
    loaded = loaded_of()
    good = write_csv(tmp_path / "good.csv", [["text"], ["fine"]])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": 1, "text": "fine"}\n{"id": 2, "text": ["a"]}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2: column 'text' contains a list"):
        predict_file(loaded, bad, tmp_path / "out.csv")
    with pytest.raises(DataError, match=r"(?s)has no column 'txt'; the columns are text.*--column NAME"):
        predict_file(loaded, good, tmp_path / "out.csv", text="txt")
    with pytest.raises(DataError, match="no column that is recognized as the text; the columns are a, b"):
        predict_file(loaded, write_csv(tmp_path / "ab.csv", [["a", "b"], ["x", "y"]]), tmp_path / "out.csv")
    with pytest.raises(DataError, match="takes 2 column"):
        predict_file(loaded, tmp_path / "ab.csv", tmp_path / "out.csv", text=["a", "b", "a"])
    with pytest.raises(DataError, match="has no rows"):
        predict_file(loaded, write_csv(tmp_path / "none.csv", [["text"]]), tmp_path / "out.csv")
    with pytest.raises(DataError, match="cannot be written to"):
        predict_file(loaded, good, tmp_path / "out.xlsx")
    with pytest.raises(DataError, match="is also the input"):
        predict_file(loaded, good, good)
    with pytest.raises(DataError, match="the folder of .* does not exist"):
        predict_file(loaded, good, tmp_path / "nowhere" / "out.csv")
    with pytest.raises(DataError, match="cannot be read"):
        predict_file(loaded, tmp_path / "missing.csv", tmp_path / "out.csv")
    assert not list(tmp_path.glob("out*"))
    assert not list(tmp_path.glob(".out*"))


def test_an_output_is_replaced_only_if_asked_and_if_all_went_well(tmp_path, monkeypatch):
    source = write_csv(tmp_path / "in.csv", [["text"], ["fine"]])
    target = tmp_path / "out.csv"
    target.write_text("older")
    with pytest.raises(DataError, match=r"(?s)out\.csv exists.*--overwrite"):
        predict_file(loaded_of(), source, target)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"(?s)out\.csv cannot be written: no space left.*free space on that disk"):
            predict_file(loaded_of(), source, target, overwrite=True)
    assert target.read_text() == "older"
    assert not list(tmp_path.glob(".out*"))
    predict_file(loaded_of(), source, target, overwrite=True)
    assert read_csv(target)[0]["text"] == "fine"


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_rows_without_a_text_get_no_prediction(tmp_path, caplog, suffix):
    caplog.set_level(logging.INFO, logger="trimtab")
    texts = [TEXTS[0], "", TEXTS[1], "  ", None]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    loaded, target = loaded_of(), tmp_path / f"out.{suffix}"
    assert predict_file(loaded, source, target) == 5
    read = {"csv": read_csv, "jsonl": read_jsonl, "parquet": lambda path: parquet.read_table(path).to_pylist()}[suffix]
    labels = [row["prediction"] for row in read(target)]
    wanted = [p.label for p in classify_texts(loaded, TEXTS[:2])]
    nothing = "" if suffix == "csv" else None
    assert labels == [wanted[0], nothing, wanted[1], nothing, nothing]
    assert "3 of 5 rows have no text and get no prediction; the first: " in caplog.text
    assert "in.jsonl, line 2" in caplog.text


def test_empty_files_pairs_and_chats(tmp_path):
    source = write_csv(tmp_path / "in.csv", [["id", "text"], ["1", ""]])
    predict_file(loaded_of(), source, tmp_path / "out.csv")
    assert read_csv(tmp_path / "out.csv") == [{"id": "1", "text": "", "prediction": "", "score": ""}]
    pairs = write_csv(tmp_path / "pairs.csv", [["premise", "hypothesis"], ["a", "b"], ["a", ""]])
    predict_file(loaded_of(), pairs, tmp_path / "pairs-out.csv")
    assert [bool(row["prediction"]) for row in read_csv(tmp_path / "pairs-out.csv")] == [True, False]
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "hello", "id": 1}\n{"prompt": "", "id": 2}\n')
    predict_file(loaded_of("chat"), chats, tmp_path / "chats-out.jsonl", max_new_tokens=2)
    assert [row["prediction"] is None for row in read_jsonl(tmp_path / "chats-out.jsonl")] == [False, True]


def test_class_probabilities(tmp_path):
    source = write_csv(tmp_path / "in.csv", [["text", "probability_bad"], *([text, "old"] for text in TEXTS)])
    loaded = loaded_of()
    predict_file(loaded, source, tmp_path / "out.csv", probabilities=True)
    wanted = classify_texts(loaded, TEXTS)
    found = read_csv(tmp_path / "out.csv")
    assert [row["probability_bad"] for row in found] == ["old"] * len(TEXTS)
    rounding = 0.5e-6 + 4 * torch.finfo(torch.float32).eps  # six places are written
    for name, column in (("bad", "probability_bad_2"), ("good", "probability_good")):
        assert [float(row[column]) for row in found] == pytest.approx([p.scores[name] for p in wanted], abs=rounding)
    writes = loaded_of("causal-lm")
    with pytest.raises(DataError, match="has no class probabilities"):
        predict_file(writes, source, tmp_path / "other.csv", probabilities=True)


def test_parquet_of_mixed_columns(tmp_path):
    rows = [{"text": text, "n": value} for text, value in zip(TEXTS, [1, "two", None], strict=False)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict_file(loaded_of(problem_type="multi_label_classification"), source, tmp_path / "out.parquet")
    found = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert found["n"] == ["1", "two", None]
    assert all(isinstance(labels, list) for labels in found["prediction"])


def test_lines_of_standard_input():
    loaded = loaded_of()
    found = [json.loads(line) for line in predict_lines(loaded, f"{TEXTS[0]}\n\n{TEXTS[1]}\n").splitlines()]
    assert [row["text"] for row in found] == TEXTS[:2]
    assert [row["prediction"] for row in found] == [p.label for p in classify_texts(loaded, TEXTS[:2])]
    with pytest.raises(DataError, match="standard input has no rows"):
        predict_lines(loaded, "\n")
    odd = predict_lines(loaded, "one\u2028half\r\ntwo\n").split("\n")  # a character that only looks like a line end
    assert [json.loads(line)["text"] for line in odd if line] == ["one\u2028half", "two"]


def test_what_parquet_or_the_disk_does_not_take(tmp_path):
    source = tmp_path / "in.jsonl"
    for value in ("100000000000000000000000000000", "{}"):
        source.write_text(f'{{"text": "good", "n": {value}}}\n')
        with pytest.raises(DataError, match="cannot be written as parquet"):
            predict_file(loaded_of(), source, tmp_path / "out.parquet")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        predict_file(loaded_of(), source, tmp_path / "folder.csv", overwrite=True)
    assert not list(tmp_path.glob("*out*"))
