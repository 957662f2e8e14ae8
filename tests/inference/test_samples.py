"""Samples in the report: text of the models before and after training, made at the end of a run or by a command."""

import json
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trimtab
from tiny_runs import reviews, write_jsonl
from trimtab import Recipe, fit
from trimtab.build import run_record, samples
from trimtab.build.parts import EndedRun
from trimtab.checkpoint.export import read_facts
from trimtab.commands.samples import write_samples
from trimtab.inference.samples import weights_dtype

pytestmark = [pytest.mark.samples, pytest.mark.usefixtures("own_folder")]

NAMES = {"chat": ("prompt", "answer"), "seq2seq": ("text", "target")}
QUICK = {"max_steps": 2, "batch_size": 8, "lr": 1e-2}


def rows_of(task):
    if task == "causal-lm":
        return [{"text": " ".join(row["text"] for row in reviews(3, index))} for index in range(30)]
    return [dict(zip(NAMES[task], row.values(), strict=True)) for row in reviews(20)]


def trained(tiny, task="causal-lm", *, rows=None, data=None, callbacks=(), **settings):
    """A short run; returns its result, its samples (None without any) and the text of its page."""
    model = tiny.folder("t5" if task == "seq2seq" else "llama", chat=task == "chat")
    data = {"train": str(write_jsonl(Path("rows.jsonl").absolute(), rows or rows_of(task)))} | (data or {})
    settings = {"model": model, "task": task, "data": data, "train": QUICK, "out": "run"} | settings
    result = fit(Recipe(**settings), progress="quiet", device="cpu", callbacks=callbacks)
    page = re.sub(r"<[^>]*>", " ", (result.folder / "report.html").read_text())
    return result, facts_of(result.folder).get("samples"), " ".join(page.split())


def facts_of(folder):
    return json.loads((folder / "report.json").read_text())


# ---------------------------------------------------------------------- what is generated


def test_a_run_ends_with_samples_of_the_models_before_and_after(tiny):
    rows = rows_of("causal-lm")
    result, found, page = trained(tiny, rows=rows)
    assert len(found["rows"]) == 3
    held_out = [row["text"] for row in rows]
    for row in found["rows"]:
        assert any(text.startswith(row["prompt"]) and row["prompt"] + row["expected"] == text for text in held_out)
    prompts = [row["prompt"] for row in found["rows"]]
    for name, source in (("before", tiny.folder("llama")), ("after", result.best)):
        assert [row[name] for row in found["rows"]] == trimtab.load(source, device="cpu").generate(prompts, 32)
    assert any(row["before"] != row["after"] for row in found["rows"])
    assert found["note"].startswith("Held-out rows, greedy decoding, at most 32 new tokens")
    assert f"Before: {tiny.folder('llama')}" in found["note"]
    assert "After: the best model (step 2)" in found["note"]
    assert page.count("Before training") == page.count("After training") == 3
    assert "No samples yet" not in page
    write_samples(result.folder, 1, device="cpu")  # the command makes the same ones
    assert facts_of(result.folder)["samples"] == found | {"rows": found["rows"][:1]}


@pytest.mark.parametrize("task", ["chat", "seq2seq"])
def test_samples_of_answers(tiny, task):
    rows = rows_of(task)
    _, found, _ = trained(tiny, task, rows=rows, evaluate={"samples": 2})
    assert len(found["rows"]) == 2
    for row in found["rows"]:
        assert row["before"] is not None
        assert dict(zip(NAMES[task], (row["prompt"].removeprefix("user: "), row["expected"]), strict=True)) in rows


def test_an_adapter_is_compared_with_its_base(tiny):
    """The base is loaded once; before the adapter is added, it generates what the base alone does."""
    result, found, _ = trained(tiny, adapter={"kind": "lora", "rank": 4}, train=QUICK | {"lr": 0.3})
    prompts = [row["prompt"] for row in found["rows"]]
    for name, source in (("before", tiny.folder("llama")), ("after", result.best)):
        assert [row[name] for row in found["rows"]] == trimtab.load(source, device="cpu").generate(prompts, 32)
    assert any(row["before"] != row["after"] for row in found["rows"])


