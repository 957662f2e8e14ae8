"""Students of every task through the one loop: exact under accumulation and resume; the teacher stays as it is."""

import hashlib
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rounding import rounding_error
from tiny_runs import NO_DROPOUT, lines_of, reproducible_lines, reviews, write_csv, write_jsonl
from trimtab import Recipe, fit, load
from trimtab.cli.main import app
from trimtab.commands.distill import distill
from trimtab.errors import CheckpointError, ModelError, RecipeError, Stopped
from trimtab.report.measurements_table import measurements_table

ROWS = reviews(40)
LABELS = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
CHATS = [
    {"messages": [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["label"]}]}
    for row in ROWS
]
PAIRS = [{"source": row["text"], "target": row["label"]} for row in ROWS]
TASKS = {
    "classify": ("bert", ROWS, {}),
    "masked-lm": ("bert", ROWS, {"text": "text"}),
    "causal-lm": ("llama", ROWS, {"text": "text"}),
    "chat": ("gpt2", CHATS, {}),
    "seq2seq": ("t5", PAIRS, {}),
}
pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def teacher_of(tiny):
    def build(task="classify", **changes):
        if task == "classify":
            settings = {"kind": "sequence-classification", "head": LABELS, "num_hidden_layers": 4}
            return tiny.folder("bert", **settings | NO_DROPOUT["bert"] | changes)
        name = TASKS[task][0]
        sizes = {"gpt2": {"n_layer": 2}, "t5": {"num_layers": 2}}.get(name, {"num_hidden_layers": 2})
        return tiny.folder(name, chat=task == "chat", **sizes | NO_DROPOUT.get(name, {}) | changes)

    return build


def recipe(teacher, task="classify", out="run", **sections):
    rows, columns = TASKS.get(task, TASKS["classify"])[1:]
    path = write_jsonl(Path("rows.jsonl"), rows)
    settings = {"teacher": teacher, "student": {"layers": "half"}, **sections.pop("distill", {})}
    train = {"max_steps": 4, "batch_size": 8, "lr": 3e-3, "log_every": 1} | sections.pop("train", {})
    data = {"train": str(path), "eval_share": 0.25, **columns}
    return Recipe(task=task, data=data, distill=settings, train=train, track="none", out=out, **sections)


def quick(made, **options):
    return fit(made, progress="quiet", device="cpu", **options)


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


def losses(run):
    return [line["loss"] for line in lines_of(Path(run)) if "loss" in line]


@pytest.mark.parametrize(
    "task", ["classify", *(pytest.param(task, marks=pytest.mark.slow) for task in list(TASKS)[1:])]
)
def test_every_task(teacher_of, task):
    teacher = teacher_of(task)
    before = digest(teacher)
    found = distill(recipe(teacher, task, distill={"hidden": 0.5, "attention": 0.5}), progress="quiet", device="cpu")
    assert digest(teacher) == before
    names = [one.name for one in found.measurements]
    assert names == ["teacher", "student"]
    assert found.measurements[1].disk_bytes < found.measurements[0].disk_bytes
    assert found.measurements[1].divergence is not None
    header, lines = measurements_table(found.measurements)
    assert len(lines) == 2
    student = load(found.result.best, device="cpu").model  # a plain folder, without the teacher
    whole = load(teacher, device="cpu").model
    assert 0 < sum(p.numel() for p in student.parameters()) < sum(p.numel() for p in whole.parameters())
    assert len(losses("run")) == 4


