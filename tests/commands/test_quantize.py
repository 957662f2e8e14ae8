"""`trimtab quantize`: every format is written, loads back with the same outputs, and keeps its bound."""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tiny_adapters import LABELS, adapted, export_run, nf4
from tiny_models import TEXTS, config_of, tokenizer
from trimtab.checkpoint.export import export_model, read_facts
from trimtab.cli.main import app
from trimtab.commands.merge import merge_in_place
from trimtab.commands.quantize import quantize
from trimtab.commands.quantize_mix import Bound
from trimtab.compress.quantized_layers import QuantizedLayers
from trimtab.compress.weight_formats import FORMATS
from trimtab.errors import ModelError, RecipeError
from trimtab.inference.load import load
from trimtab.inference.model_measurement import weight_bytes
from trimtab.inference.quality_loss import quality_loss
from trimtab.model.adapters import adapter_of
from trimtab.model.load import load_model

ON_ANY_DEVICE = ["int8-dynamic", "int8", "fp8", "nf4", "bnb-int8"]
FRAGILE = "bert.encoder.layer.0.intermediate.dense"
WIDTH = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.3}  # nf4 stores blocks of 64


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    words = ("the", "cat", "sat", "on", "a", "dog", "ran", "after", "film", "great", "worst", "mat", "ever", "saw")
    return [" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(160)]


@pytest.fixture(scope="module")
def place(tmp_path_factory, texts):
    """A classifier with one fragile layer, and rows with its own answers as labels."""
    folder = tmp_path_factory.mktemp("quantize")
    torch.manual_seed(0)
    tok = tokenizer()
    head = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    model = load_model(config_of("bert") | WIDTH, "sequence-classification", head, tok)
    make_fragile(model)
    with torch.no_grad():
        logits = model(**tok(texts, padding=True, return_tensors="pt")).logits
        margins, order = (logits[:, 1] - logits[:, 0]).sort()
        model.classifier.bias[1] -= margins[len(texts) // 2]
    export_model(folder / "model", model, tok, card={"task": "classify"})
    # clear answers only: those that a harmless rounding does not change
    answers = {"bad": order[:30].tolist(), "good": order[-30:].tolist()}
    rows = [{"text": texts[row], "label": label} for label, found in answers.items() for row in found]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@torch.no_grad()
def make_fragile(model):
    """Let one layer have huge weights for an input that is always 0: they spoil the scales of its rows."""
    norm = model.get_submodule("bert.encoder.layer.0.attention.output.LayerNorm")
    norm.weight[0] = norm.bias[0] = 0.0
    model.get_submodule(FRAGILE).weight[:, 0] = 1000.0


def logits_of(folder, texts):
    loaded = load(folder, device="cpu")
    with torch.no_grad():
        return loaded.model(**loaded.tokenizer(texts, padding=True, return_tensors="pt")).logits


@pytest.fixture(scope="module", autouse=True)
def short_timings():
    """Time each model three times only: no test reads the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimtab.inference.model_measurement._MAX_REPEATS", 3)
        yield


@pytest.fixture(scope="module")
def int8(place):
    return quantize(place / "model", place / "int8", ["int8"], data=place / "rows.jsonl", device="cpu")


@pytest.fixture(scope="module")
def folders(place, int8):
    """The model in every format that works here, made once."""
    options = {"data": place / "rows.jsonl", "device": "cpu"}
    others = [name for name in ON_ANY_DEVICE if name != "int8"]
    return {"int8": int8} | {name: quantize(place / "model", place / name, [name], **options) for name in others}


@pytest.mark.slow
def test_every_format_is_smaller_and_has_measurements(place, folders):
    before = weight_bytes(place / "model")
    for name, done in folders.items():
        original, new = done.measurements
        assert (original.name, new.name) == ("original", name)
        assert original.disk_bytes == before > new.disk_bytes
        assert new.memory_bytes < original.memory_bytes
        assert new.divergence.kl_mean > 0
        facts = read_facts(place / name)
        assert facts["quantized"]["formats"] == {name: len(done.formats)}
        assert facts["task"] == "classify"
        assert done.num_left == 0
        assert not any("classifier" in layer or "embeddings" in layer for layer in done.formats)
        assert not [path for path in (place / name).iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


def test_outputs_of_harmless_layers_are_close(place, texts, tmp_path):
    """The error follows from the format: a step is a 127th of the largest weight of a row."""
    bound = Bound(max_bytes=weight_bytes(place / "model") - 1)  # one layer, the least harmful one
    quantize(place / "model", tmp_path / "one", ["int8"], data=place / "rows.jsonl", bound=bound, device="cpu")
    loaded, plain = load(tmp_path / "one", device="cpu"), load(place / "model", device="cpu")
    names = list(read_facts(tmp_path / "one")["quantized"]["layers"])
    assert 1 <= len(names) <= 3
    for name in names:
        stored, weight = loaded.model.get_submodule(name).weight, plain.model.get_submodule(name).weight
        # steps are of 127.5, so the largest weight may be rounded by a whole one
        step = weight.abs().amax(1, keepdim=True) / 127
        assert ((stored.dequantize() - weight).abs() <= step * 1.01).all()


@pytest.mark.parametrize("names", [["int8", "fp8", "int8-dynamic"], ["nf4"], ["bnb-int8"]], ids=" ".join)
def test_the_loaded_model_computes_what_the_one_in_memory_did(place, texts, tmp_path, names):
    """Formats of torchao may be mixed in one model; every third layer is left as it is."""
    loaded = load(place / "model", device="cpu")
    layers = QuantizedLayers(loaded.model)
    chosen = [name for number, name in enumerate(layers.names) if number % 3]
    layers.finish({name: FORMATS[names[number % len(names)]] for number, name in enumerate(chosen)})
    kinds = {name: type(loaded.model.get_submodule(name).weight) for name in layers.names}
    export_model(tmp_path / "mix", loaded.model, loaded.tokenizer, card={"task": "classify"})
    with torch.no_grad():
        expected = loaded.model(**loaded.tokenizer(texts, padding=True, return_tensors="pt")).logits
    again = load(tmp_path / "mix", device="cpu").model
    assert {name: type(again.get_submodule(name).weight) for name in layers.names} == kinds
    torch.testing.assert_close(logits_of(tmp_path / "mix", texts), expected)


@pytest.mark.slow
def test_a_fresh_process_loads_the_same_outputs_with_plain_transformers(place, folders, texts):
    code = (
        "import sys, json, torch\n"
        "from safetensors.torch import save_file\n"
        "from transformers import AutoModelForSequenceClassification as A, AutoTokenizer as T\n"
        "place, texts, out = sys.argv[1], json.loads(sys.argv[2]), {}\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        f"for name in {ON_ANY_DEVICE}:\n"
        "    folder = place + '/' + name\n"
        "    model = A.from_pretrained(folder).eval()\n"
        "    with torch.no_grad():\n"
        "        out[name] = model(**T.from_pretrained(folder)(texts, padding=True, return_tensors='pt')).logits\n"
        "save_file(out, place + '/logits.safetensors')\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(place), json.dumps(texts[:8])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = load_file(place / "logits.safetensors")
    for name in ON_ANY_DEVICE:
        torch.testing.assert_close(found[name], logits_of(place / name, texts[:8]))


def test_max_loss_leaves_the_fragile_layer_alone(place, int8, tmp_path):
    options = {"data": place / "rows.jsonl", "device": "cpu"}
    whole = int8.measurements[1].quality["accuracy"]
    assert whole < 0.98  # else there is nothing to keep
    done = quantize(place / "model", tmp_path / "mix", ["int8"], bound=Bound(max_loss=0.005), **options)
    before, after = (one.quality for one in done.measurements)
    assert before["accuracy"] == 1
    assert quality_loss(before, after) <= 0.005
    assert FRAGILE not in done.formats
    assert len(done.formats) >= 10
    assert load(tmp_path / "mix", device="cpu").model.get_submodule(FRAGILE).weight.dtype is torch.float32


def test_size_is_kept_with_the_least_harmful_layers(place, int8, tmp_path):
    before, least = (one.disk_bytes for one in int8.measurements)
    wanted = (before + least) // 2
    options = {"data": place / "rows.jsonl", "device": "cpu"}
    done = quantize(place / "model", tmp_path / "mix", ["int8"], bound=Bound(max_bytes=wanted), **options)
    assert weight_bytes(tmp_path / "mix") <= wanted
    assert FRAGILE not in done.formats
    with pytest.raises(ModelError, match="with every layer quantized"):
        quantize(place / "model", tmp_path / "no", ["int8"], bound=Bound(max_bytes=least // 2), **options)
    assert not (tmp_path / "no").exists()


def test_a_failed_write_leaves_the_old_folder(place, int8, texts, monkeypatch):
    from transformers import BertForSequenceClassification

    def write_half(model, folder, **options):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = {path.name: path.read_bytes() for path in (place / "int8").iterdir()}
    monkeypatch.setattr(BertForSequenceClassification, "save_pretrained", write_half)
    with pytest.raises(OSError, match="No space"):
        quantize(place / "model", place / "int8", ["fp8"], data=place / "rows.jsonl", device="cpu")
    assert {path.name: path.read_bytes() for path in (place / "int8").iterdir()} == before


@pytest.mark.parametrize("bound", ["max_loss", "max_bytes"])
def test_a_bound_that_the_written_model_breaks_leaves_the_old_folder(place, int8, tmp_path, monkeypatch, bound):
    """The choice is made in memory, from estimates; here they promise too much."""
    old = shutil.copytree(place / "int8", tmp_path / "old")
    (old / "notes.txt").write_text("which a new model would remove")
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    if bound == "max_loss":
        monkeypatch.setattr("trimtab.commands.quantize_mix.MixEvaluator.loss", lambda evaluator: 0.0)
        limit, message = Bound(max_loss=0.005), "more than 0.50%"
    else:
        monkeypatch.setattr("trimtab.commands.quantize_mix.within_size", lambda moves, *sizes: moves)
        limit, message = Bound(max_bytes=1000), "more than 1,000"
    with pytest.raises(ModelError, match=message):
        quantize(place / "model", old, ["int8"], bound=limit, data=place / "rows.jsonl", device="cpu")
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Nothing", "_data": {}}}}, "Nothing"),
        ({"quant_method": "torchao", "quant_type": "int8"}, "contains no torchao format"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ("int8", "cannot be loaded"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}},
            "int4 needs a CUDA device",
        ),
    ],
)
def test_a_corrupt_config_is_refused(place, int8, tmp_path, settings, message):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in (place / "int8").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=message):
        load(broken, device="cpu")


def test_damaged_weights_are_refused(place, int8, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in (place / "int8").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError):
        load(broken, device="cpu")


def test_what_cannot_be_done_is_refused_with_its_cure(place, int8, tmp_path):
    rows, model = place / "rows.jsonl", place / "model"
    options = {"data": rows, "device": "cpu"}
    with pytest.raises(ModelError, match=r"int4 needs a CUDA device[\s\S]*nf4"):
        quantize(model, tmp_path / "a", ["int4"], **options)
    with pytest.raises(RecipeError, match=r"int3[\s\S]*one of int8-dynamic"):
        quantize(model, tmp_path / "a", ["int3"], **options)
    with pytest.raises(RecipeError, match="need a bound"):
        quantize(model, tmp_path / "a", ["int8", "fp8"], **options)
    with pytest.raises(RecipeError, match="can only mix torchao formats"):
        quantize(model, tmp_path / "a", ["int8", "nf4"], bound=Bound(max_loss=0.1), **options)
    with pytest.raises(RecipeError, match="the held-out rows of this model are unknown"):
        quantize(model, tmp_path / "a", ["int8"], device="cpu")
    with pytest.raises(RecipeError, match="the model itself"):
        quantize(model, model, ["int8"], **options)
    with pytest.raises(RecipeError, match="contains other files"):
        quantize(model, place, ["int8"], **options)
    with pytest.raises(ModelError, match="already quantized"):
        quantize(place / "int8", tmp_path / "a", ["int8"], **options)
    with pytest.raises(ModelError, match="quantized weights cannot be trained"):
        load_model(str(place / "int8"), "sequence-classification", {}, tokenizer())
    with pytest.raises(ModelError, match="leave dtype out"):
        load(place / "int8", device="cpu", dtype=torch.bfloat16)
    with pytest.raises(RecipeError, match="pass exactly one of them"):
        Bound(max_loss=0.1, max_bytes=100)
    assert not (tmp_path / "a").exists()


def test_command_prints_the_table(place, tmp_path):
    arguments = ["quantize", str(place / "model"), str(tmp_path / "out"), "--to", "int8", "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--data", str(place / "rows.jsonl"), "--dtype", "bf16"])
    assert done.exit_code == 0, done.output
    assert "original" in done.output
    assert "13 linear layers quantized" in done.output
    assert load(tmp_path / "out", device="cpu").model.dtype is torch.bfloat16


@pytest.mark.slow
def test_products_that_may_overflow_on_this_cpu_are_reported(place, tmp_path, monkeypatch, caplog):
    options = {"data": place / "rows.jsonl", "num_rows": 8, "device": "cpu"}
    monkeypatch.setattr("torchao.utils.should_reduce_range", lambda device: False)  # as where it is quantized
    quantize(place / "model", tmp_path / "out", ["int8-dynamic"], **options)
    monkeypatch.setattr("torchao.utils.should_reduce_range", lambda device: True)
    with caplog.at_level("INFO", logger="trimtab"):
        load(tmp_path / "out", device="cpu")
    assert "sums may overflow" in caplog.text
    caplog.clear()
    quantize(place / "model", tmp_path / "reduced", ["int8-dynamic"], **options)
    with caplog.at_level("INFO", logger="trimtab"):
        load(tmp_path / "reduced", device="cpu")
    assert "overflow" not in caplog.text


@pytest.mark.slow
def test_an_adapter_is_merged_first(place, tmp_path):
    model, tok = adapted(str(place / "model"), "sequence-classification", LABELS)
    run = export_run(tmp_path / "run", model, tok, place / "rows.jsonl")
    done = quantize(run, tmp_path / "out", ["int8"], data=place / "rows.jsonl", num_rows=8, device="cpu")
    assert done.measurements[0].disk_bytes is None  # an adapter alone is no model
    assert done.measurements[1].disk_bytes == weight_bytes(tmp_path / "out")
    facts = read_facts(tmp_path / "out")
    assert "adapter" not in facts
    assert facts["recipe"]["model"] == str(place / "model")
    merged = load(run, device="cpu").model
    merge_in_place(merged, adapter_of(merged), torch.float32)
    name = "bert.encoder.layer.1.attention.self.query"
    expected = merged.get_submodule(name).weight
    stored = load(tmp_path / "out", device="cpu").model.get_submodule(name).weight.dequantize()
    assert ((stored - expected).abs() <= expected.abs().amax(1, keepdim=True) / 127 * 1.01).all()


def test_an_adapter_on_a_quantized_base_is_sent_to_merge(place, tmp_path):
    model, tok = adapted(str(place / "model"), "sequence-classification", LABELS, **nf4())
    run = export_run(tmp_path / "run", model, tok, place / "rows.jsonl")
    with pytest.raises(ModelError, match=r"base in nf4[\s\S]*trimtab merge .* --onto dequantized"):
        quantize(run, tmp_path / "out", ["int8"], data=place / "rows.jsonl", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_ANY_DEVICE)
def test_a_language_model_in_halves(tmp_path, name):
    """What is not quantized stays in bf16; the bound is the relative rise of the loss."""
    torch.manual_seed(0)
    model = load_model(config_of("llama") | WIDTH, "causal-lm", {}, tokenizer(), dtype=torch.bfloat16)
    export_model(tmp_path / "model", model, tokenizer(), card={"task": "causal-lm"})
    (tmp_path / "rows.txt").write_text("\n".join(TEXTS * 8))
    options = {"data": tmp_path / "rows.txt", "num_rows": 16, "device": "cpu", "bound": Bound(max_loss=0.05)}
    done = quantize(tmp_path / "model", tmp_path / "out", [name], **options)
    before, after = (one.quality["loss"] for one in done.measurements)
    assert after <= before * 1.05
    assert set(done.formats.values()) == {name}
    loaded = load(tmp_path / "out", device="cpu")
    assert loaded.model.dtype is torch.bfloat16
    torch.testing.assert_close(loaded.model.lm_head.weight, model.lm_head.weight)


def test_models_without_linear_layers_are_refused(tmp_path):
    export_model(tmp_path / "gpt2", load_model(config_of("gpt2"), "causal-lm", {}, tokenizer()), tokenizer(), card={})
    (tmp_path / "rows.txt").write_text("\n".join(TEXTS))
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel has no torch\.nn\.Linear"):
        quantize(tmp_path / "gpt2", tmp_path / "out", ["int8"], data=tmp_path / "rows.txt", device="cpu")
