"""Which store a run goes to."""

from pathlib import Path

import pytest

from trimtab.tracking.mlflow.uri import (
    artifact_location,
    default_uri,
    local_uri,
    sqlite_file,
    store_root,
    tracking_uri,
)

HTTP = "http://host:5000"


@pytest.mark.parametrize(
    ("folder", "root"),
    [
        ("runs/imdb/001", "runs"),
        ("/data/runs/imdb/001", "/data/runs"),
        ("runs/mine", "runs"),
        ("/data/mine", "/data"),
        ("mine", "."),
        ("/data/experiments/imdb/001", "/data/experiments/imdb"),
    ],
)
def test_where_the_local_store_is(folder, root):
    assert store_root(Path(folder)) == Path(root).absolute()


@pytest.mark.parametrize(
    ("setting", "server", "switch", "found"),
    [
        ("local", None, None, "LOCAL"),
        ("local", HTTP, None, HTTP),
        ("local", None, "none", None),
        ("local", HTTP, "none", None),
        ("none", HTTP, None, None),
        ("http://other", HTTP, None, "http://other"),
        ("http://other", HTTP, "none", "http://other"),
        ("databricks", None, None, "databricks"),
        ("sqlite:////absolute/m.db", None, None, "sqlite:////absolute/m.db"),
        ("sqlite:///m.db", None, None, f"sqlite:///{Path('m.db').absolute()}"),
    ],
)
def test_what_decides(monkeypatch, setting, server, switch, found):
    for name, value in (("MLFLOW_TRACKING_URI", server), ("TRIMTAB_TRACK", switch)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    expected = local_uri(Path("runs")) if found == "LOCAL" else found
    assert tracking_uri(setting, Path("runs/imdb/001")) == expected
    assert default_uri() == (server or local_uri(Path("runs")))


def test_files_lie_beside_a_sqlite_store_and_a_server_decides_for_itself():
    assert artifact_location("sqlite:////data/runs/mlflow.db") == "file:///data/runs/mlartifacts"
    assert artifact_location("sqlite:////data/my runs/mlflow.db") == "file:///data/my%20runs/mlartifacts"
    assert artifact_location(HTTP) is None
    assert sqlite_file("sqlite:////a/b.db?timeout=3") == Path("/a/b.db")
    assert sqlite_file("postgresql://host/db") is None


@pytest.mark.parametrize(
    "written", ["sqlite:///./m.db", "sqlite:///runs//m.db", "sqlite:///e", "sqlite:///m.db?timeout=3"]
)
def test_a_sqlite_address_is_made_absolute_whatever_its_path_looks_like(written):
    absolute = tracking_uri(written, Path("runs/imdb/001"))
    assert sqlite_file(absolute) == sqlite_file(written).absolute()
    assert absolute.partition("?")[2] == written.partition("?")[2]
