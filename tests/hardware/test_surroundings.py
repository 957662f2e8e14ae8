"""The description of the environment of a measurement."""

import subprocess

import pytest
import torch

from trimtab.hardware.environment import describe_environment


@pytest.fixture
def repository(tmp_path):
    """A repository with one file and one commit."""

    def git(*words):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    git("init")
    (tmp_path / "file.py").write_text("")
    git("add", "file.py")
    git("commit", "-m", "first")
    return tmp_path, git("rev-parse", "--short", "HEAD")


def test_the_log_message(repository):
    folder, commit = repository
    found = describe_environment("cpu", 3, ("torch", "no-such-package"), folder)
    assert found["commit"] == commit
    assert f"torch {torch.__version__}" in found["versions"]
    assert "no-such-package" not in found["versions"]
    assert "cores, threads used: 3" in found["hardware"]
    (folder / "file.py").write_text("x = 1")
    assert describe_environment("cpu", 3, (), folder)["commit"] == f"{commit} and changes"


def test_the_commit_of_another_repository_is_not_ours(repository):
    folder, _ = repository
    installed = folder / "site-packages"
    installed.mkdir()
    assert describe_environment("cpu", 1, (), installed)["commit"] == "unknown"
