"""benchmarks/planner/zoo.py: models of the list that has to be traced, and how it counts and resumes."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "planner"
MODULES = ("zoo", "small_configs")
CAUSAL = (
    *("gpt2", "gpt_neox", "opt", "llama", "mistral", "mixtral", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma", "gemma2", "gemma3_text"),
    *("gemma4_text", "phi", "phi3", "phimoe", "falcon", "bloom", "mpt"),
    *("starcoder2", "olmo2", "olmoe", "granite", "cohere2", "deepseek_v2", "deepseek_v3"),
    *("gpt_oss", "glm4", "glm4_moe", "smollm3", "mamba2", "nemotron", "stablelm"),
)
QUICK = ("llama", "mixtral", "deepseek_v2", "gpt_oss")


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("zoo")
    for name in MODULES:
        sys.modules.pop(name)


@pytest.mark.parametrize(
    "model", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CAUSAL if name not in QUICK)]
)
def test_models_of_the_list_are_traced(zoo, model):
    pair = zoo.Pair(model, "causal-lm")
    assert pair in zoo.all_pairs()
    found = zoo.predict(pair)
    assert "reason" not in found
    weights = zoo.num_parameters(pair) * 16 / zoo.GIB  # in fp32, with gradients and two states of the optimizer
    assert found["gib"] > weights


def test_answers_are_counted_by_what_came_of_a_pair(zoo, tmp_path):
    path = tmp_path / "results.jsonl"
    lines = [
        {"model": "a", "task": "causal-lm", "gib": 1.0, "cpu_s": 0.1},
        {"model": "b", "task": "causal-lm", "not_built": "no size"},
        {"model": "c", "task": "causal-lm", "reason": "no kernel"},
        {"model": "d", "task": "classify", "reason": "no language"},
        {"model": "d", "task": "classify", "trains": "no language"},
        {"model": "e", "task": "classify", "reason": "no mask"},
        {"model": "e", "task": "classify", "gib": 9.0, "cpu_s": 6.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = zoo.read_results(path)
    summary = zoo.summary(results)
    assert "| causal-lm | 3 | 1 | 1 | 1 | 50.0% |" in summary
    assert "| all | 5 | 1 | 2 | 2 | 50.0% |" in summary
    assert "| d | classify | no language |" in summary.partition("small config")[2]
    assert "| e | classify | 6.0 |" in summary.partition("Slower")[2]
