"""Trial steps: which ones are run, what is chosen by them, and that the run does not notice them."""

import gc
import itertools
import json
import logging
import weakref

import pytest
import torch
from transformers import BertModel

import trimtab
from tiny_runs import Watch, reviews, same_bits, write_csv
from trimtab.errors import DoesNotFit, TraceError
from trimtab.hardware.resident_peak import can_measure_resident_peak
from trimtab.planner import trial_step
from trimtab.planner.probe import Measured, Probe, ways_to_measure
from trimtab.planner.trial_step import TrialSteps
from trimtab.recipe.yaml_text import read_value
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.apply import axes_of, plain_spec
from trimtab.techniques.base import Accelerator, Axis, Case

MIB = 2**20
SIZES = (1, 2, 4, 8, 16, 32)
PLAIN = (plain_spec(32, "fp32"),)
ROWS = {"train": reviews(32), "eval": reviews(8, first=100)}
needs_resident_peak = pytest.mark.skipif(not can_measure_resident_peak(), reason="steps cannot be measured here")


# ---------------------------------------------------------------------- the search


def probed(bytes_of, room, ways=PLAIN, sizes=SIZES):
    """The choice by a function of (recomputed, rows), which runs out of memory above the room."""

    def measure(spec):
        total = bytes_of(spec["gradient_checkpointing"], spec.micro_batch)
        has_run = total <= room
        known = total if has_run else None
        return Measured(spec, 10 * spec.micro_batch, has_run, known, known)

    probe = Probe(measure, room, sizes)
    chosen = probe.choose(ways)
    return chosen, [trial.spec.micro_batch for trial in probe.trials]


def test_a_line_jumps_to_the_largest_size_and_proves_it():
    chosen, tried = probed(lambda _, rows: 100 + 10 * rows, room=270)
    assert chosen.spec.micro_batch == 16
    assert tried == [1, 2, 16], "32 rows cannot fit by the line, which is never below a convex curve's extension"


def test_the_line_of_small_steps_may_be_too_low():
    """The larger of two lines: what needs nothing per row is the peak of small steps."""
    chosen, tried = probed(lambda _, rows: max(200, 60 + 30 * rows), room=400)
    assert chosen.spec.micro_batch == 8
    assert tried[:3] == [1, 2, 16], "never more than eight times the rows that were measured"
    assert tried == [1, 2, 16, 8]


def test_everything_fits():
    chosen, tried = probed(lambda _, rows: 10 * rows, room=10**6)
    assert chosen.spec.micro_batch == 32
    assert tried == [1, 2, 16, 32]


def test_techniques_follow_only_where_one_row_does_not_fit():
    ways = [plain_spec(32, "fp32", gradient_checkpointing=value) for value in ("none", "{every: 2}", "all")]
    share = {"none": 100, "{every: 2}": 60, "all": 20}
    chosen, tried = probed(lambda value, rows: 50 + share[value] * rows, 100, ways)
    assert (chosen.spec["gradient_checkpointing"], chosen.spec.micro_batch) == ("all", 2)
    assert tried == [1, 1, 1, 2]
    chosen, tried = probed(lambda value, rows: 50 + share[value] * rows, 60, ways)
    assert chosen is None
    assert tried == [1, 1, 1]


def test_the_order_of_ways():
    """Exact techniques, then what the user allowed, then last resorts; others stay as they are."""
    values = {
        "gradient_checkpointing": ("none", "{every: 2}", "all"),
        "optimizer": ("adamw", "adamw8bit"),
        "tile_tokens": ("none", "4096"),
        "attention_backend": ("torch", "math"),
    }
    axes = [Axis(technique, values[technique.key]) for technique in TECHNIQUES if technique.key in values]
    start = plain_spec(4, "fp32", attention_backend="torch")
    ways = ways_to_measure(start, axes, Case(None, Accelerator("cpu"), "fp32"))
    added = [dict(set(after.values) - set(before.values)) for before, after in itertools.pairwise(ways)]
    assert added == [
        {"gradient_checkpointing": "{every: 2}"},
        {"gradient_checkpointing": "all"},
        {"optimizer": "adamw8bit"},
        {"tile_tokens": "4096"},
    ]


# ---------------------------------------------------------------------- a run