def test_the_command(teacher_of):
    Path("recipe.yaml").write_text(
        f"data: {{train: {write_csv(Path('rows.csv'), ROWS)}}}\n"
        f"distill: {{teacher: {teacher_of()}, student: {{layers: 1}}}}\ntrain: {{max_steps: 2}}\ntrack: none\n"
    )
    done = CliRunner().invoke(app, ["distill", "recipe.yaml", "--out", "run", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "teacher" in done.output
    assert "student" in done.output
    Path("plain.yaml").write_text("model: x\ndata: {train: rows.csv}\n")
    with pytest.raises(RecipeError, match="no distill section"):
        CliRunner().invoke(app, ["distill", "plain.yaml"], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classify", pytest.param("causal-lm", marks=pytest.mark.slow)])
def test_accumulation_changes_nothing(teacher_of, task):
    train = {"optimizer": "sgd", "lr": 0.1}
    settings = {"distill": {"hidden": 1.0, "attention": 1.0, "top_k": 3}, "train": train}
    weights = []
    for size in (8, 2):
        made = recipe(teacher_of(task), task, f"micro-{size}", memory={"micro_batch": size}, **settings)
        weights.append(load_file(quick(made).best / "model.safetensors"))
    bound = rounding_error(1.0, 80)
    assert losses("micro-8") == pytest.approx(losses("micro-2"), rel=bound)
    for name, whole in weights[0].items():
        assert (whole - weights[1][name]).abs().max() <= bound * max(1.0, float(whole.abs().max())), name


class Stops:
    def on_step(self, state):
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_and_the_same_teacher(teacher_of, tiny):
    teacher = teacher_of()
    student = tiny.folder("bert", num_hidden_layers=2, hidden_dropout_prob=0.1)

    def made(out):
        settings = {"student": None, "hidden": 1.0}
        return recipe(teacher, out=out, distill=settings, model=student, train={"max_steps": 6})

    quick(made("whole"))
    with pytest.raises(Stopped):
        quick(made("stopped"), callbacks=[Stops()])
    result = quick(made("stopped"), resume=True)
    assert result.fit.step == 6
    assert reproducible_lines("stopped") == reproducible_lines("whole")
    ours, theirs = (load_file(Path(run) / "best/model.safetensors") for run in ("stopped", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_teacher_is_refused_on_resume(teacher_of, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(teacher_of(), teacher)
    with pytest.raises(Stopped):
        quick(recipe(str(teacher)), callbacks=[Stops()])
    weights = load_file(teacher / "model.safetensors")
    weights["classifier.bias"] += 1
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="its weights differ"):
        quick(recipe(str(teacher)), resume=True)


def test_a_teacher_that_does_not_belong_is_refused(teacher_of, tiny):
    with pytest.raises(ModelError, match="is a model for masked-lm, but the task is classify"):
        quick(recipe(teacher_of("masked-lm"), model=teacher_of(), distill={"student": None}))
    swapped = {"num_labels": 2, "id2label": {0: "good", 1: "bad"}, "label2id": {"good": 0, "bad": 1}}
    with pytest.raises(ModelError, match="has the labels good, bad, but the data has bad, good"):
        quick(recipe(tiny.folder("bert", kind="sequence-classification", head=swapped)))
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(RecipeError, match="a different tokenizer"):
        quick(recipe(teacher_of(), model={"config": config, "tokenizer": "train"}, distill={"student": None}))
    with pytest.raises(RecipeError, match="custom loss"):
        quick(recipe(teacher_of()), loss=lambda outputs, batch: outputs.logits.mean())


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"memory": {"padding": "none"}}, "memory.padding"),
        ({"memory": {"loss": "chunked"}, "task": "causal-lm"}, "memory.loss"),
        ({"train": {"compile": "blocks"}}, "train.compile"),
        ({"distill": {"alpha": 0}}, "distill.alpha"),
        ({"distill": {"cache": "disk", "hidden": 1.0}}, "distill.hidden"),
        ({"distill": {"cache": "disk"}, "task": "masked-lm"}, "distill.cache"),
        ({"distill": {"student": {"layers": [2, 1]}}}, "distill.student"),
        ({"task": "regress"}, "distill"),
        ({"adapter": "lora"}, "distill.student"),
        ({"adapter": "prompt", "task": "causal-lm", "distill": {"student": None, "hidden": 1.0}}, "distill.hidden"),
        ({"adapter": "prompt", "task": "causal-lm", "distill": {"student": None, "attention": 1}}, "distill.attention"),
        ({"adapter": "prefix", "task": "causal-lm", "distill": {"student": None, "attention": 1}}, "distill.attention"),
        ({"adapter": "side", "distill": {"student": None, "attention": 1.0}}, "distill.attention"),
    ],
)
def test_settings_that_contradict_a_teacher(sections, key):
    with pytest.raises(RecipeError, match=rf"{key}: "):
        recipe("teacher", **sections)


@pytest.mark.parametrize(
    ("task", "top_k"),
    [
        ("causal-lm", 3),
        *(
            pytest.param(task, top_k, marks=pytest.mark.slow)
            for task in ("classify", "causal-lm", "chat", "seq2seq")
            for top_k in (None, 3)
            if (task, top_k) != ("causal-lm", 3)
        ),
    ],
)
def test_cached_outputs_give_the_same_run(teacher_of, task, top_k):
    for cache in ("none", "disk"):
        settings = {"cache": cache, "top_k": top_k, "alpha": 1.0}
        quick(recipe(teacher_of(task), task, f"cache-{cache}", distill=settings, train={"optimizer": "sgd", "lr": 0.1}))
    bound = rounding_error(1.0, 80)  # rows have other neighbours, and so other padding, when outputs are computed
    assert losses("cache-disk") == pytest.approx(losses("cache-none"), rel=bound, abs=bound)
    ours, theirs = (load_file(Path(run) / "best/model.safetensors") for run in ("cache-disk", "cache-none"))
    for name, whole in theirs.items():
        assert (whole - ours[name]).abs().max() <= bound * max(1.0, float(whole.abs().max())), name


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "disk"])
def test_unused_rows_of_embeddings_do_not_count(teacher_of, tiny, cache):
    wide = tiny.folder("llama", vocab_size=352)
    for teacher, student in ((wide, teacher_of("causal-lm")), (teacher_of("causal-lm"), wide)):
        settings = {"cache": cache, "top_k": 345 if cache == "disk" else None, "student": None}
        result = quick(recipe(teacher, "causal-lm", distill=settings, model=student), fresh=True)
        assert result.fit.step == 4


