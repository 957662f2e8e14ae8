"""train.compile in a run: sizes before the first step, the same bits after a resume, and a way back.

Runs use the backend "aot_eager", which traces like inductor and generates no code, but for the slow ones.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from repeated_graphs import Repeats
from tiny_models import config_of
from tiny_runs import reproducible_lines, saved_tensors, write_csv
from trimtab import Recipe, fit
from trimtab.errors import RecipeError, Stopped, TrimtabError
from trimtab.model.captured_step import (
    MOST_GRAPHS,
    capture_micro_batches,
    captured_micro_batches_of,
    compute_captured,
)
from trimtab.model.compiled_blocks import CompiledBlocks, compile_blocks, compiled_blocks_of
from trimtab.model.load import load_model
from trimtab.techniques import compilation
from trimtab.techniques.apply import plain_spec, values_with_stored, values_without_plan
from trimtab.techniques.base import Accelerator, Case, StepSpec, Trial
from trimtab.techniques.compilation import Compilation


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that is fast; its `backend` may be replaced."""
    torch._dynamo.reset()
    counters.clear()
    made = []

    def compile_fast(model):
        made.append(compile_blocks(model, compile_fast.backend))
        return made[-1]

    compile_fast.backend, compile_fast.made = "aot_eager", made
    monkeypatch.setattr(compilation, "compile_blocks", compile_fast)
    yield compile_fast
    torch._dynamo.reset()


class Stops:
    def on_step(self, state):
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def rows():
    """Rows of one length, so that micro-batches have two sizes: full ones and the last one of an epoch."""
    words = {"good": "the film was good", "bad": "the cast was bad"}
    return [{"text": words[label], "label": label} for label in ("good", "bad") * 24]


def recipe_of(tiny, out, *, max_steps=6, **sections):
    train = {"compile": "blocks", "max_steps": max_steps, "batch_size": 8, "lr": 1e-3, "log_every": 1}
    return Recipe(
        model=tiny.folder("bert", num_hidden_layers=2),
        data={"train": "rows.csv", "eval_share": 0.25},
        train=train | sections.pop("train", {}),
        out=out,
        **sections,
    )


def assert_same_run(ours, theirs, step):
    assert reproducible_lines(ours) == reproducible_lines(theirs)
    for folder in ("best", f"checkpoints/step-{step}"):
        mine, others = (saved_tensors(Path(run) / folder) for run in (ours, theirs))
        assert mine
        assert mine.keys() == others.keys()
        assert all(torch.equal(mine[name], others[name]) for name in mine)


# ---------------------------------------------------------------------- in a run


@pytest.mark.slow
def test_every_size_is_compiled_before_the_first_step(tiny, own_folder, compiler, caplog):
    write_csv(own_folder / "rows.csv", rows())
    seen = []

    class Counts:
        def on_step(self, state):
            seen.append(counters["stats"]["unique_graphs"])

    with caplog.at_level("INFO", "trimtab"):
        result = fit(recipe_of(tiny, "run"), callbacks=[Counts()], progress="quiet", device="cpu")
    assert len(set(seen)) == 1, "nothing is compiled after the first step"
    assert seen[0] == 1, "one graph for both sizes"
    assert result.plan.compile == "blocks"
    assert json.loads(Path("run/plan.json").read_text())["compile"] == "blocks"
    assert any(record.message.startswith("compiling blocks") for record in caplog.records)
    assert any("compiled blocks" in line for line in result.plan.describe())


