"""`--push`: what goes to the Hub, and what is said if there is none."""

import json
from pathlib import Path

import pytest

from trimtab.commands.push import HubRepository
from trimtab.errors import ModelError, RecipeError


class FakeHub:
    """Stands in for `huggingface_hub.HfApi`, because the machine that runs the tests has no hub."""

    endpoint = "hub:"

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, dict]] = []
        self._fails = fails

    def __getattr__(self, method):
        def call(**arguments):
            self.calls.append((method, arguments))
            if method == self._fails:
                raise ConnectionError("no route to the hub")

        return call


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    recipe = {"model": "bert-base-uncased", "data": {"train": str(tmp_path / "rows.csv")}, "out": str(tmp_path)}
    facts = {"task": "classify", "recipe": recipe, "merged": {"adapter": str(tmp_path / "run" / "best"), "kl": None}}
    (place / "trimtab.json").write_text(json.dumps(facts))
    (place / "model.onnx").write_bytes(b"weights")
    return place


def test_the_folder_is_uploaded_without_paths_of_the_machine(folder):
    hub = FakeHub()
    assert HubRepository("ann/reviews", hub).upload(folder) == "hub:/ann/reviews"
    assert [name for name, _ in hub.calls] == ["whoami", "create_repo", "upload_folder", "upload_file"]
    calls = dict(hub.calls)
    assert calls["create_repo"] == {"repo_id": "ann/reviews", "private": True, "exist_ok": True}
    assert calls["upload_folder"]["folder_path"] == str(folder)
    assert calls["upload_folder"]["ignore_patterns"] == ["trimtab.json"]
    assert calls["upload_file"]["path_in_repo"] == "trimtab.json"
    sent = json.loads(calls["upload_file"]["path_or_fileobj"])
    recipe = {"model": "bert-base-uncased", "data": {"train": "rows.csv"}}
    assert sent == {"task": "classify", "merged": {"adapter": "run"}, "recipe": recipe}


def test_without_a_hub_it_says_so_before_the_work():
    with pytest.raises(ModelError, match="no route to the hub\n  cure: log in"):
        HubRepository("ann/reviews", FakeHub(fails="whoami"))


def test_a_failed_upload_names_the_folder(folder):
    repository = HubRepository("ann/reviews", FakeHub(fails="upload_folder"))
    with pytest.raises(ModelError, match=f"push it later: hf upload ann/reviews {folder}"):
        repository.upload(folder)
    assert Path(folder, "model.onnx").is_file()


@pytest.mark.parametrize("name", ["reviews", "a/b/c", "", "ann/re views"])
def test_names_that_are_none(name):
    with pytest.raises(RecipeError, match="--push USER/NAME"):
        HubRepository(name, FakeHub())