@pytest.fixture
def untraceable(monkeypatch):
    """BERT reads its inputs with NumPy, which tensors without data do not allow."""
    forward = BertModel.forward

    def reads(self, input_ids=None, **kwargs):
        assert input_ids.numpy().min() >= 0
        return forward(self, input_ids=input_ids, **kwargs)

    reads.__wrapped__ = forward  # for inspect.signature
    monkeypatch.setattr(BertModel, "forward", reads)


@pytest.fixture
def figures(monkeypatch):
    """Real trial steps, whose figures do not depend on the machine: MiB by micro-batch size and recomputation."""
    found = []

    def of(spec):
        return 100 + spec.micro_batch * {"none": 40, "{every: 2}": 25, "all": 10}[spec["gradient_checkpointing"]]

    run = TrialSteps._run

    def note(self, spec, work):
        found.append(spec)
        return run(self, spec, work)

    monkeypatch.setattr(TrialSteps, "_run", note)
    monkeypatch.setattr(trial_step, "resident_peak", lambda: of(found[-1]) * MIB)
    return found


@pytest.fixture
def train(tiny, tmp_path, own_folder):
    numbers = itertools.count()

    def train(callbacks=(), **sections):
        recipe = {
            "model": tiny.folder("bert", num_hidden_layers=4),
            "data": {name: str(write_csv(tmp_path / f"{name}.csv", rows)) for name, rows in ROWS.items()},
            "train": {"epochs": 1, "lr": 1e-3, "log_every": 1},
            "out": str(tmp_path / f"run-{next(numbers)}"),
        }
        return trimtab.fit(trimtab.Recipe(**recipe | sections), callbacks=callbacks, progress="quiet", device="cpu")

    return train


@pytest.mark.parametrize(
    ("budget", "micro_batch", "recomputed"),
    [
        pytest.param("1GiB", 8, "none", marks=pytest.mark.slow),
        ("300MiB", 4, "none"),
        pytest.param("130MiB", 1, "{every: 2}", marks=pytest.mark.slow),
        pytest.param("125MiB", 2, "all", marks=pytest.mark.slow),
    ],
)
@needs_resident_peak
def test_a_measured_plan_trains_as_the_same_values_in_the_recipe(
    train, untraceable, figures, caplog, budget, micro_batch, recomputed
):
    """The steps draw dropout masks, so every bit shows that trials left random numbers and rows alone."""
    caplog.set_level(logging.INFO, logger="trimtab")
    measured, written = Watch(), Watch()
    result = train([measured], memory={"budget": budget})
    assert figures, "trials ran"
    stored = json.loads((result.folder / "plan.json").read_text())
    assert (stored["micro_batch_size"], stored["gradient_checkpointing"]) == (micro_batch, recomputed)
    assert (stored["origin"], stored["predicted_peak_bytes"]) == ("measured", None)
    assert stored["measured_total_bytes"] == result.plan.measured_total_bytes <= 0.98 * stored["budget_bytes"]
    assert [step["fits"] for step in stored["measured_steps"]].count(True) >= 1
    assert "measured, not predicted: micro-batch" in caplog.text
    assert "predicted " not in caplog.text.replace("not predicted", "")
    train([written], memory={"micro_batch": micro_batch, "gradient_checkpointing": read_value(recomputed)})
    assert len(measured.weights) == 4
    assert all(same_bits(*pair) for pair in zip(measured.weights, written.weights, strict=True))


@pytest.mark.parametrize(
    "sections",
    [
        {"adapter": "lora"},
        {"train": {"epochs": 1, "lr": 1e-3, "freeze": {"base": "2 steps"}}},
        {"train": {"epochs": 1, "optimizer": "adagrad", "precision": "bf16"}},
        {"memory": {"padding": "none"}},
        {"task": "masked-lm", "memory": {"loss": "chunked"}},
    ],
    ids=["lora", "freezing", "bf16", "packed", "chunked"],
)
@needs_resident_peak
@pytest.mark.slow
def test_methods_and_techniques_of_a_recipe(train, untraceable, figures, sections):
    """Whatever a recipe sets is in its trial steps, and they change nothing."""
    memory = sections.get("memory", {})
    measured, written = Watch(), Watch()
    plan = train([measured], **sections | {"memory": memory | {"budget": "300MiB"}}).plan
    assert (plan.origin, plan.micro_batch_size) == ("measured", 4)
    size = {"micro_batch_tokens": plan.micro_batch_tokens} if plan.micro_batch_tokens else {"micro_batch": 4}
    train([written], **sections | {"memory": memory | size})
    assert len(measured.weights) == 4
    assert all(same_bits(*pair) for pair in zip(measured.weights, written.weights, strict=True))


