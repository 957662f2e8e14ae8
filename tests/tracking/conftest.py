"""Stores and servers of MLflow that the tests of tracking share."""

import fcntl
import os
import shutil

import pytest


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """An empty sqlite store, made once for all processes of the tests; `store` is a copy of it."""
    from mlflow_servers import make_store

    home = tmp_path_factory.getbasetemp()
    home = home.parent if "PYTEST_XDIST_WORKER" in os.environ else home
    with (home / "template.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = home / "template.db"
        return path if path.exists() else make_store(home / "template.db.writing").rename(path)


@pytest.fixture
def store(tmp_path, empty_store):
    """A sqlite store of the test's own."""
    (tmp_path / "store").mkdir()
    return shutil.copy(empty_store, tmp_path / "store" / "mlflow.db")


@pytest.fixture(scope="session")
def server(tmp_path_factory, empty_store):
    """A real `mlflow server`, shared; tests tell their runs apart by their ids."""
    from mlflow_servers import Server

    server = Server(tmp_path_factory.mktemp("server"), empty_store).start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server):
    """Stands before the shared server, and misbehaves when told to."""
    from mlflow_servers import Proxy

    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def tracked(monkeypatch):
    """Tracking as users have it; the suite switches it off."""
    monkeypatch.delenv("TRIMTAB_TRACK")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
