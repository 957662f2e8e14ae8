"""Tokens come back as they went in, and the cache gives them again only where everything that made them is the same."""

import datetime
import pickle
from array import array
from dataclasses import dataclass

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data import fingerprint as fingerprint_module
from trimtab.data import tokens as tokens_module
from trimtab.data.fingerprint import FingerprintError, fingerprint
from trimtab.data.rows import RowLocations, Rows
from trimtab.data.tokens import TokenDataset, cached
from trimtab.errors import DataError

EXAMPLES = [
    {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": 1, "weight": 0.5},
    {"input_ids": [], "attention_mask": [], "labels": 0, "weight": 2},
    {"input_ids": [2**31 - 1], "attention_mask": [1], "labels": -100, "weight": 1.25},
]


def plain(dataset: TokenDataset) -> list[dict]:
    return [
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in dataset[i].items()}
        for i in range(len(dataset))
    ]


def test_examples_come_back_as_they_went_in():
    dataset = TokenDataset.from_examples(iter(EXAMPLES), num_truncated=2)
    assert plain(dataset) == [example | {"row": row} for row, example in enumerate(EXAMPLES)]
    assert dataset.lengths == [3, 0, 1]
    assert dataset.num_truncated == 2
    first = dataset[0]
    assert [first[name].dtype for name in ("input_ids", "labels", "weight")] == [
        torch.int32,
        torch.int32,
        torch.float32,
    ]
    assert first["labels"].shape == ()
    assert dataset[-1]["row"] == 2
    with pytest.raises(IndexError):
        dataset[3]


def test_a_row_is_a_view_of_one_flat_tensor():
    dataset = TokenDataset.from_examples(EXAMPLES)
    assert dataset[0]["input_ids"].data_ptr() == dataset.fields["input_ids"].data_ptr()
    assert dataset.offsets["input_ids"] is dataset.offsets["attention_mask"]  # one set of offsets for both


def test_lists_tensors_and_arrays_are_the_same():
    kinds = [list, tuple, numpy.array, torch.tensor, lambda v: array("i", v), lambda v: array("q", v)]
    found = [plain(TokenDataset.from_examples([{"input_ids": kind([1, 2]), "labels": 1}])) for kind in kinds]
    assert found == [found[0]] * len(kinds)
    floats = TokenDataset.from_examples(
        [{"labels": array("i", [1, 0])}, {"labels": [0, 0.5]}, {"labels": array("i", [1])}]
    )
    assert [row["labels"] for row in plain(floats)] == [[1.0, 0.0], [0.0, 0.5], [1.0]]


@pytest.mark.parametrize(
    ("examples", "error", "problem"),
    [
        ([{"input_ids": [1], "labels": 1}, {"input_ids": [1]}], ValueError, "has the fields"),
        ([{"input_ids": [1]}, {"input_ids": 1}], ValueError, "a list in some examples and a number"),
        ([{"input_ids": [2**31]}], OverflowError, None),
    ],
)
def test_examples_that_do_not_fit_together(examples, error, problem):
    with pytest.raises(error, match=problem):
        TokenDataset.from_examples(examples)
    with pytest.raises(ValueError, match="different numbers of examples"):
        TokenDataset({"a": torch.ones(2), "b": torch.ones(3)}, {})


rows = st.lists(
    st.tuples(
        st.lists(st.integers(-100, 2**31 - 1), max_size=5),
        st.lists(st.floats(width=32, allow_nan=False), max_size=3),
        st.integers(0, 9),
    ),
    max_size=6,
)


@settings(max_examples=25)
@given(rows, st.integers(0, 9))
def test_saved_and_loaded(tmp_path_factory, rows, num_truncated):
    path = tmp_path_factory.mktemp("tokens") / "a.safetensors"
    examples = [{"input_ids": ids, "scores": scores, "labels": label} for ids, scores, label in rows]
    dataset = TokenDataset.from_examples(examples, num_truncated=num_truncated)
    dataset.save(path)
    loaded = TokenDataset.load(path)
    assert plain(loaded) == plain(dataset)
    assert loaded.num_truncated == num_truncated
    assert list(loaded.fields) == list(dataset.fields)
    assert [path.name for path in path.parent.iterdir()] == ["a.safetensors"]


