"""File, flags and --set: later values win, every value has its origin, and written recipes are read back."""

import inspect
import json
import re
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest

import trimtab
from trimtab.errors import RecipeError
from trimtab.recipe.load import (
    LoadedRecipe,
    as_loaded,
    build_json_schema,
    load_recipe,
    load_to_resume,
    render_commented_yaml,
    render_resolved_yaml,
)
from trimtab.recipe.schema import AdapterSettings, OptimizerName, Recipe, TrainSettings
from trimtab.recipe.schema_keys import keys_of

WORD_OR_SECTION = ("model.", "adapter.")  # given as one word here
CHECKPOINTING = "gradient_checkpointing"
LEAVES = [key.dotted for key in keys_of(Recipe) if key.section is None]
EXAMPLE = """\
model: bert-base-uncased        # Hub name
task: classify
data: {train: imdb, eval: "imdb:test", text: text, label: label, max_length: 512}
train: {epochs: 2, batch_size: 32, lr: 5e-5, optimizer: adamw, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01,
        schedule: linear, warmup: 0.06, max_grad_norm: 1.0, precision: auto, freeze: {}, max_time: 3h}
adapter: none
evaluate: {every: epoch, metric: accuracy}
early_stopping: {metric: accuracy, patience: 3, min_delta: 0}
track: none
limits: {fast_dev_run: false, overfit_batches: 0, train: null, eval: null}
seed: 0
"""


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(EXAMPLE)
    return (tmp_path / "recipe.yaml").relative_to(tmp_path)


def write(path, text):
    path.write_text(text)
    return path


def with_file(tmp_path, lines):
    """A recipe file with the required keys on lines 1 and 2, and more from line 3 on."""
    return write(tmp_path / "r.yaml", f"model: bert\ndata: {{train: rows.csv}}\n{lines}\n")


def test_later_values_win_and_have_their_origin(recipe_file):
    flags = {"train.lr": 1e-4, "train.batch_size": 16, "data.train": "mine.csv", "model": None}
    loaded = load_recipe(recipe_file, flags, ["train.lr=3e-5", "early_stopping.patience=7", "memory.micro_batch=4"])
    recipe, origins = loaded.recipe, loaded.origins
    assert (recipe.train.lr, recipe.train.batch_size, recipe.data.train) == (3e-5, 16, "mine.csv")
    assert (recipe.train.epochs, recipe.early_stopping.patience, recipe.memory.micro_batch) == (2.0, 7, 4)
    assert (recipe.model, recipe.data.eval, recipe.train.max_time) == ("bert-base-uncased", "imdb:test", "3h")
    by_place = {
        "--set": ["train.lr", "early_stopping.patience"],
        "--batch-size": ["train.batch_size"],
        "--data": ["data.train"],
        "recipe.yaml:5": ["train.warmup"],
        "recipe.yaml:8": ["early_stopping.metric"],
        "recipe.yaml:10": ["limits.train"],
        "default": ["early_stopping.mode", "out"],
    }
    assert all(origins[key] == place for place, keys in by_place.items() for key in keys)
    wholes = (*WORD_OR_SECTION, "distill.")  # the last is null
    assert set(origins) == {key for key in LEAVES if not key.startswith(wholes)} | {"model", "adapter", "distill"}


def test_no_file_is_needed():
    loaded = load_recipe(None, {"model": "bert", "data.train": "my.csv", "limits.train": 5}, [])
    assert loaded.recipe == Recipe(model="bert", data={"train": "my.csv"}, limits={"train": 5})
    assert (loaded.origins["model"], loaded.origins["limits.train"]) == ("--model", "--limit-train")


LORA_8 = AdapterSettings(kind="lora", rank=8)
QLORA_8 = AdapterSettings(kind="qlora", rank=8)
FP8 = AdapterSettings(kind="lora", base="fp8")


