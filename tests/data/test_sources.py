"""Every kind of source becomes the same rows, and everything that can be wrong with one names its place and a cure."""

import contextlib
import csv
import gzip
import itertools
import json
from pathlib import Path

import datasets
import pandas
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.build.data import build_data
from trimtab.data import folders, streams
from trimtab.data.rows import RowLocations, concatenate
from trimtab.data.sources import Rows, _slice_range, held_out_split, hold_out_rows, load_rows
from trimtab.data.streams import StreamNeed
from trimtab.data.tasks.build import build_task
from trimtab.errors import DataError
from trimtab.recipe.schema import Recipe

RECORDS = [{"text": "good, really", "label": 1}, {"text": 'he said "no"\nand left', "label": 0}]
COLUMNS = {"text": [record["text"] for record in RECORDS], "label": [1, 0]}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str | bytes):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def error_of(source, **options) -> str:
    with pytest.raises(DataError) as caught:
        load_rows(source, **options)
    assert caught.value.cure
    return str(caught.value)


CSV = 'text,label\n"good, really",1\n"he said ""no""\nand left",0\n'


def written_in_all_forms():
    write("a.csv", CSV)
    write("bom.csv", b"\xef\xbb\xbf" + CSV.encode())
    write("crlf.csv", 'text,label\r\n"good, really",1\r\n"he said ""no""\nand left",0\r\n')
    write("semicolons.csv", CSV.replace('",', '";').replace("text,label", "text;label"))
    write("spaced.csv", CSV.replace('",', '", ').replace("text,label", "text, label"))
    write("utf16.csv", CSV.encode("utf-16"))
    write("a.csv.gz", gzip.compress(CSV.encode()))
    write("a.tsv", 'text\tlabel\n"good, really"\t1\n"he said ""no""\nand left"\t0\n')
    write("a.jsonl", "".join(json.dumps(record) + "\n\n" for record in RECORDS))
    write("lines.json", "".join(json.dumps(record) + "\n" for record in RECORDS))
    write("a.json", json.dumps(RECORDS))
    write("columns.json", json.dumps(COLUMNS))
    write("wrapped.json", json.dumps({"data": RECORDS}))
    dataset = datasets.Dataset.from_dict(COLUMNS)
    pyarrow.parquet.write_table(dataset.data.table, "a.parquet")
    names = "a.csv bom.csv crlf.csv semicolons.csv spaced.csv utf16.csv a.csv.gz a.tsv a.jsonl lines.json a.json"
    with pyarrow.ipc.new_stream("a.arrow", dataset.data.table.schema) as file:  # as `datasets` writes them
        file.write_table(dataset.data.table)
    with pyarrow.ipc.new_file("b.arrow", dataset.data.table.schema) as file:
        file.write_table(dataset.data.table)
    files = {name: name for name in [*names.split(), "columns.json", "wrapped.json", "a.parquet", "a.arrow", "b.arrow"]}
    return files | {
        "dataset": dataset,
        "iterable dataset": dataset.to_iterable_dataset(),
        "one split": datasets.DatasetDict(test=dataset),
        "data frame": pandas.DataFrame(COLUMNS),
        "columns": COLUMNS,
        "generator": (record for record in RECORDS),
        "map style": type("MapStyle", (), {"__len__": lambda self: 2, "__getitem__": lambda self, i: RECORDS[i]})(),
    }


def test_all_forms_give_the_same_rows(said):
    sources = written_in_all_forms()
    assert len(sources) > 20
    for name, source in sources.items():
        rows = load_rows(source)
        assert rows.columns == COLUMNS, name
        assert rows.row(1) == RECORDS[1], name
        assert rows.names == ["text", "label"], name
        assert len(rows) == 2


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("a.csv", 'text,label\n\na,1\n"b\nb",2\nc,3\n', ["a.csv, line 3", "a.csv, line 4", "a.csv, line 6"]),
        ("a.jsonl", '\n{"text": "a"}\n\n{"text": "b"}', ["a.jsonl, line 2", "a.jsonl, line 4"]),
        ("a.json", '[{"text": "a"}, {"text": "b"}]', ["a.json, row 1", "a.json, row 2"]),
        ("sub/a.txt", "\n\na\nb\n \nc\n\n", ["sub/a.txt, line 3", "sub/a.txt, line 6"]),
    ],
)
def test_places_are_those_of_the_file(name, content, places, said):
    write(name, content)
    rows = load_rows(name)
    assert [rows.location(i) for i in range(len(rows))] == places
    picked = rows.select([len(rows) - 1, 0])
    assert [picked.location(0), picked.location(1)] == [places[-1], places[0]]
    assert picked.select([1]).location(0) == places[0]
    with pytest.raises(IndexError):
        rows.location(len(rows))


