"""`trimtab compare`: which variants there are, and what their processes leave, with real ones on a tiny model."""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tiny_runs import reviews, write_csv
from trimtab.commands.compare import (
    Protocol,
    _run_process,
    check_variants,
    compare,
    make_folder,
    shorten_recipe,
)
from trimtab.commands.measure import Observer, StepClock, measure
from trimtab.commands.variants import choose_variants, combine_values, read_variants, split_values
from trimtab.errors import RecipeError
from trimtab.model.captured_step import capture_micro_batches
from trimtab.recipe.load import load_recipe
from trimtab.recipe.schema import Recipe
from trimtab.report.compare import Measurement, Variant


@pytest.fixture
def recipe(own_folder, tiny):
    """A recipe's file, in a folder of its own."""
    data = write_csv(own_folder / "reviews.csv", reviews(64))
    path = own_folder / "recipe.yaml"
    path.write_text(f"model: {tiny.folder('bert')}\ndata: {{train: {data}}}\ntrain: {{epochs: 3, lr: 1e-3}}\n")
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where child processes put their temporary files."""
    folder = tmp_path / "temporary-of-children"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


# ---------------------------------------------------------------------- variants


def test_values_are_cut_at_commas_outside_of_brackets():
    assert split_values("none,all, {every: 2, x: [1,2]},[a,b]") == ["none", "all", "{every: 2, x: [1,2]}", "[a,b]"]
    assert split_values("'a,b',c,\"d,e\"") == ["'a,b'", "c", '"d,e"']
    assert split_values("") == []


def test_vary_is_every_combination():
    found = combine_values(["train.precision=fp32,bf16", "memory.micro_batch=auto,4"])
    assert [variant.name for variant in found] == [
        *("fp32 + micro_batch auto", "fp32 + micro_batch 4", "bf16 + micro_batch auto", "bf16 + micro_batch 4"),
    ]
    assert found[3].changes == {"train.precision": "bf16", "memory.micro_batch": 4}
    mapped = combine_values(["memory.gradient_checkpointing=none,{every: 2},{layers: [0, -1]}"])
    assert [variant.name for variant in mapped] == ["none", "every: 2", "layers: [0, -1]"]
    assert mapped[2].changes == {"memory.gradient_checkpointing": {"layers": [0, -1]}}
    vague = combine_values(["adapter=lora,none", "memory.budget=8GiB", "train.precision=bf16"])
    assert [variant.name for variant in vague] == [f"adapter {kind} + budget 8GiB + bf16" for kind in ("lora", "none")]
    assert len({variant.name for variant in combine_values(["train.precision=bf16,bf16"])}) == 2


def test_a_large_grid_is_sampled():
    """Any key may vary, and no list of all 10^9 combinations is made."""
    texts = [f"train.{key}={','.join(map(str, range(1000)))}" for key in ("lr", "weight_decay", "label_smoothing")]
    found = combine_values(texts, 20, seed=3)
    assert len({tuple(variant.changes.values()) for variant in found}) == 20
    assert tuple(found[0].changes.values()) == (0, 0, 0)  # the one that the others are compared with
    assert found == combine_values(texts, 20, seed=3)
    assert found != combine_values(texts, 20, seed=4)
    small = ["train.lr=1,2", "train.precision=fp32,bf16,fp16"]
    everything = combine_values(small)
    assert combine_values(small, 6) == combine_values(small, 99) == everything
    assert [variant for variant in everything if variant in combine_values(small, 4)] == combine_values(small, 4)
    with pytest.raises(RecipeError, match="--sample 1 leaves nothing to compare"):
        combine_values(small, 1)
    recipe = Recipe(model="x", data={"train": "y.csv"})
    with pytest.raises(RecipeError, match="--sample selects combinations of --vary"):
        choose_variants(recipe, [], "precisions", None, 3)


@pytest.mark.parametrize(
    "changes",
    [{"train.epochs": 2}, {"train": {"max_steps": 9}}, {"checkpoint": {"every": "epoch"}}, {"track.uri": "x"}],
)
def test_a_change_that_every_run_would_lose_is_refused(recipe, changes):
    with pytest.raises(RecipeError, match="compare sets itself"):
        check_variants(recipe, [Variant("plain", {}), Variant("lost", changes)])


@pytest.mark.parametrize("text", ["train.precision", "=a,b", "train.precision=", "train.precision=,"])
def test_vary_without_values(text):
    with pytest.raises(RecipeError, match="no key with values"):
        combine_values([text])


def test_a_key_is_varied_once():
    with pytest.raises(RecipeError, match=r"has train\.lr twice"):
        combine_values(["train.lr=1,2", "train.lr=3"])


def test_variants_of_a_file(tmp_path):
    path = tmp_path / "variants.yaml"
    path.write_text("plain:\nsmall: {train.precision: bf16, memory.gradient_checkpointing: {every: 2}}\n")
    assert read_variants(path) == [
        Variant("plain", {}),
        Variant("small", {"train.precision": "bf16", "memory.gradient_checkpointing": {"every": 2}}),
    ]
    path.write_text("plain: bf16\n")
    with pytest.raises(RecipeError, match="plain is 'bf16'"):
        read_variants(path)
    path.write_text("- plain\n")
    with pytest.raises(RecipeError, match=r"is a list, not a mapping\n  cure: write the variants as a mapping: \{name"):
        read_variants(path)
    with pytest.raises(RecipeError, match="cannot be read"):
        read_variants(tmp_path / "nowhere.yaml")


def test_one_way_to_choose(tmp_path):
    recipe = Recipe(model="x", data={"train": "y.csv"})
    assert [variant.name for variant in choose_variants(recipe, [], "precisions", None)][:2] == ["fp32", "tf32"]
    for vary, study, file in (([], None, None), (["a=1"], "methods", None), ([], "methods", tmp_path)):
        with pytest.raises(RecipeError, match="one of --vary, --study and --variants"):
            choose_variants(recipe, vary, study, file)


def test_protocol():
    assert [Protocol(steps).warmup for steps in (4, 50, 200, 1000)] == [2, 5, 20, 20]
    for settings in ({"num_steps": 3}, {"num_steps": 10, "num_warmup": 9}, {"num_warmup": 0}, {"num_repeats": 0}):
        with pytest.raises(RecipeError):
            Protocol(**settings)


def test_folders_are_never_used_twice(own_folder):
    recipe = Recipe(model="x", data={"train": "y.csv"}, track={"experiment": "mine"})
    assert [str(make_folder(recipe, None)) for _ in range(2)] == ["runs/mine/compare-1", "runs/mine/compare-2"]
    assert make_folder(recipe, Path("own")) == Path("own")
    (own_folder / "own" / "x").write_text("")
    with pytest.raises(RecipeError, match="own is not empty"):
        make_folder(recipe, Path("own"))


def test_a_measured_run_keeps_and_does_nothing_else():
    values = {
        "model": "x",
        "data": {"train": "y.csv"},
        "train": {"epochs": 9, "max_time": "3h", "lr": 1e-3},
        "checkpoint": {"mirror": "/z"},
        "early_stopping": {"patience": 1},
        "limits": {"fast_dev_run": True, "eval": 3},
        "evaluate": {"at_start": True, "metric": "f1"},
        "out": "elsewhere",
        "name": "mine",
    }
    found = shorten_recipe(values, 40)
    assert found == {
        "model": "x",
        "data": {"train": "y.csv"},
        "train": {"lr": 1e-3, "max_steps": 40, "log_every": 2},
        "checkpoint": {"every": None, "best": False},
        "evaluate": {"metric": "f1", "every": "40 steps", "samples": 0},
        "limits": {"eval": 3},
        "track": "none",
    }
    Recipe(**found)


# ---------------------------------------------------------------------- one run, in this process


def spec_of(folder, recipe_values, **changes):
    plain = {
        "recipe": shorten_recipe(recipe_values, 12),
        "run": str(folder / "measured"),
        "device": "cpu",
        "num_steps": 12,
        "num_warmup": 2,
        "repeat": 0,
        "records_memory": True,
    }
    return plain | changes


def test_one_run(recipe, own_folder, tiny):
    values = {"model": tiny.folder("bert"), "data": {"train": "reviews.csv"}, "memory": {"micro_batch": 3}}
    found = measure(spec_of(own_folder, values))
    assert "failure" not in found
    run = Measurement.from_json(found["measurement"])
    # 8 rows a step; recorded steps and the ones after them are not timed
    assert 4 <= len(run.step_s) <= 8
    assert run.num_rows == 8 * len(run.step_s)
    assert run.num_rows < run.num_tokens < 12 * run.num_rows
    assert all(seconds > 0 for seconds in run.step_s)
    assert [step for step, _ in run.losses] == list(range(1, 13))
    assert run.metrics.keys() == {"loss", "accuracy", "f1"}
    assert (run.metric, run.plan["num_steps"], run.allocated_peak_bytes) == ("accuracy", 12, None)
    assert run.host_peak_bytes > 1e8
    num_weights = 4 * run.plan["num_parameters"]
    assert run.anatomy.weights >= num_weights  # and the positions, which are a buffer
    assert run.anatomy.optimizer_state > 2 * num_weights
    assert "torch" in found["surroundings"]["versions"]
    assert not (own_folder / "measured" / "best").exists()


def test_rows_and_tokens_of_packed_batches_are_counted(recipe, own_folder, tiny):
    def counted(padding):
        memory = {"padding": padding, "micro_batch_tokens": 40}
        values = {"model": tiny.folder("bert"), "data": {"train": "reviews.csv", "eval_share": 0}, "memory": memory}
        found = measure(spec_of(own_folder, values, run=str(own_folder / padding), records_memory=False))["measurement"]
        assert found["plan"]["padding"] == padding
        return found["num_rows"], found["num_tokens"]

    assert counted("none") == counted("longest")


def test_a_run_that_is_not_recorded_has_all_its_steps_timed(recipe, own_folder, tiny):
    values = {"model": tiny.folder("bert"), "data": {"train": "reviews.csv", "eval_share": 0}}
    found = measure(spec_of(own_folder, values, records_memory=False))["measurement"]
    assert len(found["step_s"]) == 10
    assert (found["anatomy"], found["metrics"]) == (None, {})
    assert not (own_folder / "measured" / "best").exists()


def test_replayed_micro_batches_are_counted(own_folder):
    """Hooks of the model do not see them."""
    (own_folder / "plan.json").write_text('{"device": "cpu"}')
    model = torch.nn.Linear(2, 2)
    captured = capture_micro_batches(model)
    observer = Observer(own_folder, 3, 1, records_memory=False, evaluates=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"input_ids": torch.ones_like(mask), "attention_mask": mask, "labels": torch.zeros(2)}
    for step in (1, 2, 3):
        observer.on_step(SimpleNamespace(step=step, model=model, optimizer=None))
        for watch in captured.watchers * 2:  # micro-batches of the next step
            watch(batch)
    assert (observer.numbers["num_rows"], observer.numbers["num_tokens"]) == (8, 20)


def test_why_a_run_failed_is_told_in_a_few_words(recipe, own_folder, tiny, monkeypatch):
    values = {
        "model": tiny.folder("bert"),
        "data": {"train": "reviews.csv"},
        "train": {"freeze": {"nothing": "always"}},
    }
    refused = measure(spec_of(own_folder, values))
    assert "nothing" in refused["failure"]
    assert "\n" not in refused["failure"]

    def run_out(*arguments, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of …")

    monkeypatch.setattr("trimtab.run.fit", run_out)
    assert measure(spec_of(own_folder, {**values, "train": {}})) == {
        "failure": "out of memory (tried to allocate 2.50 GiB more)"
    }


def test_the_clock(monkeypatch):
    moments = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr("trimtab.commands.measure.time.perf_counter", lambda: next(moments))
    clock = StepClock(torch.device("cpu"))
    for _ in range(3):
        clock.tick()
    assert clock.seconds() == [0.5, 1.5]


# ---------------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("pass", ""),
        ("import sys; sys.exit('the last line')", r"the last line \(see .*log\)"),
        ("import os; os.kill(os.getpid(), 9)", r"killed \(the system may have run out of memory\)"),
        ("import os; os.kill(os.getpid(), 15)", "ended by SIGTERM"),
        ("import time; time.sleep(60)", "not finished after 1 s"),
    ],
)
def test_how_a_process_ended(tmp_path, code, reason):
    timeout = 1.0 if "sleep" in code else 60.0
    said = _run_process([sys.executable, "-c", code], tmp_path / "x.log", timeout)
    assert re.fullmatch(reason, said)


def test_a_recipe_that_is_wrong_is_refused_before_anything_starts(recipe, own_folder, caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    with pytest.raises(RecipeError, match="did you mean train.precision"):
        check_variants(recipe, combine_values(["train.precison=fp32,bf16"]))
    assert not caplog.messages, "the error has it"
    with pytest.raises(RecipeError, match="nothing to compare"):
        check_variants(recipe, [])
    with pytest.raises(RecipeError, match="there is no recipe"):
        check_variants(own_folder / "nowhere.yaml", combine_values(["train.lr=1,2"]))
    with pytest.raises(RecipeError, match="found 'fast'"):
        check_variants(recipe, combine_values(["train.lr=1,2"]), ["train.lr=fast"])
    one, other = check_variants(recipe, combine_values(["train.lr=0.5,fast"]))
    assert (one.failure, one.recipe["train"]["lr"]) == ("", 0.5)
    assert other.recipe is None
    assert other.failure.startswith("train.lr: found 'fast'")
    assert caplog.messages == [f"lr fast: refused: {other.failure}"]


@pytest.mark.slow
def test_variants_run_in_turn_and_failures_are_rows(recipe, own_folder, home, caplog):
    variants = [
        Variant("adamw", {}),
        Variant("sgd", {"train.optimizer": "sgd"}),
        Variant("unknown", {"train.nonsense": 1}),
        Variant("refused", {"train.freeze": {"nothing": "always"}}),
    ]
    with caplog.at_level(logging.INFO, logger="trimtab"):
        base = load_recipe(recipe, {}, ["seed=3"]).recipe
        candidates = check_variants(recipe, variants, ["seed=3"])
        found = compare(base, candidates, Protocol(8, 2, device="cpu"), logs=own_folder / "logs")
    said = [record.message for record in caplog.records]
    runs = [line.split(":")[0] for line in said if " run " in line]
    assert runs == [
        *("adamw, run 1 of 2", "sgd, run 1 of 2", "refused, run 1 of 2"),
        *("adamw, run 2 of 2", "sgd, run 2 of 2"),  # what failed is not tried again
    ]
    adamw, sgd, unknown, refused = found.outcomes
    assert [len(outcome.runs) for outcome in found.outcomes] == [2, 2, 0, 0]
    assert "nonsense" in unknown.failure
    assert "nothing" in refused.failure
    # the same seed and rows: repeats agree to the last bit, and both begin from one model
    assert adamw.runs[0].losses == adamw.runs[1].losses
    assert adamw.runs[0].losses[0] == sgd.runs[0].losses[0]
    assert adamw.runs[0].losses[-1] != sgd.runs[0].losses[-1]
    assert [run.anatomy is not None for run in adamw.runs] == [True, False]
    assert adamw.anatomy.optimizer_state > sgd.anatomy.optimizer_state == 0
    assert found.recipe["seed"] == 3
    assert found.is_complete
    assert list(home.iterdir()) == []
    assert len(list((own_folder / "logs").iterdir())) == 5


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_keeps_what_is_done(recipe, own_folder, home, how):
    """And leaves no process behind."""
    command = [sys.executable, "-m", "trimtab", "compare", str(recipe), "--vary", "train.optimizer=sgd,adamw"]
    command += ["--steps", "8", "--repeats", "50", "--device", "cpu", "--out", "results"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in child.stderr:
            if "sgd, run 1 of 50" in line:
                break
        started = the_child_of(child.pid)  # the second run
        child.send_signal(how)
        out, err = child.communicate(timeout=300)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == (130 if how == signal.SIGINT else -how)
    assert "the measurements so far are kept" in err
    assert "only sgd ran: nothing to compare" in out
    stored = json.loads(Path("results/results.json").read_text())
    assert [len(variant["runs"]) for variant in stored["variants"]] == [1, 0]
    assert not stored["is_complete"]
    # a signal in the middle of starting it leaves the run to itself, which sees that its parent is gone
    until(lambda: not Path(f"/proc/{started}").exists())
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_a_run_whose_comparison_is_gone_ends(recipe, own_folder, home):
    """A comparison that is killed cannot clean up; its run sees that and does not go on for hours."""
    command = [sys.executable, "-m", "trimtab", "compare", str(recipe), "--vary", "train.optimizer=sgd,adamw"]
    command += ["--steps", "100000", "--device", "cpu", "--out", "results"]
    comparison = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(lambda: list(home.glob("*/0-0/run/metrics.jsonl")))
        run = the_child_of(comparison.pid)
    finally:
        comparison.kill()
        comparison.wait()
    until(lambda: not _is_alive(run))


def until(happened, patience_s=180):
    """Wait; the patience only guards against waiting for good."""
    deadline = time.monotonic() + patience_s
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def the_child_of(parent):
    """The one process that another has started, as soon as there is one."""

    def children():
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended since
                after_the_name = (folder / "stat").read_text().rpartition(")")[2].split()
                found += [int(folder.name)] if int(after_the_name[1]) == parent else []
        return found

    (child,) = until(children)
    return child


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_the_command(recipe, own_folder, home):
    """The whole way, with the recipe of a user and a study."""
    command = [sys.executable, "-m", "trimtab", "compare", str(recipe), "--study", "accumulation", "--steps", "6"]
    command += ["--repeats", "1", "--device", "cpu", "--set", "train.batch_size=4"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    folder = Path("runs/reviews/compare-1")
    assert {path.name for path in folder.iterdir()} == {
        *("logs", "results.json", "results.md", "memory-and-speed.png", "loss.png", "report.html"),
    }
    for words in ("4 as 1 × 4", "4 as 4 × 1", "1 alone", "tensors MiB", "activations", "needs"):
        assert words in done.stdout
    stored = json.loads((folder / "results.json").read_text())
    assert [len(variant["runs"]) for variant in stored["variants"]] == [1, 1, 1, 1]
    by_name = {variant["name"]: variant for variant in stored["variants"]}
    assert by_name["4 as 4 × 1"]["anatomy"]["activations"] < by_name["4 as 1 × 4"]["anatomy"]["activations"]
    assert stored["surroundings"]["hardware"]
    assert stored["protocol"]["steps"] == 6