@pytest.mark.parametrize(
    ("file", "sets", "expected"),
    [
        ("", ["train={lr: 1e-3, epochs: 1}"], {"train.lr": 1e-3, "train.epochs": 1.0}),
        ("train: {epochs: 7}", ["train={lr: 1e-3}"], {"train.lr": 1e-3, "train.epochs": 7.0}),
        ("train: {epochs: 7}", ["train.max_steps=5"], {"train.max_steps": 5, "train.epochs": None}),
        ("train: {epochs: 7}", ["train={max_steps: 5}"], {"train.max_steps": 5, "train.epochs": None}),
        ("train: {epochs: 7}", ["train.max_steps=5", "train.epochs=null"], {"train.max_steps": 5}),
        ("train: {max_steps: 5}", ["train.epochs=7"], {"train.max_steps": None, "train.epochs": 7.0}),
        ("train: {max_steps: 5}", ["train.epochs=null"], {"train.max_steps": 5, "train.epochs": None}),
        ("train: {max_steps: 5, epochs: 3}", ["train.max_steps=6"], {"train.max_steps": 6, "train.epochs": 3.0}),
        ("train: {freeze: {a: always}}", ["train.freeze={}"], {"train.freeze": {}}),
        ("train: {freeze: {a: always}}", ["train.freeze.b.*=5"], {"train.freeze": {"a": "always", "b.*": "5 steps"}}),
        ("train:", ["train.lr=1"], {"train.lr": 1.0}),
        ("", ["train=null", "train.lr=1"], {"train.lr": 1.0}),
        ("", ["data.text=[a, b]"], {"data.text": ["a", "b"]}),
        ("", ["data.train=*.csv"], {"data.train": "*.csv"}),
        ("", ["data.train=a=b.csv", " seed = 3 "], {"data.train": "a=b.csv", "seed": 3}),
        ("", ["model=roberta"], {"model": "roberta"}),
        ("", ["model.trust_remote_code=true"], {"model.name": "bert", "model.trust_remote_code": True}),
        ("", ["model.tokenizer=t", "model=roberta"], {"model.name": "roberta", "model.tokenizer": "t"}),
        ("", ["model=roberta", "model.tokenizer=t"], {"model.name": "roberta", "model.tokenizer": "t"}),
        ("early_stopping: {patience: 5}", ["early_stopping=null"], {"early_stopping": None}),
        ("early_stopping: null", ["early_stopping.patience=5"], {"early_stopping.patience": 5}),
        ("early_stopping: none", ["early_stopping.patience=5"], {"early_stopping.patience": 5}),
        ("early_stopping: null", ["early_stopping={}"], {"early_stopping.patience": 3}),
        ("early_stopping: {metric: f1}", ["early_stopping={patience: 5}"], {"early_stopping.metric": "f1"}),
        (
            f"memory: {{{CHECKPOINTING}: all}}",
            [f"memory.{CHECKPOINTING}.every=2"],
            {f"memory.{CHECKPOINTING}": {"every": 2}},
        ),
        (
            f"memory: {{{CHECKPOINTING}: {{every: 2}}}}",
            [f"memory.{CHECKPOINTING}=all"],
            {f"memory.{CHECKPOINTING}": "all"},
        ),
        ("", ["adapter=lora", "adapter.rank=8"], {"adapter": LORA_8}),
        ("", ["adapter.rank=8", "adapter=lora"], {"adapter": LORA_8}),
        ("", ["adapter.rank=8"], {"adapter": LORA_8}),
        ("adapter: lora", ["adapter.rank=8"], {"adapter": LORA_8}),
        ("adapter: qlora", ["adapter.rank=8"], {"adapter": QLORA_8}),
        ("adapter: lora", ["adapter.base=fp8"], {"adapter": FP8}),
        ("", ["adapter.base=fp8"], {"adapter": FP8}),
        ("", ["adapter={kind: lora, base: fp8}"], {"adapter": FP8}),
        ("adapter: {base: fp8}", ["adapter.base=null"], {"adapter": AdapterSettings()}),
        ("adapter: qlora", ["adapter={rank: 8}"], {"adapter": QLORA_8}),
        ("adapter: {rank: 8}", ["adapter=qlora"], {"adapter": QLORA_8}),
        ("adapter: {kind: qlora, rank: 8}", ["adapter={kind: lora}"], {"adapter": LORA_8}),
        ("adapter: none", ["adapter.rank=8", "adapter.kind=lora"], {"adapter": LORA_8}),
        ("adapter: none", ["adapter={rank: 8, kind: lora}"], {"adapter": LORA_8}),
        ("adapter: {kind: qlora, rank: 8}", ["adapter=none"], {"adapter": "none"}),
        ("", ["adapter=lora", "adapter=qlora"], {"adapter": "qlora"}),
        ("adapter: lora", ["adapter={}"], {"adapter": AdapterSettings()}),
    ],
)
def test_later_layers_change_earlier_ones(tmp_path, file, sets, expected):
    loaded = load_recipe(with_file(tmp_path, file), {}, sets)
    assert {key: attrgetter(key)(loaded.recipe) for key in expected} == expected
    assert load_recipe(write(tmp_path / "again.yaml", render_resolved_yaml(loaded)), {}, []).recipe == loaded.recipe


