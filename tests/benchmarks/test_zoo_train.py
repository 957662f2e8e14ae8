"""benchmarks/zoo_*.py: small models of every kind, what is tried on them, and the page that is made of the results."""

import importlib
import json
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("zoo_pairs", "zoo_table", "zoo_variants", "zoo_train")


pytestmark = pytest.mark.slow


@pytest.fixture
def zoo(monkeypatch):
    """Imports a module of the benchmark by its name without the prefix."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield lambda name: importlib.import_module(f"zoo_{name}")
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def pair_of(zoo, tmp_path, monkeypatch):
    """Makes pairs whose log does not reach other tests."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trimtab.log._logged_once", set())  # whatever other tests have logged
    logger = logging.getLogger("trimtab")
    before = logger.handlers[:], logger.level, logger.propagate
    variants = zoo("variants")
    tokenizer = variants.make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "pair").mkdir()
    yield lambda model, task: variants.Pair(model, task, tokenizer, tmp_path / "pair")
    logger.handlers[:], logger.level, logger.propagate = before


def line(model, task="causal-lm", plain=("ok",), **found):
    return {
        "model": model,
        "task": task,
        "found": {"plain": list(plain), **found},
        "seconds": 6.0,
        "versions": {"a": "1"},
    }


# ---------------------------------------------------------------------- small models


