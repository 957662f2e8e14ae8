"""benchmarks/products.py: every form is timed on its own, and says why where it cannot be."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def products(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("products")
    for name in ("products", "record"):
        sys.modules.pop(name)


def test_the_command_writes_a_line_for_every_form(products, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["products.py", "--small", "--device", "cpu", "--out", str(tmp_path / "found")])
    products.main()
    report = json.loads((tmp_path / "found" / "products-cpu.json").read_text())
    table = (tmp_path / "found" / "products-cpu.md").read_text()
    assert [entry["form"] for entry in report["products"]] == list(products.forms_of(False))
    for entry in report["products"]:
        assert f"| 256 × 256 | {entry['form']} | " in table
    found = {entry["form"]: entry for entry in report["products"]}
    assert "on CUDA only" in found["palette of 4 bits, from indices"]["failure"]
    assert "capability 8.9" in found["fp8-dynamic"]["failure"]
    # half a byte for each weight, an 8-bit scale for 64, and a palette of 16 fp16 values for 32 rows
    decoded = found["palette of 4 bits, decoded first"]
    assert decoded["bytes"] == 256 * 128 + 256 * 4 + 8 * 16 * 2
    for entry in (one for one in found.values() if "rows" in one):  # every form is a rounded product of the same weight
        error = entry["rows"]["32"]["error"]
        assert 0 < error < 0.2, entry["form"]
    assert found["bf16"]["rows"]["32"]["error"] < found["int8"]["rows"]["32"]["error"] < decoded["rows"]["32"]["error"]
    assert table.split("\n\n", 1)[1] in capsys.readouterr().out


def test_a_form_that_fails_does_not_stop_the_others(products, monkeypatch):
    def broken(weight):
        raise RuntimeError("no kernel | for this\nand a long trace")

    forms = {"bf16": products.Form(products.plain), "broken": products.Form(broken)}
    monkeypatch.setattr(products, "forms_of", lambda with_compiled: forms)
    found = products.measure(((64, 64), (128, 64)), torch.device("cpu"), 1e9, False)
    assert [("failure" in entry) for entry in found] == [False, True] * 2
    assert "| 64 × 64 | broken | RuntimeError: no kernel / for this |" in products.markdown(found)
    only_many = products.Form(lambda weight: (lambda x: x @ weight.T if len(x) > 1 else broken(x), 1))
    monkeypatch.setattr(products, "forms_of", lambda with_compiled: {"picky": only_many})
    (found,) = products.measure(((64, 64),), torch.device("cpu"), 1e9, False)
    assert "failure" in found["rows"][1]
    assert found["rows"][32]["called_us"] > 0
    assert "| picky | 0.0 | RuntimeError: no kernel / for this |" in products.markdown([found])
    late = products.measure(((64, 64),), torch.device("cpu"), -1, False)
    assert all("not begun" in entry["failure"] for entry in late)


def test_copies_are_more_than_the_cache_holds(products, monkeypatch):
    of_device = SimpleNamespace(L2_cache_size=60 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_device)
    for num_bytes in (8_650_752, 33_554_432, 117_440_512):
        copies = products.num_copies(num_bytes, torch.device("cuda"))
        assert (copies - 1) * num_bytes >= 3 * of_device.L2_cache_size
