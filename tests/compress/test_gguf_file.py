"""GGUF files: what is written is what gguf and transformers read back, and what has no form in GGUF is refused."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, trainers

from tiny_models import STORIES, TEXTS, config_of, needs_stories, tokenizer
from trimtab.compress import gguf_tokenizer
from trimtab.compress.gguf_file import check_gguf, gguf_tensors, write_gguf
from trimtab.compress.gguf_tokenizer import check_tokens
from trimtab.errors import MissingDependency, ModelError
from trimtab.inference.load import load
from trimtab.model.config import load_config
from trimtab.model.load import load_model

pytest.importorskip("gguf")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, **BANDS}


def llama(model_type="llama", **changes):
    torch.manual_seed(0)
    config = config_of("llama") | {"model_type": model_type} | changes
    return load_model(config, "causal-lm", {}, tokenizer())


def sentencepiece_tokenizer():
    """BPE with a space mark and a token for each byte, as Llama 2 has."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)])
    # words one by one, so that no token contains a space mark inside
    backend.train_from_iterator([word for text in TEXTS * 20 for word in text.split()], trainer)
    content = backend.to_str()
    loaded = Tokenizer.from_str(content)
    return PreTrainedTokenizerFast(
        tokenizer_object=loaded, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )


@pytest.mark.parametrize("dtype", ["f32", pytest.param("f16", marks=pytest.mark.slow), "q8_0"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_read_back(tmp_path, name, changes, dtype):
    model, path = llama(name, **changes), tmp_path / "model.gguf"
    write_gguf(model, tokenizer(), path, dtype)
    check = check_gguf(path, model, tokenizer(), dtype)
    assert check.num_tensors == len(dict(gguf_tensors(model)))
    # a weight of q8_0 is off by at most 1/254 of the largest of its block: some percent of a logit after two layers
    share = {"f32": 1e-6, "f16": 0.01, "q8_0": 0.1}[dtype]
    assert check.max_difference <= share * check.max_logit
    assert (check.max_difference > 0) == (dtype != "f32")


def test_trimtab_loads_the_file_and_its_folder(tmp_path):
    model, tok, path = llama(), tokenizer(), tmp_path / "model.gguf"
    write_gguf(model, tok, path, "f32")
    ids = torch.tensor([tok(TEXTS[0])["input_ids"]])
    for place in (path, tmp_path):
        loaded = load(place, device="cpu")
        found = loaded.model(ids).logits[..., : model.config.vocab_size]
        torch.testing.assert_close(found, model(ids).logits)
        assert loaded.task_name == "causal-lm"


def test_a_tokenizer_in_the_style_of_sentencepiece(tmp_path):
    tok = sentencepiece_tokenizer()
    torch.manual_seed(0)
    model = load_model(config_of("llama"), "causal-lm", {}, tok)
    write_gguf(model, tok, tmp_path / "model.gguf", "f32")
    assert check_gguf(tmp_path / "model.gguf", model, tok, "f32").max_difference <= 1e-6


def test_the_chat_template_goes_along(tmp_path):
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    write_gguf(llama(), tok, tmp_path / "model.gguf")
    loaded = load(tmp_path / "model.gguf", device="cpu")
    assert loaded.tokenizer.chat_template == tok.chat_template
    assert loaded.task_name == "chat"


@pytest.mark.parametrize(
    ("name", "rope", "keys"),
    [
        ("llama", {"rope_type": "linear", "factor": 2.5}, {"type": "linear", "factor": 2.5}),
        pytest.param(
            *("qwen2", {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
            marks=pytest.mark.slow,
        ),
        ("llama", YARN, {"type": "yarn", "factor": 4.0, "original_context_length": 16}),
        pytest.param(
            *("qwen3", YARN, {"type": "yarn", "factor": 4.0, "original_context_length": 16}), marks=pytest.mark.slow
        ),
        # llama.cpp multiplies by 0.1 ln(4) + 1 itself
        ("llama", YARN | {"attention_factor": 1.5}, {"type": "yarn", "attn_factor": 1.5 / (0.1 * math.log(4) + 1)}),
        ("llama", YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, {"type": "yarn"}),
        ("llama", LLAMA3, {}),
        pytest.param("mistral", LLAMA3, {}, marks=pytest.mark.slow),
    ],
)
def test_scaled_rotary_embeddings(tmp_path, name, rope, keys):
    import gguf

    changes = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 128}}.get(name, {})
    model, path = llama(name, rope_parameters={"rope_theta": 1e4, **rope}, **changes), tmp_path / "model.gguf"
    plain = llama(name, **changes)
    assert not torch.allclose(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq, rtol=0.1), "is scaled"
    write_gguf(model, tokenizer(), path, "f32")
    check = check_gguf(path, model, tokenizer(), "f32")
    assert check.max_difference <= 1e-5 * check.max_logit
    reader = gguf.GGUFReader(path)
    arch = reader.get_field("general.architecture").contents()
    for key, value in keys.items():
        found = reader.get_field(f"{arch}.rope.scaling.{key}").contents()
        assert found == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6)), key
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    if rope is LLAMA3:
        factors = torch.from_numpy(tensors["rope_freqs.weight"].copy())
        assert factors[0] == 1.0  # short waves
        assert factors[-1] == LLAMA3["factor"]  # long waves
        assert ((factors > 1) & (factors < LLAMA3["factor"])).any()
    else:
        assert "rope_freqs.weight" not in tensors
    loaded = load(path, device="cpu").model
    assert loaded.config.rope_parameters == model.config.rope_parameters
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.5},
        YARN | {"attention_factor": 1.5},
        {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192} | BANDS,  # Llama 3.2
    ],
)
def test_files_of_other_programs_have_no_key_of_ours(tmp_path, monkeypatch, rope):
    monkeypatch.setattr("trimtab.model.gguf_rope._OWN_KEY", "some.other_key")
    model, path = llama(rope_parameters={"rope_theta": 5e5, **rope}), tmp_path / "model.gguf"
    write_gguf(model, tokenizer(), path, "f32")
    monkeypatch.undo()
    rotary = load(path, device="cpu").model.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-5, atol=0)
    assert rotary.attention_scaling == pytest.approx(model.model.rotary_emb.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("text", ["{", "[1]", '"llama3"'])
def test_a_damaged_key_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setattr("trimtab.model.gguf_rope.json", SimpleNamespace(dumps=lambda value: text, loads=json.loads))
    write_gguf(llama(rope_parameters={"rope_theta": 1e4, **YARN}), tokenizer(), tmp_path / "model.gguf", "f32")
    with pytest.raises(ModelError, match="is not a JSON object"):
        load_config(str(tmp_path / "model.gguf"))


def test_divisors_that_are_not_known_are_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("trimtab.model.gguf_rope._OWN_KEY", "some.other_key")
    model, path = llama(rope_parameters={"rope_theta": 1e4, **LLAMA3}), tmp_path / "model.gguf"
    write_gguf(model, tokenizer(), path, "f32")
    monkeypatch.undo()
    with caplog.at_level("INFO", "trimtab"):
        assert load_config(str(path)).rope_parameters["rope_type"] == "default"
    assert "are not those of Llama 3" in caplog.text


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("qwen2", {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}}, "only for llama, not for qwen2"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, **YARN, "beta_fast": 16}}, "beta_slow 16 and 1; llama.cpp"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, **YARN, "truncate": False}}, "truncate: false"),
        ("mistral", {"sliding_window": 8}, "sliding window of 8"),
    ],
)
def test_what_gguf_cannot_express(tmp_path, name, changes, words):
    with pytest.raises(ModelError, match=words):
        write_gguf(llama(name, **changes), tokenizer(), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_other_families_are_refused_with_the_list(tmp_path):
    model = load_model(config_of("gpt2"), "causal-lm", {}, tokenizer())
    with pytest.raises(ModelError, match="GPT2LMHeadModel.*llama, mistral, qwen2, qwen3"):
        write_gguf(model, tokenizer(), tmp_path / "model.gguf")


def test_wrong_weights_are_found(tmp_path):
    model = llama()
    write_gguf(model, tokenizer(), tmp_path / "model.gguf", "f32")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1e-3
    with pytest.raises(ModelError, match=r"blk.1.attn_k.weight .* is not what was written"):
        check_gguf(tmp_path / "model.gguf", model, tokenizer(), "f32")


def test_a_wrong_header_is_found(tmp_path):
    model = llama()
    eps, model.config.rms_norm_eps = model.config.rms_norm_eps, 7.0  # the file says so, the modules have theirs already
    write_gguf(model, tokenizer(), tmp_path / "model.gguf", "f32")
    model.config.rms_norm_eps = eps
    with pytest.raises(ModelError, match="logits differ by up to"):
        check_gguf(tmp_path / "model.gguf", model, tokenizer(), "f32")


@pytest.mark.parametrize("change", [{"rope_theta": 7.0}, {"factor": 8.0}, {"original_max_position_embeddings": 4096}])
def test_other_rotary_embeddings_are_found(tmp_path, change):
    model = llama(rope_parameters={"rope_theta": 1e4, **YARN})
    before = dict(model.config.rope_parameters)
    model.config.rope_parameters |= change
    write_gguf(model, tokenizer(), tmp_path / "model.gguf", "f32")
    model.config.rope_parameters = before
    with pytest.raises(ModelError, match="rotary embeddings of the GGUF file differ"):
        check_gguf(tmp_path / "model.gguf", model, tokenizer(), "f32")


def test_other_tokens_are_found():
    other = tokenizer()
    other.add_tokens(["quick"])
    with pytest.raises(ModelError, match="changes in GGUF: 'The quick"):
        check_tokens(tokenizer(), other)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, but long enough for a header")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        check_gguf(path, llama(), tokenizer(), "f32")


@needs_stories
def test_a_real_llama(tmp_path):
    loaded = load(STORIES, device="cpu")
    write_gguf(loaded.model, loaded.tokenizer, tmp_path / "model.gguf", "f32")
    check = check_gguf(tmp_path / "model.gguf", loaded.model, loaded.tokenizer, "f32")
    assert check.max_difference <= 1e-5 * check.max_logit


def test_a_transformers_that_cannot_read_the_tokenizer_back_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf.gguf_tokenizer_mapping", None)
    with pytest.raises(MissingDependency, match="cannot read tokenizers of this type") as caught:
        gguf_tokenizer._known_splits()
    assert "--upgrade transformers" in str(caught.value.cure)
