"""`trimtab merge`: what is written is a plain model that answers as the adapter did, or nothing is written."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

from tiny_adapters import LABELS, adapted, export_run, fp8, nf4
from tiny_models import batch_of
from tiny_runs import reviews, write_csv, write_jsonl
from trimtab.checkpoint.export import export_model, read_facts
from trimtab.commands.merge import MAX_KL, MIN_AGREEMENT, merge, merge_in_place, round_base
from trimtab.errors import ModelError, RecipeError
from trimtab.inference.adapted import load_base
from trimtab.inference.comparison import computed_in_fp32
from trimtab.inference.load import load
from trimtab.model.adapters import LoraSpec, adapter_of
from trimtab.model.fp8 import Fp8, Fp8Linear
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model, load_tokenizer
from trimtab.model.nf4 import Nf4, dequantized

TEXTS = ["the film was good", "a very long and dull story"]
KINDS = {"gpt2": "causal-lm", "llama": "causal-lm", "bert": "masked-lm", "t5": "seq2seq-lm", "marian": "seq2seq-lm"}
TASKS = {"causal-lm": "causal-lm", "masked-lm": "masked-lm", "seq2seq-lm": "seq2seq"}
AUTO = {"causal-lm": "AutoModelForCausalLM", "masked-lm": "AutoModelForMaskedLM", "seq2seq-lm": "AutoModelForSeq2SeqLM"}
WIDE = {"hidden_size": 64, "intermediate_size": 100}  # of one width a block of 4 bits is a part, of the other not


@pytest.fixture
def data(own_folder):
    rows = [row | {"target": row["label"]} for row in reviews(60)]
    return write_jsonl(own_folder / "reviews.jsonl", rows)


def export(folder, model, tok, data, task):
    data_settings = {"train": str(data), "text": "text"} | ({"target": "target"} if task == "seq2seq" else {})
    card = {"task": task, "max_length": 32, "recipe": {"model": model.config.name_or_path, "task": task}}
    card["recipe"]["data"] = data_settings
    export_model(Path(folder) / "best", model, tok, card=card)
    return Path(folder)


def logits_of(model, tok):
    batch = batch_of(TEXTS, tok)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("family", KINDS)
def test_every_family_becomes_a_plain_model(own_folder, tiny, data, family):
    import transformers

    kind = KINDS[family]
    model, tok = adapted(tiny.folder(family), kind)
    export("run", model, tok, data, TASKS[kind])
    merged = merge("run", "merged", device="cpu", num_rows=8)
    assert (merged.onto, merged.dtype) == ("original", "fp32")
    assert merged.closeness.kl_mean < 1e-9
    assert merged.closeness.agreement == 1.0
    assert merged.closeness.num_answers > 8 if kind != "masked-lm" else merged.closeness.num_answers > 0
    with quiet_transformers():
        plain, info = getattr(transformers, AUTO[kind]).from_pretrained("merged", output_loading_info=True)
    assert not any(info.values()), info
    assert not any("lora" in name for name, _ in plain.named_modules())
    torch.testing.assert_close(logits_of(plain, tok), logits_of(model.eval(), tok), rtol=1e-4, atol=1e-5)
    assert load("merged", device="cpu").tokenizer(TEXTS)["input_ids"] == tok(TEXTS)["input_ids"]
    # and one goes on training from it
    again = load_model("merged", kind, {}, load_tokenizer("merged"))
    assert adapter_of(again) is None


def test_a_classifier_keeps_its_labels_and_facts(own_folder, tiny, data):
    model, tok = adapted(tiny.folder("bert"), "sequence-classification", LABELS)
    export_run("run", model, tok, data)
    merged = merge("run", "merged", device="cpu")
    assert merged.closeness.num_rows == 6  # a tenth is held out
    found = load("merged", device="cpu")
    assert found.task_name == "classify"
    assert found.model.config.id2label == LABELS["id2label"]
    torch.testing.assert_close(logits_of(found.model, tok), logits_of(model.eval(), tok), rtol=1e-5, atol=1e-6)
    facts = read_facts("merged")
    assert facts["merged"]["base"] == tiny.folder("bert")
    assert facts["merged"]["closeness"]["agreement"] == 1.0
    assert facts["max_length"] == 32
    assert not {"base", "adapter", "head", "kind"} & set(facts)
    assert {path.name for path in Path("merged").iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "trimtab.json", "README.md"),
    }


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_trained_embeddings_and_ties(own_folder, tiny, data, family):
    """Embeddings that trained, tied or not, arrive whole; what was tied is tied and stored once."""
    from safetensors.torch import load_file

    tied = family == "gpt2"
    spec = LoraSpec(rank=2, trains=["wte" if tied else "embed_tokens"])
    model, tok = adapted(tiny.folder(family), "causal-lm", spec=spec)
    export("run", model, tok, data, "causal-lm")
    merge("run", "merged", device="cpu", num_rows=4)
    plain = load("merged", device="cpu").model
    assert (plain.get_output_embeddings().weight is plain.get_input_embeddings().weight) == tied
    assert torch.equal(plain.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert ("lm_head.weight" in load_file("merged/model.safetensors")) != tied


def test_chat_template_and_generation_settings(own_folder, tiny, data):
    base = tiny.folder("gpt2", chat=True)
    model, tok = adapted(base, "causal-lm")
    model.generation_config.temperature = 0.5  # not of the base: what is not trained comes from there
    export("run", model, tok, data, "causal-lm")
    settings = Path(base) / "generation_config.json"
    before = settings.read_text()
    try:
        settings.write_text(json.dumps(json.loads(before) | {"temperature": 0.6, "top_p": 0.9}))
        merge("run", "merged", device="cpu", num_rows=4)
    finally:
        settings.write_text(before)
    written = json.loads(Path("merged/generation_config.json").read_text())
    assert (written["temperature"], written["top_p"], written["do_sample"]) == (0.6, 0.9, True)
    assert load("merged", device="cpu").tokenizer.chat_template == tok.chat_template


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_numbers_are_those_of_what_is_stored(own_folder, tiny, data, dtype):
    """Halves are compared as halves; each weight was rounded once, from fp32."""
    from safetensors.torch import load_file

    model, tok = adapted(tiny.folder("llama"), "causal-lm")
    export("run", model, tok, data, "causal-lm")
    merged = merge("run", "merged", dtype=dtype, device="cpu", num_rows=8)
    assert merged.dtype == dtype
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    stored = load_file("merged/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {wanted}
    layer = model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.equal(stored["model.layers.0.self_attn.q_proj.weight"], exact.to(wanted))
    found = merged.closeness.kl_mean
    assert found < {"fp32": 1e-10, "bf16": 1e-4, "fp16": 1e-6}[dtype]
    assert (found > 1e-8) == (dtype == "bf16")


def test_a_base_in_halves_stays_in_halves(own_folder, tiny, data):
    base = own_folder / "base"
    tok = load_tokenizer(tiny.folder("llama"))
    with quiet_transformers():
        load_model(tiny.folder("llama"), "causal-lm", {}, tok).to(torch.bfloat16).save_pretrained(base)
        tok.save_pretrained(base)
    model, tok = adapted(str(base), "causal-lm", dtype=torch.bfloat16)
    export("run", model, tok, data, "causal-lm")
    merged = merge("run", "merged", device="cpu", num_rows=8)
    assert merged.dtype == "bf16"
    assert json.loads(Path("merged/config.json").read_text())["dtype"] == "bfloat16"
    assert merge("run", "wide", dtype="fp32", device="cpu", num_rows=8).closeness.kl_mean < 1e-10


def test_one_module_at_a_time_is_in_fp32(tiny, monkeypatch):
    model, _ = adapted(tiny.folder("llama"), "causal-lm", dtype=torch.bfloat16)
    model.requires_grad_(False)
    adapter = adapter_of(model)
    layers = [model.get_submodule(name) for name in adapter.targets]
    wide = []
    plain = type(layers[0]).merge

    def watched(layer):
        wide.append(sum(each.base_layer.weight.dtype is torch.float32 for each in layers))
        plain(layer)

    monkeypatch.setattr(type(layers[0]), "merge", watched)
    merge_in_place(model, adapter, torch.bfloat16)
    assert wide == [1] * len(layers)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# ---------------------------------------------------------------------- bases of 4 bits


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_of_4_bits_are_those_that_trained(tiny, family, dtype):
    """What the comparison takes for the base is the model that bitsandbytes computes with."""
    pytest.importorskip("bitsandbytes")
    base = tiny.folder(family, **({"n_embd": 64} if family == "gpt2" else WIDE))
    how = Nf4(dtype)
    quantized = load_model(base, KINDS[family], {}, None, dtype=dtype, quantization=how, device="cpu")
    rounded = load_model(base, KINDS[family], {}, None, dtype=dtype)
    before = {name: p.clone() for name, p in rounded.named_parameters()}
    round_base(rounded, how, torch.device("cpu"))
    changed = {name for name, p in rounded.named_parameters() if not torch.equal(p, before[name])}
    in_4_bits = {name for name, module in quantized.named_modules() if type(module).__name__ == "Linear4bit"}
    assert {name.removesuffix(".weight") for name in changed if name.endswith("weight")} == in_4_bits
    assert in_4_bits
    for name in in_4_bits:
        weight = rounded.get_submodule(name).weight
        expected = dequantized(quantized.get_submodule(name).weight, dtype)
        assert torch.equal(weight.T if family == "gpt2" else weight, expected)


@pytest.fixture
def qlora(own_folder, tiny, data):
    pytest.importorskip("bitsandbytes")
    model, tok = adapted(tiny.folder("llama", **WIDE), "causal-lm", **nf4())
    return export("run", model, tok, data, "causal-lm"), model.eval(), tok


def test_onto_the_values_of_4_bits(qlora):
    run, model, tok = qlora
    merged = merge(run, "merged", onto="dequantized", device="cpu", num_rows=8)
    assert merged.closeness.kl_mean < 1e-9
    assert merged.closeness.agreement == 1.0
    plain = load("merged", device="cpu").model
    torch.testing.assert_close(logits_of(plain, tok), logits_of(model, tok), rtol=1e-4, atol=1e-5)


def test_onto_the_original(qlora, tiny):
    """Other weights than those that trained: measured, and told apart from the first way."""
    run, model, tok = qlora
    merged = merge(run, "merged", force=True, device="cpu", num_rows=8)
    assert merged.closeness.kl_mean > 1e-6
    plain = load("merged", device="cpu").model
    original = load_model(tiny.folder("llama", **WIDE), "causal-lm", {}, tok)
    layer = model.model.layers[0].mlp.up_proj
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    expected = original.model.layers[0].mlp.up_proj.weight + delta
    torch.testing.assert_close(plain.model.layers[0].mlp.up_proj.weight, expected)
    # the comparison is with the model of 4 bits
    with computed_in_fp32(model, torch.device("cpu")):
        p, q = (logits_of(each, tok).log_softmax(-1) for each in (model, plain))
    assert (p.exp() * (p - q)).sum(-1).mean().item() == pytest.approx(merged.closeness.kl_mean, rel=1.0)


def test_two_models_are_never_in_memory_together(qlora, monkeypatch):
    run, *_ = qlora
    loaded = []

    def load_alone(*arguments, **options):
        assert not [model for model in loaded if model() is not None]
        model = load_base(*arguments, **options)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr("trimtab.commands.merge.load_base", load_alone)
    merge(run, "original", force=True, device="cpu", num_rows=4)
    assert len(loaded) == 2
    gc.collect()
    merge(run, "dequantized", onto="dequantized", device="cpu", num_rows=4)
    assert len(loaded) == 3  # the one that was asked is the one that is merged


# ---------------------------------------------------------------------- bases of fp8


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_of_fp8_are_those_that_trained(tiny, family, dtype):
    base = tiny.folder(family, **({"n_embd": 64} if family == "gpt2" else WIDE))
    quantized = load_model(base, KINDS[family], {}, None, dtype=dtype, quantization=Fp8(dtype), device="cpu")
    rounded = load_model(base, KINDS[family], {}, None, dtype=dtype)
    round_base(rounded, Fp8(dtype), torch.device("cpu"))
    modules = {name: module for name, module in quantized.named_modules() if isinstance(module, Fp8Linear)}
    assert modules
    for name, module in modules.items():
        weight = rounded.get_submodule(name).weight
        assert torch.equal(weight.T if family == "gpt2" else weight, module.dequantized(dtype))


@pytest.mark.parametrize("onto", ["dequantized", "original"])
def test_an_adapter_on_fp8(own_folder, tiny, data, onto):
    """Close enough to be written onto either base; only the trained one has the values that were trained on."""
    model, tok = adapted(tiny.folder("llama", **WIDE), "causal-lm", **fp8())
    run = export("run", model, tok, data, "causal-lm")
    merged = merge(run, "merged", onto=onto, dtype="bf16", device="cpu", num_rows=8)
    assert merged.closeness.kl_mean < MAX_KL
    plain = load("merged", device="cpu").model
    layer = model.model.layers[0].mlp.up_proj
    original = load_model(tiny.folder("llama", **WIDE), "causal-lm", {}, tok).model.layers[0].mlp.up_proj.weight
    base = layer.base_layer.dequantized(torch.float32) if onto == "dequantized" else original
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    found = plain.model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(found, (base + delta).bfloat16().to(found.dtype), rtol=2**-7, atol=1e-6)


# ---------------------------------------------------------------------- refused


def test_too_far_apart_is_not_written(qlora):
    run, *_ = qlora
    for limits in ({"max_kl": 1e-12}, {"min_agreement": 1.01}):
        with pytest.raises(ModelError, match="differs from the adapter: KL .* nothing was written") as refused:
            merge(run, "merged", device="cpu", num_rows=8, **limits)
        assert "--onto dequantized" in refused.value.cure
        assert refused.value.exit_code == 2
        assert not Path("merged").exists()
    assert merge(run, "merged", device="cpu", num_rows=8, max_kl=1e-12, force=True).closeness.kl_mean > 1e-12
    assert (Path("merged") / "model.safetensors").exists()


def test_a_model_that_is_broken_is_not_written(own_folder, tiny, data):
    """Weights beyond what fp16 can hold."""
    model, tok = adapted(tiny.folder("llama"), "causal-lm")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.lora_B["default"].weight.fill_(1e6)
    export("run", model, tok, data, "causal-lm")
    with pytest.raises(ModelError, match="KL nan"):
        merge("run", "merged", dtype="fp16", device="cpu", num_rows=4)
    assert not Path("merged").exists()


def test_a_full_disk(own_folder, tiny, data, trimtab, file_size_limit):
    model, tok = adapted(tiny.folder("bert"), "sequence-classification", LABELS)
    export_run("run", model, tok, data)
    with file_size_limit(2000):
        code, _, err = trimtab("merge", "run", "merged", "--rows", "4", "--device", "cpu")
    assert code == 1
    assert f"error: {own_folder / 'merged'}: File too large\n  cure: free space on that disk" in err
    assert not list(own_folder.glob("*merged*"))


def test_rows_that_are_gone(own_folder, tiny, data):
    model, tok = adapted(tiny.folder("bert"), "sequence-classification", LABELS)
    export_run("run", model, tok, data)
    data.unlink()
    with pytest.raises(RecipeError, match=r"cannot be compared: .*reviews\.jsonl") as refused:
        merge("run", "merged", device="cpu")
    assert refused.value.cure.endswith("--force to merge without a comparison")
    assert merge("run", "merged", device="cpu", force=True).closeness is None
    assert read_facts("merged")["merged"]["closeness"] is None
    (Path("run") / "best" / "trimtab.json").unlink()
    with pytest.raises(RecipeError, match="has no record of the rows it was trained on"):
        merge("run", "again", device="cpu")


def test_rows_without_a_label(own_folder, tiny):
    """Of one short row no token may be hidden, so that there is nothing to ask."""
    data = write_jsonl(own_folder / "short.jsonl", [{"text": "a"}] * 4)
    model, tok = adapted(tiny.folder("bert"), "masked-lm")
    export("run", model, tok, data, "masked-lm")
    with pytest.raises(RecipeError, match="have no labels to predict") as refused:
        merge("run", "merged", device="cpu", num_rows=1)
    assert "increase --rows" in refused.value.cure


def test_what_cannot_be_merged(own_folder, tiny, data):
    model, tok = adapted(tiny.folder("bert"), "sequence-classification", LABELS)
    export_run("run", model, tok, data)
    with pytest.raises(ModelError, match="was not quantized"):
        merge("run", "merged", onto="dequantized")
    with pytest.raises(ModelError, match="is a whole model"):
        merge(tiny.folder("bert"), "merged")
    with pytest.raises(ModelError, match="there is no run or folder nowhere"):
        merge("nowhere", "merged")
    with pytest.raises(RecipeError, match="is not empty"):
        merge("run", "run")
    for wrong in ({"onto": "base"}, {"dtype": "int8"}, {"num_rows": 0}):
        with pytest.raises(RecipeError):
            merge("run", "merged", **wrong)
    assert not Path("merged").exists()


# ---------------------------------------------------------------------- the command


@pytest.fixture
def trimtab(own_folder, trimtab_command):
    return trimtab_command


@pytest.mark.parametrize(
    "adapter", ["adapter=lora", pytest.param("adapter={kind: lora, base: fp8}", marks=pytest.mark.slow)]
)
def test_from_training_to_predicting(own_folder, tiny, trimtab, adapter):
    """The whole way on the command line: train an adapter, use it, merge it, use that, train on from it."""
    rows = write_csv(own_folder / "reviews.csv", reviews(40))
    train = ("train", "--data", rows, "--max-steps", 3, "--lr", 1e-2, "--quiet", "--device", "cpu")
    code, _, err = trimtab(*train, "--model", tiny.folder("bert"), "--set", adapter, "--out", "run")
    assert code == 0, err
    assert not (own_folder / "run/best/config.json").exists()
    code, adapted_label, err = trimtab("predict", "run", "--text", "a lovely film", "--device", "cpu")
    assert code == 0, err
    code, out, err = trimtab("merge", "run", "merged", "--device", "cpu", "--rows", 4)
    assert code == 0, err
    assert "on 4 rows (4 predictions): mean KL " in out
    assert "100.00% of the predictions are equal" in out
    assert "merged (original), in fp32" in out
    assert trimtab("predict", "merged", "--text", "a lovely film", "--device", "cpu")[1] == adapted_label
    code, _, err = trimtab(*train, "--model", "run", "--out", "on")
    assert code == 2
    assert "trimtab merge run DIR" in err
    code, _, err = trimtab(*train, "--model", "merged", "--out", "on")
    assert code == 0, err
    code, out, err = trimtab("merge", "run", "never", "--min-agreement", 1.1, "--device", "cpu")
    assert (code, out) == (2, "")
    assert err.splitlines()[-2].startswith("error: the merged model differs from the adapter")
    assert not (own_folder / "never").exists()


def test_help_names_the_limits(trimtab, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    text = trimtab("merge", "--help")[1]
    assert f"Default: {MAX_KL:g}." in text
    assert f"Default: {MIN_AGREEMENT:g}." in text