def test_rows_without_a_file_have_places_too():
    rows = load_rows([{"a": 1}, {"b": 2}, {"a": 3}])
    assert rows.columns == {"a": [1, None, 3], "b": [None, 2, None]}
    assert rows.select([2]).location(0) == "the rows given, row 3"
    assert load_rows({"a": [1, 2]}).location(1) == "the columns given, row 2"
    assert load_rows(["x", "y"]).columns == {"text": ["x", "y"]}
    assert load_rows(rows) is rows


def test_txt_is_cut_at_blank_lines_or_else_at_lines(said):
    write("poem.txt", "one\ntwo\r\n\n\nthree\n")
    write("lines.txt", "one\ntwo\nthree\n\n\n")
    assert load_rows("poem.txt").columns["text"] == ["one\ntwo", "three"]
    assert load_rows("lines.txt").columns["text"] == ["one", "two", "three"]
    assert [line.partition(" (")[0] for line in said] == ["poem.txt: 2 texts", "lines.txt: 3 texts"]
    assert len(load_rows("*.txt")) == 5
    assert len(said) == 3  # one line for a source, however many files


def test_characters_that_look_like_line_ends_stay_inside_a_text(said):
    text = "one\u2028two\x85three\x0bfour"
    write("a.jsonl", json.dumps({"text": text}, ensure_ascii=False) + "\n")
    write("a.csv", f"text,label\n{text},1\n")
    write("a.txt", f"{text}\nb")
    assert [load_rows(name).columns["text"][0] for name in ("a.jsonl", "a.csv", "a.txt")] == [text] * 3


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["1", "0"], [1, 0]),
        (["1", "", "NA"], [1, None, None]),
        (["1.5", "-2", "1e3"], [1.5, -2.0, 1000.0]),
        (["007", "1"], ["007", "1"]),
        (["1", "x"], ["1", "x"]),
        (["nan", "1"], [None, 1]),
        (["NA", "None"], ["NA", "None"]),
        (["1_000", "2"], ["1_000", "2"]),
        (["٣", "1"], ["٣", "1"]),
        (["True", "False"], ["True", "False"]),
    ],
)
def test_columns_of_numbers_become_numbers(written, read):
    write("a.csv", "n,t\n" + "".join(f"{value},x\n" for value in written))
    found = load_rows("a.csv").columns["n"]
    assert found == read
    assert [type(value) for value in found] == [type(value) for value in read]


def test_numbers_are_told_by_the_whole_column_of_all_files():
    write("a-1.csv", "label\n1\n2\n")
    write("a-2.csv", "label\nx\n")
    assert load_rows("a-*.csv").columns["label"] == ["1", "2", "x"]
    assert load_rows("a-2.csv").columns["label"] == ["x"]


def test_tab_separated_text_with_loose_quotes():
    """Quotes in such files are mostly letters; a reader that honours them joins these two lines to one row."""
    write("a.tsv", 'text\tlabel\n"Go\t1\nnow"\t0\n"a ""b"" c"\t1\n')
    assert load_rows("a.tsv").columns == {"text": ['"Go', 'now"', 'a "b" c'], "label": [1, 0, 1]}


def test_long_fields_and_the_limit_of_the_csv_module():
    before = csv.field_size_limit()
    write("a.csv", "text,label\n" + "x" * 200_000 + ",1\n")
    assert len(load_rows("a.csv").columns["text"][0]) == 200_000
    assert csv.field_size_limit() == before