@needs_resident_peak
@pytest.mark.slow
def test_memory_that_runs_out_in_a_trial(train, untraceable, figures, monkeypatch):
    """As an allocator under its cap refuses: there is no figure, and a smaller micro-batch is chosen."""
    run = TrialSteps._run

    def runs_out(self, spec, work):
        if spec.micro_batch > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …")
        return run(self, spec, work)

    monkeypatch.setattr(TrialSteps, "_run", runs_out)
    plan = train(memory={"budget": "4GiB"}).plan
    assert plan.micro_batch_size == 2
    steps = [(step["micro_batch"], step["fits"], step["total_bytes"] is None) for step in plan.measured_steps]
    assert steps == [(1, True, False), (2, True, False), (8, False, True), (4, False, True)]


@needs_resident_peak
@pytest.mark.slow
@pytest.mark.parametrize(("every", "copies"), [("epoch", 3), (None, 0)])
def test_a_trial_has_the_copy_that_checkpoints_are_written_from(
    train, untraceable, figures, monkeypatch, every, copies
):
    """On a CPU the snapshot of a checkpoint is in the memory that is measured: weights and two moments of Adam."""
    taken = []

    class Noted(trial_step.Snapshots):
        def take(self, parts):
            taken.append(sum(t.nbytes for part in parts.values() for t in part.tensors.values() if t.dim()))
            return super().take(parts)

    monkeypatch.setattr(trial_step, "Snapshots", Noted)
    plan = train(memory={"budget": "300MiB"}, checkpoint={"every": every}).plan
    assert set(taken) == ({4 * copies * plan.num_parameters} if copies else set())
    assert plan.measured_steps


@needs_resident_peak
@pytest.mark.slow
@pytest.mark.parametrize("update", ["device", "in-backward", "host", "streamed"])
def test_nothing_of_a_trial_stays_in_memory(train, untraceable, figures, monkeypatch, update):
    """Weights, gradients and optimizer state of a trial would be missing in the next one, and in the run."""
    build, found = trial_step.build_parts, []

    def note(run):
        gc.collect()
        assert [thing() for thing in found if thing() is not None] == [], "of the trial before"
        parts = build(run)
        found.extend(map(weakref.ref, (parts.model, parts.optimizer.optimizer, *parts.model.parameters())))
        return parts

    monkeypatch.setattr(trial_step, "build_parts", note)
    train(memory={"budget": "300MiB", "update": update}, train={"max_steps": 1, "max_grad_norm": None})
    gc.collect()
    assert len(figures) > 1
    assert found
    assert [thing() for thing in found if thing() is not None] == []


@needs_resident_peak
@pytest.mark.slow
def test_nothing_fits(train, untraceable, figures):
    with pytest.raises(DoesNotFit, match=r"does not fit: needs 110\.0 MiB, measured, 5\.0 MiB over") as caught:
        train(memory={"budget": "105MiB"})
    assert caught.value.exit_code == 3
    assert "micro-batch 1, recompute all" in str(caught.value)
    assert "would fit with (measured):" in str(caught.value)
    assert "memory.budget: 113MiB" in str(caught.value), "with the reserve of a plan"
    assert "not measured: a smaller data.max_length" in str(caught.value)
    assert train(memory={"budget": "113MiB"}).plan.micro_batch_size == 1


@needs_resident_peak
@pytest.mark.slow
def test_a_resumed_run_keeps_its_measured_plan(train, untraceable, figures, tmp_path):
    done = train(memory={"budget": "300MiB"})
    num_trials = len(figures)
    longer = trimtab.resume(done.folder, sets=["train.epochs=2"], device="cpu", progress="quiet")
    assert len(figures) == num_trials, "nothing is measured again"
    assert longer.plan.micro_batch_size == 4
    assert longer.plan.origin == "measured"
    assert longer.fit.step == 8


