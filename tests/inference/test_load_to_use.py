"""`load`: a run, a folder or a name becomes a model that is ready, with its task known."""

import pytest
import torch

from tiny_models import STORIES, config_of, needs_stories, same_weights, tokenizer
from trimtab.checkpoint.export import export_model
from trimtab.errors import ModelError
from trimtab.inference.load import load
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model

CLASSIFIER = ("bert", "sequence-classification", {"num_labels": 2})
REGRESSION = ("bert", "sequence-classification", {"num_labels": 1, "problem_type": "regression"})
SEVERAL = ("gpt2", "sequence-classification", {"num_labels": 3, "problem_type": "multi_label_classification"})


@pytest.mark.parametrize(
    ("made", "task"),
    [
        (CLASSIFIER, "classify"),
        (SEVERAL, "classify"),
        (REGRESSION, "regress"),
        (("bert", "sequence-classification", {"num_labels": 1}), "regress"),
        (("gpt2", "causal-lm", {}), "causal-lm"),
        (("llama", "causal-lm", {}), "causal-lm"),
        (("t5", "seq2seq-lm", {}), "seq2seq"),
        (("marian", "seq2seq-lm", {}), "seq2seq"),
        (("bart", "seq2seq-lm", {}), "seq2seq"),
        (("encoder-decoder", "seq2seq-lm", {}), "seq2seq"),
        (("bert", "masked-lm", {}), "masked-lm"),
    ],
)
def test_the_task_follows_from_the_model(tmp_path, made, task):
    name, kind, head = made
    model = load_model(config_of(name), kind, head, tokenizer())
    model.train()
    with quiet_transformers():
        model.save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
    loaded = load(tmp_path, device="cpu")
    assert loaded.task_name == task
    assert loaded.facts == {}
    assert not loaded.model.training
    assert loaded.device == torch.device("cpu")
    assert type(loaded.model) is type(model)
    assert same_weights(loaded.model, model)


def test_a_run_tells_its_task_and_length(tmp_path):
    tok = tokenizer()
    model = load_model(config_of("gpt2"), "causal-lm", {}, tok)
    export_model(tmp_path / "run" / "best", model, tok, card={"task": "chat", "recipe": {"data": {"max_length": 20}}})
    loaded = load(tmp_path / "run", device="cpu")
    assert loaded.task_name == "chat"
    assert loaded.max_length == 20
    export_model(tmp_path / "run" / "best", model, tok, card={"max_length": 1000, "recipe": {"data": {}}})
    assert load(tmp_path / "run", device="cpu").max_length == 64  # the model's positions


def test_a_class_that_is_trained_for_several_tasks(tmp_path):
    """BART's has a head for masked-lm and for seq2seq; what trimtab trained it for counts."""
    tok = tokenizer()
    model = load_model(config_of("bart"), "masked-lm", {}, tok)
    export_model(tmp_path / "masked", model, tok, card={"task": "masked-lm"})
    assert load(tmp_path / "masked", device="cpu").task_name == "masked-lm"
    export_model(tmp_path / "unknown", model, tok, card={})
    assert load(tmp_path / "unknown", device="cpu").task_name == "seq2seq"


def test_a_class_whose_name_does_not_tell_its_task(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    tok = tokenizer()
    model = load_model({"model_type": "bert-generation", "is_decoder": True, **sizes}, "causal-lm", {}, tok)
    assert type(model).__name__ == "BertGenerationDecoder"
    export_model(tmp_path, model, tok, card={})
    assert load(tmp_path, device="cpu").task_name == "causal-lm"


def test_a_chat_template_makes_a_chat_model(tmp_path):
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    export_model(tmp_path, load_model(config_of("gpt2"), "causal-lm", {}, tok), tok, card={})
    assert load(tmp_path).task_name == "chat"


def test_models_that_cannot_predict(tmp_path):
    model = load_model(config_of("bert"), "masked-lm", {}, tokenizer())
    with quiet_transformers():
        model.bert.save_pretrained(tmp_path / "base")
        tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match="BertModel, which has no task head") as failure:
        load(tmp_path / "base")
    assert "trimtab train --model" in failure.value.cure
    path = tmp_path / "base" / "config.json"
    path.write_text(path.read_text().replace('"BertModel"', '"BertForSequenceClassification"'))
    with pytest.raises(ModelError, match="is not trained for classify"):
        load(tmp_path / "base")
    with pytest.raises(ModelError, match="cannot be reached"):
        load("no-such-org/no-such-model")


@needs_stories
def test_a_real_model():
    loaded = load(STORIES)
    assert loaded.task_name == "causal-lm"
    assert loaded.max_length == 512