@pytest.mark.slow
def test_the_warm_up_changes_nothing(tiny, own_folder, compiler, monkeypatch):
    write_csv(own_folder / "rows.csv", rows())
    fit(recipe_of(tiny, "warm"), progress="quiet", device="cpu")
    monkeypatch.setattr(Compilation, "warm_up", lambda *_: None)
    fit(recipe_of(tiny, "cold"), progress="quiet", device="cpu")
    assert_same_run("warm", "cold", 6)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tiny, own_folder, compiler):
    write_csv(own_folder / "rows.csv", rows())
    fit(recipe_of(tiny, "whole"), progress="quiet", device="cpu")
    with pytest.raises(Stopped):
        fit(recipe_of(tiny, "stopped"), callbacks=[Stops()], progress="quiet", device="cpu")
    result = fit(recipe_of(tiny, "stopped"), progress="quiet", device="cpu", resume=True)
    assert result.fit.step == 6
    assert_same_run("stopped", "whole", 6)


@pytest.mark.slow
def test_a_failure_is_recorded_and_kept(tiny, own_folder, compiler, caplog):
    write_csv(own_folder / "rows.csv", rows())

    def broken(graph, inputs):
        raise NotImplementedError("no code for this machine")

    compiler.backend = broken
    with caplog.at_level("INFO", "trimtab"), pytest.raises(Stopped):
        fit(recipe_of(tiny, "run"), callbacks=[Stops()], progress="quiet", device="cpu")
    assert sum("no code for this machine" in record.message for record in caplog.records) == 1
    compiler.backend = "aot_eager"  # the machine has learned it since
    fit(recipe_of(tiny, "run"), progress="quiet", device="cpu", resume=True)
    assert "no code for this machine" in compiler.made[-1].failure
    fit(recipe_of(tiny, "plain", train={"compile": "off"}), progress="quiet", device="cpu")
    assert_same_run("run", "plain", 6)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("off", "blocks"), ("blocks", "off")])
def test_a_run_may_resume_with_another_value(tiny, own_folder, compiler, before, after):
    write_csv(own_folder / "rows.csv", rows())
    fit(recipe_of(tiny, "run", max_steps=2, train={"compile": before}), progress="quiet", device="cpu")
    longer = recipe_of(tiny, "run", max_steps=4, train={"compile": after})
    result = fit(longer, progress="quiet", device="cpu", resume=True)
    assert (result.fit.step, result.plan.compile) == (4, after)


def test_recomputation_of_single_operations_is_refused(tiny, own_folder, compiler):
    write_csv(own_folder / "rows.csv", rows())
    recipe = recipe_of(tiny, "run", memory={"gradient_checkpointing": "ops"})
    with pytest.raises(TrimtabError, match=r"ops does not work with train\.compile: blocks"):
        fit(recipe, progress="quiet", device="cpu")


# ---------------------------------------------------------------------- rules


def case_of(model, **train):
    return Case(model, Accelerator("cuda"), "bf16", Recipe(model="m", data={"train": "d"}, train=train))


def auto_values(model=None, recipe=None, **changes):
    model = model or load_model(config_of("bert"), "sequence-classification", {}, None)
    hopper = Accelerator("cuda", (9, 0), is_here=False)
    asked = Recipe(**{"model": "m", "data": {"train": "d"}, **(recipe or {})})
    settings = {"accelerator": hopper, "recipe": asked, "num_steps": 10_000} | changes
    return Compilation().values(Case(model, precision="bf16", **settings))


def test_auto_considers_long_runs_on_one_gpu(monkeypatch):
    assert auto_values() == ("off", "capture", "graphs")
    assert auto_values(recipe={"adapter": "lora"}) == ("off", "capture", "graphs")
    monkeypatch.setattr(compilation, "_MOST_FOR_GRAPHS", 5)
    assert auto_values() == ("off", "blocks"), "all gradients of a large model would stay allocated"
    assert auto_values(recipe={"adapter": "lora"}) == ("off", "capture", "graphs"), "few weights have gradients"


