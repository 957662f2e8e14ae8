"""Predictions are kept between plans: equal to traced ones, never those of another step, and never in the way."""

import gzip
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import trimtab
from trimtab.planner import prediction_cache, prediction_key
from trimtab.planner.prediction_cache import PredictionCache, PredictionFolder, open_prediction_cache, remove_oldest
from trimtab.planner.prediction_key import PredictionKeys, is_known_code, traced_recipe
from trimtab.planner.shapes import BatchShape, OneLength, named_task
from trimtab.planner.survey import survey
from trimtab.planner.target import known_target
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.planner.trace.stored_trace import as_plain, from_plain
from trimtab.techniques.base import StepSpec

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 0} | TINY


def recipe(config=LLAMA, task="causal-lm", **sections):
    train = {"batch_size": 4, "precision": "bf16", "max_steps": 100} | sections.pop("train", {})
    model = {"config": config, "tokenizer": "train"}
    return trimtab.Recipe(model=model, task=task, data={"train": "rows.jsonl"}, train=train, **sections)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    return tmp_path / "predictions"


@pytest.fixture
def no_traces(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a step was traced")

    def forbid():
        monkeypatch.setattr(StepTracer, "_trace", fail)

    return forbid


def planned(made, **options):
    found = survey(made, **({"gpu": "t4", "length": 64, "thorough": False} | options))
    return found.as_dict(), found.notes()


def files(folder):
    return sorted(path for path in folder.glob("*/*") if path.is_file())


# ---------------------------------------------------------------------- what a second plan does


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="full"),
        pytest.param({"memory": {"update": "host"}}, id="host"),
        pytest.param({"adapter": "lora", "train": {"compile": "blocks"}}, id="compiled", marks=pytest.mark.slow),
        pytest.param(
            {"adapter": "lora", "train": {"compile": "graphs"}, "memory": {"padding": "none"}},
            id="captured",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_second_plan_traces_nothing_and_is_equal(cache, monkeypatch, no_traces, sections):
    made, options = recipe(**sections), {"gpu": "h200", "memory": "2GiB"}
    monkeypatch.setenv("TRIMTAB_CACHE", "off")
    traced = planned(made, **options)
    assert not cache.exists()
    monkeypatch.setenv("TRIMTAB_CACHE", str(cache.parent))
    assert planned(made, **options) == traced
    assert files(cache)
    no_traces()
    assert planned(made, **options) == traced


@pytest.mark.parametrize("target", ["mi300x", "cpu"])  # fixed segments; no caching allocator
def test_other_kinds_of_targets(cache, no_traces, target):
    first, _ = planned(recipe(), gpu=target)
    no_traces()
    second, _ = planned(recipe(), gpu=target)
    if target == "cpu":  # where memory in use and rates are measured each time
        first, second = ([row["parts"]["activations"] for row in found["ladder"]] for found in (first, second))
    assert second == first


def test_settings_that_change_no_step_share_predictions(cache, no_traces):
    planned(recipe())
    no_traces()
    others = {"train": {"lr": 3e-3, "schedule": "constant", "warmup": 5}, "seed": 3, "out": "elsewhere"}
    planned(recipe(**others))
    planned(recipe(), memory="14GiB")


def test_what_no_plan_asked_is_computed_from_the_stored_trace(cache, no_traces):
    first = planned(recipe())
    answers = [path for path in files(cache) if ".answers." in path.name]
    for path in answers:
        path.unlink()
    no_traces()
    assert planned(recipe()) == first
    assert all(path.exists() for path in answers)


def test_fit_uses_the_cache(tiny, own_folder, no_traces):
    rows = own_folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"good {n}", "label": n % 2}) + "\n" for n in range(16)))
    made = trimtab.Recipe(
        model=tiny.folder("bert"),
        data={"train": str(rows), "eval": str(rows)},
        train={"max_steps": 1, "batch_size": 4},
        memory={"budget": "8GiB"},
    )
    first = trimtab.fit(made, fresh=True).plan
    no_traces()
    assert trimtab.fit(made, fresh=True).plan.spec == first.spec


# ---------------------------------------------------------------------- keys

SPEC = StepSpec.of(2, "bf16", {"a": "b"})
SHAPE = BatchShape(2, 16)


def key_of(made=None, *, gpu=None, parts=(SPEC, SHAPE, 1), has_tokenizer=False):
    made = traced_recipe(made or recipe())
    model = StepTracer(made, named_task(made), Gpu()).skeleton()
    return PredictionKeys(made, named_task(made), gpu or Gpu(), model, has_tokenizer=has_tokenizer).of(*parts)