def test_a_small_model_has_every_kind_of_layer_of_the_large_one(zoo):
    shrunk = zoo("pairs").shrunk
    assert shrunk("gemma3_text")["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert shrunk("gemma3_text")["num_hidden_layers"] == 3
    assert shrunk("llama")["num_hidden_layers"] == 2
    assert shrunk("llama", 273)["vocab_size"] == 273
    heads = [
        (shrunk(name)["num_attention_heads"], shrunk(name).get("num_key_value_heads")) for name in ("llama", "mistral")
    ]
    assert heads == [(4, 4), (4, 2)]  # Llama's default has as many of both, Mistral's a quarter
    assert shrunk("mixtral")["num_local_experts"] == 4
    assert shrunk("qwen3_5")["text_config"]["hidden_size"] == 64


def test_pairs_are_those_of_transformers(zoo):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = zoo("pairs").pairs()
    assert {model for model, task in found if task == "causal-lm"} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(zoo("pairs").NAMED) <= set(found)
    assert set(zoo("pairs").KILLED) <= set(zoo("pairs").NAMED)
    assert len(zoo("pairs").KILLED) == 10


# ---------------------------------------------------------------------- results and page


def test_the_last_line_of_a_pair_counts(zoo, tmp_path):
    table, path = zoo("table"), tmp_path / "results.jsonl"
    for state in ("failed", "ok"):
        table.append_results(path, line("llama", fit=[state]))
    assert table.read_results(path)["llama", "causal-lm"]["found"]["fit"] == ["ok"]
    table.compact_results(path, [("gpt2", "causal-lm"), ("llama", "causal-lm")])
    assert [json.loads(text)["model"] for text in path.read_text().splitlines()] == ["gpt2", "llama"]
    assert table.read_results(path)["gpt2", "causal-lm"]["found"] == {}


def test_the_page_says_what_the_results_say(zoo):
    table = zoo("table")
    known = "padded: {} models need padding"
    lines = [
        line("llama", fit=["ok"], packed=["ok"], recompute=["ok", "not the same bits: x differs by 1.0e-07"]),
        line("mamba", fit=["ok"], packed=["fallback", known.format("mamba")], lora=["refused", "no | adapter\nat all"]),
        line("rwkv", fit=["failed", "over 9 s"], packed=["fallback", known.format("rwkv")]),
        line("git", plain=("failed", "ValueError: no pixels")),
        {"model": "xglm", "task": "causal-lm", "found": {}},
        line("bert", "classify", fit=["ok"], kill=["ok"]),
    ]
    page = table.render({(each["model"], each["task"]): each for each in lines})
    rows = {
        text.split(" | ")[0].strip("| "): text.strip("| ").split(" | ")[1:] for text in page.splitlines() if "|" in text
    }
    names = list(table.COLUMNS)
    assert rows["llama"][names.index("fit")] == "✓"
    assert rows["llama"][names.index("recompute")] == "✓ 1"
    assert rows["llama"][names.index("lora")] == "not run"
    assert rows["mamba"][names.index("packed")] == rows["rwkv"][names.index("packed")] == "fallback 2"
    assert rows["mamba"][names.index("lora")] == "✗ 3"
    assert rows["rwkv"][names.index("fit")] == "✗ 4"
    assert rows["bert"][names.index("chunked")] == "–"
    assert set(rows["xglm"]) == {"not run"}
    assert "git" not in rows
    assert "- git, causal-lm: ValueError: no pixels" in page
    assert "2. padded: these models need padding\n3. no / adapter at all\n4. over 9 s\n" in page
    assert rows["causal-lm"][:3] == ["5", "3", "2 ✓, 1 ✗"]
    assert rows["causal-lm"][2 + names.index("packed")] == "1 ✓, 2 fallback"
    assert "5 of 6 pairs were tried" in page
    assert "## Killed and resumed\n\n- bert, classify: ✓\n" in page


def test_the_page_is_made_of_the_stored_results(zoo):
    table, train = zoo("table"), zoo("train")
    results = table.read_results(train.RESULTS)
    text = table.PAGE.read_text(encoding="utf-8")
    assert text.partition(table.BEGIN)[2].partition(table.END)[0].strip() == table.render(results).strip()
    assert set(zoo("pairs").NAMED) <= {pair for pair, found in results.items() if found["found"]}


def test_results_of_variants_that_were_not_tried_again_stay(zoo):
    with_older = zoo("train").with_older
    older = line("llama", fit=["ok"], kill=["ok"], lora=["refused", "a reason"])
    found = with_older(line("llama", fit=["ok"], lora=["ok"]), older)["found"]
    assert found == {"plain": ["ok"], "fit": ["ok"], "kill": ["ok"], "lora": ["ok"]}
    failed = line("llama", fit=["failed", "a reason"])
    assert with_older(failed, older) == failed
    other = line("llama", fit=["ok"]) | {"versions": {"a": "2"}}
    assert with_older(other, older) == other


# ---------------------------------------------------------------------- what is tried


@pytest.mark.parametrize(
    ("model", "task", "variants"),
    [
        ("llama", "causal-lm", ("packed",)),
        ("bert", "classify", ("recompute",)),
        ("t5", "seq2seq", ("chunked",)),
    ],
)
def test_a_pair_is_trained_saved_loaded_and_compared(pair_of, model, task, variants):
    pair = pair_of(model, task)
    for name in ("plain", "fit", *variants):
        assert getattr(pair, name)() is None


def test_a_run_that_trains_something_else_is_found(pair_of, zoo):
    pair = pair_of("llama", "causal-lm")
    pair.plain()
    pair.fit()
    assert pair._is_reproducible
    some = next(iter(pair.reference.weights.values()))
    some += 1e-6
    with pytest.raises(zoo("variants").Differs, match="not the same bits"):
        pair.resume()
    pair.reference.evaluations[0] += 0.1
    pair._is_reproducible = False  # as if it drew a seed of its own
    with pytest.raises(zoo("variants").Differs, match="two equal runs differ"):
        pair.chunked()


def test_a_fallback_is_one_only_if_the_log_says_so(pair_of, zoo):
    pair = pair_of("t5", "seq2seq")
    pair.plain()
    pair.fit()
    with pytest.raises(zoo("variants").Fallback, match="padded: t5 models with a seq2seq-lm head"):
        pair.packed()
    shutil.rmtree(pair.out("packed"))
    with pytest.raises(zoo("variants").Differs, match="nothing says why"):  # the line is logged once in a process
        pair.packed()


@pytest.mark.parametrize(("ends", "reason"), [("sleep", "over 1 s"), ("die", "the process ended with -9")])
def test_a_variant_that_does_not_end_costs_one_pair(zoo, tmp_path, ends, reason):
    class Stuck(zoo("train").Server):
        def __init__(self):
            self._time_limit, self._folder = 1, tmp_path

        def _run_pair(self, model_type, task, variants, sink, folder):
            for what in (("plain", None), ("plain", ["ok"]), ("fit", None)):
                os.write(sink, json.dumps(what).encode() + b"\n")
            if ends == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    found = Stuck().try_pair("bert", "classify", ["plain", "fit", "lora"])
    assert found["found"] == {"plain": ["ok"], "fit": ["failed", reason]}


def test_pairs_that_are_not_tried_again(zoo):
    train = zoo("train")
    options = SimpleNamespace(retry=False, kill=False, variants=("plain", "fit", "chunked"))
    versions = {"versions": {name: train.version(name) for name in train.PACKAGES}}
    assert train.is_open(None, options)
    assert train.is_open({"model": "bert", "task": "classify", "found": {}}, options)
    assert train.is_open(line("llama", fit=["ok"]) | versions, options)  # no chunked loss yet
    assert not train.is_open(line("bert", "classify", fit=["ok"]) | versions, options)  # a classifier has none
    assert train.is_open(line("bert", "classify", fit=["ok"]), options)  # other versions
    refused = line("llama", fit=["ok"], chunked=["refused", "a reason"]) | versions
    assert not train.is_open(refused, options)
    assert train.is_open(refused, SimpleNamespace(**vars(options) | {"retry": True}))


@pytest.mark.slow
def test_the_models_that_are_fine_tuned_most_do_what_the_page_says(fork_server, zoo, tmp_path):
    """All of them with all techniques, ten with a real kill: about two minutes of one core."""
    found = tmp_path / "results.jsonl"
    words = ("--only", "@named", "--kill", "--quiet", "--results", str(found))
    child = fork_server.start_script(BENCHMARKS / "zoo_train.py", *words)
    assert child.wait(1800) == 0, child.said[-3000:]
    table = zoo("table")
    stored, now = table.read_results(zoo("train").RESULTS), table.read_results(found)
    assert set(now) == set(zoo("pairs").NAMED)
    for pair, result in now.items():
        states, wanted = ({name: words[0] for name, words in each["found"].items()} for each in (result, stored[pair]))
        assert states == wanted, pair
    assert sum("kill" in result["found"] for result in now.values()) == 10