def test_a_length_that_is_replaced_says_so(tmp_path):
    loaded = load_recipe(with_file(tmp_path, "train: {epochs: 7}"), {"train.max_steps": 5}, [])
    lines = [" ".join(line.split()) for line in render_resolved_yaml(loaded).splitlines()]
    assert "max_steps: 5 # --max-steps; replaces train.epochs" in lines
    assert "epochs: null # replaced by train.max_steps" in lines
    run = write(tmp_path / "written.yaml", render_resolved_yaml(loaded))
    longer = load_to_resume(run, "", tmp_path, ["train.epochs=9"])
    assert (longer.recipe.train.epochs, longer.recipe.train.max_steps) == (9, None)
    assert longer.origins["train.epochs"] == "--set; replaces train.max_steps"
    with pytest.raises(RecipeError, match=r"train\.epochs: found 2\.0; train\.max_steps replaces epochs; leave one"):
        load_recipe(None, {"model": "bert", "data.train": "a.csv", "train.epochs": 2, "train.max_steps": 3}, [])
    with pytest.raises(RecipeError, match=r"train\.epochs: found null; a run needs an end"):
        load_recipe(with_file(tmp_path, "train: {epochs: 7}"), {}, ["train.epochs=null"])


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path / "recipe.yaml", "model: bert")
    with pytest.raises(RecipeError, match=r"there is no recipe .*recipes.yaml\n.*did you mean .*recipe.yaml\?"):
        load_recipe(tmp_path / "recipes.yaml", {}, [])
    with pytest.raises(RecipeError, match="trimtab init"):
        load_recipe(tmp_path / "no" / "such.yaml", {}, [])
    with pytest.raises(RecipeError, match=r"cannot be read: Is a directory\n.*recipe.yaml; or trimtab resume "):
        load_recipe(tmp_path, {}, [])
    (tmp_path / "latin.yaml").write_bytes("model: bert\nname: café\n".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"latin.yaml:2: not UTF-8"):
        load_recipe(tmp_path / "latin.yaml", {}, [])
    write(tmp_path / "empty.yaml", "# nothing\n")
    with pytest.raises(RecipeError, match="empty.yaml is empty"):
        load_recipe(tmp_path / "empty.yaml", {"model": "bert"}, [])


def test_a_missing_recipe_suggests_only_similar_names(tmp_path):
    with pytest.raises(RecipeError, match="cure: `trimtab init` writes one"):
        load_recipe(tmp_path / "missing.yaml", {}, [])
    first = write(tmp_path / "mixing-a.yaml", "model: bert")
    with pytest.raises(RecipeError, match=f"cure: pass {first}; or `trimtab init`"):
        load_recipe(tmp_path / "missing.yaml", {}, [])
    files = [first, *(write(tmp_path / f"{name}.yaml", "model: bert") for name in ("mixing-b", "training"))]
    listed = re.escape(", ".join(map(str, files)))
    with pytest.raises(RecipeError, match=f"cure: pass one of {listed}; or `trimtab init`"):
        load_recipe(tmp_path / "missing.yaml", {}, [])
    write(tmp_path / "tuning.yml", "model: bert")
    with pytest.raises(RecipeError, match=f"cure: pass one of {listed} and 1 more; or"):
        load_recipe(tmp_path / "missing.yaml", {}, [])
    for name in ("trainings.yaml", "Training.yml", "training"):
        with pytest.raises(RecipeError, match=r"cure: did you mean .*training.yaml\?"):
            load_recipe(tmp_path / name, {}, [])


@pytest.mark.parametrize("call", [trimtab.fit, trimtab.plan])
@pytest.mark.parametrize(
    ("given", "found", "cure"),
    [
        ("mine.yaml", "there is no recipe mine.yaml", "trimtab init"),
        (Path("mine.yaml"), "there is no recipe mine.yaml", "trimtab init"),
        ({"model": "bert"}, "found the dict {model: bert}", "pass Recipe(**settings)"),
        (3, "found the int 3", "pass Recipe(model="),
    ],
)
def test_something_else_than_a_recipe(call, given, found, cure):
    with pytest.raises(RecipeError, match=re.escape(found)) as caught:
        call(given)
    assert cure in caught.value.cure


