"""Models in ONNX files: they give the logits and the texts of the torch model, from a cache that the files fill."""

import pytest
import torch

from tiny_models import KINDS, TEXTS, batch_of, config_of, tokenizer
from trimtab import load
from trimtab.checkpoint.export import export_model
from trimtab.commands.export import export
from trimtab.compress.onnx_file import quantize_onnx, write_onnx
from trimtab.errors import ModelError
from trimtab.inference.onnx_check import OnnxCheck, _pieces, compare_onnx, require_close
from trimtab.inference.onnx_generator import OnnxDecoder, OnnxEncoderDecoder, load_onnx_model
from trimtab.inference.onnx_model import OnnxModel
from trimtab.model.load import load_model

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

CONFIGS = {
    "mistral": config_of("llama") | {"model_type": "mistral", "sliding_window": 4},  # looks at the last 4 tokens
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2},  # finds positions from the mask
}
DECODERS = ("llama", "gpt2", "mistral", "bloom")
PAIRS = ("t5", "bart", "marian", "encoder-decoder")


def model_of(name, kind=None, **head):
    torch.manual_seed(0)
    kind = kind or KINDS.get(name, "causal-lm")
    model = load_model(CONFIGS.get(name) or config_of(name), kind, head, tokenizer()).eval()
    with torch.no_grad():  # random models have nearly equal logits, so that a wrong cache could go unnoticed
        for parameter in (one for one in model.parameters() if one.dim() > 1):
            parameter *= 2
    return model


def written(model, folder):
    """Writes the files of a model, and what loads them."""
    files = write_onnx(model, tokenizer(), folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return files, load_onnx_model(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "head"),
    [
        ("bert", "sequence-classification", {"num_labels": 3}),
        ("roberta", "masked-lm", {}),
        ("gpt2", "sequence-classification", {"num_labels": 2}),
        *((name, None, {}) for name in (*DECODERS, *PAIRS)),
    ],
)
def test_the_files_give_the_logits_of_the_model(tmp_path, capfd, name, kind, head):
    model, exact, rounded = model_of(name, kind, **head), tmp_path / "exact", tmp_path / "rounded"
    exact.mkdir()
    rounded.mkdir()
    capfd.readouterr()
    files, exported = written(model, exact)
    expected = OnnxModel if kind else OnnxEncoderDecoder if name in PAIRS else OnnxDecoder
    assert isinstance(exported, expected)
    check = compare_onnx(exported, model, tokenizer())
    require_close(check)
    assert "".join(capfd.readouterr()) == "", "the exporters are quiet"
    assert check.max_logit > 0
    for file in files:
        quantize_onnx(exact / file, rounded / file)
        assert (rounded / file).stat().st_size < (exact / file).stat().st_size
    model.config.save_pretrained(rounded)
    of_rounded = compare_onnx(load_onnx_model(rounded), model, tokenizer())
    assert of_rounded.max_difference > check.limit, "weights of 8 bits are not exact"
    # a product of 7-bit weights and 8-bit inputs is off by about a percent, and layers add up
    assert of_rounded.max_difference < 0.5 * of_rounded.max_logit


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "t5", "bart"])
def test_an_exported_folder_generates_the_texts_of_the_model(tmp_path, name):
    task = "seq2seq" if name in PAIRS else "causal-lm"
    export_model(tmp_path / "model", model_of(name), tokenizer(), card={"task": task})
    export(tmp_path / "model", tmp_path / "onnx", to="onnx")
    before, after = load(tmp_path / "model", device="cpu"), load(tmp_path / "onnx")
    assert after.task_name == task
    for options in ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}):
        assert after.generate(TEXTS, 12, **options) == before.generate(TEXTS, 12, **options)
    assert "".join(after.generate(TEXTS[0], 8, stream=True)) == before.generate(TEXTS[0], 8)
    batch = batch_of(TEXTS, side="right" if task == "seq2seq" else "left")
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(after.model.generate(**batch, **beams), before.model.generate(**batch, **beams))
    card = (tmp_path / "onnx" / "README.md").read_text()
    files = ("encoder_model.onnx", "decoder_model.onnx") if task == "seq2seq" else ("model.onnx",)
    for file in files:
        assert (tmp_path / "onnx" / file).is_file()
        assert f"`{file}` takes" in card


@pytest.mark.slow
def test_later_tokens_read_what_the_files_cached(tmp_path):
    model = model_of("llama")
    _, exported = written(model, tmp_path)
    ids = batch_of(TEXTS[:1])["input_ids"]
    cache = exported._new_cache()
    exported(ids[:, :-1], past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1] - 1
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, -1:]
    limit = OnnxCheck(0.0, expected.abs().max().item(), 1).limit
    found = exported(ids[:, -1:], past_key_values=cache).logits
    assert (found - expected).abs().max().item() <= limit
    cache.layers[0].keys.zero_()
    spoiled = exported(ids[:, -1:], past_key_values=cache).logits
    assert (spoiled - expected).abs().max().item() > limit, "the cache is an input of the file"


@pytest.mark.slow
def test_another_model_is_not_close(tmp_path):
    model, tok = model_of("bert", "sequence-classification", num_labels=2), tokenizer()
    _, exported = written(model, tmp_path)
    batch = batch_of(TEXTS)
    torch.testing.assert_close(exported(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        model.classifier.bias += 0.01
    with pytest.raises(ModelError, match="the ONNX file differs from the model"):
        require_close(compare_onnx(exported, model, tok))
    with pytest.raises(ModelError, match="has no key-value cache and does not generate"):
        _ = exported.generation_config


@pytest.mark.slow
def test_a_folder_of_another_architecture_is_refused(tmp_path):
    model = model_of("gpt2")
    written(model, tmp_path)
    for name in ("AutoConfig", "BertModel", "NoSuchClass"):
        model.config.architectures = [name]
        model.config.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=f"names the architecture '{name}'"):
            load_onnx_model(tmp_path)


def test_nan_is_never_close():
    with pytest.raises(ModelError, match="logits by up to nan"):
        require_close(OnnxCheck(float("nan"), 1.0, 4))
    require_close(OnnxCheck(1e-5, 1.0, 4))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9, 48])
def test_pieces_cover_every_token_once(length):
    pieces = _pieces(length)
    assert [token for start, end in pieces for token in range(start, end)] == list(range(length))
    assert length < 3 or len(pieces) >= 3
