"""Shared by all tests: one thread a process, no hub, and nothing left behind."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["TRIMTAB_TRACK"] = "none"  # making a store takes seconds; tests of tracking take this away
os.environ.pop("MLFLOW_TRACKING_URI", None)

import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible_and_clean():
    """Every test starts from one seed; what it does to the environment or the default dtype is an error."""
    torch.manual_seed(0)
    environment = dict(os.environ)
    yield
    changed = {key for key in environment.keys() | os.environ.keys() if environment.get(key) != os.environ.get(key)}
    own_of_torch = {key for key in changed if key.startswith(("KMP_", "TORCHINDUCTOR_"))}
    assert changed - own_of_torch <= {"PYTEST_CURRENT_TEST"}, changed
    assert torch.get_default_dtype() is torch.float32


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folders with tiny models, each made when it is first asked for."""
    from tiny_runs import TinyModels  # not above: tests of small parts should not wait for it

    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The test works in an empty folder, which also holds its cache and its temporary files."""
    import tempfile

    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return work