BROKEN = [
    ("a.csv", "text,label\ngood,1\nbad\nfine,0\n", "a.csv, line 3: 1 field(s), but the header has 2 (text, label)", 2),
    ("a.csv", "text,label\ngood,1\nb,a,d\nfine,0\n", "a.csv, line 3: 3 field(s)", 2),
    ("a.csv", 'text,label\ngood,1\n"bad"x,1\nfine,0\n', "a.csv, line 3: invalid quotes", 2),
    ("a.csv", 'text,label\ngood,1\n"never closed,1\nfine,0\nmore,1\n', "a.csv, line 3: invalid quotes", 3),
    ("a.csv", b"text,label\ngood,1\nbad \xff,1\nfine,0\n", "a.csv, line 3: not UTF-8 (byte 0xff)", 2),
    ("a.tsv", "text\tlabel\ngood\t1\nbad\nfine\t0\n", "a.tsv, line 3: 1 field(s)", 2),
    ("a.jsonl", '{"text": "a"}\n{"text": \n{"text": "b"}\n', "a.jsonl, line 2: invalid JSON", 2),
    ("a.jsonl", '{"text": "a"}\n["b"]\n{"text": "b"}\n', "a.jsonl, line 2: a JSON list, expected", 2),
    ("a.jsonl", '{"text": "a"}\n{"text": "\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n', "line 2: half of a surrogate", 2),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "b"}\n', "a.jsonl, line 2: not UTF-8", 2),
    ("a.jsonl", '{"text": "a"}\n{"text": "b", "n": %s}\n{"text": "c"}\n' % ("1" * 5000), "2: a number with thousa", 2),
    ("a.jsonl", '{"text": "a"}\n{"text": %s}\n{"text": "c"}\n' % ("[" * 99_999), "line 2: JSON nested too deeply", 2),
    (
        "a.jsonl",
        '{"text": "a"}\n{"text": %s}\n{"text": "c"}\n' % ("[" * 500 + "]" * 500),
        "line 2: values are nested",
        2,
    ),
    ("a.json", '[{"text": "a"}, {"text": %s}, {"text": "c"}]' % ("[" * 500 + "]" * 500), "row 2: values are nested", 2),
    ("a.json", '[{"text": "a"}, 3, {"text": "b"}]', "a.json, row 2: a int, expected", 2),
    ("a.txt", b"a\n\n\xe9\nb\n\nc\n", "a.txt, line 3: not UTF-8", 2),
]


@pytest.mark.parametrize(("name", "content", "problem", "num_good"), BROKEN)
def test_broken_rows_stop_with_their_place_or_are_skipped_and_counted(name, content, problem, num_good, said):
    write(name, content)
    message = error_of(name)
    assert problem in message
    assert "data.on_bad_rows: skip" in message
    rows = load_rows(name, on_bad_rows="skip")
    assert len(rows) == num_good
    assert not any("\udc80" <= letter <= "\udcff" for text in rows.columns["text"] for letter in text)
    assert [line for line in said if f"{name}: skipped 1 bad row(s); the first: " in line]


def test_bad_items_of_an_iterable():
    assert "the rows given, row 2: a str, expected a dict" in error_of([{"a": 1}, "b"])
    assert len(load_rows([{"a": 1}, "b"], on_bad_rows="skip")) == 1
    assert "no rows: all 1 are bad and were skipped" in error_of([3], on_bad_rows="skip")


def endless(read, **columns):
    """Rows without an end, each of which is appended to the list `read`."""
    for number in itertools.count():
        if isinstance(read, list):
            read.append(number)
        yield {"text": f"row {number}", **{name: values[number % len(values)] for name, values in columns.items()}}


def built(source, **settings):
    return build_data(Recipe(model="none", data={"train": source} | settings.pop("data", {}), **settings))


def test_a_stream_is_read_as_far_as_the_steps_need(said):
    read = []
    labels = {"label": ("good", "bad")}
    dataset = datasets.IterableDataset.from_generator(endless, gen_kwargs={"read": (), **labels})
    built_rows = built(dataset, train={"max_steps": 3, "batch_size": 6})
    assert (len(built_rows.train), len(built_rows.eval)) == (18, 2)
    assert "the rows of the dataset given have no length: the first 20 are read, enough for train.max_steps: 3" in said
    held_out = {"data": {"eval": [{"text": "a", "label": "good"}]}}
    assert len(built(endless(read, **labels), train={"max_steps": 3, "batch_size": 6}, **held_out).train) == 18
    assert len(read) == 18, "not one more"
    read.clear()
    rows = built(endless(read), train={"max_steps": 1, "batch_size": 2}, data={"max_length": 4, "eval_share": 0}).train
    assert sum(map(len, rows.columns["text"])) >= 2 * 4 * 8, "texts are concatenated"
    assert len(rows) == len(read) < 20
    assert len(load_rows(iter(RECORDS), need=StreamNeed(5))) == 2


