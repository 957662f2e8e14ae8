"""Exports: plain Hugging Face folders that are whole or not there, with label names and facts."""

import json
import math
import shutil

import pytest
import torch

from tiny_adapters import LABELS as REVIEW_LABELS
from tiny_adapters import adapted, fp8, nf4, shake
from tiny_models import CONFIGS, TEXTS, batch_of, config_of, same_weights, tokenizer
from trimtab.checkpoint.export import (
    RetryingExport,
    export_model,
    find_export_problem,
    read_facts,
    read_quantization,
    weight_checksums,
    weights_to_export,
)
from trimtab.errors import CheckpointError
from trimtab.model.adapters import LoraSpec, adapter_of, add_adapter
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model

LABELS = {"num_labels": 2, "id2label": {0: "bad", 1: "gut ü"}, "label2id": {"bad": 0, "gut ü": 1}}
KINDS = {"bert": "masked-lm", "roberta": "masked-lm", "gpt2": "causal-lm", "llama": "causal-lm"}


def classifier():
    return load_model(config_of("bert"), "sequence-classification", LABELS, tokenizer())


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_every_shape(tmp_path, name):
    import transformers

    kind = KINDS.get(name, "seq2seq-lm")
    model = load_model(config_of(name), kind, {}, tokenizer())
    export_model(tmp_path / "best", model, tokenizer(), card={})
    auto = {"masked-lm": "MaskedLM", "causal-lm": "CausalLM", "seq2seq-lm": "Seq2SeqLM"}[kind]
    with quiet_transformers():
        loaded, info = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(
            tmp_path / "best", output_loading_info=True
        )
        tok = transformers.AutoTokenizer.from_pretrained(tmp_path / "best")
    assert not any(info.values()), info
    assert same_weights(loaded, model)
    assert tok(TEXTS)["input_ids"] == tokenizer()(TEXTS)["input_ids"]


def test_label_names_facts_and_files(tmp_path):
    from transformers import AutoModelForSequenceClassification

    model = classifier()
    card = {
        "task": "classify",
        "step": 7,
        "metrics": {"accuracy": 0.5, "loss": math.nan},
        "path": tmp_path,
        "t": (1, 2),
    }
    assert export_model(tmp_path / "best", model, tokenizer(), card=card) == tmp_path / "best"
    with quiet_transformers():
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best")
    assert loaded.config.id2label == LABELS["id2label"]
    batch = batch_of(TEXTS)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    files = {path.name for path in (tmp_path / "best").iterdir()}
    written = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files == written | {"trimtab.json", "README.md"}
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    facts = read_facts(tmp_path / "best")
    assert facts["metrics"] == {"accuracy": 0.5, "loss": "nan"}
    assert facts["t"] == [1, 2]
    assert facts["trimtab"]
    assert read_facts(tmp_path) == {}


def test_a_newer_one_replaces_it_and_a_failure_leaves_it(tmp_path, monkeypatch):
    first, second, tok = classifier(), classifier(), tokenizer()
    assert not same_weights(first, second)
    for step, model in enumerate((first, second)):
        export_model(tmp_path / "best", model, tok, card={"step": step})

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(type(tok), "save_pretrained", fail)
    with pytest.raises(OSError, match="no space"):
        export_model(tmp_path / "best", first, tok, card={"step": 2})
    monkeypatch.undo()
    assert read_facts(tmp_path / "best")["step"] == 1
    assert same_weights(load_model(str(tmp_path / "best"), "sequence-classification", {}, None), second)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_killed_between_two_renames(tmp_path):
    """The model is found until the next export, which tidies up."""
    model = classifier()
    export_model(tmp_path / "best", model, tokenizer(), card={})
    (tmp_path / "best").rename(tmp_path / ".best.outdated-123")
    assert same_weights(load_model(str(tmp_path), "sequence-classification", {}, None), model)
    export_model(tmp_path / "best", model, tokenizer(), card={})
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    with pytest.raises(CheckpointError, match="contains other files"):
        export_model(tmp_path / "photos", classifier(), None, card={})
    assert (tmp_path / "photos" / "cat.jpg").exists()
    with pytest.raises(CheckpointError, match="is a file"):
        export_model(tmp_path / "photos" / "cat.jpg", classifier(), None, card={})
    with pytest.raises(CheckpointError, match="Linear is not a transformers model"):
        export_model(tmp_path / "best", torch.nn.Linear(1, 1), None, card={})


