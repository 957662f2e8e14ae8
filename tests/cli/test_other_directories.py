"""Runs whose recipe has relative paths: resumed from another directory, or moved together with their files."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

import trimtab
from tiny_runs import reviews, write_csv
from trimtab.build.paths import with_absolute_paths
from trimtab.commands.merge import merge
from trimtab.recipe.load import load_recipe


def project(folder, tiny, **settings):
    """A directory with data, a model, and a recipe that names them by relative paths."""
    folder.mkdir()
    write_csv(folder / "reviews.csv", reviews(60))
    write_csv(folder / "held-out.csv", reviews(12, first=500))
    shutil.copytree(tiny.folder("bert"), folder / "model")
    recipe = {
        "model": "model",
        "data": {"train": "reviews.csv[:50]", "eval": "held-out.csv"},
        "train": {"epochs": 1, "batch_size": 9, "log_every": 2, "lr": 1e-3},
        "checkpoint": {"every": "2 steps", "mirror": "drive"},
        "out": "run",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | settings))
    return folder


class Kill:
    """A callback that ends the run without saving, as a kill does."""

    def on_step(self, state):
        if state.step == 4:
            raise KeyboardInterrupt


def start(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(KeyboardInterrupt):
        trimtab.fit(load_recipe(Path("recipe.yaml"), {}, []), callbacks=[Kill()], progress="quiet", device="cpu")


def weights(run):
    return (Path(run) / "best" / "model.safetensors").read_bytes()


def test_resumed_from_another_directory(own_folder, tiny, monkeypatch, caplog):
    caplog.set_level("INFO", logger="trimtab")
    here = project(own_folder / "here", tiny)
    monkeypatch.chdir(here)
    trimtab.fit(load_recipe(Path("recipe.yaml"), {"out": "whole"}, []), progress="quiet", device="cpu")
    start(here, monkeypatch)
    elsewhere = own_folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = trimtab.resume(here / "run", progress="quiet", device="cpu")
    assert f"resuming from step-2 ({here / 'run'})" in caplog.text
    assert result.fit.step == 6
    assert weights(here / "run") == weights(here / "whole")
    assert list(elsewhere.iterdir()) == [], "the mirror stays in the directory of the recipe"
    assert (here / "drive" / "here" / "run" / "checkpoints" / "step-6").is_dir()
    # loaded in its own directory, the recipe still is that of the run
    monkeypatch.chdir(here)
    trimtab.fit(load_recipe(Path("recipe.yaml"), {}, ["train.epochs=2"]), resume=True, progress="quiet", device="cpu")


def test_moved_with_its_files(own_folder, tiny, monkeypatch, caplog):
    """Like a project that is copied to another machine under another path."""
    caplog.set_level("INFO", logger="trimtab")
    start(project(own_folder / "here", tiny), monkeypatch)
    there = own_folder / "there"
    monkeypatch.chdir(own_folder)
    (own_folder / "here").rename(there)
    monkeypatch.chdir(there)
    with pytest.raises(trimtab.errors.RecipeError, match=r"--set checkpoint.mirror=\S+there/drive;"):
        trimtab.resume("run", progress="quiet", device="cpu")
    result = trimtab.resume("run", sets=["checkpoint.mirror=drive"], progress="quiet", device="cpu")
    assert "resuming from step-2 (run)" in caplog.text
    assert result.fit.step == 6
    assert not (own_folder / "here").exists()
    written = load_recipe(Path("run/recipe.yaml"), {}, []).recipe
    assert (written.data.train, written.model) == (f"{there}/reviews.csv[:50]", f"{there}/model")
    assert json.loads(Path("run/run.json").read_text())["directory"] == str(there)


def test_a_run_of_a_version_that_kept_relative_paths(own_folder, tiny, monkeypatch):
    """It resumes from the directory in which it was started."""
    here = project(own_folder / "here", tiny)
    start(here, monkeypatch)
    shutil.copy(here / "recipe.yaml", here / "run" / "recipe.yaml")
    status = json.loads(Path("run/run.json").read_text())
    (here / "run" / "run.json").write_text(
        json.dumps({key: value for key, value in status.items() if key not in ("directory", "recipe_checksum")})
    )
    without_settings(here / "run")
    assert trimtab.resume("run", progress="quiet", device="cpu").fit.step == 6


def without_settings(run):
    from trimtab.checkpoint.store import MANIFEST, _signed

    for path in run.glob(f"checkpoints/*/{MANIFEST}"):
        manifest = json.loads(path.read_text())
        del manifest["checksum"], manifest["facts"]["settings"], manifest["facts"]["run"]
        path.write_bytes(_signed(manifest))


def test_merged_from_another_directory(own_folder, tiny, monkeypatch):
    here = project(own_folder / "here", tiny, adapter="lora", checkpoint={"every": None})
    monkeypatch.chdir(here)
    trimtab.fit(load_recipe(Path("recipe.yaml"), {}, []), progress="quiet", device="cpu")
    monkeypatch.chdir(own_folder)
    merged = merge("here/run", "merged", device="cpu")
    assert merged.closeness is not None
    assert merged.closeness.num_answers == 12


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("reviews.csv", "{here}/reviews.csv"),
        ("reviews.csv[10%:]", "{here}/reviews.csv[10%:]"),
        ("./sub/../reviews.csv", "{here}/sub/../reviews.csv"),
        ("*.csv", "{here}/*.csv"),
        ("*.csv[:5]", "{here}/*.csv[:5]"),
        ("sub", "{here}/sub"),
        ("sub:train", "{here}/sub:train"),
        ("missing.csv", "missing.csv"),
        ("imdb:train[:100]", "imdb:train[:100]"),
        ("glue/mrpc:train", "glue/mrpc:train"),
        ("<list given in Python>", "<list given in Python>"),
    ],
)
def test_which_sources_are_paths(own_folder, source, found):
    (own_folder / "sub").mkdir()
    (own_folder / "reviews.csv").touch()
    recipe = with_absolute_paths(trimtab.Recipe(model="bert-base", data={"train": source}))
    assert recipe.data.train == found.format(here=own_folder)
    assert recipe.model == "bert-base"
    assert recipe.track.experiment == ("run" if source.startswith("*") else None)


def test_the_tokenizer_train_is_not_a_path(own_folder):
    (own_folder / "train").mkdir()
    (own_folder / "tokens").mkdir()
    for word, kept in {"train": "train", "tokens": str(own_folder / "tokens")}.items():
        model = {"config": {"model_type": "bert"}, "tokenizer": word}
        recipe = with_absolute_paths(trimtab.Recipe(model=model, data={"train": "x.csv"}))
        assert recipe.model.tokenizer == kept
