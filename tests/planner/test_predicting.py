"""The memory of a step from its settings alone: the figures of measured rows, and what cannot be asked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import trimtab
from tiny_models import config_of
from trimtab.errors import ModelError, RecipeError
from trimtab.hardware.catalog import find
from trimtab.model import linear_cross_entropy
from trimtab.planner.allocator import CAP_STEP, replay
from trimtab.planner.memory import PARTS
from trimtab.planner.target import known_target

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]
TASKS = {
    "AutoModelForSequenceClassification": "classify",
    "AutoModelForCausalLM": "causal-lm",
    "AutoModelForSeq2SeqLM": "seq2seq",
    "AutoModelForMaskedLM": "masked-lm",
}


def rows(name):
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))["rows"]


PLAIN = [row for row in rows("h200-plain.json") if row["flash"] and row["config"]["model_type"] in ("bert", "t5")][:6]
SOME_PLAIN = [PLAIN[0], *(pytest.param(row, marks=pytest.mark.slow) for row in PLAIN[1:])]


@pytest.mark.parametrize("row", SOME_PLAIN, ids=lambda row: f"{row['config']['model_type']}-{row['precision']}")
def test_a_plain_loop_takes_what_was_measured(row):
    found = trimtab.predict_step_memory(
        row["config"],
        TASKS[row["head"]],
        row["rows"],
        row["length"],
        precision=row["precision"],
        optimizer=row["optimizer"],
        implementation=row["implementation"],
        gradient_checkpointing="all" if row["gradient_checkpointing"] else "none",
        mask=row["mask"],
        target_length=row["target_length"],
        code="transformers",
    )
    assert found.allocated == pytest.approx(row["measured"]["allocated"], rel=0.01)
    assert sum(found.parts.values()) == found.allocated
    assert set(found.parts) == set(PARTS)
    assert found.allocated <= found.needed <= found.reserved * 1.01
    assert found.total == found.needed + found.outside


@pytest.mark.parametrize(
    "name", ["qlora", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fp16", "recompute all"))]
)
def test_a_step_of_ours_takes_what_was_measured(name, monkeypatch):
    found = [row for row in rows("h200-own.json") if (row["recipe"], row["name"]) == ("llama-1b.yaml", name)]
    row = next(row for row in found if row["table"] == "ladder")
    from trimtab.recipe.load import load_recipe

    # as it was when the rows were measured
    monkeypatch.setattr(linear_cross_entropy, "kernels_of_chunks", lambda dtype, device: None)
    recipe = load_recipe(ROOT / "benchmarks" / "memory" / row["recipe"], {}, ["data.train=text.jsonl"]).recipe
    prediction = trimtab.predict_step_memory(
        recipe.model.config,
        "causal-lm",
        row["micro_batch_size"],
        row["length"],
        precision=row["precision"],
        optimizer=row["optimizer"],
        adapter=row["changes"].get("adapter", "none"),
        gradient_checkpointing=row["gradient_checkpointing"],
        loss=row["loss"],
        kernels=row["kernels"],
        offload=row["offload"],
    )
    assert prediction.allocated == pytest.approx(row["measured"]["allocated"], rel=0.01)
    heights = [moment.num_bytes for moment in prediction.timeline()]
    assert max(heights) == prediction.allocated
    assert {moment.stage for moment in prediction.timeline()} >= {"forward", "backward"}
    over_time = prediction.timeline(device=find("h200"))
    assert max(moment.num_bytes for moment in over_time) == prediction.allocated
    assert [moment.position for moment in over_time] == sorted(moment.position for moment in over_time)
    assert {moment.stage for moment in over_time} >= {"forward", "backward"}


def test_a_folder_with_a_config_is_enough(tiny):
    found = trimtab.predict_step_memory(tiny.folder("gpt2"), "causal-lm", 4, 64)
    assert found.parts["weights"] > 0


@pytest.mark.parametrize("code", ["trimtab", "transformers"])
def test_a_model_that_cannot_be_traced_is_said_so(code):
    """Rows of its experts are not aligned as the kernel demands."""
    experts = {"num_local_experts": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 4}
    config = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 126, "vocab_size": 100, **experts}
    with pytest.raises(ModelError, match=r"step cannot be traced \(RuntimeError"):
        trimtab.predict_step_memory(config, "causal-lm", 2, 16, precision="bf16", code=code)


def test_a_decoder_that_classifies_needs_no_tokenizer():
    assert trimtab.predict_step_memory(config_of("gpt2"), "classify", 4, 16).parts["weights"] > 0


def test_every_setting_counts():
    """Each moves the figure the way that it should."""
    config = {"model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 1000}

    def peak(**settings):
        settings = {"micro_batch": 8, "length": 512, "precision": "bf16"} | settings
        return trimtab.predict_step_memory(config, "causal-lm", **settings).allocated

    plain = peak()
    assert peak(micro_batch=16) > plain
    assert peak(length=1024) > plain
    assert peak(gradient_checkpointing="all") < plain
    assert peak(optimizer="sgd") < plain
    assert peak(adapter={"kind": "lora", "rank": 4}) < plain
    assert peak(num_micro_batches=2) > plain
    assert peak(precision="fp32") > plain
    assert peak(gpu="t4", precision="fp16", mask="padded") > peak(gpu="t4", precision="fp16")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mask": "half"}, "mask='half' is not valid"),
        ({"code": "jax"}, "code='jax' is not valid"),
        ({"implementation": "slow"}, "implementation='slow' is not valid"),
        ({"micro_batch": 0}, "micro_batch=0 is not a positive integer"),
        ({"micro_batch": 2.5}, "micro_batch=2.5 is not a positive integer"),
        ({"length": True}, "length=True is not a positive integer"),
        ({"target_length": 0}, "target_length=0 is not a positive integer"),
        ({"target_length": 8}, "task classify generates nothing"),
        ({"length": 5000}, "5000 tokens exceed the model's"),
        ({"offload": "embeddings"}, "the embeddings are trainable"),
        ({"gpu": None}, "gpu=None must be a string"),
        ({"offlod": "none"}, "did you mean offload"),
        ({"kernels": "liger"}, "liger has no kernel for BertForSequenceClassification"),
        ({"implementation": "foreach"}, "implementation has no effect"),
        ({"gpu": "voodoo2"}, "unknown device 'voodoo2'"),
        ({"precision": "fp7"}, "train.precision: found 'fp7'"),
        ({"loss": "auto"}, "'auto' needs a plan"),
        ({"kernels": "auto"}, "'auto' needs a plan"),
        ({"offload": "auto"}, "'auto' needs a plan"),
        ({"loss": None}, "memory.loss: found null"),
        ({"optimizer": None}, "train.optimizer: found null"),
        ({"code": "transformers", "adapter": "lora"}, "does not support adapter lora"),
        (
            {"code": "transformers", "gradient_checkpointing": {"every": 2}},
            "does not support gradient_checkpointing {every: 2}",
        ),
        ({"code": "transformers", "optimizer": "adafactor"}, "does not support optimizer adafactor"),
        ({"task": "guess"}, "task: found 'guess'"),
    ],
)
def test_what_cannot_be_asked_is_said(settings, words):
    asked = {"model": config_of("bert"), "task": "classify", "micro_batch": 1, "length": 8} | settings
    with pytest.raises(RecipeError, match=words.replace("(", r"\(")):
        trimtab.predict_step_memory(**asked)


def test_a_device_without_expandable_segments_needs_what_fixed_ones_need():
    """As under allocator settings of the user's own: plans fit by the allocator that the run will have."""
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
    config |= {"intermediate_size": 1408, "vocab_size": 8000}
    found = trimtab.predict_step_memory(config, "causal-lm", 8, 512, precision="bf16", gpu="a100", num_micro_batches=2)
    target = known_target("a100", None)
    fixed = replace(target, expandable=False).as_here(found)
    both = replay(found.trace.events)
    assert target.as_here(found) == found
    assert (fixed.reserved, fixed.allocated) == (both.reserved_peak_fixed, both.allocated_peak_fixed)
    assert fixed.reserved > found.reserved
    assert fixed.needed > found.needed
    assert sum(fixed.parts.values()) == fixed.allocated > found.allocated
    assert fixed.fits(fixed.total)
    assert not fixed.fits(fixed.total - CAP_STEP)
    assert found.fits(fixed.total - CAP_STEP)


def test_rocm_has_fixed_segments():
    assert not known_target("mi300x", None).expandable
    assert known_target("h200", None).expandable
