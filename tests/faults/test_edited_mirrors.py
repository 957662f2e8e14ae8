"""A mirror that somebody else has edited, with every checksum made right again: what acts needs the user's word."""

import json
import shutil
from pathlib import Path

import pytest

from edited_mirrors import Listener, edit_json, edit_recipe, make_remote_code, make_run
from tiny_runs import reviews, write_csv
from trimtab.build.resumed_recipe import recover_recipe
from trimtab.errors import RecipeError
from trimtab.recipe.schema import Recipe
from trimtab.recipe.schema_keys import keys_of

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A finished run with its mirror; tests copy the mirror."""
    return make_run(tmp_path_factory.mktemp("mirrored"), tiny.folder("bert"))


@pytest.fixture
def mirror(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "drive" / "reviews" / "here"))


@pytest.fixture
def listener():
    server = Listener()
    yield server
    server.close()


def resumed(trimtab_command, mirror, *options):
    always = ("--out", "there", "--device", "cpu", "--set", "train.max_steps=3")
    return trimtab_command("resume", mirror, *always, *options)


def test_code_that_a_mirror_names_needs_consent(trimtab_command, mirror, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, mark = make_remote_code(tmp_path / "attacker", tiny.folder("bert"))
    edit_recipe(mirror, lambda recipe: recipe.update(model={"name": str(model), "trust_remote_code": True}))
    for options in ((), ("--quiet",)):
        code, _, err = resumed(trimtab_command, mirror, *options)
        assert code == 2
        assert f"model.trust_remote_code: execute the Python code of {model}" in err
        assert f"trimtab resume {mirror} --trust-remote-code" in err
        assert not mark.exists()
        assert not Path("there").exists()  # refused before anything is copied
    code, _, err = resumed(trimtab_command, mirror, "--trust-remote-code")
    assert (code, mark.exists()) == (0, True), err
    mark.unlink()
    assert trimtab_command("resume", "there", "--device", "cpu", "--set", "train.max_steps=4")[0] == 0  # unattended
    # the same files in another place, and another model in the same place, are asked about again
    shutil.copytree("there", "copied")
    other, other_mark = make_remote_code(tmp_path / "other", tiny.folder("bert"))
    assert trimtab_command("resume", "copied", "--device", "cpu")[0] == 2
    edit_recipe(Path("there"), lambda recipe: recipe["model"].update(name=str(other)))
    code, _, err = trimtab_command("resume", "there", "--device", "cpu")
    assert (code, f"the Python code of {other}" in err) == (2, True)
    assert not other_mark.exists()
    # the best model, which is loaded for samples, is named too
    edit_recipe(mirror, lambda recipe: recipe.update(model={"name": "someone/known", "trust_remote_code": True}))
    edit_json(mirror / "best" / "config.json", lambda config: config.update(auto_map={"AutoModel": "evil/code--a.B"}))
    assert "the Python code of someone/known, evil/code\n" in resumed(trimtab_command, mirror)[2]


def test_the_tracking_token_goes_to_no_address_of_a_mirror(trimtab_command, mirror, listener, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    edit_recipe(mirror, lambda recipe: recipe["track"].update(uri=listener.uri))
    code, _, err = resumed(trimtab_command, mirror)
    assert code == 2
    assert f"track.uri: {listener.uri}" in err
    edit_json(mirror / "best" / "trimtab.json", lambda facts: facts["recipe"]["track"].update(uri=listener.uri))
    (mirror / "tracking.json").write_text(json.dumps({"about": {}, "servers": [{"uri": listener.uri}]}))
    write_csv(Path("reviews.csv"), reviews(4))
    for command in (("track", "sync", mirror), ("evaluate", mirror, "reviews.csv", "--track")):
        code, _, err = trimtab_command(*command)
        assert (code, f"name the tracking server {listener.uri}, which was not given here" in err) == (2, True), err
    assert listener.received == []
    assert recover_recipe(mirror, "confirmed", None, [f"track.uri={listener.uri}"], trusts=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", listener.uri)
    assert recover_recipe(mirror, "of-the-environment", None, [], trusts=False)


ACTING = {  # an edited value, and the option that agrees to it
    "track.uri": ("sqlite:////tmp/elsewhere/mlflow.db", "--set track.uri=sqlite:////tmp/elsewhere/mlflow.db"),
    "track.register_as": ("production", "--set track.register_as=production"),
    "model.trust_remote_code": (True, "--trust-remote-code"),
}
READ = {
    "model.name": "/home/me/model",
    "model.tokenizer": "someone/tokenizer",
    "data.train": "/home/me/private.csv",
    "data.eval": "/home/me/private.csv",
    "distill.teacher": "someone/teacher",
    "track.experiment": "another",
}
REPLACED = {"out": "/tmp/elsewhere", "name": "another", "checkpoint.mirror": "/tmp/elsewhere"}
OF_THE_RUN_ALONE = {"task", "seed", "model.config", "track.log_model"}
OF_THE_RUN_ALONE_IN = {"data", "train", "adapter", "distill", "memory", "evaluate", "checkpoint"}
OF_THE_RUN_ALONE_IN |= {"early_stopping", "limits"}


def edit_keys(mirror, values):
    def change(recipe):
        recipe["model"] = {"name": recipe["model"]}
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            if section and recipe[section] is None:
                recipe[section] = {}
            (recipe[section] if section else recipe)[name] = value

    edit_recipe(mirror, change)


def test_every_key_of_an_edited_mirror(mirror, caplog):
    """Each key of a recipe has a decision here, so a new one needs one too."""
    caplog.set_level("INFO", logger="trimtab")
    known = ACTING.keys() | READ.keys() | REPLACED.keys() | OF_THE_RUN_ALONE
    leaves = {key.dotted for key in keys_of(Recipe) if key.section is None}
    assert {key for key in leaves - known if key.partition(".")[0] not in OF_THE_RUN_ALONE_IN} == set()
    for key, (value, option) in ACTING.items():
        copied = Path(shutil.copytree(mirror, key))
        edit_keys(copied, {"track.uri": "local", key: value})
        with pytest.raises(RecipeError) as refused:
            recover_recipe(copied, "there", None, [], trusts=False)
        assert f"\n  {key}: " in refused.value.problem
        assert option in refused.value.cure
    assert not Path("there").exists()
    edit_keys(mirror, {key: value for key, (value, _) in ACTING.items()} | READ | REPLACED)
    agreed = [f"{key}={value}" for key, (value, _) in ACTING.items()]
    loaded = recover_recipe(mirror, "there", None, agreed, trusts=False)
    (said,) = (message for message in caplog.messages if message.startswith("from the mirror: "))
    assert [key for key, value in READ.items() if value not in said] == []
    assert (loaded.recipe.out, loaded.recipe.name) == ("there", None)
    assert loaded.recipe.checkpoint.mirror == str(mirror.parent.parent)