@pytest.mark.parametrize(
    "changed",
    [
        {"parts": (SPEC.with_micro_batch(1), SHAPE, 1)},
        {"parts": (SPEC.having({"a": "c"}), SHAPE, 1)},
        {"parts": (replace(SPEC, precision="fp32"), SHAPE, 1)},
        {"parts": (SPEC, replace(SHAPE, length=17), 1)},
        {"parts": (SPEC, replace(SHAPE, is_padded=True), 1)},
        {"parts": (SPEC, SHAPE, 2)},
        {"gpu": Gpu(capability=(8, 0))},
        {"gpu": Gpu(workspace_config=":16:8")},
        {"has_tokenizer": True},
        {"made": recipe(LLAMA | {"vocab_size": 513})},
        {"made": recipe(LLAMA | {"num_hidden_layers": 5})},
        {"made": recipe(LLAMA | {"attention_dropout": 0.1})},
        {"made": recipe(LLAMA | {"model_type": "mistral"})},
        {"made": recipe(adapter="lora")},
        {"made": recipe(train={"max_grad_norm": None})},
        {"made": recipe(train={"optimizer": "sgd"})},
        {"made": recipe(train={"weight_decay": 0.1})},
        {"made": recipe(train={"label_smoothing": 0.1})},
        {"made": recipe(train={"freeze": {"model.layers.0": "always"}})},
        {"made": recipe(task="classify")},
        {"made": recipe(memory={"tile_tokens": 64})},
    ],
)
def test_what_changes_a_step_changes_its_key(changed):
    assert key_of() == key_of()
    assert key_of(**changed) not in (None, key_of())


def test_ranks_of_an_adapter_are_part_of_the_key():
    kinds = [{"kind": "lora", "rank": rank} for rank in (4, 8)]
    assert len({key_of(recipe(adapter=adapter)) for adapter in kinds}) == 2


@pytest.mark.parametrize("number", range(5))
def test_versions_and_code_are_part_of_the_key(monkeypatch, number):
    before, versions = key_of(), prediction_key._versions()
    monkeypatch.setattr(prediction_key, "_versions", lambda: (*versions[:number], "other", *versions[number + 1 :]))
    assert key_of() != before


def test_versions_name_packages_and_digest_all_code(monkeypatch, tmp_path):
    names = {line.split()[0].lower() for line in prediction_key._versions()[4:]}
    assert {"torch", "transformers", "peft"} <= names
    package = tmp_path / "trimtab"
    (package / "planner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    code = package / "planner" / "rules.py"
    monkeypatch.setattr(trimtab, "__file__", str(package / "__init__.py"))
    found = []
    for text in ("a = 1", "a = 2"):
        code.write_text(text)
        found.append(prediction_key._versions.__wrapped__())
    assert found[0] != found[1]


def test_switches_of_attention_are_part_of_the_key():
    before = key_of()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert key_of() != before
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_no_setting_that_is_left_out_of_the_key_reaches_a_trace():
    left_out = {"lr": 1.0, "max_steps": 9, "batch_size": 77, "warmup": 7, "on_nan": "skip"}
    changed = recipe(train=left_out, memory={"budget": "1GiB", "allow": ["8bit"], "micro_batch": 3}, seed=9, name="x")
    assert traced_recipe(changed) == traced_recipe(recipe())
    assert traced_recipe(recipe(train={"max_grad_norm": 2.0})) != traced_recipe(recipe())


# ---------------------------------------------------------------------- what is not cached


class OwnLinear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)


def skeleton():
    made = recipe()
    return StepTracer(made, named_task(made), Gpu()).skeleton()


def test_unknown_code_is_not_cached(monkeypatch):
    assert is_known_code(skeleton())
    other = skeleton()
    other.lm_head = OwnLinear(64, 512, bias=False, device="meta")
    assert not is_known_code(other)
    other = skeleton()
    other.lm_head.forward = lambda x: x
    assert not is_known_code(other)
    kind = type(skeleton())  # packages patch transformers in a running process
    with monkeypatch.context() as patched:
        patched.setattr(kind, "forward", lambda *_: None)
        assert not is_known_code(skeleton())
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[kind.__module__], "apply_rotary_pos_emb", lambda *_: None)
        assert not is_known_code(skeleton())
    assert is_known_code(skeleton())


def test_remote_code_is_not_cached():
    remote = type("Remote", (torch.nn.Linear,), {"__module__": "transformers_modules.me.model"})
    other = skeleton()
    other.lm_head = remote(64, 512, bias=False, device="meta")
    assert not is_known_code(other)
    assert PredictionKeys(recipe(), named_task(recipe()), Gpu(), other, has_tokenizer=False).of(SPEC) is None


def test_without_a_key_nothing_is_written(cache):
    folder = PredictionFolder(cache)
    assert folder.answers(None).get("needed", lambda: 3) == 3
    assert folder.trace(None, lambda: "trace") == "trace"
    assert not cache.exists()


