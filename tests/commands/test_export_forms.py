"""`trimtab export`: every form loads by itself and answers as the original did, or nothing is written."""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from small_disk import mounted
from tiny_adapters import LABELS, adapted, export_run, nf4
from tiny_models import batch_of
from tiny_runs import reviews, write_csv
from trimtab.checkpoint.export import export_model, read_facts
from trimtab.commands import export as command
from trimtab.commands.export import export
from trimtab.errors import ModelError, RecipeError
from trimtab.inference.load import load
from trimtab.inference.onnx_model import OnnxModel
from trimtab.inference.predict_text import predict_text
from trimtab.model.load import load_model, load_tokenizer

TEXTS = ["the film was good", "a very long and dull story"]


@pytest.fixture
def data(own_folder):
    return write_csv(own_folder / "reviews.csv", reviews(40))


@pytest.fixture
def texts(own_folder):
    (own_folder / "texts.txt").write_text("\n".join(row["text"] for row in reviews(40)))
    return own_folder / "texts.txt"


def classifier(tiny, data, folder="run"):
    base = tiny.folder("bert")
    tok = load_tokenizer(base)
    torch.manual_seed(0)
    return export_run(folder, load_model(base, "sequence-classification", LABELS, tok), tok, data)


def decoder(tiny, folder="decoder", **changes):
    base = tiny.folder("llama", **changes)
    tok = load_tokenizer(base)
    export_model(folder, load_model(base, "causal-lm", {}, tok), tok, card={"task": "causal-lm"})
    return Path(folder)


def logits(loaded, tok=None):
    with torch.no_grad():
        return loaded.model(**batch_of(TEXTS, tok or loaded.tokenizer)).logits


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_gguf_with_table_and_card(tiny, texts):
    decoder(tiny)
    done = export("decoder", "out", to="gguf", dtype="f32", data=texts)
    original, exported = done.measurements
    assert exported.divergence.agreement == 1.0
    assert exported.divergence.kl_mean < 1e-9
    assert exported.quality["perplexity"] == pytest.approx(original.quality["perplexity"], rel=1e-5)
    assert exported.disk_bytes == Path("out/model.gguf").stat().st_size
    assert set(contents("out")) == {"model.gguf", "trimtab.json", "README.md"}
    card = Path("out/README.md").read_text()
    assert "library_name: gguf" in card
    assert "the same prediction in 100.00%" in card
    assert 'gguf_file="model.gguf"' in card
    assert re.search(r"Measured: .*perplexity \d+\.\d{4} \(original \d+\.\d{4}\)", card)
    assert "sample texts have the same tokens" in card
    assert read_facts("out")["task"] == "causal-lm"
    before, loaded = load("decoder", device="cpu"), load("out", device="cpu")
    # transformers adds a token to the tokenizer, whose row the model gets
    torch.testing.assert_close(logits(loaded, before.tokenizer)[..., : len(before.tokenizer)], logits(before))


def test_merged_from_an_adapter(tiny, data):
    model, tok = adapted(tiny.folder("bert"), "sequence-classification", LABELS)
    export_run("run", model, tok, data)
    done = export("run", "out", to="merged", data=data)
    assert done.measurements[1].divergence.kl_mean < 1e-9
    torch.testing.assert_close(logits(load("out", device="cpu")), logits(load("run", device="cpu")))
    assert not Path("out/adapter_config.json").exists()
    assert not list(Path().glob(".*export*")), "nothing temporary is left"
    assert "library_name: transformers" in Path("out/README.md").read_text()


def test_an_adapter_on_four_bits_is_merged_onto_what_it_was_trained_on(tiny, data):
    pytest.importorskip("bitsandbytes")
    model, tok = adapted(tiny.folder("llama"), "causal-lm", **nf4())
    rows = {"train": str(data)}
    card = {"task": "causal-lm", "recipe": {"model": model.config.name_or_path, "task": "causal-lm", "data": rows}}
    export_model("run/best", model, tok, card=card)
    done = export("run", "out", to="gguf", dtype="f32", data=data)
    assert done.measurements[1].divergence.kl_mean < 1e-6


