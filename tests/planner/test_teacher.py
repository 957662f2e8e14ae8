"""The planner counts the teacher of a student: its weights, and what its forward allocates."""

import pytest

from tiny_runs import reviews, write_csv
from trimtab import Recipe, fit
from trimtab.data.batching import Batching
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.shapes import OneLength, named_task
from trimtab.planner.target import known_target
from trimtab.techniques.apply import plain_spec

MIB = 2**20
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}


def planner(teacher, model, **distill):
    made = Recipe(
        model=model,
        task="causal-lm",
        data={"train": "nowhere"},
        train={"batch_size": 4},
        distill={"teacher": teacher, **distill} if distill or teacher else None,
    )
    return RecipePlanner(made, named_task(made), known_target("a100", None), OneLength(256))


@pytest.fixture
def models(tiny):
    teacher = tiny.folder("llama", num_hidden_layers=12, max_position_embeddings=512, **SIZES)
    student = tiny.folder("llama", num_hidden_layers=3, max_position_embeddings=512, **SIZES)
    return teacher, student


def weights(found, precision="fp32"):
    skeleton = found.tracer(plain_spec(4, precision)).teacher(precision)
    return sum(parameter.nbytes for parameter in skeleton.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_prediction_contains_the_teacher(models, precision):
    spec = plain_spec(4, precision)
    alone = planner(None, models[1]).prediction(spec)
    both = planner(models[0], models[1])
    together = both.prediction(spec)
    of_teacher = weights(both, precision)
    assert of_teacher > 20 * MIB / (2 if precision == "bf16" else 1)
    assert together.parts["weights"] - alone.parts["weights"] == pytest.approx(of_teacher, rel=0.02)
    assert together.allocated >= alone.allocated + of_teacher
    # an evaluation needs no teacher, but its weights stay allocated
    assert both.tracer(spec).trace_evaluation(spec, both.shape(spec))
    flops = [sum(op.flops for op in each.trace.ops) for each in (alone, together)]
    assert flops[1] > 1.5 * flops[0]  # 12 more layers forward; 3 layers forward and backward alone


def test_a_student_is_cut_in_a_prediction_too(models):
    spec = plain_spec(4, "fp32")
    cut = planner(models[0], models[0], student={"layers": 3}).prediction(spec)
    given = planner(models[0], models[1]).prediction(spec)
    assert cut.allocated == given.allocated


def test_repeated_blocks_and_whole_models_are_predicted_alike(models):
    spec, found = plain_spec(4, "fp32"), planner(models[0], models[0], student={"layers": 8})
    shape = found.lengths.shape(4, Batching())
    short, whole = (found.tracer(spec).trace(spec, shape, whole=each) for each in (False, True))
    assert sum(op.flops for op in short.ops) == sum(op.flops for op in whole.ops)
    assert len(short.events) == len(whole.events)


def test_terms_of_layers_take_memory(models):
    spec = plain_spec(4, "fp32")
    plain = planner(models[0], models[1]).prediction(spec)
    layers = planner(models[0], models[1], hidden=1.0, attention=1.0).prediction(spec)
    assert layers.allocated > plain.allocated + 12 * 4 * 256 * 256 * 4 * 4  # attention of 12 layers and 4 heads


def test_a_run_with_a_budget_is_planned_with_its_teacher(own_folder, tiny):
    labels = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    teacher = tiny.folder("bert", kind="sequence-classification", head=labels, num_hidden_layers=4)
    data = {"train": str(write_csv(own_folder / "rows.csv", reviews(24)))}
    predicted = []
    for distill in (None, {"teacher": teacher}):
        made = Recipe(
            model=teacher, data=data, distill=distill, train={"max_steps": 1}, memory={"budget": "8GiB"}, track="none"
        )
        predicted.append(fit(made, progress="quiet", device="cpu").plan.predicted_peak_bytes)
    assert predicted[1] > predicted[0]


def test_cached_outputs_take_the_place_of_the_teacher(models):
    spec = plain_spec(4, "fp32")
    alone, both = planner(None, models[1]).prediction(spec), planner(*models).prediction(spec)
    few = planner(*models, cache="disk", top_k=8).prediction(spec)
    every = planner(*models, cache="disk").prediction(spec)
    assert few.parts["weights"] == alone.parts["weights"] < both.parts["weights"]
    assert few.allocated < both.allocated
    assert every.parts != few.parts


@pytest.mark.parametrize("attention", [0.0, 1.0])
def test_a_teacher_keeps_cudnn_out_of_its_attention(models, attention):
    """cuDNN would build a plan for every length of a padded batch; probabilities need plain products."""
    found = planner(models[0], models[1], attention=attention)
    teacher = found.tracer(plain_spec(4, "bf16")).teacher("bf16")
    name = teacher.config._attn_implementation
    assert name == "eager" if attention else name.startswith("trimtab_attention")