def test_the_cache_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", "off")
    assert type(open_prediction_cache()) is PredictionCache


# ---------------------------------------------------------------------- files


def damage(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "a flipped bit":
        path.write_bytes(content[:-10] + bytes([content[-10] ^ 1]) + content[-9:])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other JSON":
        path.write_bytes(gzip.compress(b"[1]"))
    else:
        path.write_bytes(gzip.compress(b'{"storages": [1]}'))


@pytest.mark.parametrize("how", ["truncated", "a flipped bit", "empty", "other JSON", "another dict"])
def test_damaged_files_are_ignored_and_written_again(cache, no_traces, how):
    first = planned(recipe())
    for path in files(cache):
        if how != "another dict" or ".trace." in path.name:
            damage(path, how)
    assert planned(recipe()) == first
    no_traces()
    assert planned(recipe()) == first


def test_a_folder_that_cannot_be_written_to_costs_nothing_else(cache, monkeypatch):
    said = []
    monkeypatch.setattr(prediction_cache, "log_info_once", said.append)
    cache.write_text("a file in its place")
    planned(recipe())
    assert "set TRIMTAB_CACHE" in said[0]


def test_files_of_another_user_are_read(cache, no_traces, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    first = planned(recipe())
    no_traces()
    monkeypatch.setattr(os, "utime", refuse)
    assert planned(recipe()) == first


def test_writers_and_readers_at_once(cache):
    folders = [PredictionFolder(cache) for _ in range(2)]
    content = {"numbers": list(range(20_000))}
    ends = threading.Event()
    seen = []

    def read():
        while not ends.is_set():
            seen.append(folders[0].read("aa"))

    def write(folder):
        for _ in range(30):
            folder.write("aa", content)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(folder,)) for folder in folders]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ends.set()
    reader.join()
    assert all(found in (None, content) for found in seen)
    assert seen[-1] == content or folders[0].read("aa") == content
    assert [path.name for path in files(cache)] == ["aa.json.gz"]


def test_old_files_are_removed_and_used_ones_stay(cache):
    folder = PredictionFolder(cache)
    for number in range(10):
        folder.write(f"{number}x", {"bytes": os.urandom(500).hex()})
        os.utime(cache / f"{number}x" / f"{number}x.json.gz", (number, number))
    folder.read("0x")  # the oldest one is used again
    size = sum(path.stat().st_size for path in files(cache))
    remove_oldest(cache, size)
    assert len(files(cache)) == 10
    remove_oldest(cache, size // 2)
    left = {path.name.split(".")[0] for path in files(cache)}
    assert {"0x", "9x"} <= left
    assert sum(path.stat().st_size for path in files(cache)) <= size // 2


def test_the_folder_is_looked_at_while_it_grows(cache, monkeypatch):
    monkeypatch.setattr(prediction_cache, "_MOST_BYTES", 2000)
    monkeypatch.setattr(prediction_cache, "_NUM_WRITES_BETWEEN_LOOKS", 1)
    folder = PredictionFolder(cache)
    for number in range(20):
        folder.write(f"{number}", {"bytes": os.urandom(200).hex()})
    assert sum(path.stat().st_size for path in files(cache)) <= 2000


def test_answers_about_a_step_are_bounded(cache, monkeypatch):
    monkeypatch.setattr(prediction_cache, "_MOST_ANSWERS", 5)
    answers = PredictionFolder(cache).answers("ab")
    for number in range(12):
        assert answers.get(f"runs under {number}", lambda: True)
    (path,) = files(cache)
    assert len(json.loads(gzip.decompress(Path(path).read_bytes()))) <= 5


# ---------------------------------------------------------------------- stored traces


@pytest.mark.parametrize("sections", [{}, {"adapter": "lora", "train": {"compile": "blocks"}}], ids=["full", "lora"])
def test_a_stored_trace_is_equal(sections):
    from trimtab.planner.recipe_planner import RecipePlanner

    made = recipe(**sections)
    planner = RecipePlanner(made, named_task(made), known_target("h200", None), OneLength(64))
    found = planner.prediction(planner.space.reference()).trace
    again = from_plain(json.loads(json.dumps(as_plain(found))))
    assert again == replace(found, shares={})
    assert list(again.births) == list(found.births)


def test_remarks_of_a_trace_are_shown_by_later_plans(cache, monkeypatch):
    from trimtab.planner import predicted_step

    real = StepTracer._trace
    monkeypatch.setattr(StepTracer, "_trace", lambda *a, **k: replace(real(*a, **k), remarks=("not compiled",)))
    planned(recipe())
    said = []
    monkeypatch.setattr(predicted_step, "log_info_once", said.append)
    planned(recipe())
    assert "not compiled" in said
