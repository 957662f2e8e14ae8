"""A recipe's plan: what is open, what is fixed, what a run takes from it, and that a resumed run keeps it."""

import json

import pytest
import torch

import trimtab
import trimtab.training.evaluate
from tiny_runs import reviews, write_csv
from trimtab.data.batching import Batching
from trimtab.errors import DoesNotFit
from trimtab.hardware.memory import memory_in_use
from trimtab.planner import decide as deciding
from trimtab.planner import step_timing
from trimtab.planner.memory import predict
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.shapes import LengthsOfData, OneLength, named_task
from trimtab.planner.survey import RecipeRows, survey
from trimtab.planner.target import known_target
from trimtab.planner.time import step_seconds
from trimtab.planner.trace.recorder import Op
from trimtab.techniques.apply import plain_spec
from trimtab.techniques.base import IN_AFTER_OUT, WEIGHTS_FROM_HOST, WEIGHTS_TO_HOST

GIB = 2**30
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def recipe(**sections):
    sections.setdefault("train", {"batch_size": 16})
    return trimtab.Recipe(
        model={"config": CONFIG, "tokenizer": "train"}, task="causal-lm", data={"train": "nowhere"}, **sections
    )


def planner(made, gpu="t4", budget=None, length=512):
    return RecipePlanner(made, named_task(made), known_target(gpu, budget), OneLength(length))


def values_of(space):
    return {axis.technique.key: axis.values for axis in space.axes}


def test_what_is_open():
    space = planner(recipe()).space
    assert space.micro_batches == (16, 8, 4, 2, 1)
    assert values_of(space) == {
        "adapter": ("none",),
        "gradient_checkpointing": ("none", "{every: 2}", "all"),
        "offload_activations": ("none", "all"),
        "loss": ("plain", "chunked"),
        "optimizer": ("adamw",),
        "update": ("device", "streamed", "host"),  # gradients are clipped, so not in backward
        "stream_weights": ("none", "all"),
        "offload_state": ("none", "host"),
        "offload": ("none",),  # embeddings that train stay on the device
        "kernels": ("plain",),
        "tile_tokens": ("none", "4096", "1024"),
        "attention_backend": ("torch",),
        "padding": ("longest",),
        "compile": ("off",),
    }


@pytest.mark.parametrize(("gpu", "more"), [("a100", 2 * (32 * 2**20 - 8320 * 1024)), ("h200", 0)])
def test_deterministic_kernels_have_work_memory_of_their_own(gpu, more):
    """Of cuBLAS, for the thread of forward and for autograd's; from Hopper on it is the usual size."""

    def library_bytes(deterministic):
        asked = planner(recipe(train={"batch_size": 2, "deterministic": deterministic}), gpu, length=64)
        births = asked.prediction(plain_spec(2, asked.precision)).trace.births.values()
        return sum(birth.size for birth in births if birth.part == "library")

    assert library_bytes(True) - library_bytes(False) == more


def test_what_is_fixed_is_kept():
    memory = {"micro_batch": 3, "gradient_checkpointing": {"layers": [0, -1]}, "loss": "plain", "allow": ["8bit"]}
    memory["attention_backend"] = "efficient"
    space = planner(recipe(memory=memory, train={"batch_size": 16, "optimizer": "adam"}, adapter="lora")).space
    assert space.micro_batches == (3,)
    assert values_of(space) == {
        "adapter": ("lora",),
        "gradient_checkpointing": ("{layers: [0, -1]}",),
        "offload_activations": ("none", "all"),
        "loss": ("plain",),
        "optimizer": ("adam", "adam8bit"),
        "update": ("device",),
        "stream_weights": ("none", "all"),
        "offload_state": ("none",),
        "offload": ("none", "embeddings"),
        "kernels": ("plain",),
        "tile_tokens": ("none", "4096", "1024"),
        "attention_backend": ("efficient",),
        "padding": ("longest",),
        "compile": ("off",),
    }


def test_small_logits_are_not_cut():
    assert values_of(planner(recipe(), length=32).space)["loss"] == ("plain",)