def test_a_recipe_from_a_file(tmp_path):
    path = write(tmp_path / "mine.yaml", "model: bert\ndata: {train: a.csv}\ntrain: {epochs: 2}\n")
    recipe = Recipe.from_file(str(path), sets=["train.lr=1e-3"])
    assert recipe == Recipe(model="bert", data={"train": "a.csv"}, train={"epochs": 2, "lr": 1e-3})
    assert as_loaded(path) == load_recipe(path, {}, [])
    assert repr(recipe) == (
        "Recipe(model='bert', data=DataSettings(train='a.csv'), train=TrainSettings(epochs=2.0, lr=0.001))"
    )


def test_help_of_a_recipe_explains_every_key():
    text = inspect.getdoc(Recipe)
    assert [key.dotted for key in keys_of(Recipe) if f"\n    {key.dotted}: " not in text] == []
    assert "train.lr: Peak learning rate" in text
    assert "epochs" in inspect.signature(TrainSettings).parameters
    assert str(inspect.signature(Recipe)).startswith("(*, model, task=None, data, train=TrainSettings(), ")
    assert "Keys:" not in json.dumps(build_json_schema())


def test_data_in_the_place_of_a_recipe(tmp_path):
    path = write(tmp_path / "rows.csv", "text,label\na,b\n")
    with pytest.raises(RecipeError, match=f"is a data file, not a recipe\n  cure: .* --model NAME --data {path}$"):
        load_recipe(path, {}, [])


@pytest.mark.parametrize(("text", "problem"), [("=3", "a key"), ("train.lr:3", "a value"), ("seed", "a value")])
def test_a_set_without_a_key_or_a_value(text, problem):
    with pytest.raises(RecipeError, match=f"  --set: {text}: found '{text}' without {problem}; write --set KEY=VALUE"):
        load_recipe(None, {"model": "bert", "data.train": "x.csv"}, [text])


def test_a_byte_order_mark_and_anchors(tmp_path):
    text = "model: bert\ndata: {train: x}\ntrain: {batch_size: &b 32}\nevaluate: {batch_size: *b}\n"
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    recipe = load_recipe(tmp_path / "r.yaml", {}, []).recipe
    assert (recipe.model, recipe.train.batch_size, recipe.evaluate.batch_size) == ("bert", 32, 32)


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["early_stopping=null", "train.freeze={'*.layer.0.*': 200 steps, base: always}", "name=run: 1 # not a comment"],
        ["model={config: {model_type: bert, x: [1, {y: null}, .inf], z: 1e-12}, tokenizer: train}", "data.text=[a, b]"],
        ["train.warmup=500", "limits.fast_dev_run=5", "data.train=no", "limits.eval=5%", "train.max_grad_norm=0"],
    ],
)
def test_a_resolved_recipe_is_read_back(recipe_file, tmp_path, sets):
    loaded = load_recipe(recipe_file, {}, sets)
    text = render_resolved_yaml(loaded)
    again = load_recipe(write(tmp_path / "again.yaml", text), {}, [])
    assert again.recipe == loaded.recipe
    assert render_resolved_yaml(LoadedRecipe(again.recipe, loaded.origins)) == text


def test_a_resolved_recipe_has_origins(recipe_file):
    text = render_resolved_yaml(load_recipe(recipe_file, {"seed": 7}, ["train.lr=3e-5"]))
    assert re.search(r"^  lr: 3.0e-05 +# --set$", text, re.MULTILINE)
    assert re.search(r"^  warmup: 0.06 +# recipe.yaml:5$", text, re.MULTILINE)
    assert re.search(r"^seed: 7 +# --seed$", text, re.MULTILINE)
    assert re.search(r"^  momentum: 0.0 +# default$", text, re.MULTILINE)
    values = [line for line in text.splitlines() if not re.fullmatch(r"\w+:", line)]
    assert all("  # " in line for line in values)


