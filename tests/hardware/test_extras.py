"""Packages that are missing or broken are named, with the pip command."""

import importlib

import pytest

from trimtab.hardware.extras import import_failure
from trimtab.model.hub import explained


@pytest.mark.parametrize("raised", ["ImportError('no libfoo.so.1')", "RuntimeError('no libfoo.so.1')"])
def test_an_installed_package_that_cannot_be_imported(tmp_path, monkeypatch, raised):
    package = tmp_path / "site-packages" / "brokenpackage"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(str(package.parent))
    with pytest.raises((ImportError, RuntimeError)) as caught:
        importlib.import_module("brokenpackage")
    failure = import_failure(caught.value)
    assert failure.problem == (
        f"the package brokenpackage is installed and cannot be imported: {raised.partition('(')[0]}: no libfoo.so.1"
    )
    assert failure.cure == "pip install --force-reinstall brokenpackage"
    assert explained("org/name", caught.value).problem == f"org/name: {failure.problem}"


def test_a_missing_package():
    for name, cure in (("absentpackage", "pip install absentpackage"), ("gguf", "pip install 'trimtab[gguf]'")):
        assert import_failure(ModuleNotFoundError("No module", name=f"{name}.part")).cure == cure
    assert import_failure(ModuleNotFoundError("No module", name="trimtab.absent")) is None
    assert import_failure(ValueError("a number")) is None
