"""Adapters ready to use: their base is found, the adapter laid onto it, and what is missing is told in one message."""

import json
import shutil

import pytest
import torch

from tiny_adapters import LABELS, adapted, export_run, fp8, nf4
from tiny_models import batch_of
from tiny_runs import reviews, write_csv
from trimtab.checkpoint.export import export_model
from trimtab.errors import ModelError
from trimtab.inference.classify import classify_texts
from trimtab.inference.generate import generate_texts
from trimtab.inference.load import load
from trimtab.inference.predict_text import predict_text
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model, load_tokenizer

TEXTS = ["the film was good", "a very long and dull story"]
CAUSAL = [("gpt2", "causal-lm", "causal-lm"), ("llama", "causal-lm", "causal-lm")]
OTHERS = [("bert", "masked-lm", "masked-lm"), ("t5", "seq2seq-lm", "seq2seq"), ("marian", "seq2seq-lm", "seq2seq")]


@pytest.fixture
def data(tmp_path):
    return write_csv(tmp_path / "reviews.csv", reviews(40))


@pytest.fixture
def classifier(tmp_path, tiny, data):
    """A run with an adapter on a copy of a base, the model as it was in memory, and the base."""
    base = tmp_path / "base"
    shutil.copytree(tiny.folder("bert"), base)
    model, tok = adapted(str(base), "sequence-classification", LABELS)
    return export_run(tmp_path / "run", model, tok, data), model.eval(), base


def logits_of(model, tok):
    batch = batch_of(TEXTS, tok)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize(("family", "kind", "task"), [*CAUSAL, *OTHERS])
def test_every_family(tmp_path, tiny, data, family, kind, task):
    model, tok = adapted(tiny.folder(family), kind)
    export_run(tmp_path / "run", model, tok, data, task)
    loaded = load(tmp_path / "run", device="cpu")
    assert loaded.task_name == task
    assert loaded.max_length == 32
    assert type(loaded.model) is type(model)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert torch.equal(logits_of(loaded.model, tok), logits_of(model.eval(), tok))
    plain = load(tiny.folder(family), device="cpu")
    assert not torch.allclose(logits_of(plain.model, tok), logits_of(loaded.model, tok), atol=1e-3)
    if kind != "masked-lm":
        assert len(generate_texts(loaded, TEXTS, max_new_tokens=3)) == 2


def test_labels_and_a_new_head(classifier):
    run, model, _ = classifier
    loaded = load(run, device="cpu")
    assert loaded.task_name == "classify"
    assert loaded.model.config.id2label == LABELS["id2label"]
    assert torch.equal(logits_of(loaded.model, loaded.tokenizer), logits_of(model, loaded.tokenizer))
    assert {each.label for each in classify_texts(loaded, TEXTS)} <= {"bad", "good"}
    assert predict_text(loaded, TEXTS[0])


def test_in_half_precision(classifier):
    run, model, _ = classifier
    loaded = load(run, device="cpu", dtype=torch.bfloat16)
    assert loaded.model.get_input_embeddings().weight.dtype is torch.bfloat16
    found = logits_of(loaded.model, loaded.tokenizer)
    torch.testing.assert_close(found.float(), logits_of(model, loaded.tokenizer), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("form", "kind"), [(nf4, "Linear4bit"), (fp8, "Fp8Linear")])
def test_a_quantized_base_is_one_again(tmp_path, tiny, data, form, kind):
    """As it was trained unless a dtype is asked for: those are other weights, and another model."""
    pytest.importorskip("bitsandbytes")
    base = tiny.folder("llama", hidden_size=64, intermediate_size=128)
    model, tok = adapted(base, "causal-lm", **form())
    export_run(tmp_path / "run", model, tok, data, "causal-lm")
    loaded = load(tmp_path / "run", device="cpu")
    torch.testing.assert_close(logits_of(loaded.model, tok), logits_of(model.eval(), tok), rtol=1e-5, atol=1e-5)
    assert any(type(module).__name__ == kind for module in loaded.model.modules())
    plain = load(tmp_path / "run", device="cpu", dtype=torch.float32)
    assert not any(type(module).__name__ == kind for module in plain.model.modules())
    assert not torch.allclose(logits_of(plain.model, tok), logits_of(model, tok), atol=1e-3)


