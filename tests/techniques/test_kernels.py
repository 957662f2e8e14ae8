"""Fused kernels in predictions and plans: what they read and write, and when `auto` takes them."""

import json
from pathlib import Path

import pytest

from trimtab import Recipe, predict_step_memory
from trimtab.errors import RecipeError
from trimtab.planner.decide import choose_row
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.search import Estimate
from trimtab.planner.shapes import OneLength, named_task
from trimtab.planner.target import known_target
from trimtab.techniques.apply import refusal

ROWS, LENGTH, WIDTH, INNER, NUM_BLOCKS = 2, 64, 128, 512, 3
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}
BERT = {"model_type": "bert", "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
BERT |= {"num_hidden_layers": 6, "vocab_size": 8000}


def test_what_the_kernels_read_and_write_is_counted():
    """A gated activation reads two tensors and writes one; its backward reads three and writes two."""
    step = predict_step_memory(LLAMA, "causal-lm", ROWS, LENGTH, gpu="h100", precision="bf16-pure", kernels="liger")
    wide = 2 * ROWS * LENGTH * INNER
    moved = {"forward": 0, "backward": 0}
    for op in step.trace.ops:
        if not op.flops and op.moved in (2 * wide, 3 * wide):
            moved[op.stage] += op.moved
    assert moved == {"forward": 3 * wide * NUM_BLOCKS, "backward": 5 * wide * NUM_BLOCKS}


def test_rotary_embeddings_are_one_operation_for_queries_and_one_for_keys():
    ops = {}
    for kernels in ("plain", "liger"):
        step = predict_step_memory(LLAMA, "causal-lm", ROWS, LENGTH, gpu="h100", precision="bf16-pure", kernels=kernels)
        ops[kernels] = [op.name for op in step.trace.ops]
    assert sum("cat" in name for name in ops["plain"]) >= 2 * NUM_BLOCKS  # halves of heads change places
    assert sum("cat" in name for name in ops["liger"]) <= 1


def planner_of(
    kernels="auto",
    compile="auto",
    config=BERT,
    gpu="h200",
    num_steps=100_000,
    length=128,
    task="classify",
    batch=8,
    **memory,
):
    recipe = Recipe(
        model={"config": config, "tokenizer": "train"},
        task=task,
        data={"train": "rows.jsonl"},
        train={"batch_size": batch, "compile": compile, "precision": "bf16", "max_steps": num_steps},
        memory={"kernels": kernels, **memory},
    )
    return RecipePlanner(recipe, named_task(recipe), known_target("h200", None), OneLength(length))


def prediction(kernels, compile):
    memory = {"padding": "none", "gradient_checkpointing": "none", "micro_batch": 8}
    planner = planner_of(kernels, compile, length=512, **memory)
    spec = planner.space.reference()
    return planner.prediction(spec), planner.estimate(spec)


def test_an_encoder_needs_less_memory_and_time():
    (plain, slow), (fused, fast) = prediction("plain", "capture"), prediction("fused", "capture")
    assert fused.allocated < plain.allocated
    assert fast.step_s < slow.step_s
    names = [op.name for op in fused.trace.ops]
    micro_batches = 2  # a captured step is traced with two
    for name, count in (("norm_of_sum", 2), ("bias_gelu", 1)):
        for direction in ("forward", "backward"):
            found = sum(f"{name}_{direction}" in other for other in names)
            assert found == micro_batches * count * BERT["num_hidden_layers"], (name, direction)


def test_the_peak_that_was_measured():
    """Of benchmarks/results/peers-bert-imdb-h200.json: the largest batch has 32 rows of 512 tokens."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "peers-bert-imdb-h200.json"
    (run,) = json.loads(results.read_text())["runs"]["trimtab"]
    assert (run["plan"]["kernels"], run["plan"]["compile"]) == ("fused", "capture")
    planner = planner_of("fused", "capture", {"model_type": "bert"}, batch=32, length=512, padding="none")
    found = planner.prediction(planner.space.reference()).allocated
    assert found == pytest.approx(run["peak_bytes"], rel=0.01)


@pytest.mark.parametrize("num_steps", [300, 1_000_000])
def test_auto_takes_the_kernels_of_encoders_in_captured_steps(num_steps):
    planner = planner_of(num_steps=num_steps)
    chosen = choose_row(planner, planner.choose()).spec
    assert (chosen["kernels"], chosen["compile"]) == ("fused", "capture")


def test_auto_takes_none_in_a_step_that_is_not_captured():
    planner = planner_of(num_steps=20)
    chosen = choose_row(planner, planner.choose()).spec
    assert (chosen["kernels"], chosen["compile"]) == ("plain", "off")


@pytest.mark.parametrize("compile", ["blocks", "graphs"])
def test_compiled_blocks_have_kernels_of_their_own(compile):
    planner = planner_of("fused", compile)
    assert "does not work with train.compile" in refusal(planner.space.reference(), planner.case)


def test_a_decoder_has_no_blocks_of_bert():
    with pytest.raises(RecipeError, match="has none"):
        planner_of("fused", "capture", config=LLAMA).space.reference()


@pytest.mark.parametrize(("fits", "expected"), [(True, "off"), (False, "capture")])
def test_small_micro_batches_decide_where_the_batch_does_not_fit(fits, expected, monkeypatch):
    """Micro-batches of a few rows take the time of Python, which graphs save."""
    planner = planner_of(config=LLAMA, task="causal-lm", kernels="plain")

    def estimate(spec):
        if refusal(spec, planner.case) is not None:
            return None
        python_s = 0.02 if spec["compile"] == "off" else 0.001
        computed_s = {"off": 0.1, "capture": 0.11, "graphs": 0.12}[spec["compile"]]
        step_s = max(computed_s, python_s * planner.batch_size / spec.micro_batch)
        return Estimate(fits or spec.micro_batch < planner.batch_size, 1, 1, {}, step_s, 1.0, 0.0, 1000)

    monkeypatch.setattr(planner, "estimate", estimate)
    values = {axis.technique.key: axis.values for axis in planner._narrowed_space.axes}
    assert values["compile"] == (expected,)
