"""`trimtab quantize --rows 0`: weights go through memory one at a time, and the result is that of the whole model."""

import json
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from allocated_bytes import peak_bytes
from tiny_adapters import LABELS, adapted, export_run
from tiny_models import KINDS, TEXTS, config_of, tokenizer
from trimtab.checkpoint.export import export_model, find_export_problem, read_facts
from trimtab.cli.main import app
from trimtab.commands.quantize import quantize
from trimtab.commands.quantize_mix import Bound
from trimtab.compress.quantized_layers import QuantizedLayers
from trimtab.compress.weight_files import WeightShards
from trimtab.compress.weight_formats import FORMATS
from trimtab.errors import CheckpointError, ModelError, RecipeError
from trimtab.inference.load import load
from trimtab.model.load import load_model

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # nf4 stores blocks of 64
WIDTHS = {"bert": WIDE, "llama": WIDE, "t5": {"d_model": 64, "d_kv": 32, "d_ff": 128}}
TIED = {"tie_word_embeddings": True}


def model_folder(folder, family, dtype=torch.bfloat16, shards="50GB", **settings):
    """A model with random weights."""
    torch.manual_seed(0)
    model = load_model(config_of(family) | WIDTHS[family] | settings, KINDS[family], {}, tokenizer(), dtype=dtype)
    export_model(folder, model, tokenizer(), card={})
    if shards != "50GB":
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size=shards)
    return folder


def quantize_in_memory(source, folder, name):
    """Quantize the whole model in memory, without calibration, and let transformers write it."""
    loaded = load(source, device="cpu", dtype=torch.bfloat16)
    layers = QuantizedLayers(loaded.model)
    layers.finish(dict.fromkeys(layers.suited(FORMATS[name]), FORMATS[name]))
    return export_model(folder, loaded.model, loaded.tokenizer, card={})