def test_without_a_budget_nothing_is_measured(train, untraceable, figures):
    assert train().plan.origin is None
    assert not figures


@needs_resident_peak
def test_a_trial_that_fails_otherwise_leaves_the_run_alone(train, untraceable, monkeypatch, caplog):
    """Such as a model that cannot be copied: it trains as without a plan."""
    caplog.set_level(logging.INFO, logger="trimtab")

    def fails(*_):
        raise TypeError("cannot pickle '_thread.lock' object")

    monkeypatch.setattr(trial_step, "copied_without_weights", fails)
    result = train(memory={"budget": "4GiB"})
    assert result.plan.origin is None
    assert result.fit.step == 4
    assert "no trial step could be measured (TypeError: cannot pickle '_thread.lock' object): the batch" in caplog.text


def test_a_plan_without_a_device_says_why_and_what_to_do(tiny, tmp_path, untraceable):
    recipe = trimtab.Recipe(
        model=tiny.folder("bert"), data={"train": str(write_csv(tmp_path / "rows.csv", reviews(16)))}
    )
    with pytest.raises(TraceError, match="cannot be traced") as caught:
        trimtab.plan(recipe, gpu="t4")
    assert caught.value.exit_code == 2
    assert "set memory.budget (a size, or auto)" in str(caught.value)


@needs_resident_peak
@pytest.mark.slow
def test_real_memory_of_growing_steps(tiny, tmp_path, own_folder, untraceable):
    """Nothing is stood in for: the second budget is below what the whole batch took, and holds."""
    rows = [{"text": " ".join([row["text"]] * 8), "label": row["label"]} for row in reviews(64)]
    wide = {"hidden_size": 128, "intermediate_size": 4096, "max_position_embeddings": 128}

    def train(name, budget):
        recipe = trimtab.Recipe(
            model=tiny.folder("bert", num_hidden_layers=4, **wide),
            data={"train": rows},
            train={"batch_size": 32, "max_steps": 1},
            memory={"budget": budget},
            out=str(tmp_path / name),
        )
        return trimtab.fit(recipe, progress="quiet", device="cpu").plan

    whole = train("whole", f"{8 * 2**30}B")
    assert whole.micro_batch_size == 32
    sizes = [step["total_bytes"] for step in whole.measured_steps]
    assert sizes == sorted(sizes)
    smallest, largest = sizes[0], sizes[-1]
    assert largest - smallest > 100 * MIB, "else the test would see noise only"
    less = train("less", f"{(smallest + largest) // 2}B")
    assert 2 <= less.micro_batch_size <= 16
    assert less.measured_total_bytes < (smallest + largest) // 2


# ---------------------------------------------------------------------- the model and its copies


def test_trials_change_neither_weights_nor_modules(tiny):
    from transformers import AutoModelForSequenceClassification

    from trimtab.model.freeze import Freezing
    from trimtab.techniques.apply import change_model
    from trimtab.techniques.base import Site
    from trimtab.units import parse_every

    model = AutoModelForSequenceClassification.from_pretrained(tiny.folder("bert"))
    freezing = Freezing(model, {"bert.embeddings": parse_every("3 steps")})
    freezing.apply()
    copied, frozen = trial_step.copied_without_weights(model, freezing)
    for (name, ours), theirs in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert theirs is not ours
        assert theirs.data_ptr() == ours.data_ptr()
        assert theirs.requires_grad == ours.requires_grad, name
    assert {id(p) for p in frozen.released_later()} <= {id(p) for p in copied.parameters()}
    assert frozen.released_later()
    spec = plain_spec(1, "fp32", gradient_checkpointing="all")
    change_model(copied, spec, Site(torch.device("cpu"), Accelerator("cpu")))
    copied.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any("_trimtab_plain_block" in module.__dict__ for module in model.modules())


def test_all_axes_of_a_real_model_give_ways(tiny):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tiny.folder("bert", num_hidden_layers=4))
    recipe = trimtab.Recipe(model="none", data={"train": "none"})
    case = Case(model, Accelerator("cpu"), "fp32", recipe, loss_kind="cross-entropy", num_rows=8)
    start = plain_spec(8, "fp32")
    ways = ways_to_measure(start, axes_of(case), case)
    assert [way["gradient_checkpointing"] for way in ways[:3]] == ["none", "{every: 2}", "all"]