def test_merged_keeps_the_dtype_of_the_files(tiny, texts):
    base = tiny.folder("llama")
    tok = load_tokenizer(base)
    export_model("half", load_model(base, "causal-lm", {}, tok, dtype=torch.bfloat16), tok, card={})
    export("half", "out", to="merged")
    assert json.loads(Path("out/config.json").read_text())["dtype"] == "bfloat16"
    assert Path("out/model.safetensors").stat().st_size == Path("half/model.safetensors").stat().st_size


def test_an_older_export_stays_whole_if_writing_fails(tiny, texts, monkeypatch):
    decoder(tiny)
    export("decoder", "out", to="gguf")
    before = contents("out")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "_write_card", full)
    with pytest.raises(OSError, match="No space left"):
        export("decoder", "out", to="gguf", dtype="q8_0")
    assert contents("out") == before
    assert sorted(path.name for path in Path().iterdir()) == ["decoder", "out", "texts.txt"]


def test_on_a_disk_that_is_full(tiny, own_folder):
    decoder(tiny)
    with mounted(own_folder / "disk", "96k"):
        with pytest.raises(OSError, match="No space left"):
            export("decoder", "disk/out", to="gguf", dtype="f32")
        assert not list(Path("disk").iterdir())


def test_a_difference_refuses_and_writes_nothing(tiny, own_folder, monkeypatch):
    decoder(tiny)

    def refuse(*args):
        raise ModelError("the GGUF file differs from the model")

    monkeypatch.setattr(command, "check_gguf", refuse)
    with pytest.raises(ModelError, match="differs"):
        export("decoder", "out", to="gguf")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"to": "tflite"}, RecipeError, "--to tflite is not valid"),
        ({"to": "gguf", "dtype": "q3"}, RecipeError, "--dtype q3 is not valid"),
        ({"to": "merged", "dtype": "f16"}, RecipeError, "is for GGUF files"),
        ({"to": "gguf"}, ModelError, "BertForSequenceClassification cannot be written as GGUF"),
        ({"to": "merged", "push": "no-user"}, RecipeError, "USER/NAME"),
    ],
)
def test_what_is_refused(tiny, data, options, error, words):
    classifier(tiny, data)
    with pytest.raises(error, match=words):
        export("run", "out", **options)
    assert not Path("out").exists()


def test_foreign_files_are_not_replaced(tiny, texts):
    decoder(tiny)
    Path("photos").mkdir()
    Path("photos/cat.jpg").write_bytes(b"meow")
    with pytest.raises(RecipeError, match="contains other files"):
        export("decoder", "photos", to="gguf")
    assert contents("photos") == {"cat.jpg": b"meow"}


