"""ONNX files: what cannot be written is refused with the reason, and nothing of the exporters is shown."""

import logging
import warnings

import pytest
import torch

from tiny_models import config_of, tokenizer
from trimtab.compress.onnx_file import muted_exporters, open_session, write_onnx
from trimtab.errors import MissingDependency, ModelError
from trimtab.model.load import load_model

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def model_of(name, kind, **head):
    torch.manual_seed(0)
    return load_model(config_of(name), kind, head, tokenizer()).eval()


@pytest.mark.slow
def test_the_reason_is_that_of_the_operation_that_onnx_lacks(tmp_path):
    experts = config_of("llama") | {"model_type": "mixtral", "num_local_experts": 2}
    torch.manual_seed(0)
    model = load_model(experts, "causal-lm", {}, tokenizer())
    with pytest.raises(ModelError, match="MixtralForCausalLM cannot be exported to ONNX: .*No ONNX function found"):
        write_onnx(model, tokenizer(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot be loaded by onnxruntime"):
        open_session(tmp_path / "model.onnx")


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, missing):
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == missing else found(name, *rest))
    with pytest.raises(
        MissingDependency, match=rf"{missing}, which is not installed\n  cure: pip install 'trimtab\[onnx"
    ):
        write_onnx(model_of("bert", "masked-lm"), tokenizer(), tmp_path)


def test_logging_is_as_before():
    before = logging.root.handlers[:], logging.root.manager.disable
    with muted_exporters():
        logging.warning("not shown")
        warnings.warn("not raised", stacklevel=1)
    assert (logging.root.handlers, logging.root.manager.disable) == before
