"""The list of private names: complete, without entries that nothing uses, and present in the installed versions."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import trimtab
from trimtab.hardware import doctor
from trimtab.hardware.private_names import PRIVATE_NAMES, missing_names

SOURCE = Path(trimtab.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py") if path.name != "private_names.py"}
PACKAGES = {"torch", "transformers", "peft", "bitsandbytes", "torchao", "liger_kernel"}
# documented although they are in a module of their own, or part of Python's own named tuples and modules
DOCUMENTED = ("transformers.cache_utils", "transformers.generation", "transformers.modeling_outputs")
DOCUMENTED += ("transformers.utils.logging",)
PYTHON = {"_exit", "_getframe", "_current_frames", "_run_exitfuncs", "_shutdown", "_replace", "_fields"}
# read with a default, set with setattr, or of a class that is replaced as a whole: absence is handled there
OPTIONAL = {"_regions", "_stdout", "_pcontext", "_num_samples", "_step_count", "_orig_mod"}

# versions without them get a message where they are needed
ABSENT_IN_OLDER_VERSIONS = {"transformers.integrations.gguf.gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Private names that our own code defines."""
    found = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def foreign_imports(tree: ast.Module) -> Iterator[str]:
    """Names from private or undocumented modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{one.name}" for one in node.names]
        else:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            is_deep = parts[0] in PACKAGES - {"torch"} and len(parts) > 2 and not name.startswith(DOCUMENTED)
            if parts[0] in PACKAGES and (is_deep or any(map(is_private, parts))):
                yield name


def used_attributes() -> Iterator[tuple[str, str]]:
    ours = own_names()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours:
                yield node.attr, f"{path.relative_to(SOURCE)}: {ast.unparse(node)}"


def listed_parts() -> set[str]:
    return {part for name in PRIVATE_NAMES for part in name.split(".")}


def test_every_private_import_is_listed():
    used = {name: str(path.relative_to(SOURCE)) for path, tree in TREES.items() for name in foreign_imports(tree)}
    assert len(used) > 20
    listed = set(PRIVATE_NAMES)
    for name, path in used.items():
        is_listed = any(one == name or one.startswith(f"{name}.") for one in listed)
        assert is_listed, f"{path} imports {name}: add it to hardware/private_names.py with what needs it"


def test_every_private_attribute_is_listed():
    used = dict(used_attributes())
    assert len(used) > 20
    unlisted = {place for name, place in used.items() if name not in listed_parts() | PYTHON | OPTIONAL}
    assert not unlisted, f"add these to hardware/private_names.py with what needs them: {sorted(unlisted)}"


def test_every_listed_name_is_used():
    text = "\n".join(path.read_text() for path in TREES)
    unused = [name for name in PRIVATE_NAMES if name.rpartition(".")[2] not in text]
    assert not unused, f"nothing uses these any more: {unused}"


@pytest.mark.parametrize("package", sorted(PACKAGES - {"bitsandbytes"}))
def test_installed_versions_have_them(package):
    names = {name: use for name, use in PRIVATE_NAMES.items() if name.startswith(f"{package}.")}
    assert names
    missing = set(missing_names(names)) - ABSENT_IN_OLDER_VERSIONS
    assert not missing, f"this version of {package} lacks {missing}; torch is {torch.__version__}"


def test_a_missing_name_is_reported_by_the_doctor(monkeypatch):
    wanted = {"torch._no_such_kernel": "a test", "no_such_package._name": "a package that is absent"}
    assert missing_names(wanted) == {"torch._no_such_kernel": "a test"}
    monkeypatch.setattr(doctor, "missing_names", lambda: missing_names({"torch._no_such_kernel": "a test"}))
    last = doctor.collect_findings()[-1]
    assert "torch._no_such_kernel" in last.topic
    assert "a test" in last.found
    assert "constraints.txt" in last.cure