def test_without_held_out_rows_prompts_are_training_rows(tiny):
    _, found, _ = trained(tiny, data={"eval_share": 0})
    assert found["note"].startswith("Training rows (none were held out)")
    assert len(found["rows"]) == 3


def test_a_model_with_random_weights_has_no_text_before(tiny):
    config = json.loads((Path(tiny.folder("llama")) / "config.json").read_text())
    _, found, page = trained(tiny, model={"config": config, "tokenizer": tiny.folder("llama")})
    assert [row["before"] for row in found["rows"]] == [None] * 3
    assert all(isinstance(row["after"], str) for row in found["rows"])
    assert "Before: random weights (no samples)" in page


def test_long_prompts_are_left_out(tiny, monkeypatch):
    monkeypatch.setattr("trimtab.inference.samples._MAX_PROMPT", 31)  # longer ones are cut to 32
    short = {"prompt": "a short film", "answer": "good"}
    rows = [{"prompt": "the very long story " * 12, "answer": "bad"}] * 30 + [short] * 3
    _, found, _ = trained(tiny, "chat", rows=rows, data={"eval_share": 0})
    assert [row["prompt"] for row in found["rows"]] == ["user: a short film"] * 3


def test_the_dtype_on_a_gpu_is_that_of_the_weights_in_training(tiny):
    gpu = torch.device("cuda")
    assert weights_dtype({"adapter": {"base_dtype": "bfloat16"}}, gpu) == torch.bfloat16
    assert weights_dtype({"adapter": {"base_dtype": "bfloat16"}}, torch.device("cpu")) is None
    assert weights_dtype({"recipe": {"train": {"precision": "bf16-pure"}}}, gpu) == torch.bfloat16
    assert weights_dtype({"recipe": {"train": {"precision": "bf16"}}}, gpu) is None
    nf4 = {"compute_dtype": "bfloat16"}
    assert weights_dtype({"adapter": {"base_dtype": "bfloat16", "nf4": nf4}}, gpu) is None


def test_a_model_object_and_a_separate_tokenizer(tiny):
    """The folder of the start has no tokenizer: it is loaded with that of the run."""
    loaded = trimtab.load(tiny.folder("llama"), device="cpu")
    rows = write_jsonl(Path("rows.jsonl").absolute(), rows_of("causal-lm"))
    recipe = Recipe(model="mine", task="causal-lm", data={"train": str(rows)}, train=QUICK, out="run")
    result = fit(recipe, model=loaded.model, tokenizer=loaded.tokenizer, progress="quiet", device="cpu")
    found = facts_of(result.folder)["samples"]["rows"]
    expected = trimtab.load(tiny.folder("llama"), device="cpu").generate([row["prompt"] for row in found], 32)
    assert [row["before"] for row in found] == expected


def test_a_base_that_cannot_generate_costs_only_its_own_texts(tiny, monkeypatch):
    monkeypatch.setattr("trimtab.inference.samples.load_model", lambda *_, **__: 1 / 0)
    _, found, page = trained(tiny)
    assert [row["before"] for row in found["rows"]] == [None] * 3
    assert all(isinstance(row["after"], str) for row in found["rows"])
    assert "(ZeroDivisionError: division by zero)" in page


def test_a_start_without_a_head_has_no_text(tiny):
    """The head of its language model would be random."""
    other = tiny.folder("llama", kind="sequence-classification", head={"num_labels": 2})
    _, found, _ = trained(tiny, model=other)
    assert [row["before"] for row in found["rows"]] == [None] * 3
    assert "(it has no weights for lm_head.weight)" in found["note"]


def test_virtual_tokens_leave_space_for_prompts(tiny):
    _, found, _ = trained(tiny, adapter={"kind": "prompt", "tokens": 34})
    assert len(found["rows"]) == 3
    assert "at most 15 new tokens" in found["note"]


def test_the_last_answer_of_a_conversation_is_the_expected_one(tiny):
    turns = [{"role": "user", "content": "a film"}, {"role": "assistant", "content": "good"}]
    _, found, _ = trained(tiny, "chat", rows=[{"messages": turns}] * 20)
    assert {(row["prompt"], row["expected"]) for row in found["rows"]} == {("user: a film", "good")}