def stored(folder):
    """The tensors of a folder as bytes, with their dtypes and shapes."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist()) for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "int8"),
        ("llama", "nf4"),
        pytest.param("bert", "int8-dynamic", marks=pytest.mark.slow),
        pytest.param("t5", "fp8", marks=pytest.mark.slow),
        pytest.param("bert", "bnb-int8", marks=pytest.mark.slow),
    ],
)
def test_weight_by_weight_writes_the_bits_of_the_whole_model(tmp_path, family, name):
    settings = TIED if family == "llama" else {}
    source = model_folder(tmp_path / "model", family, **settings)
    done = quantize(source, tmp_path / "files", [name], num_rows=0, device="cpu")
    assert done.measurements == []
    assert len(done.formats) >= 10
    whole = quantize_in_memory(source, tmp_path / "memory", name)
    assert stored(done.folder) == stored(whole)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (done.folder, whole))
    assert ours == theirs
    assert {path.name for path in done.folder.iterdir()} == {path.name for path in whole.iterdir()}
    facts = read_facts(done.folder)
    assert facts["quantized"]["formats"] == {name: len(done.formats)}
    assert facts["task"] == {"llama": "causal-lm", "bert": "classify", "t5": "seq2seq"}[family]


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_files_of_bounded_size_load_with_an_index(tmp_path, monkeypatch, name):
    source = model_folder(tmp_path / "model", "llama", shards="50KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2
    limit = 30_000
    monkeypatch.setattr("trimtab.commands.quantize.WeightShards", partial(WeightShards, shard_bytes=limit))
    done = quantize(source, tmp_path / "files", [name], num_rows=0, device="cpu")
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    files = sorted(done.folder.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) >= 3
    held = 0
    for path in files:
        with safe_open(path, "pt") as file:
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
            assert {key for key, place in index["weight_map"].items() if place == path.name} == set(file.keys())
        assert sum(sizes) <= limit or len(sizes) == 1
        held += sum(sizes)
    assert index["metadata"]["total_size"] == held
    assert find_export_problem(done.folder) == ""
    whole = quantize_in_memory(source, tmp_path / "memory", name)
    batch = tokenizer()(TEXTS, padding=True, return_tensors="pt")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (done.folder, whole))
    with torch.no_grad():
        assert torch.equal(ours(**batch).logits, theirs(**batch).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_memory_does_not_grow_with_the_model(tmp_path, monkeypatch, name):
    """It is that of an output file and of some copies of a weight, whatever the number of layers."""
    weight_bytes = 4 * 128 * 256
    shard_bytes = 2 * weight_bytes
    monkeypatch.setattr("trimtab.commands.quantize.WeightShards", partial(WeightShards, shard_bytes=shard_bytes))
    peaks, sizes = [], []
    for num_layers in (4, 16):
        size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": num_layers}
        source = model_folder(tmp_path / f"model-{num_layers}", "llama", torch.float32, **size)
        sizes.append(sum(path.stat().st_size for path in source.glob("*.safetensors")))
        out = tmp_path / f"out-{num_layers}"
        files = list(source.glob("*.safetensors"))
        peaks.append(peak_bytes(lambda: quantize(source, out, [name], num_rows=0, device="cpu"), files))  # noqa: B023
    # rounding takes some copies of a weight in fp32
    assert max(peaks) <= shard_bytes + 8 * weight_bytes < sizes[1] / 4
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # allocations of other threads are not counted
    whole = peak_bytes(lambda: quantize_in_memory(source, tmp_path / "memory", name), files)
    assert whole > sizes[1] / 2  # of fp32 files, in bf16: the count is right


def test_a_full_disk_leaves_the_old_folder(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    source = model_folder(tmp_path / "model", "llama")
    old = quantize(source, tmp_path / "out", ["int8"], num_rows=0, device="cpu").folder
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(CheckpointError, match="free space"):
        quantize(source, old, ["nf4"], num_rows=0, device="cpu")
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before


def test_what_cannot_be_done_weight_by_weight_is_refused(tmp_path):
    source, out = model_folder(tmp_path / "model", "bert", **LABELS), tmp_path / "out"
    options = {"num_rows": 0, "device": "cpu"}
    with pytest.raises(RecipeError, match="need an evaluation"):
        quantize(source, out, ["int8"], bound=Bound(max_loss=0.1), **options)
    with pytest.raises(RecipeError, match="--data has no effect"):
        quantize(source, out, ["int8"], data="rows.csv", **options)
    with pytest.raises(RecipeError, match="is not valid"):
        quantize(source, out, ["int8"], num_rows=-1, device="cpu")
    model, tok = adapted(str(source), "sequence-classification", LABELS)
    run = export_run(tmp_path / "run", model, tok, tmp_path / "rows.jsonl")
    with pytest.raises(ModelError, match=r"is an adapter[\s\S]*trimtab merge"):
        quantize(run, out, ["int8"], **options)
    done = quantize(source, tmp_path / "int8", ["int8"], **options)
    with pytest.raises(ModelError, match="already quantized"):
        quantize(done.folder, out, ["int8"], **options)
    (source / "model.safetensors").rename(source / "weights.safetensors")
    with pytest.raises(ModelError, match=r"no safetensors files[\s\S]*--rows 512"):
        quantize(source, out, ["int8"], **options)
    (source / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="cannot be read"):
        quantize(source, out, ["int8"], **options)
    assert not out.exists()


def test_files_of_another_shape_are_refused(tmp_path):
    source = model_folder(tmp_path / "model", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    with pytest.raises(ModelError, match="do not match each other"):
        quantize(source, tmp_path / "out", ["int8"], num_rows=0, device="cpu")


def test_command_without_rows(tmp_path):
    source = model_folder(tmp_path / "model", "llama")
    arguments = ["quantize", str(source), str(tmp_path / "out"), "--to", "int8", "--rows", "0", "--device", "cpu"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "14 linear layers quantized" in done.output
    assert load(tmp_path / "out", device="cpu").task_name == "causal-lm"
    done = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert (done.exit_code, done.output) == (0, "")