def test_a_resumed_recipe_keeps_the_first_origins(recipe_file, tmp_path):
    first = load_recipe(recipe_file, {"seed": 7}, ["train.lr=3e-5"])
    written = write(tmp_path / "run.yaml", render_resolved_yaml(first))
    again = load_to_resume(written, "", tmp_path, ["train.epochs=5"])
    assert again.origins == {**first.origins, "train.epochs": "--set", "out": "resume", "name": "default"}


def test_a_recipe_from_python_has_origins():
    text = render_resolved_yaml(LoadedRecipe(Recipe(model="bert", data={"train": "x"}, train={"lr": 1}), {}))
    assert re.search(r"^  lr: 1.0 +# Python$", text, re.MULTILINE)
    assert re.search(r"^  epochs: 3.0 +# default$", text, re.MULTILINE)


GIVEN = {"model": "bert", "data.train": "reviews.csv", "train.lr": 3e-5, "task": None}


def test_a_commented_recipe_has_every_key_and_its_documentation():
    text = render_commented_yaml(GIVEN)
    for key in keys_of(Recipe):
        if not key.dotted.startswith(WORD_OR_SECTION):
            assert re.search(rf"^[# ]*{key.name}:", text, re.MULTILINE), key.dotted
            first_words = " ".join(key.field.description.split()[:4])
            assert first_words in text, key.dotted


def test_every_key_can_be_uncommented(tmp_path):
    """Each key that is commented out has the right indentation and a valid value."""
    lines = render_commented_yaml(GIVEN).splitlines()
    live = [re.sub(r"# (?=(  )?[a-z_]+:( |$))", "", line, count=1) for line in lines]
    loaded = load_recipe(write(tmp_path / "r.yaml", "\n".join(live)), {}, [])
    assert (
        loaded.recipe.model_copy(update={"early_stopping": None, "distill": None})
        == load_recipe(None, GIVEN, []).recipe
    )
    assert loaded.recipe.early_stopping.patience == 3
    leaves = [key for key in LEAVES if not key.startswith(WORD_OR_SECTION)]
    assert [key for key in leaves if loaded.origins[key] == "default"] == []


def test_a_commented_recipe_without_values_names_the_required_keys(tmp_path):
    path = write(tmp_path / "r.yaml", render_commented_yaml({}))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, {}, [])
    lines = str(caught.value).splitlines()[1:]
    assert [re.search(r"r.yaml:\d+: ([\w.]+): required", line)[1] for line in lines] == ["model", "data.train"]


@pytest.mark.parametrize(
    "given",
    [
        GIVEN,
        {"model.config": {"model_type": "bert"}, "model.tokenizer": "train", "data.train": "x.csv"},
        {"model": "bert", "data.train": "x.csv", "early_stopping.patience": 5},
        {"model": "bert", "data.train": "x.csv", "data.text": ["a", "b"], "train.freeze": {"base": "always"}},
    ],
)
def test_a_commented_recipe_is_the_recipe(tmp_path, given):
    loaded = load_recipe(write(tmp_path / "r.yaml", render_commented_yaml(given)), {}, [])
    expected = load_recipe(None, given, [])
    assert loaded.recipe == expected.recipe
    assert {key for key, origin in loaded.origins.items() if origin != "default"} == {
        key for key, origin in expected.origins.items() if origin != "default"
    }


def test_a_commented_recipe_is_validated():
    with pytest.raises(RecipeError, match="train.lr: found 'fast'"):
        render_commented_yaml({"train.lr": "fast"})


def test_the_json_schema():
    schema = build_json_schema()
    json.dumps(schema)
    assert schema["required"] == ["model", "data"]
    assert schema["additionalProperties"] is False
    train = schema["$defs"]["TrainSettings"]["properties"]
    assert train["optimizer"]["enum"] == list(get_args(OptimizerName))
    assert train["lr"] == {
        "default": 5e-5,
        "description": Recipe.model_fields["train"].annotation.model_fields["lr"].description,
        "exclusiveMinimum": 0,
        "title": "Lr",
        "type": "number",
    }
    for section in [schema, *schema["$defs"].values()]:
        for name, field in section["properties"].items():
            assert field.get("description"), name