def test_a_stream_without_an_end_is_refused(said, monkeypatch):
    monkeypatch.setattr(streams, "_MAX_BYTES", 40_000)
    monkeypatch.setattr(streams, "_REPORTED_BYTES", 20_000)
    for source in (endless([]), (row["text"] for row in endless([])), ([row] for row in endless([]))):
        assert "have no length, and no end in sight: " in error_of(source)
    assert sum("are in memory, and reading goes on" in line for line in said) == 3
    with pytest.raises(DataError, match="with train.max_steps, only the rows that these steps need"):
        built(endless([], label=["good", "bad"]))
    assert len(load_rows([{"text": "a" * 50_000}])) == 1, "a list has a length"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "", "a.csv has no rows"),
        ("a.csv", "text,label\n", "a.csv has no rows"),
        ("a.csv", "text,text\na,b\n", "the header has text more than once"),
        ("a.txt", "\n \n", "a.txt has no rows"),
        ("a.jsonl", "\n", "a.jsonl has no rows"),
        ("a.json", '{"a": 3}', "a JSON object without rows"),
        ("a.json", '[{"a": 1},\n{"a" 2}]', "a.json, line 2: invalid JSON"),
        ("a.json", '[{"a": %s}]' % ("1" * 5000), "a.json: a number with thousands of digits"),
        ("a.json", "[" * 99_999, "a.json: JSON nested too deeply"),
        ("a.json", '{"a": [1], "b": [1, 2]}', "columns of different lengths (a: 1, b: 2)"),
        ("a.json", '{"a": [%s]}' % ("[" * 500 + "]" * 500), "a.json: values are nested in more than 100 levels"),
        ("a.arrow", b"ARROW1 but not really", "a.arrow is not a complete arrow file"),
        ("a.parquet", b"PAR1 but not really", "a.parquet is not a complete parquet file"),
        ("a.csv.gz", b"not gzip", "a.csv.gz is not a complete gzip file"),
        ("a.csv.gz", gzip.compress(b"text\na\n" * 100, mtime=0)[:-20], "a.csv.gz is not a complete gzip file"),
        ("a.xlsx", "x", "a.xlsx: unsupported file format"),
    ],
)
def test_files_that_cannot_be_used(name, content, problem, said):
    write(name, content)
    assert problem in error_of(name)


def test_a_number_of_thousands_of_digits_is_text():
    digits = "1" * 5000
    write("a.csv", f"text,label\na,1\nb,{digits}\n")
    rows = load_rows("a.csv")
    assert rows.columns["label"] == ["1", digits]
    assert build_task("classify", rows).head()["num_labels"] == 2


@pytest.mark.slow
def test_a_header_of_very_many_columns():
    """Linear in the number of columns: comparing each name with each other would take a quarter of an hour."""
    names = [f"c{index}" for index in range(200_000)]
    write("a.csv", ",".join(names) + "\n" + ",".join("x" * len(names)) + "\n")
    assert load_rows("a.csv").names == names
    write("a.csv", ",".join([*names, "c7"]) + "\n")
    assert "the header has c7 more than once" in error_of("a.csv")
    write("b.csv", ",text\n0,a\n")
    assert load_rows("b.csv").names == ["column_1", "text"]
    write("a.csv", ",".join(names) + "\nx\n")
    message = error_of("a.csv")
    assert "1 field(s), but the header has 200000 (c0, c1, " in message
    assert len(message) < 500


def test_too_few_rows_to_hold_some_out():
    with pytest.raises(DataError, match=r": 1 row, too few to hold some out\n  cure: .* data.eval_share: 0"):
        hold_out_rows(load_rows([{"text": "a"}]), 0.1, 0)


def test_what_is_not_there():
    write("reviews.csv", CSV)
    write("none.csv", CSV)
    assert "did you mean reviews.csv?" in error_of("review.csv")
    assert "did you mean reviews.csv?" in error_of("Reviews.tsv")
    assert "cure: check the path; relative paths start in" in error_of("nowhere.csv")
    assert "the folder nowhere does not exist" in error_of("nowhere/a.csv")
    assert "no file matches 'x*.csv'" in error_of("x*.csv")
    assert "cannot load rows from a int" in error_of(3)
    assert "'https://host/a.csv' is an address" in error_of("https://me:secret@host/a.csv")
    assert "'csv' is the name of a file format" in error_of("csv")
    assert "on_bad_rows is 'ignore'" in error_of("reviews.csv", on_bad_rows="ignore")