def test_an_onnx_file_that_is_damaged(tiny, data):
    classifier(tiny, data)
    folder = Path("run/best")
    (folder / "model.safetensors").unlink()
    (folder / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot be loaded by onnxruntime"):
        load("run")


@pytest.mark.slow
def test_every_form_in_a_fresh_process(tiny, data):
    """One process loads all forms and prints their logits; it is killed while it writes an export, at the end."""
    classifier(tiny, data)
    decoder(tiny)
    done = export("run", "onnx", to="onnx", data=data)
    assert done.measurements[1].divergence.kl_mean < 1e-9
    assert done.measurements[1].divergence.agreement == 1.0
    assert done.measurements[1].memory_bytes == Path("onnx/model.onnx").stat().st_size
    rounded = export("run", "int8", to="onnx-int8", data=data)
    assert rounded.measurements[1].disk_bytes < done.measurements[1].disk_bytes
    assert 0 < rounded.measurements[1].divergence.kl_mean < 0.1
    export("run", "merged", to="merged")
    export("decoder", "gguf", to="gguf", dtype="f32")
    before = contents("gguf")
    code = f"""
import json, os, signal, torch
from trimtab import load
from trimtab.commands import export as command
for name in ("onnx", "int8", "merged", "gguf"):
    loaded = load(name, device="cpu")
    tokenizer = load("decoder" if name == "gguf" else name, device="cpu").tokenizer
    batch = dict(tokenizer({TEXTS!r}, padding=True, return_tensors="pt"))
    with torch.no_grad():
        print("LOGITS", json.dumps([name, loaded.model(**batch).logits.tolist()]))
command._write_card = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
command.export("decoder", "gguf", to="gguf", dtype="q8_0")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [line.removeprefix("LOGITS ") for line in ended.stdout.splitlines() if line.startswith("LOGITS ")]
    found = {name: torch.tensor(values) for name, values in map(json.loads, lines)}
    assert set(found) == {"onnx", "int8", "merged", "gguf"}, ended.stderr
    expected = logits(load("run", device="cpu"))
    torch.testing.assert_close(found["onnx"], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["merged"], expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found["int8"], logits(load("int8")), rtol=1e-4, atol=1e-6)
    written = logits(load("decoder", device="cpu"))
    torch.testing.assert_close(found["gguf"][..., : written.shape[-1]], written, rtol=1e-4, atol=1e-6)
    assert contents("gguf") == before, "killed while it wrote"
    assert list(Path().glob(".gguf.writing-*")), "which it leaves"
    export("decoder", "gguf", to="gguf", dtype="q8_0")
    assert not list(Path().glob(".gguf.writing-*")), "and the next one removes"


@pytest.mark.slow
def test_an_onnx_folder_predicts_and_is_described(tiny, data):
    classifier(tiny, data)
    export("run", "out", to="onnx")
    loaded = load("out")
    assert isinstance(loaded.model, OnnxModel)
    assert loaded.task_name == "classify"
    assert predict_text(loaded, TEXTS[0]) == predict_text(load("run", device="cpu"), TEXTS[0])
    for path in Path("out").iterdir():
        if path.name != "trimtab.json":  # which names the data, so that rows can be found again
            assert str(data.parent).encode() not in path.read_bytes(), path.name
    code = Path("out/README.md").read_text().split("```python\n")[2].split("```")[0]
    found = {"texts": TEXTS}
    exec(code.replace("FOLDER", "out"), found)
    torch.testing.assert_close(torch.from_numpy(found["logits"]), logits(loaded))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "onnx-int8"])
def test_an_onnx_decoder_generates_and_is_measured(tiny, texts, to):
    decoder(tiny)
    done = export("decoder", "out", to=to, data=texts)
    if to == "onnx":
        assert done.measurements[1].divergence.agreement == 1.0
        loaded = load("decoder", device="cpu")
        assert predict_text(load("out"), "the film", max_new_tokens=5) == predict_text(
            loaded, "the film", max_new_tokens=5
        )
    assert done.measurements[1].quality["perplexity"] == pytest.approx(
        done.measurements[0].quality["perplexity"], rel=0.05
    )
    assert done.measurements[1].memory_bytes == Path("out/model.onnx").stat().st_size
    assert len(load("out").generate(["the film", "a"], max_new_tokens=5)) == 2


@pytest.mark.slow
def test_an_onnx_encoder_decoder_is_measured(tiny, own_folder):
    rows = [{"text": row["text"], "target": row["label"]} for row in reviews(20)]
    export_model(
        "pair", load_model(tiny.folder("t5"), "seq2seq-lm", {}, None), load_tokenizer(tiny.folder("t5")), card={}
    )
    done = export("pair", "out", to="onnx", data=write_csv(own_folder / "rows.csv", rows))
    original, exported = done.measurements
    assert exported.divergence.agreement == 1.0
    assert exported.divergence.kl_mean < 1e-9
    assert exported.quality["perplexity"] == pytest.approx(original.quality["perplexity"], rel=1e-4)
    files = [Path("out/encoder_model.onnx"), Path("out/decoder_model.onnx")]
    assert exported.memory_bytes == exported.disk_bytes == sum(file.stat().st_size for file in files)


def test_what_has_no_other_form(tiny, data, monkeypatch):
    classifier(tiny, data)
    monkeypatch.setattr(command, "is_quantized_model", lambda model: True)
    with pytest.raises(ModelError, match="run.best is a quantized model"):
        export("run", "out", to="merged")
    assert not Path("out").exists()


def test_the_rows_of_the_run_are_used(tiny, data):
    classifier(tiny, data)
    done = export("run", "out", to="merged")
    assert done.measurements[1].divergence.num_rows == 4  # a tenth of 40 is held out
    data.unlink()
    assert export("run", "again", to="merged").measurements == ()