def test_worker_processes_get_the_same():
    dataset = TokenDataset.from_examples(EXAMPLES)
    assert plain(pickle.loads(pickle.dumps(dataset))) == plain(dataset)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other", "missing"])
def test_a_broken_file_is_refused(tmp_path, damage):
    path = tmp_path / "a.safetensors"
    TokenDataset.from_examples(EXAMPLES).save(path)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        from safetensors.torch import save_file

        save_file({"a": torch.ones(2)}, path)
    else:
        content[-1] ^= 1
        path.write_bytes({"cut": content[:-4], "flip": content, "empty": b""}[damage])
    with pytest.raises(DataError, match="is not a readable token file"):
        TokenDataset.load(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    dataset = TokenDataset.from_examples(EXAMPLES)
    dataset.save(path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(tokens_module.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        TokenDataset.from_examples(EXAMPLES[:1]).save(path)
    assert plain(TokenDataset.load(path)) == plain(dataset)
    assert [found.name for found in tmp_path.iterdir()] == ["a.safetensors"]


class Builder:
    """Counts how often it was asked."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        return TokenDataset.from_examples(EXAMPLES, num_truncated=self.num_calls)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_tokens_are_made_once(cache, monkeypatch):
    build = Builder()
    first, second = cached(["a", 1], build), cached(["a", 1], build)
    assert build.num_calls == 1
    assert plain(first) == plain(second)
    assert second.num_truncated == 1
    cached(["a", 2], build)
    monkeypatch.setenv("TRIMTAB_CACHE", "off")
    cached(["a", 1], build)
    assert build.num_calls == 3
    assert len(files(cache)) == 2


def test_a_broken_file_is_made_again(cache, said):
    build = Builder()
    cached(["a"], build)
    (path,) = files(cache)
    path.write_bytes(path.read_bytes()[:-1])
    assert cached(["a"], build).num_truncated == 2
    assert "tokenizing again" in said[0]
    assert cached(["a"], build).num_truncated == 2  # read from the mended file
    assert build.num_calls == 2


def test_the_environment_is_read_at_each_call(tmp_path, monkeypatch):
    build = Builder()
    for name in ("one", "two"):
        monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / name))
        cached(["a"], build)
    assert build.num_calls == 2
    monkeypatch.setenv("HOME", str(tmp_path))  # the default is in the home folder
    for value in (None, ""):
        monkeypatch.setenv("TRIMTAB_CACHE", value) if value is not None else monkeypatch.delenv("TRIMTAB_CACHE", False)
        cached(["a"], Builder())
    assert len(files(tmp_path / ".cache" / "trimtab")) == 1


def test_a_cache_that_cannot_be_used_costs_nothing_else(cache, said):
    build = Builder()
    for _ in range(2):
        cached([object()], build)
    assert build.num_calls == 2
    assert "tokens are not cached: a object cannot be hashed" in said[0]
    assert not cache.exists()
    cache.write_text("")  # a file where the folder should be
    assert len(cached(["a"], build)) == 3
    assert f"tokens are not cached in {cache}" in said[-1]


@dataclass(frozen=True)
class Settings:
    length: int


@dataclass(frozen=True)
class OtherSettings:
    length: int


# fmt: off
DIFFERENT = [
    None, True, 1, 1.0, "1", b"1", "", [], [1], ["1"], [[1]], ["1", ""], ["", "1"], [1, 2], [12], ["a", "bc"],
    ["ab", "c"], {"a": 1}, {"a": 2}, {"b": 1}, {1: "a"}, {"1": "a"}, {}, {"a": {"b": 1}}, [["a"], "b"], ["a", ["b"]],
    [2**70], [True], Settings(1), Settings(2), OtherSettings(1), {1, 2}, {1, 3}, datetime.date(2024, 1, 1), 0.1,
    float("nan"), torch.tensor([1]), torch.tensor([1.0]), torch.tensor([[1]]), numpy.int64(1), numpy.float32(1),
    "\ud800", "\ud801", Rows({"a": ["x"]}, "o"), Rows({"a": ["y"]}, "o"), Rows({"b": ["x"]}, "o"),
    Rows({"a": ["x"]}, "o", {"a": ["n"]}),
]
# fmt: on


def test_different_values_have_different_digests():
    digests = [fingerprint([value]) for value in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT) > 40
    assert fingerprint(["a", "b"]) != fingerprint([["a", "b"]]) != fingerprint(["ab"])
    assert digests == [fingerprint([value]) for value in DIFFERENT]


def test_what_changes_no_token_changes_no_digest():
    one = Rows({"a": ["x"], "b": [1]}, "one.csv", locations=RowLocations.of("one.csv, line", [7]))
    assert fingerprint([one]) == fingerprint([Rows({"b": [1], "a": ["x"]}, "two.csv")])
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])


def test_versions_and_code_are_part_of_the_digest(tmp_path, monkeypatch):
    before, versions = fingerprint(["a"]), fingerprint_module._versions()
    assert len(versions) == 4
    for index in range(len(versions)):
        changed = [*versions[:index], "other", *versions[index + 1 :]]
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint_module, "_versions", lambda changed=changed: changed)
            assert fingerprint(["a"]) != before
    (tmp_path / "tasks").mkdir()
    monkeypatch.setattr(fingerprint_module, "__file__", str(tmp_path / "fingerprint.py"))
    found = []
    for text in ("one", "two", "one"):
        (tmp_path / "tasks" / "classify.py").write_text(text)
        found.append(fingerprint_module._versions.__wrapped__())
    assert found[0] == found[2] != found[1]


def make_tokenizer(words=("a", "b"), **options):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", **options)


def test_a_tokenizer_is_known_by_its_content(tmp_path):
    digest = fingerprint([make_tokenizer()])
    assert fingerprint([make_tokenizer()]) == digest
    others = [
        make_tokenizer(words=("b", "a")),
        make_tokenizer(words=("a", "b", "c")),
        make_tokenizer(eos_token="a"),
        make_tokenizer(padding_side="left"),
        make_tokenizer(truncation_side="left"),
        make_tokenizer(model_max_length=7),
        make_tokenizer(chat_template="{{ messages }}"),
        make_tokenizer(split_special_tokens=True),
    ]
    added = make_tokenizer()
    added.add_tokens(["c"])
    lowered = make_tokenizer()
    from tokenizers import normalizers

    lowered.backend_tokenizer.normalizer = normalizers.Lowercase()
    digests = [fingerprint([other]) for other in [*others, added, lowered]]
    assert len({digest, *digests}) == len(digests) + 1


def test_using_or_moving_a_tokenizer_does_not_change_it(tmp_path):
    """A call leaves its truncation and padding in the backend; a second run would never find its tokens."""
    from transformers import AutoTokenizer

    make_tokenizer().save_pretrained(tmp_path / "one")
    make_tokenizer().save_pretrained(tmp_path / "two")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    before = fingerprint([tokenizer])
    serialized = tokenizer.backend_tokenizer.to_str()
    tokenizer(["a b a", "b"], truncation=True, max_length=2, padding=True)
    assert tokenizer.backend_tokenizer.to_str() != serialized
    assert fingerprint([tokenizer]) == before
    assert fingerprint([AutoTokenizer.from_pretrained(tmp_path / "two")]) == before


def test_tokenizers_written_in_python():
    from transformers import ByT5Tokenizer

    assert fingerprint([ByT5Tokenizer()]) == fingerprint([ByT5Tokenizer()])
    assert fingerprint([ByT5Tokenizer()]) != fingerprint([ByT5Tokenizer(extra_ids=3)])

    class Own:
        def get_vocab(self):
            return {}

    with pytest.raises(FingerprintError, match="content of the tokenizer .* cannot be read"):
        fingerprint([Own()])