def test_slices():
    write("n.csv", "n\n" + "\n".join(map(str, range(10))) + "\n")
    cases = {"[:3]": [0, 1, 2], "[8:]": [8, 9], "[-2:]": [8, 9], "[2:4]": [2, 3], "[:20%]": [0, 1], "[50%:7]": [5, 6]}
    for text, found in cases.items():
        assert load_rows("n.csv" + text).columns["n"] == found, text
    assert load_rows("n.csv[8:]").location(0) == "n.csv, line 10"
    assert load_rows("*.csv[:1]").columns["n"] == [0]
    assert "n.csv[20:30] is empty" in error_of("n.csv[20:30]")
    assert "'x' is not a slice bound" in error_of("n.csv[x:]")
    assert "'120%' is not a slice bound" in error_of("n.csv[:120%]")
    write("odd[1:2].csv", "n\n7\n")
    assert load_rows("odd[1:2].csv").columns["n"] == [7]  # what exists under the whole name is taken


@settings(max_examples=50)
@given(st.integers(1, 500), st.floats(0, 100))
def test_slices_by_share_meet_without_gap_or_overlap(num_rows, percent):
    found = []
    for window in (("", f"{percent:.2f}%"), (f"{percent:.2f}%", "")):
        with contextlib.suppress(DataError):  # one of the two may be empty, which is an error
            found += _slice_range(num_rows, window, "x")
    assert found == list(range(num_rows))


def test_folders_and_patterns(said):
    write("d/b.csv", "text,label\nb,1\n")
    write("d/a.csv", "text,label\na,0\n")
    write("d/deep/c.csv", "label,text\n2,c\n")
    write("d/.hidden.csv", "x\n1\n")
    write("d/notes.md", "# no data")
    rows = load_rows("d")
    assert rows.columns == {"text": ["a", "b", "c"], "label": [0, 1, 2]}
    assert [rows.location(i) for i in range(3)] == ["d/a.csv, line 2", "d/b.csv, line 2", "d/deep/c.csv, line 2"]
    assert load_rows("d/?.csv").columns["text"] == ["a", "b"]
    assert load_rows(["d/b.csv", "d/a.csv"]).columns["text"] == ["b", "a"]
    assert said[-1] == "reading the 2 files that the list of strings names"
    write("d/z.csv", "")
    assert len(load_rows("d")) == 3  # an empty file adds nothing
    write("d/other.csv", "name\nx\n")
    assert "d/other.csv has the columns name, but d/a.csv has text, label" in error_of("d")
    write("d/x.txt", "text")
    assert "several formats" in error_of("d")
    write("e/train.csv", CSV)
    write("e/test.csv", CSV)
    assert "e has files of several splits: test.csv, train.csv" in error_of("e")
    assert error_of("e").endswith("for example e/train.csv")
    assert "without a split 'train'" in error_of("e:train")
    write("f/readme.md", "")
    assert "f has no data files" in error_of("f")


def test_texts_in_folders_named_after_their_labels(said):
    """The layout of IMDb's reviews."""
    for number in range(5):
        write(f"imdb/pos/{number}_9.txt", f"good {number}\n\nreally")
        write(f"imdb/neg/{number}_2.txt", f"bad {number}")
    write("imdb/urls.txt", "http://a")
    rows = load_rows("imdb")
    assert rows.columns["text"] == [*(f"bad {i}" for i in range(5)), *(f"good {i}\n\nreally" for i in range(5))]
    assert rows.columns["label"] == ["neg"] * 5 + ["pos"] * 5
    assert rows.location(6) == "imdb/pos/1_9.txt, text 1"
    assert "names of folders as labels: neg, pos; 1 other file(s) are not read" in said[0]
    assert len(load_rows("imdb[4:7]")) == 3
    write("imdb/pos/1_9.txt", b"\xff")
    assert "imdb/pos/1_9.txt, line 1: not UTF-8" in error_of("imdb")
    assert len(load_rows("imdb", on_bad_rows="skip")) == 9
    write("books/a/one.txt", "a\nb")
    write("books/b/two.txt", "c")
    assert load_rows("books").columns == {"text": ["a", "b", "c"]}  # single files are parts of a corpus