def test_to_capture_takes_less_time_than_to_compile():
    """Nothing is compiled, so shorter runs are captured."""
    model = load_model(config_of("bert"), "sequence-classification", {}, None)
    case = Case(model, Accelerator("cuda", (9, 0)), "bf16", count_shapes=lambda: 20)
    off, capture, blocks, graphs = (
        Compilation().start_seconds(value, case) for value in ("off", "capture", "blocks", "graphs")
    )
    assert off == 0 < capture < blocks
    assert graphs == pytest.approx(capture + blocks)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_steps": 100},
        {"num_processes": 2},
        {"model": torch.nn.Linear(2, 2)},
        {"accelerator": Accelerator("cpu")},
        {"accelerator": Accelerator("cuda", (7, 5), is_here=False)},
        {"recipe": {"adapter": "qlora"}},
        {"recipe": {"adapter": {"kind": "lora", "base": "fp8"}}},
        {"recipe": {"train": {"compile": "off"}}},
    ],
    ids=str,
)
def test_auto_is_off_otherwise(changes):
    assert auto_values(**changes) == ("off",)


def test_own_loops_are_left_alone():
    assert Compilation().values(Case(torch.nn.Linear(2, 2), Accelerator("cuda", (9, 0)), "bf16")) == ("off",)


@pytest.mark.parametrize("value", ["capture", "graphs"])
def test_graphs_need_one_process(value):
    spec = StepSpec.of(4, "bf16", {"compile": value})
    case = Case(None, Accelerator("cuda", (9, 0)), "bf16", num_processes=2)
    assert f"{value} works with one process" in Compilation().refuse(spec, case)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(RecipeError, match="Linear has no repeated blocks"):
        Compilation().values(case_of(torch.nn.Linear(2, 2), compile="blocks"))
    assert Compilation().values(case_of(torch.nn.Linear(2, 2), compile="capture")) == ("capture",)


def test_only_the_most_frequent_sizes_are_captured():
    ran = []
    model = torch.nn.Linear(2, 2)
    model.__dict__["_trimtab_compiled_blocks"] = CompiledBlocks()
    capture_micro_batches(model, Repeats())
    shares = [0.5 if number in (3, 17) else 0.01 for number in range(40)]
    trials = [Trial((1, n), share, partial(ran.append, n)) for n, share in enumerate(shares)]
    Compilation().warm_up(model, "graphs", lambda: trials)
    assert len(set(ran)) == MOST_GRAPHS
    assert {3, 17} <= set(ran)
    assert ran[-MOST_GRAPHS:] == sorted(set(ran)), "captured in the order given, the largest first"


# ---------------------------------------------------------------------- with generated code