@pytest.mark.parametrize(("gpu", "wanted", "precision"), [("t4", "auto", "fp16"), ("a100", "auto", "bf16")])
def test_precision_follows_the_device_that_is_planned_for(gpu, wanted, precision):
    assert planner(recipe(), gpu).precision == precision
    assert planner(recipe(train={"precision": "fp32"}), gpu).precision == "fp32"


@pytest.mark.slow
def test_two_micro_batches_stand_for_more():
    """The peak is that of many micro-batches, the time that of all of them."""
    made = planner(recipe(train={"batch_size": 8}))
    many, few = (made.estimate(plain_spec(rows, made.precision)) for rows in (1, 4))
    spec = plain_spec(1, made.precision)
    whole = made.tracer(spec).trace(spec, made.shape(spec), 8)
    assert many.allocated_bytes == pytest.approx(predict(whole).allocated, rel=1e-4)
    assert many.step_s == pytest.approx(step_seconds(whole.ops, made.target.device).seconds, rel=0.01)
    assert many.step_s > few.step_s


def test_a_plan_in_python():
    plan = trimtab.plan(recipe(train={"batch_size": 4}), gpu="t4", length=512)
    assert plan.device == "t4"
    assert plan.precision == "fp16"
    assert plan.budget_bytes == int(14.74 * GIB)
    assert plan.predicted_peak_bytes == sum(plan.predicted_parts.values())
    assert plan.predicted_peak_bytes < plan.predicted_total_bytes <= plan.budget_bytes
    assert plan.predicted_step_s > 0
    assert (plan.micro_batch_size, plan.gradient_checkpointing, plan.loss) == (4, "none", "plain")


def test_a_plan_in_less_memory():
    memory = {"budget": "1230MiB", "gradient_checkpointing": "all"}
    plan = trimtab.plan(recipe(train={"batch_size": 4}, memory=memory), gpu="t4", length=512)
    assert plan.budget_bytes == 1230 * 2**20
    assert plan.predicted_total_bytes <= 0.98 * plan.budget_bytes
    assert (plan.micro_batch_size, plan.loss) != (4, "plain")


# ---------------------------------------------------------------------- a run


@pytest.fixture
def train(tiny, own_folder):
    rows = write_csv(own_folder / "reviews.csv", reviews(24))

    def run(name, resume=False, memory=None, **sections):
        made = trimtab.Recipe(
            model=tiny.folder("bert"),
            data={"train": str(rows)},
            train={"batch_size": 8, "max_steps": 4, **sections},
            memory=memory or {},
            out=str(own_folder / name),
        )
        return trimtab.fit(made, progress="quiet", device="cpu", resume=resume)

    return run


def test_on_a_cpu_without_a_budget_nothing_is_predicted(train, monkeypatch):
    monkeypatch.setattr(deciding._Question, "_planner", None)  # would fail if it were asked
    plan = train("plain").plan
    assert (plan.micro_batch_size, plan.gradient_checkpointing, plan.offload) == (8, "none", "none")
    assert plan.predicted_peak_bytes is None
    assert plan.budget_bytes is None


def test_a_budget_that_is_plenty_changes_nothing(train):
    plain, held = train("plain"), train("held", memory={"budget": "auto"})
    assert plain.fit.metrics == held.fit.metrics
    assert held.plan.micro_batch_size == 8
    assert 0 < held.plan.predicted_peak_bytes < held.plan.budget_bytes
    assert any("predicted: " in line for line in held.plan.describe())


