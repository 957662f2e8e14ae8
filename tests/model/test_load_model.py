"""Loading: every model from scratch, common problems fixed and reported, every failure with its cure."""

import json
import logging
import math
import shutil

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tiny_gguf import write_gguf
from tiny_models import CONFIGS, KINDS, STORIES, TEXTS, batch_of, config_of, needs_stories, same_weights, tokenizer
from trimtab.errors import ModelError, RecipeError
from trimtab.model.block_init import build_in_host_memory
from trimtab.model.config import build_config
from trimtab.model.hub import explained, quiet_transformers
from trimtab.model.load import load_model, load_tokenizer, max_positions, newly_initialized, resolve_source

HEADS = [
    *KINDS.items(),
    *((name, "sequence-classification") for name in ("roberta", "gpt2", "llama")),
    ("bert", "masked-lm"),
]
LABELS = {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    return lambda: [record.message for record in caplog.records if record.name == "trimtab"]


def saved(folder, name="bert", kind="masked-lm", head=None, tok=None):
    tok = tok or tokenizer()
    model = load_model(config_of(name), kind, head or {}, tok)
    with quiet_transformers():
        model.save_pretrained(folder)
        tok.save_pretrained(folder)
    return model


def decoder_tokenizer():
    """As of GPT-2: an end token, and none that pads."""
    tok = tokenizer()
    tok.pad_token = None
    return tok


@pytest.mark.parametrize("name", ["bert", "roberta", "bart", "gpt2", "llama"])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_an_encoder_with_a_causal_head_is_reported(said, name, is_decoder):
    """It sees the tokens that it predicts: the first logits change with the last token."""
    model = load_model(config_of(name) | {"is_decoder": is_decoder}, "causal-lm", {}, tokenizer())
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        changes = [model(input_ids=row).logits[0, 0] for row in (ids, ids + torch.tensor([0, 0, 0, 1]))]
    sees_later_tokens = not torch.equal(*changes)
    assert sees_later_tokens == (name in ("bert", "roberta") and not is_decoder)
    assert any("attends to later tokens" in line for line in said()) == sees_later_tokens


@pytest.mark.parametrize(("name", "kind"), HEADS)
def test_every_shape_starts_from_scratch(name, kind):
    """With the tokenizer's sizes and ids: forward, backward and generation work."""
    assert set(KINDS) == set(CONFIGS)
    tok = tokenizer()
    model = load_model(config_of(name), kind, LABELS if kind == "sequence-classification" else {}, tok)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight.shape[0] == len(tok)
    assert model.config.pad_token_id == tok.pad_token_id
    batch = batch_of(TEXTS, tok)
    labels = torch.tensor([0, 1, 2, 0, 1]) if kind == "sequence-classification" else batch["input_ids"]
    with quiet_transformers():
        loss = model(**batch, labels=labels).loss
    loss.backward()
    assert torch.isfinite(loss)
    if kind == "seq2seq-lm":
        start = tok.bos_token_id if name == "encoder-decoder" else tok.pad_token_id
        assert model.config.decoder_start_token_id == model.generation_config.decoder_start_token_id == start
        with quiet_transformers():
            model.generate(**batch, max_new_tokens=3)


def test_a_new_head_is_reported_in_one_line(tmp_path, said, capfd):
    saved(tmp_path)
    before = said()
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_warning()
    capfd.readouterr()
    model = load_model(str(tmp_path), "sequence-classification", LABELS, load_tokenizer(str(tmp_path)))
    assert their_logging.get_verbosity() == logging.WARNING
    assert their_logging.set_tqdm_hook(None) is None
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    (line,) = said()[len(before) :]
    assert "BertForSequenceClassification" in line
    assert " parameters in fp32" in line
    assert "newly initialized: bert.pooler.dense, classifier" in line
    assert model.config.id2label == LABELS["id2label"]
    assert newly_initialized(model) == {
        *("classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias")
    }


def test_new_head_depends_on_the_seed_alone(tmp_path):
    saved(tmp_path)
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        heads.append(load_model(str(tmp_path), "sequence-classification", LABELS, tokenizer()).classifier.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_base_weights_are_loaded(tmp_path):
    original = saved(tmp_path)
    model = load_model(str(tmp_path), "sequence-classification", LABELS, tokenizer())
    assert same_weights(original.bert.encoder, model.bert.encoder)
    assert same_weights(original.bert.embeddings, model.bert.embeddings)


def test_head_of_another_size_is_replaced(tmp_path, said):
    original = saved(tmp_path, kind="sequence-classification", head=LABELS)
    model = load_model(str(tmp_path), "sequence-classification", {"num_labels": 5}, tokenizer())
    assert model.classifier.weight.shape[0] == 5
    assert model.config.id2label[4] == "LABEL_4"
    assert same_weights(original.bert, model.bert)
    assert "its head for 3 labels is replaced by a new one for 5" in said()[-1]


def test_head_of_the_same_size_is_kept(tmp_path, said):
    original = saved(tmp_path, kind="sequence-classification", head=LABELS)
    model = load_model(str(tmp_path), "sequence-classification", LABELS, tokenizer())
    assert same_weights(original, model)
    assert said()[-1].endswith("its head is kept")
    assert not newly_initialized(model)
    other = {"num_labels": 3, "id2label": {0: "x", 1: "y", 2: "z"}, "label2id": {"x": 0, "y": 1, "z": 2}}
    assert load_model(str(tmp_path), "sequence-classification", other, tokenizer()).config.id2label[2] == "z"
    assert "its labels were bad, fair, good and are now x, y, z" in said()[-1]


def test_half_precision_files_become_fp32(tmp_path):
    model = saved(tmp_path)
    with quiet_transformers():
        model.half().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "masked-lm", {}, tokenizer())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.config.dtype in ("float32", torch.float32)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_pad_token(tmp_path, said, name):
    """The end token pads; a padded batch then gives what each text alone gives."""
    saved(tmp_path, name, "causal-lm", tok=decoder_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["pad_token_id"] is None
    tok = load_tokenizer(str(tmp_path))
    assert tok.pad_token_id == tok.eos_token_id is not None
    assert "no pad token" in said()[-1]
    model = load_model(str(tmp_path), "sequence-classification", LABELS, tok)
    assert model.config.pad_token_id == tok.eos_token_id
    with torch.no_grad():
        together = model(**batch_of(TEXTS, tok)).logits
        alone = torch.cat([model(**batch_of([text], tok)).logits for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_an_end_token_used_for_padding_gets_gradients(tmp_path):
    """transformers gives the embedding of a pad token no gradient, also after the model was saved and loaded."""
    tok = tokenizer()
    tok.pad_token = tok.eos_token
    saved(tmp_path, "llama", "causal-lm", tok=tok)
    model = load_model(str(tmp_path), "causal-lm", {}, load_tokenizer(str(tmp_path)))
    assert model.config.pad_token_id == tok.eos_token_id
    model.get_input_embeddings()(torch.tensor([tok.eos_token_id])).sum().backward()
    assert model.get_input_embeddings().weight.grad[tok.eos_token_id].abs().sum() > 0


def test_neither_pad_nor_end_token(tmp_path, said):
    tok = tokenizer()
    tok.pad_token = tok.eos_token = None
    saved(tmp_path, "gpt2", "causal-lm", tok=tok)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token == "[PAD]"
    assert "[PAD] was added" in said()[-1]
    model = load_model(str(tmp_path), "causal-lm", {}, loaded)
    assert model.get_input_embeddings().weight.shape[0] == loaded.pad_token_id + 1


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_tokenizer_larger_than_the_embeddings(tmp_path, said, name):
    kind = {"bert": "masked-lm", "llama": "causal-lm", "t5": "seq2seq-lm"}[name]
    original = saved(tmp_path, name, kind)
    tok = tokenizer()
    num_before = len(tok)
    tok.add_tokens(["<new>", "<newer>"])
    model = load_model(str(tmp_path), kind, {}, tok)
    assert f"grown from {num_before} to {num_before + 2} rows" in said()[-1]
    old, new = original.get_input_embeddings().weight, model.get_input_embeddings().weight
    assert torch.equal(old, new[:num_before])
    assert model.config.vocab_size == num_before + 2
    batch = batch_of(["<new> <newer>"], tok)
    assert batch["input_ids"].max() == num_before + 1
    assert model(**batch, labels=batch["input_ids"]).logits.shape[-1] == num_before + 2


def test_encoder_decoder_cannot_grow(tmp_path):
    saved(tmp_path, "encoder-decoder", "seq2seq-lm")
    tok = tokenizer()
    tok.add_tokens(["<new>"])
    with pytest.raises(ModelError, match="cannot be resized"):
        load_model(str(tmp_path), "seq2seq-lm", {}, tok)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("bert", 64), ("roberta", 64), ("gpt2", 64), ("llama", 64), ("t5", None), ("marian", 64), ("encoder-decoder", 48)],
)
def test_max_positions_is_the_longest_input_that_runs(name, limit):
    kind = KINDS[name]
    model = load_model(config_of(name), kind, {}, tokenizer())
    assert max_positions(model) == max_positions(model.config) == limit
    if limit is None or name == "llama":  # rotary positions have no table that ends
        return
    ids = torch.full((1, limit + 1), 7)
    extra = {"decoder_input_ids": ids[:, :1]} if kind == "seq2seq-lm" else {}
    model(input_ids=ids[:, :limit], **extra)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids, **extra)


def test_sources(tmp_path):
    model = tmp_path / "model"
    saved(model)
    assert resolve_source(str(model)) == str(model)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ModelError, match="no best model yet"):
        resolve_source(str(run))
    shutil.copytree(model, run / ".best.outdated-7")  # killed between two renames
    assert resolve_source(str(run)) == str(run / ".best.outdated-7")
    shutil.copytree(model, run / "best")
    assert resolve_source(str(run)) == str(run / "best")
    assert same_weights(load_model(str(run), "masked-lm", {}, None), load_model(str(model), "masked-lm", {}, None))
    assert resolve_source("org/some-model") == "org/some-model"
    with pytest.raises(ModelError, match="pass .*model"):
        resolve_source(str(tmp_path))
    for text, problem in {
        "best:imdb": "is on a tracking server",
        str(tmp_path / "nowhere"): "there is no folder",
        "./nowhere": "there is no folder",
        str(tmp_path / "x.gguf"): "there is no file",
        str(model / "config.json"): "is a file, not a model",
        "": "no model was given",
    }.items():
        with pytest.raises(ModelError, match=problem):
            resolve_source(text)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json \(it is empty\)"):
        load_tokenizer(str(tmp_path / "empty"))
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="only an adapter"):
        resolve_source(str(tmp_path / "empty"))


