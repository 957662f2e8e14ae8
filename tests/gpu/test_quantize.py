"""Formats whose products need a GPU: written, loaded again with the same outputs, and mixed under a bound."""

import pytest
import torch

from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.checkpoint.export import export_model
from trimtab.commands.quantize import quantize
from trimtab.commands.quantize_mix import Bound
from trimtab.compress.weight_formats import FORMATS
from trimtab.inference.load import load
from trimtab.inference.model_measurement import weight_bytes
from trimtab.model.load import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WIDE = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize")
    torch.manual_seed(0)
    model = load_model(config_of("llama") | WIDE, "causal-lm", {}, tokenizer(), dtype=torch.bfloat16)
    export_model(folder / "model", model, tokenizer(), card={"task": "causal-lm"})
    (folder / "rows.txt").write_text("\n".join(TEXTS * 8))
    return folder


def logits_of(folder):
    loaded = load(folder, device="cuda")
    batch = {name: value.cuda() for name, value in batch_of(TEXTS, loaded.tokenizer).items()}
    with torch.no_grad():
        return loaded.model(**batch).logits.float()


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_on_a_gpu(place, name, tmp_path):
    capability = FORMATS[name].capability
    if capability is not None and torch.cuda.get_device_capability() < capability:
        pytest.skip(f"{name} needs capability {capability}")
    options = {"data": place / "rows.txt", "num_rows": 16, "device": "cuda"}
    done = quantize(place / "model", tmp_path / "out", [name], **options)
    assert len(done.formats) == 14
    assert done.measurements[1].disk_bytes < done.measurements[0].disk_bytes
    assert done.measurements[1].divergence.kl_mean < 0.05
    torch.testing.assert_close(logits_of(tmp_path / "out"), logits_of(tmp_path / "out"))
    # against the original: 4 bits and fp8 round weights by up to a tenth, and the errors of products are independent
    found, expected = logits_of(tmp_path / "out"), logits_of(place / "model")
    assert (found - expected).norm() < 0.1 * len(done.formats) ** 0.5 * expected.norm()


def test_8_and_4_bits_are_mixed(place, tmp_path):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("int4 needs capability 8.0")
    options = {"data": place / "rows.txt", "num_rows": 16, "device": "cuda"}
    sizes = {}
    for name in ("int8", "int4"):
        quantize(place / "model", tmp_path / name, [name], **options)
        sizes[name] = weight_bytes(tmp_path / name)
    wanted = sum(sizes.values()) // 2
    done = quantize(place / "model", tmp_path / "mix", ["int8", "int4"], bound=Bound(max_bytes=wanted), **options)
    assert weight_bytes(tmp_path / "mix") <= wanted
    assert "int4" in done.formats.values()
    assert logits_of(tmp_path / "mix").isfinite().all()