def test_lists_of_files():
    write("a.csv", CSV)
    write("b.csv", CSV)
    assert len(load_rows([Path("a.csv"), Path("b.csv")])) == 4
    assert "'nowhere.csv' is not a file" in error_of([Path("a.csv"), Path("nowhere.csv")])
    assert "given in Python, as a list" in error_of("<list given in Python>")


def test_a_whole_disk_is_not_read(said, monkeypatch):
    for number in range(30):
        write(f"d/{number:02}/a.txt", "x")
    assert len(load_rows("d")) == 30
    assert said[0] == "d: reading 30 files, from d/00/a.txt to d/29/a.txt"
    monkeypatch.setattr(folders, "_MAX_ENTRIES", 40)
    for source in ("d", "d/**/*.txt", "d/*/**/*.csv"):
        assert "d contains more than 40 files and folders" in error_of(source)
    assert len(load_rows("d/1*/*.txt")) == 10


def labelled_dataset():
    names = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": names, "tags": datasets.List(names), "n": datasets.Value("int32")}
    )
    return datasets.Dataset.from_dict(
        {"text": ["a", "b", "c"], "label": [0, 1, 0], "tags": [[0], [], [0, 1]], "n": [1, 2, 3]}, features=features
    )


def test_names_of_class_labels_are_kept(monkeypatch):
    dataset = labelled_dataset()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", ".")
    datasets.disable_progress_bars()
    dataset.to_parquet("a.parquet")
    dataset.save_to_disk("one")
    datasets.DatasetDict(train=dataset, test=dataset.select([1])).save_to_disk("both")
    datasets.enable_progress_bars()
    names = {"label": ["bad", "good"], "tags": ["bad", "good"]}
    sources = [dataset, dataset.with_format("torch"), dataset.to_iterable_dataset(), "a.parquet", "one", "both"]
    for source in sources:
        rows = load_rows(source)
        assert rows.label_names == names
        assert rows.columns["label"] == [0, 1, 0]
        assert rows.columns["tags"] == [[0], [], [0, 1]]
    assert load_rows("both:test").columns["text"] == ["b"]
    assert load_rows("both:train[1:]").columns["text"] == ["b", "c"]
    assert "both has no split 'dev'" in error_of("both:dev")
    assert rows.select([1]).label_names == names


def test_several_splits_need_a_choice():
    dataset = labelled_dataset()
    assert len(load_rows(datasets.DatasetDict(train=dataset, test=dataset.select([0])))) == 3
    assert "choose one of its splits: a, b" in error_of(datasets.DatasetDict(a=dataset, b=dataset))


def test_the_split_for_evaluation(monkeypatch, said):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", ".")
    dataset = labelled_dataset()
    both = datasets.DatasetDict(train=dataset, test=dataset.select([1]))
    assert load_rows(both, role="eval").columns["text"] == ["b"]
    assert "none named validation or valid" in error_of(datasets.DatasetDict(a=dataset, b=dataset), role="eval")
    three = datasets.DatasetDict(**both, validation=dataset.select([2]))
    assert load_rows(held_out_split(three), role="eval").columns["text"] == ["c"]
    assert said == ["data.eval is not set: using the split 'validation' of the datasets given"]
    datasets.disable_progress_bars()
    both.save_to_disk("both")
    datasets.enable_progress_bars()
    assert held_out_split("both") == "both:test"
    for source in (dataset, datasets.DatasetDict(train=dataset), "both:train", "both[:2]", [{"text": "a"}], "nowhere"):
        assert held_out_split(source) is None


class FakeHub:
    """Stands in for `datasets.load_dataset`."""

    def __init__(self, **found):
        self.found = found
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *name):
        self.asked.append(name)
        result = self.found.get("/".join(name).replace("/", "_") + ("_config" if len(name) > 1 else ""))
        if result is None:
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset {name[0]!r} doesn't exist on the Hub")
        if isinstance(result, Exception):
            raise result
        return result