@pytest.mark.slow
def test_other_techniques_work_with_a_teacher(teacher_of):
    settings = {"hidden": 1.0, "attention": 1.0}
    plain = {"optimizer": "sgd", "lr": 0.1}
    quick(recipe(teacher_of(), out="plain", distill=settings, train=plain))
    recomputed = {"gradient_checkpointing": "all"}
    quick(recipe(teacher_of(), out="recomputed", distill=settings, train=plain, memory=recomputed))
    assert losses("recomputed") == pytest.approx(losses("plain"), rel=rounding_error(1.0, 80))
    quick(recipe(teacher_of(), out="half", distill=settings, train=plain | {"precision": "bf16"}))
    assert losses("half") == pytest.approx(losses("plain"), rel=rounding_error(1.0, 8, torch.bfloat16))
    student = {"student": None, "temperature": 3.0}
    adapted = quick(recipe(teacher_of(), out="lora", distill=student, model=teacher_of(), adapter="lora"))
    assert load(adapted.best, device="cpu").task_name == "classify"


@pytest.mark.slow
def test_outputs_are_computed_once_and_by_content(teacher_of, monkeypatch):
    from trimtab.build import teacher_outputs

    computed = []
    compute = teacher_outputs._compute
    monkeypatch.setattr(teacher_outputs, "_compute", lambda *args: computed.append(1) or compute(*args))
    settings = {"cache": "disk"}
    with pytest.raises(Stopped):
        quick(recipe(teacher_of(), out="first", distill=settings), callbacks=[Stops()])
    quick(recipe(teacher_of(), out="first", distill=settings), resume=True)
    quick(recipe(teacher_of(), out="second", distill=settings, seed=0, train={"lr": 1e-3}))
    assert len(computed) == 1
    quick(recipe(teacher_of(), out="third", distill=settings | {"temperature": 3.0}))
    assert len(computed) == 2
    whole = quick(recipe(teacher_of(), out="whole", distill=settings))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (Path("first/best"), whole.best))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_outputs_that_are_too_large_are_refused(teacher_of, monkeypatch):
    from trimtab.build import teacher_outputs

    monkeypatch.setattr(teacher_outputs, "free_memory", lambda device: 2000)
    with pytest.raises(RecipeError, match=r"distill\.top_k: 16"):
        quick(recipe(teacher_of("causal-lm"), "causal-lm", distill={"cache": "disk"}))
