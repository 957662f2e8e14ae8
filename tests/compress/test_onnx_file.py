"""ONNX files: they give the model's logits on any shape, and a file that does not is refused."""

import logging
import warnings

import pytest
import torch

from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.compress.onnx_file import (
    OnnxCheck,
    compare_onnx,
    muted_exporters,
    open_session,
    quantize_onnx,
    require_close,
    run_session,
    write_onnx,
)
from trimtab.errors import MissingDependency, ModelError
from trimtab.model.load import load_model

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def model_of(name, kind, **head):
    torch.manual_seed(0)
    return load_model(config_of(name), kind, head, tokenizer()).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "head"),
    [
        ("bert", "sequence-classification", {"num_labels": 3}),
        ("roberta", "masked-lm", {}),
        ("llama", "causal-lm", {}),
        ("gpt2", "causal-lm", {}),
        ("gpt2", "sequence-classification", {"num_labels": 2}),
    ],
)
def test_the_file_gives_the_logits_of_the_model(tmp_path, capfd, name, kind, head):
    model, tok, path = model_of(name, kind, **head), tokenizer(), tmp_path / "model.onnx"
    capfd.readouterr()
    write_onnx(model, tok, path)
    check = compare_onnx(open_session(path), model, tok)
    require_close(check)
    assert "".join(capfd.readouterr()) == "", "the exporters are quiet"
    assert check.max_logit > 0
    quantize_onnx(path, tmp_path / "int8.onnx")
    rounded = compare_onnx(open_session(tmp_path / "int8.onnx"), model, tok)
    assert rounded.max_difference > check.limit, "weights of 8 bits are not exact"
    # a product of 7-bit weights and 8-bit inputs is off by about a percent, and two layers add up
    assert rounded.max_difference < 0.5 * rounded.max_logit
    assert (tmp_path / "int8.onnx").stat().st_size < path.stat().st_size


@pytest.mark.slow
def test_another_model_is_not_close(tmp_path):
    model, tok, path = model_of("bert", "sequence-classification", num_labels=2), tokenizer(), tmp_path / "model.onnx"
    write_onnx(model, tok, path)
    session, batch = open_session(path), batch_of(TEXTS)
    torch.testing.assert_close(run_session(session, batch), model(**batch).logits, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        model.classifier.bias += 0.01
    with pytest.raises(ModelError, match="the ONNX file differs from the model"):
        require_close(compare_onnx(session, model, tok))


def test_nan_is_never_close():
    with pytest.raises(ModelError, match="logits by up to nan"):
        require_close(OnnxCheck(float("nan"), 1.0, 4))
    require_close(OnnxCheck(1e-5, 1.0, 4))


def test_an_encoder_decoder_is_refused(tmp_path):
    model = model_of("t5", "seq2seq-lm")
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        write_onnx(model, tokenizer(), tmp_path / "model.onnx")
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
        write_onnx(model_of("bert", "masked-lm"), tokenizer(), tmp_path / "model.onnx")


def test_logging_is_as_before():
    before = logging.root.handlers[:], logging.root.manager.disable
    with muted_exporters():
        logging.warning("not shown")
        warnings.warn("not raised", stacklevel=1)
    assert (logging.root.handlers, logging.root.manager.disable) == before