# ---------------------------------------------------------------------- when nothing is generated


def test_samples_can_be_turned_off(tiny):
    result, found, page = trained(tiny, evaluate={"samples": 0})
    assert found is None
    assert f"trimtab report {result.folder.absolute()} --samples 3" in page


@pytest.mark.parametrize(
    ("task", "num_samples", "is_said"), [("classify", 5, True), ("classify", 3, False), ("chat", 5, False)]
)
def test_a_number_that_has_no_effect_is_reported(caplog, task, num_samples, is_said):
    caplog.set_level("INFO", logger="trimtab")
    recipe = Recipe(model="x", data={"train": "y.csv"}, evaluate={"samples": num_samples})
    samples.report_unused_setting(recipe, task)
    assert ("evaluate.samples: 5 has no effect: models of task classify do not" in caplog.text) == is_said


@pytest.mark.parametrize(
    ("device", "precision", "adapter", "num_bytes"),
    [
        ("cpu", "bf16-pure", "none", 4 * 6 + 5),
        ("cuda", "bf16-pure", "none", 2 * 6 + 5),
        ("cuda", "bf16", "lora", 2 * 6 + 5),
        ("cuda", "bf16", "none", 4 * 6 + 5),  # half-precision copies of fp32 weights
    ],
)
def test_the_size_of_weights_is_that_of_loading(device, precision, adapter, num_bytes):
    half, codes = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.uint8)
    model = SimpleNamespace(parameters=lambda: [half, codes])
    run = SimpleNamespace(
        recipe=SimpleNamespace(adapter=adapter),
        engine=SimpleNamespace(device=torch.device(device)),
        plan=SimpleNamespace(precision=precision),
        data=None,
        loaded=SimpleNamespace(model=model),
    )
    assert EndedRun.of(run).weights_bytes == num_bytes


def test_an_interrupted_run_has_no_samples(tiny, monkeypatch):
    class Stop:
        def on_step(self, state):
            state.interrupt("signal SIGTERM")

    monkeypatch.setattr(samples, "generate_samples", lambda *_: pytest.fail("it generates"))
    with pytest.raises(trimtab.Stopped):
        trained(tiny, callbacks=[Stop()])


def test_samples_of_an_earlier_best_model_are_not_shown(tiny):
    result, found, _ = trained(tiny)
    again = trimtab.resume(result.folder, sets=["train.max_steps=4", "evaluate.samples=0"], progress="quiet")
    assert read_facts(again.best)["step"] == 4
    assert facts_of(again.folder)["samples"] == found
    page = (again.folder / "report.html").read_text()
    assert "Before training" not in page
    assert "No samples yet" in page