def test_a_folder_with_a_similar_name_is_suggested(own_folder):
    (own_folder / "runs" / "first").mkdir(parents=True)
    (own_folder / "tiny-bert").mkdir()
    with pytest.raises(
        ModelError, match=r"there is no folder .*\n  cure: did you mean the folder runs/first\? If not,"
    ):
        resolve_source("./runs/frist")
    with pytest.raises(ModelError, match=r"cannot be reached\n  cure: did you mean the folder tiny-bert\? If not,"):
        load_tokenizer("tinybert")
    with pytest.raises(ModelError, match=r"the Hub cannot be reached\n  cure: pass a folder, or connect"):
        load_tokenizer("roberta")


def test_hub_failures(monkeypatch):
    with pytest.raises(ModelError, match="the Hub cannot be reached") as failure:
        load_model("no-such-org/no-such-model", "causal-lm", {}, None)
    assert "HF_HUB_OFFLINE" in failure.value.cure
    with pytest.raises(ModelError, match="the Hub cannot be reached"):
        load_tokenizer("no-such-org/no-such-model")
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    for kind, cure in {GatedRepoError: "accept it on the model's page", RepositoryNotFoundError: "spelling"}.items():
        error = OSError("a wall of words")
        error.__cause__ = kind.__new__(kind)
        assert cure in explained("org/name", error).cure
    assert "trust_remote_code: true" in explained("org/name", ValueError("set trust_remote_code=True")).cure
    assert explained("org/name", ImportError("needs sentencepiece")).exit_code == 2


