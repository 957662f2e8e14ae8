"""Models come back: the best run of an experiment, names on a server, folders, commands, recipes, Python."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from mlflow_servers import free_port
from tracked_models import CLASSIFIER, TEXTS, THREE, TrackedModels, contents, exported, loud

import trimtab
from tiny_adapters import adapted, export_run
from tiny_runs import reviews, write_csv
from trimtab import Recipe, fit
from trimtab.build.data_report import report_data
from trimtab.errors import ModelError, RecipeError
from trimtab.inference.classify import classify_texts
from trimtab.inference.load import load
from trimtab.log import quiet_package
from trimtab.model.hub import quiet_transformers
from trimtab.run import resume
from trimtab.runs.run_folder import read_status
from trimtab.tracking.mlflow import ranking, registry
from trimtab.tracking.mlflow.registry import fetch_model, find_model, local_source, pull_model, rank_runs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow and its dependencies


@pytest.fixture
def models(own_folder, empty_store):
    """The local store of a folder of runs."""
    (own_folder / "runs").mkdir()
    path = shutil.copy(empty_store, own_folder / "runs" / "mlflow.db")
    return TrackedModels(f"sqlite:///{path}", own_folder / "runs" / "mlartifacts")


@pytest.fixture
def best(tmp_path, tiny):
    """A model, as a run leaves it."""
    return exported(tmp_path / "one" / "best", loud(tiny), CLASSIFIER, "classify", metrics={"accuracy": 0.7, "f1": 0.4})


@pytest.fixture
def better(tmp_path, tiny):
    """Another one."""
    source = tiny.folder("bert", kind=CLASSIFIER, head=THREE, initializer_range=0.7)
    return exported(tmp_path / "two" / "best", source, CLASSIFIER, "classify", metrics={"accuracy": 0.9, "f1": 0.3})


def shown(ranking):
    return [(run.name, run.value, run.model_id is not None) for run in ranking.runs]


# ---------------------------------------------------------------------- which run is the best


def test_runs_are_ranked_by_their_best_models(models, best, better):
    models.log(models.run("imdb", "first", [{"accuracy": 0.7}, {"accuracy": 0.1}], start_time=1), best, value=0.7)
    models.log(models.run("imdb", "second", [{"accuracy": 0.9}], start_time=2), better, value=0.9)
    models.run("imdb", "without a model", [{"accuracy": 0.6}, {"accuracy": 0.8}, {"accuracy": float("nan")}])
    models.run("imdb", "without numbers")
    models.run("another", "run", [{"accuracy": 1.0}])
    found = rank_runs("imdb")
    assert (found.metric, found.higher_is_better) == ("accuracy", True)
    assert shown(found) == [
        ("second", 0.9, True),
        ("without a model", 0.8, False),
        ("first", 0.7, True),
        ("without numbers", None, False),
    ]
    assert found.winner.name == "second"
    by_f1 = rank_runs("imdb", "eval_f1")
    assert shown(by_f1)[:2] == [("first", 0.4, True), ("second", 0.3, True)]
    assert rank_runs("another", "accuracy", models.uri).winner.value == 1.0


def test_less_may_be_better(models, best, better):
    models.run("stories", "low", [{"loss": 3.0}, {"loss": 1.0}, {"loss": 2.0}])
    models.run("stories", "high", [{"loss": 2.5}])
    assert shown(rank_runs("stories", "loss")) == [("low", 1.0, False), ("high", 2.5, False)]
    for name, folder, value in (("one", best, 0.3), ("two", better, 0.2)):  # a metric of the user's own
        models.log(models.run("own", name), folder, metric="errors", value=value, rises=False)
    assert shown(rank_runs("own")) == [("two", 0.2, True), ("one", 0.3, True)]


def test_more_runs_than_a_page_has(models, monkeypatch):
    for number in range(5):
        models.run("imdb", f"run-{number}", [{"accuracy": number / 10}])
    monkeypatch.setattr(ranking, "_PAGE", 2)
    assert [run.name for run in rank_runs("imdb", "accuracy").runs] == [f"run-{n}" for n in (4, 3, 2, 1, 0)]


def test_names_that_are_not_there(models, best):
    models.log(models.run("imdb", "first", [{"accuracy": 0.7, "f1": 0.5}]), best, register="reviews")
    models.run("empty", "first")
    for call, problem, cure in [
        (lambda: rank_runs("imbd"), "no experiment 'imbd'", "did you mean imdb?"),
        (lambda: rank_runs("zzz"), "no experiment 'zzz'", "it has Default, empty, imdb"),
        (lambda: rank_runs("imdb", "acuracy"), "no run of imdb has a value of acuracy", "did you mean accuracy?"),
        (lambda: rank_runs("imdb", "zzz"), "a value of zzz", "they have accuracy, f1"),
        (lambda: rank_runs("empty"), "no run of empty has logged a model", "--metric"),
        (lambda: rank_runs("empty", "f1"), "a value of f1", "run an evaluation first"),
        (lambda: find_model("best:"), "is not the name of a model", "best:EXPERIMENT"),
        (lambda: find_model("best:imdb?metric="), "is not the name of a model", "metric=f1"),
        (lambda: find_model("best:empty?metric=f1"), "a value of f1", ""),
        (lambda: find_model("models:/reviews"), "is not the name of a version", "@best"),
        (lambda: find_model("models:/review@best"), "no registered model 'review'", "did you mean reviews?"),
        (lambda: find_model("models:/reviews@bset"), "no alias 'bset'", "did you mean best?"),
        (lambda: find_model("models:/reviews/7"), "no version 7", "trimtab ui"),
    ]:
        with pytest.raises(RecipeError, match=problem) as failure:
            call()
        assert cure in failure.value.cure
    models.log(models.run("imdb", "other"), best, metric="f1", value=0.5)
    with pytest.raises(RecipeError, match="selected by several metrics: .*f1"):
        rank_runs("imdb")
    with pytest.raises(ModelError, match="m-0{32}"):
        local_source(f"models:/m-{'0' * 32}")
    models.run("unlogged", "first", [{"accuracy": 0.7}])
    with pytest.raises(ModelError, match="has logged its model"):
        find_model("best:unlogged?metric=accuracy")


def test_no_store_and_no_server(own_folder):
    with pytest.raises(RecipeError, match="there is no tracking store .*runs/mlflow.db"):
        rank_runs("imdb")
    assert not any(own_folder.iterdir()), "looking makes nothing"
    Path("elsewhere").mkdir()
    Path("elsewhere/mlflow.db").touch()
    with pytest.raises(RecipeError) as missing:
        rank_runs("imdb")
    assert missing.value.cure.startswith("--uri sqlite:///elsewhere/mlflow.db;")
    uri = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ModelError, match=f"did not respond.*{uri}") as failure:  # left alone, mlflow tries for minutes
        rank_runs("imdb", uri=uri)
    assert "--uri" in failure.value.cure
    with pytest.raises(RecipeError, match="'banana' is not the address of a tracking server"):
        rank_runs("imdb", uri="banana")


# ---------------------------------------------------------------------- models


def test_names_become_exact_models(models, best, better, caplog):
    caplog.set_level("INFO", "trimtab")
    one = models.log(models.run("imdb", "first"), best, value=0.7, register="reviews")
    two = models.log(models.run("imdb", "second"), better, value=0.9, register="reviews")
    assert find_model("best:imdb").exact == two
    assert find_model("best:imdb").words == "the model of run second, accuracy 0.9"
    assert find_model("best:imdb?metric=f1").exact == one
    assert find_model("models:/reviews@best").exact == two
    assert find_model("models:/reviews/1").exact == one
    assert find_model(one).exact == one
    models.run("imdb", "third", [{"accuracy": 0.95}])
    assert find_model("best:imdb").exact == two
    assert "run third is better, but its model was not logged" in caplog.text


def test_a_store_on_this_machine_is_used_in_place(models, best, tmp_path):
    address = models.log(models.run("imdb", "first"), best)
    folder = fetch_model(find_model("best:imdb"))
    assert folder == models.files(address) / "model"
    assert local_source("best:imdb") == str(folder)
    assert local_source("bert-base-uncased") == "bert-base-uncased"
    assert not (tmp_path / "cache" / "models").exists()


def test_files_elsewhere_come_into_the_cache_once(models, best, tmp_path, monkeypatch):
    models.log(models.run("imdb", "first"), best)
    found = find_model("best:imdb")
    monkeypatch.setattr(registry, "_local_folder", lambda _: None)
    folder = fetch_model(found)
    assert tmp_path / "cache" / "models" == folder.parent
    assert contents(folder) == contents(best)
    shutil.rmtree(models.files(found.exact))
    Path("runs/mlflow.db").unlink()
    assert fetch_model(found) == folder, "the server is not asked again"


def test_pull(models, best, tmp_path):
    models.log(models.run("imdb", "first"), best, register="reviews")
    pull_model("imdb", tmp_path / "by-experiment")
    pull_model("best:imdb", tmp_path / "by-metric", metric="f1")
    pull_model("models:/reviews@best", tmp_path / "by-name", uri=models.uri)
    for name in ("by-experiment", "by-metric", "by-name"):
        assert contents(tmp_path / name) == contents(best)
    for name, problem in (("by-name", "is not empty"), ("new", "which names a model")):
        with pytest.raises(RecipeError, match=problem):
            pull_model("models:/reviews@best", tmp_path / name, metric="f1")
    with pytest.raises(RecipeError, match="no experiment"):
        pull_model("nothing", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_damaged_weights_on_the_server_are_refused(models, best, tmp_path, monkeypatch):
    address = models.log(models.run("imdb", "first"), best)
    weights = models.files(address) / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100] + bytes(100))
    found = find_model("best:imdb")
    with pytest.raises(ModelError, match="are damaged"):
        pull_model("imdb", tmp_path / "pulled")
    with pytest.raises(ModelError, match="are damaged"):
        fetch_model(found)
    monkeypatch.setattr(registry, "_local_folder", lambda _: None)
    with pytest.raises(ModelError, match="are damaged"):
        fetch_model(found)
    assert not (tmp_path / "pulled").exists()
    assert not list((tmp_path / "cache" / "models").glob("*"))


def test_an_adapter_comes_back_with_its_base_named(models, tiny, tmp_path):
    model, tok = adapted(tiny.folder("bert"), CLASSIFIER, THREE)
    run = export_run(tmp_path / "run", model, tok, "reviews.csv")
    models.log(models.run("imdb", "first"), run / "best")
    pull_model("imdb", tmp_path / "pulled")
    expected = classify_texts(load(run, device="cpu"), TEXTS)
    assert classify_texts(load(tmp_path / "pulled", device="cpu"), TEXTS) == expected
    assert classify_texts(trimtab.best_model("imdb", device="cpu"), TEXTS) == expected


def test_a_model_that_others_have_logged(models, best, tmp_path, monkeypatch):
    """Their tokenizer lies in a folder of its own."""
    import mlflow
    from transformers import pipeline

    monkeypatch.setenv("MLFLOW_TRACKING_URI", models.uri)
    run_id = models.run("theirs", "first", [{"accuracy": 0.5}])
    with quiet_package("mlflow"), quiet_transformers():
        theirs = pipeline("text-classification", str(best))
        with mlflow.start_run(run_id):
            mlflow.transformers.log_model(
                theirs, name="model", registered_model_name="theirs", pip_requirements=["transformers"]
            )
    expected = classify_texts(load(best, device="cpu"), TEXTS)
    for name in ("models:/theirs/1", "best:theirs?metric=accuracy"):
        found = classify_texts(load(name, device="cpu"), TEXTS)
        assert [one.label for one in found] == [one.label for one in expected]
    with pytest.raises(RecipeError, match="no alias 'best'"):
        load("models:/theirs@best")


def test_python_gets_it_ready_to_use(models, best, better):
    models.log(models.run("imdb", "first"), best, value=0.7)
    models.log(models.run("imdb", "second"), better, value=0.9)
    expected = classify_texts(load(better, device="cpu"), TEXTS)
    loaded = trimtab.best_model("imdb", device="cpu")
    assert classify_texts(loaded, TEXTS) == expected
    assert loaded.task_name == "classify"
    by_f1 = trimtab.best_model("imdb", metric="f1", uri=models.uri, device="cpu", dtype=torch.float32)
    assert classify_texts(by_f1, TEXTS) == classify_texts(load(best, device="cpu"), TEXTS) != expected


# ---------------------------------------------------------------------- commands


def test_commands(models, best, better, trimtab_command, tmp_path):
    one = models.log(models.run("imdb", "first"), best, value=0.7, register="reviews")
    models.log(models.run("imdb", "second"), better, value=0.9)
    code, out, _ = trimtab_command("best", "imdb")
    header, first, second = out.splitlines()
    assert (code, header.split()[:3]) == (0, ["run", "accuracy", "state"])
    assert first.split()[:3] == ["best", "second", "0.9000"]
    assert second.split()[:2] == ["first", "0.7000"]
    assert one.removeprefix("models:/") in second
    code, out, _ = trimtab_command("best", "imdb", "--metric", "f1", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["name"], line["is_best"]) for line in lines] == [("first", True), ("second", False)]
    code, out, err = trimtab_command("best", "imbd")
    assert (code, out) == (2, "")
    assert "cure: did you mean imdb?" in err
    code, _, err = trimtab_command("best", "imdb", "--metric", "acuracy")
    assert code == 2
    assert "cure: did you mean accuracy?" in err

    code, out, _ = trimtab_command("pull", "models:/reviews@best", tmp_path / "pulled")
    assert (code, out) == (0, f"{tmp_path / 'pulled'}: version 1 of reviews\n")
    assert contents(tmp_path / "pulled") == contents(best)
    assert trimtab_command("pull", "imdb", tmp_path / "pulled")[0] == 2

    code, _, err = trimtab_command("merge", "best:imdb", tmp_path / "merged")
    assert code == 2
    assert "is a whole model" in err

    code, out, _ = trimtab_command("predict", "best:imdb", "--text", TEXTS[0], "--device", "cpu")
    answer = classify_texts(load(better, device="cpu"), TEXTS[:1])[0]
    assert (code, out) == (0, f"{answer.label} ({answer.score:.3f})\n")


# ---------------------------------------------------------------------- recipes


def recipe_of(model, data, **train):
    return Recipe(
        model=model,
        task="classify",
        data={"train": str(data), "eval_share": 0.25},
        train={"max_steps": 2, "batch_size": 4, **train},
        out="trained",
    )


def test_a_recipe_trains_on_and_a_run_stays_with_its_model(models, tiny, tmp_path, caplog):
    caplog.set_level("INFO", "trimtab")
    two = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    data = write_csv(tmp_path / "reviews.csv", reviews(24))
    one = exported(tmp_path / "one", loud(tiny, two), CLASSIFIER, "classify")
    first = models.log(models.run("imdb", "first"), one, value=0.7)
    recipe = recipe_of("best:imdb", data)
    result = fit(recipe, progress="quiet", device="cpu")
    assert "best:imdb is the model of run first" in caplog.text
    assert "its head is kept" in caplog.text
    source = read_status(result.folder)["model_source"]
    assert (source["asked"], source["exact"], source["uri"]) == ("best:imdb", first, models.uri)
    assert "model: best:imdb" in (result.folder / "recipe.yaml").read_text()
    assert json.loads((result.best / "trimtab.json").read_text())["recipe"]["model"] == str(
        models.files(first) / "model"
    )

    changed = tiny.folder("bert", kind=CLASSIFIER, head=two, initializer_range=0.7)
    other = exported(tmp_path / "two", changed, CLASSIFIER, "classify")
    second = models.log(models.run("imdb", "second"), other, value=0.9)
    caplog.clear()
    longer = resume(result.folder, sets=["train.max_steps=4"], progress="quiet", device="cpu")
    assert longer.fit.step == 4
    assert "best:imdb is the model of run first, accuracy 0.7, the same as at the start of the run" in caplog.text
    assert read_status(result.folder)["model_source"]["exact"] == first

    again = fit(recipe, progress="quiet", device="cpu", fresh=True)
    assert read_status(again.folder)["model_source"]["exact"] == second


def test_every_way_to_name_it_in_a_recipe(models, tiny, tmp_path):
    """Whatever only looks at a recipe finds the model, too; and the store below runs, wherever the run goes."""
    data = write_csv(tmp_path / "reviews.csv", reviews(24))
    source = exported(tmp_path / "one", loud(tiny), CLASSIFIER, "classify")
    models.log(models.run("imdb", "first"), source, register="reviews")
    for model in ("models:/reviews@best", {"name": "best:imdb?metric=accuracy"}):
        assert report_data(recipe_of(model, data)).task == "classify"
    with pytest.raises(RecipeError, match="did you mean imdb"):
        fit(recipe_of("best:imbd", data), progress="quiet", device="cpu")
    assert not Path("trained").exists()


# ---------------------------------------------------------------------- a real server


@pytest.mark.slow
def test_through_a_server(server, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    models = TrackedModels(server.uri)
    best = exported(tmp_path / "best", loud(tiny), CLASSIFIER, "classify", metrics={"accuracy": 0.7})
    address = models.log(models.run("served", "first"), best, value=0.7, register="served")
    assert rank_runs("served", uri=server.uri).winner.value == 0.7
    assert find_model("models:/served@best", server.uri).exact == address
    loaded = trimtab.best_model("served", uri=server.uri, device="cpu")
    assert classify_texts(loaded, TEXTS) == classify_texts(load(best, device="cpu"), TEXTS)
    assert contents(next((tmp_path / "cache" / "models").iterdir())) == contents(best)
    pull_model("served", tmp_path / "pulled", uri=server.uri)
    assert contents(tmp_path / "pulled") == contents(best)
    with pytest.raises(RecipeError, match="did you mean served"):
        rank_runs("serve", uri=server.uri)