def test_a_single_word_for_track_is_its_uri(recipe_file):
    loaded = load_recipe(recipe_file, {}, [])
    assert (loaded.recipe.track.uri, loaded.origins["track.uri"]) == ("none", "recipe.yaml:9")
    loaded = load_recipe(recipe_file, {}, ["track.experiment=mine"])
    assert (loaded.recipe.track.uri, loaded.recipe.track.experiment) == ("none", "mine")
    for sets in (["track.experiment=mine", "track=local"], ["track=local", "track.experiment=mine"]):
        loaded = load_recipe(recipe_file, {}, sets)
        assert (loaded.recipe.track.uri, loaded.recipe.track.experiment) == ("local", "mine")
        assert loaded.origins["track.uri"] == "--set"


def test_parts_of_one_setting_have_their_own_origin(tmp_path):
    path = with_file(tmp_path, "adapter: lora")
    origins = load_recipe(path, {}, ["adapter.rank=8"]).origins
    assert origins["adapter.kind"].endswith("r.yaml:3")
    assert (origins["adapter.rank"], origins["adapter.alpha"]) == ("--set", "default")
    assert load_recipe(path, {}, ["train.freeze.x=5"]).origins["train.freeze"] == "--set"


@pytest.mark.parametrize(
    ("file", "sets", "message"),
    [
        ("", ["adapter=lora", "adapter.nonsense=8"], r"adapter.nonsense: found 8; no such key"),
        ("", ["adapter=lora", "adapter.rnak=8"], r"adapter.rnak: found 8; no such key; did you mean adapter.rank"),
        (
            "adapter: none",
            ["adapter.rank=8"],
            r"adapter.rank: found 8; adapter is none \(.*r.yaml:3\); .* set adapter.k",
        ),
        ("", ["adapter=off", "adapter.rank=8"], r"adapter.rank: found 8; adapter is none \(--set\)"),
        ("", ["adapter.rank=8", "adapter=none"], r"adapter: found 'none', and adapter.rank: 8 \(--set\); leave one"),
        (
            "",
            ["memory.gradient_checkpointing=all", "memory.gradient_checkpointing.every=2"],
            r"gradient_checkpointing.every: found 2, and memory.gradient_checkpointing: 'all' \(--set\); leave one",
        ),
        (
            "",
            ["memory.gradient_checkpointing.every=2", "memory.gradient_checkpointing=all"],
            r"gradient_checkpointing: found 'all', and memory.gradient_checkpointing.every: 2 \(--set\); leave one",
        ),
        ("", ["early_stopping=null", "early_stopping.patience=2"], r"patience: found 2, and early_stopping: null"),
        ("", ["early_stopping.patience=2", "early_stopping=none"], r"early_stopping: found 'none', and early_.*: 2"),
        ("", ["train.freeze.base=always", "train.freeze={}"], r"train.freeze: found \{\}, and train.freeze.base: 'alw"),
        ("", ["train.lr=1", "train=null"], r"train: found null, and train.lr: 1 \(--set\)"),
        ("train: 3", ["train.lr=1"], r"r.yaml:3: train: found 3; allowed: a mapping"),
        ("", ["data.train=[a.csv, 3]"], r"data.train: found \[a.csv, 3\]; allowed: a file, folder, glob"),
        ("train: {lr: 1}", ["train.lr.foo=2"], r"train.lr: found \{foo: 2\}; allowed: a number"),
        ("", ["train.lr=1", "train.lr.foo=2"], r"train.lr.foo: found 2, and train.lr: 1 \(--set\)"),
        ("", ["model.tokenizer=t", "model={config: {model_type: bert}}"], r"model: found .*, and model.tokenizer: 't'"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(tmp_path, file, sets, message):
    path = with_file(tmp_path, file)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path, {}, sets)


def test_a_model_that_is_replaced_whole_is_reported(tmp_path, caplog):
    path = write(tmp_path / "r.yaml", "model: {name: bert, tokenizer: mine}\ndata: {train: rows.csv}\n")
    with caplog.at_level("INFO", logger="trimtab"):
        assert load_recipe(path, {"model": "roberta"}, []).recipe.model == "roberta"
    assert "--model replaces all of model in the recipe, including tokenizer: 'mine'" in caplog.text


def test_the_variants_of_a_comparison_replace_the_command_line(tmp_path):
    path = with_file(tmp_path, "")
    assert load_recipe(path, {}, ["adapter.rank=8"], ["adapter=none"]).recipe.adapter == "none"
    assert load_recipe(path, {}, ["adapter.rank=8"], ["adapter=qlora"]).recipe.adapter == QLORA_8
