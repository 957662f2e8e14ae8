"""Peaks of trimtab's own step, measured on a GPU and predicted without one: levers, optimizers, formats, adapters."""

import importlib.util
import statistics
from pathlib import Path

import pytest

from trimtab.errors import MissingDependency
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.shapes import OneLength, named_task
from trimtab.planner.target import known_target
from trimtab.recipe.schema import Recipe

ACCURACY = Path(__file__).parents[2] / "benchmarks" / "planner" / "accuracy.py"
spec = importlib.util.spec_from_file_location("planner_accuracy", ACCURACY)
accuracy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(accuracy)

ROWS = [row for row in accuracy.golden_rows() if row.file == "h200-own"]
PREDICTED = [row for row in ROWS if row.name not in accuracy.NOT_PREDICTED]
# Each of their choices is made by other rows too, so they are left to the slow run of the tests.
SLOW = {
    "own 1B, ladder: tf32",
    "own 1B, ladder: loss chunked + kernels",
    "own 1B, ladder: … + recompute all",
    "own 1B, ladder: … + adamw8bit",
    "own 1B, optimizers: adam",
    "own 1B, optimizers: adam8bit",
    "own 1B, optimizers: adagrad8bit",
    "own 8B, ladder: full, bf16",
    "own 8B, ladder: full, bf16-pure, adamw8bit",
    "own 8B, ladder: loss chunked",
    "own 8B, ladder: kernels liger",
    "own 8B, ladder: recompute ops",
    "own 8B, ladder: recompute all",
    "own 8B, ladder: qlora",
    "own 8B, ladder: loss chunked + kernels + recompute all",
    "own 8B, ladder: … + qlora, paged-adamw8bit",
    "own 8B, ladder: … + embeddings on the host",
    "own 8B, ladder: all of these, 16 rows at once",
    "own 8B, without flash: t4",
    "own 8B, 4 x 2048: embeddings on the device",
    "own 8B, 4 x 2048: embeddings on the host",
}


@pytest.fixture(scope="module")
def predictor():
    return accuracy.Predictor()


def error(row, outcome):
    return outcome.allocated / row.measured["allocated"] - 1


def marked(row):
    marks = [pytest.mark.slow] if row.name in SLOW else []
    return pytest.param(row, id=row.name.replace("…", "and"), marks=marks)


@pytest.mark.parametrize("row", [marked(row) for row in PREDICTED])
def test_the_peak_is_the_measured_one(row, predictor):
    outcome = predictor.predict(row)
    off = error(row, outcome)
    if row.name in accuracy.KNOWN:  # one that has become good must be taken off the list
        figure, why = accuracy.KNOWN[row.name]
        assert abs(off - figure) < 0.002, f"{off:+.2%}; was off by {figure:+.2%} because {why}"
    else:
        assert -accuracy.MOST_BELOW <= off <= accuracy.MOST_ABOVE, f"{off:+.2%}"
    assert sum(outcome.parts.values()) == outcome.allocated


@pytest.mark.parametrize("left_out", [SLOW, pytest.param(set(), marks=pytest.mark.slow)], ids=["quick", "all"])
def test_most_are_right_to_a_thousandth(predictor, left_out):
    rows = [row for row in PREDICTED if row.name not in left_out]
    errors = [abs(error(row, predictor.predict(row))) for row in rows]
    assert len(errors) >= 43 - len(left_out)
    assert left_out <= {row.name for row in PREDICTED}
    assert statistics.median(errors) <= 0.005
    assert sum(off > 0.001 for off in errors) <= 0.1 * len(PREDICTED)


@pytest.mark.parametrize(
    ("table", "agreement", "num_close"),
    [pytest.param("ladder", 0.85, 15, marks=pytest.mark.slow), ("4 x 2048", 0.65, 10)],
)
def test_the_faster_step_is_known(table, agreement, num_close, predictor):
    """Two machines that measured the same ladder agree with each other to 0.88; near ties are many."""
    rows = [row for row in PREDICTED if row.values["table"] == table and "host_op_s" in row.measured]
    pairs = [(row.measured["step_s"], predictor.predict(row).step_s) for row in rows]
    assert len(pairs) >= 10
    assert accuracy.order(pairs) >= agreement
    assert sum(abs(predicted / measured - 1) <= 0.25 for measured, predicted in pairs) >= num_close


@pytest.mark.parametrize("name", accuracy.NOT_PREDICTED)
def test_what_cannot_be_predicted_says_so(name, predictor):
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    (row,) = [row for row in ROWS if row.name == name]
    with pytest.raises(MissingDependency, match="liger"):
        predictor.predict(row)


# Rows of 120,000 tokens, QLoRA, measured on an H200 with 2 and with 32 layers: attention in backward is the peak.
LONG = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336}
LONG |= {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
LONG_LEVERS = {"padding": "longest", "offload_activations": "all", "tile_tokens": 1024, "offload": "embeddings"}
LONG_LEVERS |= {"kernels": "liger", "gradient_checkpointing": "all", "loss": "chunked", "stream_weights": "none"}


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "measured"), [(2, 14_271_447_552), (32, 18_283_295_232)])
def test_the_peak_of_a_row_of_120_000_tokens(num_layers, measured):
    recipe = Recipe(
        model={"config": LONG | {"num_hidden_layers": num_layers}, "tokenizer": "train"},
        task="causal-lm",
        data={"train": [{"text": "the film " * 200}], "eval_share": 0, "max_length": 120_000},
        train={"batch_size": 1, "precision": "bf16", "optimizer": "paged-adamw8bit", "compile": "off"},
        adapter={"kind": "qlora", "rank": 32},
        memory=LONG_LEVERS | {"update": "device", "micro_batch": 1},
    )
    lengths = OneLength(120_000, num_rows=1)
    planner = RecipePlanner(recipe, named_task(recipe), known_target("h200", None), lengths)
    predicted = planner.prediction(planner.space.reference()).allocated
    assert predicted == pytest.approx(measured, rel=0.001)