_RUN = """
import sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from trimtab import Recipe, fit
from trimtab.errors import Stopped
folder, out, stops, resume = sys.argv[1], sys.argv[2], sys.argv[3] == "stops", sys.argv[4] == "resume"
recipe = Recipe(
    model=folder, data={"train": "rows.csv", "eval_share": 0.25}, out=out, track="none",
    train={"compile": "blocks", "deterministic": True, "max_steps": 6, "batch_size": 8, "log_every": 1},
)
class Stops:
    def on_step(self, state):
        if stops and state.step == 3:
            import os, signal
            os.kill(os.getpid(), signal.SIGTERM)
try:
    fit(recipe, callbacks=[Stops()], progress="quiet", device="cpu", resume=resume)
except Stopped:
    print("stopped")
print("HITS", counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
print("MISSES", counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
@pytest.mark.slow
def test_bits_are_the_same_with_generated_code_and_a_later_process_reads_the_cache(tiny, own_folder):
    """With dropout, in processes of their own: the second one compiles nothing."""
    write_csv(own_folder / "rows.csv", rows())
    folder = tiny.folder("bert", num_hidden_layers=2, hidden_dropout_prob=0.1)

    def run(*words):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(own_folder / "cache"), "TRIMTAB_TRACK": "none"}
        command = [sys.executable, "-c", _RUN, str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return dict(line.split() for line in done.stdout.splitlines() if " " in line), done.stdout

    first, _ = run("whole", "", "")
    assert int(first["MISSES"]) > 0
    _, text = run("stopped", "stops", "")
    assert "stopped" in text
    last, _ = run("stopped", "", "resume")
    assert int(last["MISSES"]) == 0
    assert int(last["HITS"]) > 0
    assert_same_run("stopped", "whole", 6)


# ---------------------------------------------------------------------- captured


class Refuses(Repeats):
    def record(self, work):
        self.num_recorded += 1
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.slow
@pytest.mark.parametrize(("plain", "captured"), [("blocks", "graphs"), ("off", "capture")])
def test_a_run_replays_captured_micro_batches(tiny, own_folder, compiler, monkeypatch, plain, captured):
    write_csv(own_folder / "rows.csv", rows())
    recorder = Repeats()
    monkeypatch.setattr(compilation, "capture_micro_batches", lambda model: capture_micro_batches(model, recorder))
    for value in (plain, captured):
        recipe = recipe_of(tiny, value, memory={"micro_batch": 4}, train={"compile": value})
        fit(recipe, progress="quiet", device="cpu")
    assert recorder.num_recorded == 1
    assert recorder.num_replayed == 1 + 11  # a trial, and 6 steps of 2 micro-batches: one step has half the rows
    assert len(compiler.made) == (2 if plain == "blocks" else 0), "capture compiles nothing"
    assert_same_run(captured, plain, 6)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["capture", "graphs"])
def test_graphs_on_a_cpu_are_reported(tiny, own_folder, compiler, caplog, value):
    write_csv(own_folder / "rows.csv", rows())
    with caplog.at_level("INFO", "trimtab"):
        fit(recipe_of(tiny, "run", max_steps=2, train={"compile": value}), progress="quiet", device="cpu")
    assert sum(f"{value} needs an NVIDIA GPU" in record.message for record in caplog.records) == 1


@pytest.mark.slow
def test_a_run_that_cannot_be_captured_says_so_and_stays_so(tiny, own_folder, monkeypatch, caplog):
    """Also after a resume: the failure is in the checkpoint."""
    write_csv(own_folder / "rows.csv", rows())
    recorder = Refuses()
    monkeypatch.setattr(compilation, "capture_micro_batches", lambda model: capture_micro_batches(model, recorder))
    fit(recipe_of(tiny, "plain", train={"compile": "off"}), progress="quiet", device="cpu")
    recipe = recipe_of(tiny, "captured", train={"compile": "capture"})
    with caplog.at_level("INFO", "trimtab"):
        with pytest.raises(Stopped):
            fit(recipe, callbacks=[Stops()], progress="quiet", device="cpu")
        fit(recipe, progress="quiet", device="cpu", resume=True)
    assert sum("could not be captured" in record.message for record in caplog.records) == 1
    assert recorder.num_recorded == 1
    assert_same_run("captured", "plain", 6)


@pytest.mark.slow
def test_graphs_that_ran_out_of_memory_are_dropped(tiny, own_folder, compiler, monkeypatch):
    """Their pool would not be free for smaller micro-batches."""
    write_csv(own_folder / "rows.csv", rows())
    recorder, states, fails = Repeats(), [], []

    def capture(model):
        states.append(capture_micro_batches(model, recorder))
        return states[-1]

    def compute(*args):
        if fails:
            raise torch.OutOfMemoryError(fails.pop())
        return compute_captured(*args)

    class RunsOut:
        def on_step(self, state):
            if state.step == 2:
                seen.append((states[0].num_graphs, recorder.num_forgotten))
                fails.append("CUDA out of memory")
            elif state.step == 3:
                seen.append((states[0].num_graphs, recorder.num_forgotten))

    seen = []
    monkeypatch.setattr(compilation, "capture_micro_batches", capture)
    monkeypatch.setattr(compilation, "compute_captured", compute)
    recipe = recipe_of(tiny, "run", memory={"micro_batch": 4}, train={"compile": "graphs"})
    fit(recipe, callbacks=[RunsOut()], progress="quiet", device="cpu")
    (before, forgotten), (after, forgotten_later) = seen
    assert before == 1
    assert after == 1, "of the smaller size alone"
    assert forgotten_later == forgotten + 1


def test_a_failure_belongs_to_what_failed():
    """After a resume with another value: what was captured says nothing about the compiler, and vice versa."""

    def execution(value):
        model = torch.nn.Linear(2, 2)
        if value in ("blocks", "graphs"):
            model.__dict__["_trimtab_compiled_blocks"] = CompiledBlocks()
        if value in ("capture", "graphs"):
            capture_micro_batches(model, Repeats())
        return compiled_blocks_of(model), captured_micro_batches_of(model), Compilation().state(model, value)

    for before, after in (("capture", "blocks"), ("capture", "graphs"), ("graphs", "capture"), ("blocks", "capture")):
        blocks, captured, state = execution(before)
        for part in (blocks, captured):
            if part is not None:
                part.failure = f"the reason of {type(part).__name__}"
        later_blocks, later_captured, later = execution(after)
        later.load_state_dict(state.state_dict())
        if later_blocks is not None:
            assert later_blocks.failure == (blocks.failure if blocks is not None else None)
        if later_captured is not None:
            assert later_captured.failure == (captured.failure if captured is not None else None)


def test_other_addresses_of_weights_drop_the_graphs():
    model = torch.nn.Linear(2, 2)
    captured = capture_micro_batches(model, recorder := Repeats())
    captured._forget_if_changed(model)
    captured._forget_if_changed(model)
    assert recorder.num_forgotten == 1, "at the beginning"
    model.weight.data = model.weight.data.clone()
    captured._forget_if_changed(model)
    assert recorder.num_forgotten == 2


# ---------------------------------------------------------------------- on another machine


@pytest.mark.parametrize(
    ("accelerator", "num_processes", "expected"),
    [
        (Accelerator("cuda", (9, 0)), 1, ("none", "graphs")),
        (Accelerator("cuda", (9, 0)), 2, ("none", "off")),
        (Accelerator("cuda", (7, 5)), 1, ("longest", "graphs")),  # attention dropout
        (Accelerator("cpu"), 1, ("none", "off")),
        (Accelerator("mps"), 1, ("longest", "off")),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_planned", [True, False])
def test_a_resumed_run_keeps_what_auto_chose_if_it_works_here(accelerator, num_processes, expected, is_planned):
    model = load_model(config_of("bert"), "sequence-classification", {}, None)
    asked = Recipe(model="m", data={"train": "d"})
    options = {"model_kind": "sequence-classification", "num_processes": num_processes}
    case = Case(model, accelerator, "bf16" if accelerator.capability != (7, 5) else "fp16", asked, **options)
    stored = plain_spec(4, case.precision, padding="none", compile="graphs")
    found = values_with_stored(stored, case) if is_planned else values_without_plan(case, stored)
    assert (found["padding"], found["compile"]) == expected
    old = plain_spec(4, case.precision)
    kept = values_with_stored(old, case) if is_planned else values_without_plan(case, old)
    assert (kept["padding"], kept["compile"]) == ("longest", "off"), "an older run continues as it was"


def test_auto_captures_classifiers_only_if_a_batch_is_one_micro_batch():
    hopper, kind = Accelerator("cuda", (9, 0), is_here=False), "sequence-classification"
    for micro_batch, memory, is_possible in ((16, {}, True), (8, {}, False), (16, {"micro_batch_tokens": 64}, False)):
        asked = Recipe(model="m", data={"train": "d"}, train={"batch_size": 16}, memory=memory)
        spec = plain_spec(micro_batch, "bf16", padding="none", compile="graphs")
        reason = Compilation().refuse(spec, Case(None, hopper, "bf16", asked, model_kind=kind))
        assert (reason is None) is is_possible
        assert Compilation().refuse(spec, Case(None, hopper, "bf16", asked, model_kind="causal-lm")) is None