@pytest.mark.parametrize("error", [RuntimeError("no such device"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_whatever_happens_before_them_the_run_ends_and_its_folder_is_free(tiny, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(samples, "_find_obstacle", fail)
    result, found, _ = trained(tiny)
    assert found is None
    assert trimtab.resume(result.folder, sets=["train.max_steps=3"], progress="quiet").fit.step == 3


def test_the_memory_of_an_unknown_device_is_not_an_obstacle(monkeypatch):
    monkeypatch.setattr(samples, "memory_in_use", lambda device: 0)
    monkeypatch.setattr(samples, "resolve_budget", lambda *_: None)
    for free, is_enough in ((0, True), (10, False), (10_000, True)):
        monkeypatch.setattr(samples, "free_memory", lambda device, free=free: free)
        settings = SimpleNamespace(memory=SimpleNamespace(budget=None))
        run = SimpleNamespace(engine=SimpleNamespace(device=torch.device("mps")), weights_bytes=1000, recipe=settings)
        assert (samples._find_obstacle(run, SimpleNamespace(seconds_left=None)) is None) == is_enough


@pytest.mark.parametrize("obstacle", ["memory", "budget", "time", "error", "Ctrl-C", "mistake"])
def test_a_run_without_memory_or_time_for_samples_ends_well(tiny, monkeypatch, caplog, obstacle):
    caplog.set_level("INFO", logger="trimtab")

    def fail(*_):
        kinds = {"error": RuntimeError("kernel\nlong trace"), "Ctrl-C": KeyboardInterrupt()}
        raise kinds.get(obstacle) or trimtab.errors.ModelError("the base is gone", "restore it")

    train, why = QUICK, ""
    if obstacle == "memory":
        monkeypatch.setattr(samples, "free_host_memory", lambda: 1000)
        why = r"the model needs [\d.]+ KiB, and 1000 B are free on the host; "
    elif obstacle == "budget":
        monkeypatch.setattr(samples, "resolve_budget", lambda *_: 1000)
        why = r"the model needs [\d.]+ KiB, and 1000 B are free within memory\.budget; "
    elif obstacle == "time":
        train, why = QUICK | {"max_time": "2m"}, r"train\.max_time is almost over; "
    else:
        monkeypatch.setattr(samples, "generate_samples", fail)
        why = {"error": "RuntimeError: kernel; ", "Ctrl-C": "interrupted; ", "mistake": "the base is gone"}[obstacle]
    result, found, page = trained(tiny, train=train)
    assert found is None
    assert result.fit.step == 2
    assert json.loads((result.folder / "run.json").read_text())["state"] == "finished"
    cure = "" if obstacle == "mistake" else f"make them with: trimtab report {result.folder} --samples 3"
    [line] = [line for line in caplog.messages if "samples" in line]
    assert re.fullmatch(f"no samples in the report: {why}{re.escape(cure)}", line)
    assert "No samples yet" in page


def test_the_report_exists_before_samples_are_generated(tiny, monkeypatch):
    """A process that is killed while it generates leaves a finished run."""
    seen = []

    def look(best, request):
        run = best.parent
        seen.append(((run / "report.html").exists(), json.loads((run / "run.json").read_text())["state"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(samples, "generate_samples", look)
    trained(tiny)
    assert seen == [(True, "finished")]


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_trained_model_is_freed_before_others_are_loaded(tiny, monkeypatch, adapter):
    models, alive = [], []
    build = trimtab.run.build_trainer

    def note(run, *arguments, **options):
        models.extend(weakref.ref(each) for each in (run.loaded.model, next(run.loaded.model.parameters())))
        return build(run, *arguments, **options)

    def look(best, request):
        alive.extend(model() is not None for model in models)
        raise KeyboardInterrupt

    monkeypatch.setattr(trimtab.run, "build_trainer", note)
    monkeypatch.setattr(samples, "generate_samples", look)
    trained(tiny, adapter=adapter)
    assert alive == [False, False]


def test_code_of_a_model_runs_only_if_the_recipe_trusts_it(tiny, monkeypatch):
    requests = []
    monkeypatch.setattr(samples, "generate_samples", lambda best, request: requests.append(request) or {"rows": []})
    for trusted in (False, True):
        trained(tiny, model={"name": tiny.folder("llama"), "trust_remote_code": trusted}, out=f"run-{trusted}")
    assert [request.trust_remote_code for request in requests] == [False, True]


def test_samples_are_uploaded_with_the_report(tiny, monkeypatch):
    """The page is complete when the uploader gets it."""
    pages = []
    finish = run_record.RunFolder.finish

    def look(folder, state, *, before_upload, **facts):
        def and_read():
            before_upload()
            pages.append((folder.path / "report.html").read_text())

        finish(folder, state, before_upload=and_read, **facts)

    monkeypatch.setattr(run_record.RunFolder, "finish", look)
    result, _, _ = trained(tiny)
    assert "Before training" in pages[0]
    assert read_facts(result.best)["step"] == 2


@pytest.mark.slow
def test_the_first_of_two_processes_generates(tiny):
    rows = write_jsonl(Path("rows.jsonl").absolute(), rows_of("causal-lm"))
    recipe = {"model": tiny.folder("llama"), "task": "causal-lm", "data": {"train": str(rows)}, "train": QUICK}
    Path("recipe.yaml").write_text(json.dumps(recipe))
    words = ["launch", "--cpu", "--processes", "2", "recipe.yaml", "--out", "run"]
    done = subprocess.run([sys.executable, "-m", "trimtab", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("generating samples") == 1
    assert len(facts_of(Path("run"))["samples"]["rows"]) == 3