def test_hub_names(monkeypatch):
    dataset = labelled_dataset()
    splits = datasets.DatasetDict(train=dataset, test=dataset.select([2]))
    for name in splits:
        splits[name]._split = datasets.NamedSplit(name)
    hub = FakeHub(
        imdb=splits,
        glue_mrpc_config=splits,
        own_set_config=None,
        own_set=splits,
        own_set_big_config=splits,
        gated=datasets.exceptions.DatasetNotFoundError("Dataset 'gated' is a gated dataset on the Hub."),
        many=ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']"),
    )
    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert load_rows("imdb").columns["text"] == ["a", "b", "c"]
    assert load_rows("imdb").label_names["label"] == ["bad", "good"]
    assert load_rows("imdb:test").location(0) == "imdb:test, row 1"
    assert load_rows("imdb[1:]").location(0) == "imdb:train, row 2"
    assert load_rows("own/set:train[:2]").columns["text"] == ["a", "b"]
    assert load_rows("own/set/big:test").columns["text"] == ["c"]
    hub.asked.clear()
    assert load_rows("glue/mrpc:train[-1:]").columns["text"] == ["c"]
    assert hub.asked == [("glue/mrpc",), ("glue", "mrpc")]
    assert "choose one of its splits: train, test" in error_of("imdb:dev")
    assert "hf auth login" in error_of("gated")
    assert "pick one among: ['a', 'b']" in error_of("many")
    assert "doesn't exist on the Hub" in error_of("immdb")


def test_the_hub_out_of_reach():
    message = error_of("some-owner/some-set:train")
    assert "Couldn't reach 'some-owner/some-set' on the Hub" in message
    assert "reviews.csv" in message


rows_to_split = st.lists(st.sampled_from("aaaabbc"), min_size=2, max_size=60)


@settings(max_examples=50)
@given(rows_to_split, st.floats(0.01, 0.99), st.integers(0, 5), st.booleans())
def test_a_split_is_pure_and_whole(labels, share, seed, by_label):
    rows = Rows({"label": labels, "n": list(range(len(labels)))}, "x")
    kept, taken = hold_out_rows(rows, share, seed, label="label" if by_label else None)
    again = hold_out_rows(rows, share, seed, label="label" if by_label else None)
    assert (kept, taken) == again
    assert min(len(kept), len(taken)) >= 1
    assert sorted(kept.columns["n"] + taken.columns["n"]) == rows.columns["n"]
    assert kept.columns["n"] == sorted(kept.columns["n"])
    wanted = min(max(round(len(labels) * share), 1), len(labels) - 1)
    if not by_label:
        assert len(taken) == wanted
    elif len(set(labels)) < len(labels):
        assert len(taken) <= wanted
        assert set(taken.columns["label"]) <= set(kept.columns["label"])
    assert taken.location(0) == f"x, row {taken.columns['n'][0] + 1}"


def test_a_split_by_label_keeps_the_shares():
    labels = ["a"] * 80 + ["b"] * 20
    _, taken = hold_out_rows(Rows({"label": labels}, "x"), 0.1, 0, label="label")
    assert sorted(taken.columns["label"]) == ["a"] * 8 + ["b"] * 2
    several = Rows({"label": [["a", "b"], ["a", "b"], [], [], [], []]}, "x")
    kept, taken = hold_out_rows(several, 0.5, 0, label="label")
    assert len(taken) == 3
    assert ["a", "b"] in kept.columns["label"]


def test_seeds_choose_other_rows():
    rows = Rows({"n": list(range(100))}, "x")
    assert len({tuple(hold_out_rows(rows, 0.1, seed)[1].columns["n"]) for seed in range(20)}) == 20


def test_labels_that_stand_once_are_never_split_off(said):
    rows = Rows({"label": [*range(50), 7]}, "x")
    kept, taken = hold_out_rows(rows, 0.2, 0, label="label")
    assert taken.columns["label"] == [7]
    assert 7 in kept.columns["label"]
    assert "1 rows held out instead of 10" in said[0]


def test_splits_that_cannot_be():
    for rows, share, label in ((1, 0.5, None), (5, 0.0, None), (5, 1.0, None), (5, 0.5, "label")):
        with pytest.raises(DataError):
            hold_out_rows(Rows({"n": list(range(rows))}, "x"), share, 0, label=label)


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(DataError, match="a: 1, b: 2"):
        Rows({"a": [1], "b": [1, 2]}, "x")
    assert len(concatenate([Rows({}, "x")], "y")) == 0
    assert RowLocations.of("x, line", [4])[0] == "x, line 4"