def test_on_a_cpu_the_memory_of_the_process_is_predicted_and_measured(train):
    """Not that of tensors beside that of a process with all its libraries."""
    before = memory_in_use(torch.device("cpu"))
    held = train("held", memory={"budget": "auto"})
    measured = json.loads((held.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert measured["predicted_peak_bytes"] == held.plan.predicted_total_bytes > before / 2


def test_a_budget_that_is_small_decides_and_a_resumed_run_keeps_it(train, monkeypatch, own_folder):
    """Nothing fits into 1 MiB beside Python: the smallest plan is taken on a CPU, where no limit is hard."""
    held = train("held", memory={"budget": "1MiB"})
    stored = json.loads((own_folder / "held" / "plan.json").read_text())
    assert stored["micro_batch_size"] == held.plan.micro_batch_size < 8
    assert stored["predicted_peak_bytes"] == held.plan.predicted_peak_bytes
    recipe_text = (own_folder / "held" / "recipe.yaml").read_text()
    assert "micro_batch: auto" in recipe_text, "the recipe stays open, the plan has decided"
    monkeypatch.setattr(deciding._Question, "_planner", None)
    again = train("held", resume=True, memory={"budget": "1MiB"}, max_steps=6)
    levers = ("micro_batch_size", "gradient_checkpointing", "loss", "kernels", "offload", "predicted_peak_bytes")
    assert [getattr(again.plan, name) for name in levers] == [getattr(held.plan, name) for name in levers]
    monkeypatch.undo()
    wider = train("held", resume=True, memory={"budget": "auto"}, max_steps=8)
    assert wider.plan.micro_batch_size == held.plan.micro_batch_size, "auto is no other budget"


@pytest.mark.slow
def test_what_was_chosen_reaches_the_run(train, monkeypatch):
    """As on a GPU: a search decides also without a budget, and too little memory ends a run before it begins."""
    memory = {"loss": "plain", "offload": "none", "gradient_checkpointing": "none"}
    larger = recipe(train={"batch_size": 8}, memory=memory, adapter="lora")

    def on_a_card(question):
        return planner(larger, "t4", budget)

    monkeypatch.setattr(deciding, "_is_planned", lambda recipe, device: True)
    monkeypatch.setattr(deciding._Question, "_planner", on_a_card)
    budget = "14GiB"
    plan = train("roomy").plan
    assert (plan.micro_batch_size, plan.gradient_checkpointing, plan.budget_bytes) == (8, "none", 14 * GIB)
    budget = "1300MiB"
    plan = train("tight").plan
    assert plan.micro_batch_size < 8
    assert plan.predicted_total_bytes <= plan.budget_bytes == 1300 * 2**20
    budget = "855MiB"  # of which a context takes 850
    with pytest.raises(DoesNotFit, match="over the budget of 855.0 MiB") as caught:
        train("nothing")
    assert caught.value.exit_code == 3


def test_a_model_that_cannot_be_traced_trains_all_the_same(train, monkeypatch, caplog):
    def fails(*parts):
        raise NotImplementedError("no such operation")

    monkeypatch.setattr(deciding._Question, "_planner", fails)
    with caplog.at_level("INFO", logger="trimtab"):
        plan = train("odd", memory={"budget": "auto"}).plan
    assert (plan.micro_batch_size, plan.gradient_checkpointing) == (8, "none")
    assert "no plan could be made (NotImplementedError: no such operation)" in caplog.text


def test_lengths_of_data(tiny, own_folder):
    rows = write_csv(own_folder / "reviews.csv", reviews(40))
    made = trimtab.Recipe(model=tiny.folder("bert"), data={"train": str(rows)}, train={"batch_size": 8})
    found = RecipeRows(made)
    lengths = LengthsOfData(made, found.tokens, found.data.task)
    all_lengths = found.tokens.train.lengths
    assert lengths.longest == max(all_lengths)
    padded, packed = Batching(), Batching(is_packed=True)
    assert lengths.shape(4, padded).is_padded
    assert not lengths.shape(1, padded).is_padded
    assert lengths.tokens(8) == pytest.approx(8 * sum(all_lengths) / len(all_lengths))
    # one row at once is never padded: the mean of all rows
    real = sum(all_lengths) / len(all_lengths) / max(all_lengths)
    steps = -(-len(all_lengths) // 8)
    assert lengths.mean_share(1, padded) == pytest.approx(real * len(all_lengths) / (steps * 8))
    assert lengths.mean_share(8, padded) >= lengths.mean_share(1, padded)
    # packed rows have no padding, whatever their number: the mean step as a share of the largest one
    assert lengths.mean_share(1, packed) == pytest.approx(lengths.mean_share(1, padded))
    for rows in (2, 8):
        largest = 8 // rows * lengths.shape(rows, packed).packed_tokens
        assert lengths.mean_share(rows, packed) * largest == pytest.approx(sum(all_lengths) / steps)
    shape = lengths.shape(2, packed)
    assert not shape.is_padded
    assert shape.packed_tokens == 2 * lengths.longest
    assert shape.max_rows == 8, "short rows fill a micro-batch"
    longest_batch = sum(sorted(all_lengths)[-8:])
    assert lengths.shape(8, packed).packed_tokens == longest_batch


@pytest.mark.parametrize(
    "memory", [{}, *(pytest.param(m, marks=pytest.mark.slow) for m in ({"micro_batch": 4}, {"micro_batch_tokens": 40}))]
)
def test_limits_of_packed_rows_are_beyond_the_data(tiny, own_folder, memory):
    """The largest batch and the longest rows that fit do not depend on how many tokens a batch of the data has."""
    rows = write_csv(own_folder / "reviews.csv", reviews(40))
    made = trimtab.Recipe(
        model=tiny.folder("bert"),
        data={"train": str(rows)},
        train={"batch_size": 8},
        memory={"padding": "none", **memory},
    )
    found = RecipeRows(made)
    lengths = LengthsOfData(made, found.tokens, found.data.task)
    many = RecipePlanner(made, found.data.task, known_target("a100", None), lengths)
    spec = many.space.reference()
    assert spec["padding"] == "none"
    shapes = []
    steps = many._steps
    predict_step = steps.step
    steps.step = lambda spec, shape, **options: shapes.append(shape) or predict_step(spec, shape, **options)
    many.most_rows(spec)
    assert len(shapes) > 1
    assert all(shape.packed_tokens == shape.rows * lengths.longest for shape in shapes)
    shapes.clear()
    many.longest(spec)
    longer = [shape for shape in shapes if shape.length > lengths.longest]
    assert longer
    limit = memory.get("micro_batch_tokens", 10**9)
    for shape in longer:
        assert shape.packed_tokens == max(shape.length, min(limit, spec.micro_batch * shape.length))


# ---------------------------------------------------------------------- evaluations, the host, other processes


@pytest.mark.slow
def test_an_evaluation_is_cut_to_what_fits():
    """Plain logits of 64 rows of 512 tokens alone are 4 GiB in fp32."""
    made = recipe(memory={"loss": "plain"}, evaluate={"batch_size": 64}, train={"compile": "off"})
    all_rows, found = planner(made, "a100").evaluation(plain_spec(1, "bf16"))
    assert all_rows == 64
    assert found.allocated > 4 * GIB
    tight = planner(made, "a100", "3GiB")
    rows, smaller = tight.evaluation(plain_spec(1, "bf16"))
    assert rows in (8, 16, 32)
    assert smaller.total <= 3 * GIB
    assert smaller.allocated < found.allocated / 2
    outlook = deciding.outlook_of(tight, tight.choose().chosen)
    assert outlook.eval_micro_batch == rows
    assert outlook.predicted_peak_bytes >= outlook.predicted_eval_peak_bytes


def test_evaluations_begin_with_what_was_planned(train, monkeypatch):
    sizes = []
    real = RecipePlanner.evaluation

    def few(planner, spec):
        return 2, real(planner, spec)[1]

    monkeypatch.setattr(RecipePlanner, "evaluation", few)
    cut = trimtab.training.evaluate.split_batch
    monkeypatch.setattr(
        "trimtab.training.evaluate.split_batch", lambda batch, rows: sizes.append(rows) or cut(batch, rows)
    )
    held = train("held", memory={"budget": "auto"})
    assert held.plan.eval_micro_batch == 2
    assert set(sizes) == {2}
    assert held.fit.metrics["accuracy"] == train("plain").fit.metrics["accuracy"]


def test_the_vocabulary_is_that_of_the_tokenizer(tiny, own_folder):
    """A new tokenizer is small, and a model from a config that names no size follows it."""
    rows = write_csv(own_folder / "reviews.csv", reviews(40))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = trimtab.Recipe(
        model={"config": {"model_type": "bert", **shape}, "tokenizer": "train"},
        data={"train": str(rows)},
        train={"max_steps": 1},
        out=str(own_folder / "run"),
    )
    found = survey(made, gpu="t4", thorough=False).plan
    result = trimtab.fit(made, progress="quiet", device="cpu")
    assert found.num_parameters == result.plan.num_parameters


def test_a_tokenizer_that_outgrew_its_model(tiny):
    from transformers import AutoTokenizer

    from trimtab.model.load import load_skeleton

    tokenizer = AutoTokenizer.from_pretrained(tiny.folder("bert"))
    before = load_skeleton(tiny.folder("bert"), "sequence-classification", {}, tokenizer)
    tokenizer.add_tokens([f"word{number}" for number in range(1000)])
    after = load_skeleton(tiny.folder("bert"), "sequence-classification", {}, tokenizer)
    rows = [len(model.get_input_embeddings().weight) for model in (before, after)]
    assert rows[1] == len(tokenizer) > rows[0]
    assert after.get_input_embeddings().weight.is_meta


def test_only_one_process_traces(monkeypatch):
    """A world of several would wait for the others, which do not trace."""

    def others(*parts):
        raise AssertionError("the other processes were asked")

    monkeypatch.setattr("trimtab.engine.engine.init_world", others)
    assert planner(recipe()).prediction(plain_spec(1, "fp16")).allocated > 0


def test_the_host_is_planned_for_too():
    found = survey(recipe(), gpu="t4", length=128, thorough=False)
    plan = found.plan
    weights = 4 * plan.num_parameters
    assert plan.predicted_host_bytes > 3 * weights, "a snapshot of weights and both moments"
    assert plan.predicted_disk_bytes == pytest.approx(3 * 3 * weights + 2 * weights, rel=0.01)
    (line,) = found.notes()
    assert line.startswith("Also predicted: evaluation in batches of ")
    assert known_target("t4", None).host_bytes == 64 * 2**30
    assert known_target("a100", None).host_bytes == 2 * known_target("a100", None).budget_bytes
    assert known_target("t4", None, "32GiB").host_bytes == 32 * 2**30
    unsaved = survey(recipe(checkpoint={"every": None}), gpu="t4", length=128, thorough=False).plan
    assert unsaved.predicted_disk_bytes == pytest.approx(2 * weights, rel=0.01)


def test_a_learnt_mask_takes_the_plain_kernel():
    """No kernel gives the gradient of a mask, so that T5, whose position biases are learnt, holds all pairs."""
    import torch

    from trimtab.planner.trace.cuda import CudaRules, Gpu, as_on_cuda
    from trimtab.planner.trace.recorder import Recorder

    def peak(learns):
        recorder = Recorder(CudaRules(Gpu()), lambda tensor: 0)
        query = torch.empty(2, 4, 64, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
        mask = torch.empty(1, 4, 64, 64, device="meta", dtype=torch.bfloat16, requires_grad=learns)
        with as_on_cuda(Gpu()), recorder:
            torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask).sum().backward()
        return {op.name for op in recorder.trace().ops}

    assert any("efficient" in name for name in peak(False))
    assert not any("efficient" in name for name in peak(True))


def test_attention_of_shorter_rows():
    """Padded rows are all shorter then; packed ones differ, and the long ones stay."""
    ops = [Op("aten._flash_attention_forward", "forward", 400, 80, "bf16"), Op("aten.mm", "forward", 400, 80, "bf16")]
    assert [op.flops for op in step_timing.scaled(ops, 0.5, is_packed=False)] == [100, 200]
    assert [op.flops for op in step_timing.scaled(ops, 0.5, is_packed=True)] == [200, 200]
    assert [op.moved for op in step_timing.scaled(ops, 0.5, is_packed=True)] == [40, 40]


@pytest.mark.parametrize("name", [WEIGHTS_TO_HOST, WEIGHTS_FROM_HOST, IN_AFTER_OUT])
def test_copies_of_weights_are_the_same_for_all_rows(name):
    assert step_timing.scaled([Op(name, "backward", 0, 80, "fp32")], 0.25, is_packed=False)[0].moved == 80