def test_a_damaged_config_is_not_reported_as_a_missing_tokenizer(tmp_path):
    saved(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is damaged: Expecting") as failure:
        load_tokenizer(str(tmp_path))
    assert failure.value.cure == "download or save it again"


def test_files_that_do_not_belong_together(tmp_path):
    saved(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(ModelError, match=r"\[48\] in the file but \[40\] in its config.json"):
        load_model(str(tmp_path), "masked-lm", {}, tokenizer())
    path.write_text(json.dumps({**config, "model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 2}))
    with pytest.raises(ModelError, match="most weights of DistilBertForMaskedLM are not in its files"):
        load_model(str(tmp_path), "masked-lm", {}, tokenizer())
    path.write_text(json.dumps({**config, "model_type": "bort-of-tomorrow"}))
    with pytest.raises(ModelError, match="bort-of-tomorrow"):
        load_model(str(tmp_path), "masked-lm", {}, tokenizer())
    path.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        load_model(str(tmp_path), "masked-lm", {}, tokenizer())
    path.write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load_model(str(tmp_path), "masked-lm", {}, tokenizer())
    weights.unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path), "masked-lm", {}, tokenizer())
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="contains no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_quantized_files_are_refused(tmp_path):
    saved(tmp_path)
    path = tmp_path / "config.json"
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantized))
    with pytest.raises(ModelError, match="quantized weights cannot be trained"):
        load_model(str(tmp_path), "masked-lm", {}, tokenizer())


def test_no_head_of_that_kind(tmp_path):
    saved(tmp_path)
    with pytest.raises(ModelError, match="bert, which has no seq2seq-lm head"):
        load_model(str(tmp_path), "seq2seq-lm", {}, tokenizer())
    with pytest.raises(ModelError, match="which has no masked-lm head"):
        load_model(config_of("gpt2"), "masked-lm", {}, tokenizer())
    with pytest.raises(ModelError, match="kind of model: 'image'"):
        load_model(str(tmp_path), "image", {}, tokenizer())


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("deberta-v2", {"position_buckets": 8, "relative_attention": True, "hidden_size": 32}),
        ("qwen3_moe", {"head_dim": 16, "num_local_experts": 4, "hidden_size": 32}),
        ("qwen3_moe", {"num_experts": 4}),
        ("jetmoe", {"num_attention_heads": 8, "num_key_value_heads": 4}),
        ("falcon_mamba", {"intermediate_size": 64, "hidden_size": 32}),
    ],
)
def test_settings_that_a_config_class_does_not_declare(model_type, settings):
    config = build_config({"model_type": model_type, **settings}, None, "model.config")
    assert {name: getattr(config, name) for name in settings} == settings