def test_wrapped_models(tmp_path):
    """As DDP and torch.compile wrap them, and in the mixed precision of the engine."""
    from trimtab.engine.engine import Engine

    model = classifier()
    prepared = Engine("bf16", device="cpu").prepare(model)
    export_model(tmp_path / "best", wrapped("module", prepared), None, card={})
    loaded = load_model(str(tmp_path / "best"), "sequence-classification", {}, None)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert same_weights(loaded, model)
    export_model(tmp_path / "best", wrapped("module", wrapped("_orig_mod", model)), None, card={})
    assert same_weights(load_model(str(tmp_path / "best"), "sequence-classification", {}, None), model)


def wrapped(attribute, model):
    wrapper = torch.nn.Module()
    wrapper.add_module(attribute, model)
    return wrapper


def test_sampling_settings_of_published_models(tmp_path):
    """Some have a temperature without do_sample; transformers would refuse to save them at the end of a run."""
    model = load_model(config_of("llama"), "causal-lm", {}, tokenizer())
    model.generation_config.temperature = 0.6
    model.generation_config.top_p = 0.9
    with pytest.raises(ValueError, match="temperature"), quiet_transformers():
        model.generation_config.save_pretrained(tmp_path / "refused")
    export_model(tmp_path / "best", model, tokenizer(), card={})
    saved = json.loads((tmp_path / "best" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["top_p"], saved["do_sample"]) == (0.6, 0.9, True)


def test_what_counts_as_damaged(tmp_path, tiny):
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder("bert"), folder)
    weights, known = folder / "model.safetensors", weight_checksums(folder)
    assert find_export_problem(folder) == find_export_problem(folder, known) == ""
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-20] + bytes([raw[-20] ^ 1]) + raw[-19:])
    assert find_export_problem(folder) == ""
    assert "its checksum does not match" in find_export_problem(folder, known)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_export_problem(folder).endswith("model-00002-of-00002.safetensors is missing")
    assert find_export_problem(tmp_path / "nothing").endswith("nothing is missing")
    (folder / "trimtab.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_facts(folder)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_pending_model_is_the_one_of_its_time(tmp_path, file_size_limit, caplog, name):
    """Byte for byte, also where weights are tied; what was trained since then is not in it."""
    caplog.set_level("INFO", logger="trimtab")
    model, tok = load_model(config_of(name), KINDS.get(name, "seq2seq-lm"), {}, tokenizer()), tokenizer()
    export_model(tmp_path / "at-once", model, tok, card={"step": 1})
    patient = RetryingExport(tmp_path / "later", model, tok)
    with file_size_limit(1000):
        assert not patient.write({"step": 1})
        assert not patient.write_pending()
    assert "the model is kept in host memory" in caplog.text
    assert patient.problem is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert patient.write_pending()
    assert patient.problem is None
    assert not patient.write_pending()
    files = [{path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("at-once", "later")]
    assert files[0] == files[1]


# ---------------------------------------------------------------------- adapters


def test_of_an_adapter_the_base_is_never_written(tmp_path, tiny):
    from safetensors.torch import load_file

    base = tiny.folder("bert")
    model, tok = adapted(base, "sequence-classification", REVIEW_LABELS)
    export_model(tmp_path / "best", model, tok, card={"task": "classify"})
    files = {path.name for path in (tmp_path / "best").iterdir()}
    assert files == {
        *("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("trimtab.json", "README.md"),
    }
    stored = load_file(tmp_path / "best" / "adapter_model.safetensors")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in trained.values())
    assert not [name for name in stored if "base_layer" in name or "embeddings" in name]
    assert set(weights_to_export(model)) == set(trained)
    facts = read_facts(tmp_path / "best")
    assert facts["base"] == base
    assert facts["kind"] == "sequence-classification"
    assert facts["head"]["id2label"] == {"0": "bad", "1": "good"}
    assert facts["adapter"]["base_dtype"] == "float32"
    assert facts["adapter"]["nf4"] is None
    model = load_model(config_of("llama"), "causal-lm", {}, tokenizer())  # a base made from a config has no name
    add_adapter(model, LoraSpec(rank=2))
    export_model(tmp_path / "best", model, tokenizer(), card={})
    facts = read_facts(tmp_path / "best")
    assert (facts["base"], facts["kind"], facts["head"]) == (None, "causal-lm", {})


def test_peft_loads_an_exported_adapter(tmp_path, tiny):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = tiny.folder("bert")
    model, tok = adapted(base, "sequence-classification", REVIEW_LABELS)
    export_model(tmp_path / "best", model, tok, card={})
    with quiet_transformers():
        plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
        theirs = PeftModel.from_pretrained(plain, tmp_path / "best").eval()
    batch = batch_of(TEXTS, tok)
    torch.testing.assert_close(theirs(**batch).logits, model.eval()(**batch).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_how_the_base_was_held(tmp_path, tiny, dtype):
    pytest.importorskip("bitsandbytes")
    form = nf4(getattr(torch, dtype))
    model, tok = adapted(tiny.folder("bert"), "sequence-classification", REVIEW_LABELS, **form)
    export_model(tmp_path / "best", model, tok, card={})
    facts = read_facts(tmp_path / "best")["adapter"]
    assert facts["base_dtype"] == dtype
    assert facts["nf4"] == {"compute_dtype": dtype, "double_quant": True}
    form = fp8(getattr(torch, dtype))
    model, tok = adapted(tiny.folder("bert"), "sequence-classification", REVIEW_LABELS, **form)
    export_model(tmp_path / "best", model, tok, card={})
    facts = read_facts(tmp_path / "best")
    assert facts["adapter"]["base_dtype"] == dtype
    assert (facts["adapter"]["nf4"], facts["adapter"]["fp8"]) == (None, {"compute_dtype": dtype})
    assert read_quantization(facts) == form["quantization"]
    model, tok = adapted(tiny.folder("bert"), "masked-lm", dtype=getattr(torch, dtype))
    export_model(tmp_path / "best", model, tok, card={})
    assert read_facts(tmp_path / "best")["adapter"] | {"num_parameters": 0} == {
        "num_parameters": 0,
        "base_dtype": dtype,
        "nf4": None,
    }


def test_of_an_adapter_only_the_adapter_waits(tmp_path, tiny, file_size_limit):
    """A full disk: a copy of the adapter is kept in memory and written when there is space."""
    from trimtab.inference.load import load

    model, tok = adapted(tiny.folder("bert"), "sequence-classification", REVIEW_LABELS)
    model.eval()
    patient = RetryingExport(tmp_path / "best", model, tok)
    batch = batch_of(TEXTS, tok)
    before = model(**batch).logits
    with file_size_limit(1000):
        assert not patient.write({"step": 1})
    assert not (tmp_path / "best").exists()
    shake(adapter_of(model))
    waiting = {id(tensor): tensor.numel() for tensor in patient._pending[0].values()}
    assert sum(waiting.values()) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert patient.write_pending()
    loaded = load(tmp_path / "best", device="cpu").model
    torch.testing.assert_close(loaded(**batch).logits, before)
    assert not torch.allclose(model(**batch).logits, before, atol=1e-3)


def test_a_wrapped_model_with_an_adapter(tmp_path, tiny):
    model, tok = adapted(tiny.folder("bert"), "masked-lm")
    export_model(tmp_path / "best", wrapped("module", wrapped("_orig_mod", model)), tok, card={})
    assert not (tmp_path / "best" / "config.json").exists()
    assert (tmp_path / "best" / "adapter_model.safetensors").stat().st_size < 2 * 4 * sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