def test_a_chat_template_comes_with_the_adapter(tmp_path, tiny, data):
    model, tok = adapted(tiny.folder("gpt2"), "causal-lm")
    tok.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    export_model(tmp_path / "adapter", model, tok, card={})
    loaded = load(tmp_path / "adapter", device="cpu")
    assert loaded.task_name == "chat"
    assert loaded.tokenizer.chat_template == tok.chat_template


def test_trained_embeddings_stay_tied(tmp_path, tiny, data):
    spec = LoraSpec(rank=2, trains=["wte"])
    model, tok = adapted(tiny.folder("gpt2"), "causal-lm", spec=spec)
    export_run(tmp_path / "run", model, tok, data, "causal-lm")
    loaded = load(tmp_path / "run", device="cpu").model
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(logits_of(loaded, tok), logits_of(model.eval(), tok))


def test_embeddings_that_grew_for_the_tokenizer(tmp_path, tiny, data):
    """Their new rows are frozen and random, so they have to come out the same again."""
    base = tiny.folder("llama")
    tok = load_tokenizer(base)
    tok.add_tokens([f"<word-{number}>" for number in range(200)])
    torch.manual_seed(7)
    model = load_model(base, "causal-lm", {}, tok)
    assert model.get_input_embeddings().num_embeddings > load_model(base, "causal-lm", {}, None).config.vocab_size
    add_adapter(model, LoraSpec(rank=2))
    export_run(tmp_path / "run", model, tok, data, "causal-lm", seed=7)
    torch.manual_seed(99)
    loaded = load(tmp_path / "run", device="cpu").model
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_an_adapter_that_peft_wrote(tmp_path, tiny):
    """Without a word about labels or a tokenizer of its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    base = tiny.folder("bert")
    with quiet_transformers():
        plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    theirs = get_peft_model(plain, LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name or "pooler" in name:
                parameter.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"has weights for bert\.pooler"):
        load(tmp_path / "adapter", device="cpu")
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2, modules_to_save=["pooler", "classifier"])
    with quiet_transformers():
        plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    theirs = get_peft_model(plain, config).eval()
    theirs.save_pretrained(tmp_path / "whole")
    loaded = load(tmp_path / "whole", device="cpu")
    assert loaded.task_name == "classify"
    assert loaded.model.config.num_labels == 3
    torch.testing.assert_close(
        logits_of(loaded.model, loaded.tokenizer), logits_of(theirs, loaded.tokenizer), rtol=1e-5, atol=1e-6
    )


def test_a_base_that_is_gone(classifier, tmp_path):
    run, model, base = classifier
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="which no longer exists") as failure:
        load(run)
    assert str(base) in failure.value.problem
    assert "base_model_name_or_path" in failure.value.cure
    path = run / "best" / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"base_model_name_or_path": str(tmp_path / "elsewhere")}))
    loaded = load(run, device="cpu")
    assert torch.equal(logits_of(loaded.model, loaded.tokenizer), logits_of(model, loaded.tokenizer))
    path.write_text(json.dumps(settings | {"base_model_name_or_path": "no-org/no-model"}))
    with pytest.raises(ModelError, match="an adapter for no-org/no-model, which cannot be loaded: .*cannot be reached"):
        load(run)


def test_a_base_that_was_made_from_a_config(tmp_path):
    from tiny_models import config_of, tokenizer

    model = load_model(config_of("llama"), "causal-lm", {}, tokenizer())
    add_adapter(model, LoraSpec(rank=2))
    export_model(tmp_path / "run" / "best", model, tokenizer(), card={})
    with pytest.raises(ModelError, match="created from a config: the random weights of its base were not saved"):
        load(tmp_path / "run")


def test_another_base_is_refused(classifier, tiny):
    run, *_ = classifier
    path = run / "best" / "adapter_config.json"
    other = tiny.folder("bert", intermediate_size=64)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": other}))
    with pytest.raises(ModelError, match="size mismatch|no adapter of this"):
        load(run, device="cpu")


def test_an_adapter_is_no_model_to_train_from(classifier):
    run, *_ = classifier
    for source in (run, run / "best"):
        with pytest.raises(ModelError, match="contains only an adapter") as failure:
            load_model(str(source), "sequence-classification", {}, None)
        assert failure.value.cure == f"merge it first: trimtab merge {source} DIR"


def test_files_that_cannot_be_read(classifier):
    run, *_ = classifier
    path = run / "best" / "adapter_config.json"
    settings = json.loads(path.read_text())
    facts = run / "best" / "trimtab.json"
    facts.unlink()
    path.write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="does not name its base model"):
        load(run)
    path.write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config\.json cannot be read"):
        load(run)