def test_keys_of_older_config_files():
    older = {"rope_theta": 5e5, "use_cache": False, "sep_token_id": 2, "attn_implementation": "eager"}
    config = build_config(config_of("llama") | older, None, "model.config")
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.use_cache is False
    with pytest.raises(RecipeError, match="rope_theta: bert has no such setting"):
        build_config(config_of("bert") | {"rope_theta": 5e5}, None, "model.config")


def test_infinity_in_a_config_file():
    """transformers writes it as an object; Mamba's blocks have it by default."""
    with quiet_transformers():
        saved = json.loads(CONFIG_MAPPING["mamba2"]().to_json_string())
        assert saved["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
        assert list(build_config(saved, None, "model.config").time_step_limit) == [0.0, math.inf]


def test_the_text_model_inside_a_model_gets_the_pad_token():
    """A classifier on several rows reads it there."""
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"head_dim": 16, "intermediate_size": 32, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    config = {"model_type": "gemma3", "text_config": text | {"vocab_size": 400, "pad_token_id": None}}
    config |= {"vision_config": vision | {"image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}
    model = load_model(config, "sequence-classification", {"num_labels": 2}, tokenizer())
    assert model.config.text_config.pad_token_id == tokenizer().pad_token_id
    assert model(**batch_of(TEXTS)).logits.shape == (len(TEXTS), 2)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "qwen3_moe", "falcon_mamba", "gemma3_text"])
def test_the_config_of_a_saved_model_is_accepted(name):
    with quiet_transformers():
        saved = CONFIG_MAPPING[name]().to_dict() | {"_name_or_path": "elsewhere", "transformers_version": "4.30.0"}
        config = build_config(dict(saved), None, "model.config")
    assert config.to_dict() == CONFIG_MAPPING[name]().to_dict()
    assert config.name_or_path == ""  # an adapter would take it for the name of its base


@pytest.mark.parametrize(
    ("change", "problem", "cure"),
    [
        ({"dropout": 0.5}, "dropout: bert has no such setting", "hidden_dropout_prob"),  # the model's own attribute
        ({"model_type": "berd"}, "model_type is 'berd'", "did you mean .*bert"),
        ({"hidden_sise": 32}, "hidden_sise: bert has no such setting", "did you mean hidden_size"),
        ({"hidden_size": "32"}, "'hidden_size' expected int", ""),
        ({"num_attention_heads": 5}, "not a multiple|not valid|cannot be built", ""),
    ],
)
def test_mistakes_in_a_config(change, problem, cure):
    import re

    with pytest.raises(RecipeError, match=problem) as failure:
        load_model(config_of("bert") | change, "masked-lm", {}, tokenizer())
    assert re.search(cure, failure.value.cure)


def test_mistake_inside_an_encoder_decoder():
    config = config_of("encoder-decoder")
    config["decoder"]["hiden_size"] = 3
    with pytest.raises(RecipeError, match=r"model\.config\.decoder\.hiden_size"):
        load_model(config, "seq2seq-lm", {}, tokenizer())


def test_settings_win_over_the_tokenizer():
    model = load_model(
        config_of("marian") | {"decoder_start_token_id": 0, "vocab_size": 400}, "seq2seq-lm", {}, tokenizer()
    )
    assert model.config.decoder_start_token_id == 0
    assert model.get_input_embeddings().weight.shape[0] == 400


@needs_stories
def test_a_trained_model_is_loaded_correctly(said):
    """A trained Llama gives a text of its kind a far better loss than chance."""
    tok = load_tokenizer(str(STORIES))
    model = load_model(str(STORIES), "causal-lm", {}, tok)
    assert "260,032 parameters" in said()[-1]
    ids = tok("Once upon a time, there was a little girl named Lily. She loved to play outside.", return_tensors="pt")
    with torch.no_grad():
        assert model(**ids, labels=ids["input_ids"]).loss < 1.7  # chance is ln 512 = 6.2


def test_gguf(tmp_path):
    """A GGUF file gives a plain fp32 model with the same logits, which can be saved."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    original = load_model(config_of("llama") | {"vocab_size": 280, "tie_word_embeddings": True}, "causal-lm", {}, None)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original)
    tok = load_tokenizer(str(path))
    assert len(tok) == 280
    assert tok.pad_token == tok.eos_token
    model = load_model(str(path), "causal-lm", {}, tok)
    ids = tok("a bad cab", return_tensors="pt")["input_ids"]
    assert torch.equal(model(input_ids=ids).logits, original(input_ids=ids).logits)
    with quiet_transformers():
        model.save_pretrained(tmp_path / "plain")
    assert same_weights(load_model(str(tmp_path / "plain"), "causal-lm", {}, tok), original)
    classifier = load_model(str(path), "sequence-classification", LABELS, tok)
    assert newly_initialized(classifier) == {"score.weight"}
    assert same_weights(classifier.model, original.model)


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_in_host_memory_are_drawn_block_by_block(is_tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_of("llama"), tie_word_embeddings=is_tied, initializer_range=0.05)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = build_in_host_memory(AutoModelForCausalLM, config, torch.bfloat16, torch.device("cpu"))
    assert (found.lm_head.weight is found.model.embed_tokens.weight) is is_tied
    pairs = zip(plain.state_dict().items(), found.state_dict().items(), strict=True)
    for (name, expected), (own, weight) in pairs:
        assert (name, expected.shape, expected.dtype) == (own, weight.shape, weight.dtype)
        if "norm" in name:
            assert torch.equal(weight, expected)
        else:  # other random numbers of the same kind: 5 standard errors
            assert weight.float().std() == pytest.approx(0.05, rel=5 / (2 * weight.numel()) ** 0.5 + 0.01)
    ids = torch.tensor([[1, 2, 3]])
    assert found(input_ids=ids).logits.isfinite().all()
