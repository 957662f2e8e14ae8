"""`trimtab cluster`: what is written loads as the model it says, in both ways; files that are wrong are refused."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from allocated_bytes import peak_bytes
from tiny_models import batch_of
from tiny_runs import reviews, write_jsonl
from trimtab.checkpoint.export import FACTS, export_model, read_facts, weight_checksums
from trimtab.commands.cluster import cluster
from trimtab.compress.clustered_file import ClusteredWriter, is_clustered, read_weights
from trimtab.compress.clustered_modules import ClusteredEmbedding, ClusteredLinear
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.clustering import ClusterSettings
from trimtab.errors import ModelError, RecipeError
from trimtab.inference.load import load

WIDE = {"hidden_size": 64, "intermediate_size": 96}
WIDTHS = {
    "bert": WIDE,
    "llama": WIDE | {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 64},
    "t5": {"d_model": 64, "d_kv": 32, "d_ff": 96},
}
TEXTS = ["the film was good", "a very long and dull story"]
HEAD = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.fixture
def data(own_folder):
    return write_jsonl(own_folder / "reviews.jsonl", reviews(48))


def classifier(tiny):
    return tiny.folder("bert", kind="sequence-classification", head=HEAD, **WIDE)


@pytest.fixture(scope="module")
def clustered(tiny, tmp_path_factory):
    """A clustered classifier; not to be changed."""
    return cluster(classifier(tiny), tmp_path_factory.mktemp("clustered") / "out", ClusterSettings()).folder


def logits_of(loaded):
    batch = batch_of(TEXTS, loaded.tokenizer)
    if loaded.model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return loaded.model(**batch).logits


@pytest.mark.parametrize(
    "family",
    [family if family in ("bert", "gpt2") else pytest.param(family, marks=pytest.mark.slow) for family in WIDTHS],
)
def test_every_family_loads_in_both_ways(own_folder, tiny, family):
    source = tiny.folder(family, **WIDTHS[family])
    done = cluster(source, own_folder / "out", ClusterSettings(bits=6))
    assert 6 < done.bits < 7
    once, on_use = load(done.folder), load(done.folder, decode="on-use")
    assert torch.equal(logits_of(once), logits_of(on_use))
    original = logits_of(load(source))
    assert (logits_of(once) - original).abs().mean() < 0.1 * original.std()
    kinds = {type(module) for module in on_use.model.modules()}
    assert {ClusteredLinear, ClusteredEmbedding} <= kinds
    assert not {type(module) for module in once.model.modules()} & {ClusteredLinear, ClusteredEmbedding}
    assert once.model.dtype == torch.float32


def test_files_and_a_model_in_memory_give_the_same_weights(own_folder, tiny, data):
    """Without calibration, weights are read from the files one at a time."""
    source = classifier(tiny)
    cluster(source, own_folder / "files", ClusterSettings())
    cluster(source, own_folder / "memory", ClusterSettings(), calibration=data)
    one, other = (dict(read_weights(own_folder / name)) for name in ("files", "memory"))
    assert one.keys() == other.keys()
    assert any(isinstance(weight, ClusteredWeight) for weight in one.values())
    for name, weight in one.items():
        if isinstance(weight, ClusteredWeight):
            assert torch.equal(weight.packed_OB, other[name].packed_OB)
            assert torch.equal(weight.palettes_GK, other[name].palettes_GK)
        else:
            assert torch.equal(weight, other[name])


def run_of_classifier(tiny, folder, data, **settings):
    """The best model of a run, which knows its held-out rows."""
    loaded = load(tiny.folder("bert", kind="sequence-classification", head=HEAD, **WIDE | settings), device="cpu")
    recipe = {"model": "bert", "task": "classify", "data": {"train": str(data)}}
    return export_model(folder, loaded.model, loaded.tokenizer, card={"task": "classify", "recipe": recipe})


@pytest.mark.slow
def test_without_rows_a_run_is_clustered_weight_by_weight(own_folder, tiny, data, monkeypatch):
    source = run_of_classifier(tiny, own_folder / "best", data)
    measured = cluster(source, own_folder / "judged", ClusterSettings(), num_rows=8)
    assert measured.measurements[0].quality
    assert cluster(source, own_folder / "fewer", ClusterSettings(), num_rows=2).measurements[1].divergence.num_rows == 2
    cluster(source, own_folder / "memory", ClusterSettings(), calibration=data)  # of which nothing is used

    def refuse(*args, **options):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("trimtab.commands.cluster.load", refuse)
    done = cluster(source, own_folder / "files", ClusterSettings(), num_rows=0)
    assert done.measurements == []
    assert done.bits == measured.bits
    assert read_facts(done.folder)["recipe"] == read_facts(source)["recipe"]
    for other in ("judged", "memory"):
        one, two = (stored_tensors(own_folder / name) for name in ("files", other))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def stored_tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(own_folder, tiny, data, monkeypatch):
    """It is that of an output file and of some copies of a weight, whatever the number of layers."""
    monkeypatch.setattr("trimtab.commands.cluster.ClusteredWriter", partial(ClusteredWriter, file_bytes=2**16))
    settings = ClusterSettings(bits=1, per="tensor", scale_block=0)
    peaks, sizes = [], []
    for num_layers in (2, 12):
        size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": num_layers}
        source = run_of_classifier(tiny, own_folder / f"{num_layers}", data, **size)
        files = list(source.glob("*.safetensors"))
        sizes.append(sum(path.stat().st_size for path in files))
        out = own_folder / f"out-{num_layers}"
        peaks.append(peak_bytes(lambda: cluster(source, out, settings, num_rows=0), files))  # noqa: B023
    assert sizes[1] > 4 * sizes[0]
    assert peaks[1] <= 1.1 * peaks[0] < sizes[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_rows": 0, "data": "rows.csv"}, "--data has no effect"),
        ({"num_rows": 0, "calibration": "rows.csv"}, "needs the whole model in memory"),
        ({"num_rows": 5}, "--rows 5 has no effect"),
    ],
)
def test_rows_that_have_no_effect_are_refused(own_folder, tiny, options, words):
    with pytest.raises(RecipeError, match=words):
        cluster(classifier(tiny), own_folder / "out", ClusterSettings(), **options)
    assert not (own_folder / "out").exists()


def test_a_model_without_such_files_cannot_be_read_weight_by_weight(own_folder, tiny):
    source = Path(shutil.copytree(classifier(tiny), own_folder / "source"))
    (source / "model.safetensors").rename(source / "weights.safetensors")
    with pytest.raises(ModelError, match="no safetensors files"):
        cluster(source, own_folder / "out", ClusterSettings(), num_rows=0)


def test_the_table_has_the_original_and_both_ways(own_folder, tiny, data):
    done = cluster(classifier(tiny), own_folder / "out", ClusterSettings(), data=data)
    original, once, on_use = done.measurements
    assert once.disk_bytes < 0.5 * original.disk_bytes
    assert on_use.memory_bytes < 0.7 * once.memory_bytes
    assert once.divergence.kl_mean < 1e-3
    assert once.quality == on_use.quality
    assert load(done.folder).task_name == "classify"


@pytest.mark.slow
@pytest.mark.parametrize("importance", ["activations", "gradients"])
def test_calibration_and_trained_palettes_come_closer(own_folder, tiny, data, importance):
    loaded = load(classifier(tiny))
    loaded.model.classifier.weight.data *= 50  # outputs of a random head hardly depend on the input
    source = export_model(own_folder / "source", loaded.model, loaded.tokenizer, card={})
    plain = cluster(source, own_folder / "plain", ClusterSettings(bits=3), data=data)
    settings = ClusterSettings(bits=3, importance=importance, compensate=True)
    trained = cluster(source, own_folder / "trained", settings, data=data, calibration=data, train_steps=30)
    assert trained.bits == plain.bits
    assert trained.measurements[1].divergence.kl_mean < 0.5 * plain.measurements[1].divergence.kl_mean


def test_the_card_says_how_to_load_it_and_whose_metrics_it_states(own_folder, tiny):
    loaded = load(classifier(tiny))
    facts = {"task": "classify", "metrics": {"accuracy": 0.875}}
    source = export_model(own_folder / "source", loaded.model, loaded.tokenizer, card=facts)
    card = (cluster(source, own_folder / "out", ClusterSettings(bits=3)).folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: trimtab\npipeline_tag: text-classification\n")
    assert "indices of 3 bits into palettes" in card
    assert 'load("FOLDER", decode="on-use")' in card
    assert "AutoModel" not in card  # it would not load
    assert card.count("```") % 2 == 0
    assert "Of the original model, on the held-out rows:" in card
    assert "| accuracy | 0.875 |" in card
    assert "| trimtab |" in card


def test_shared_weights_are_stored_once_and_stay_shared(own_folder, tiny):
    done = cluster(tiny.folder("llama", **WIDTHS["llama"]), own_folder / "out", ClusterSettings())
    assert "lm_head.weight" not in dict(read_weights(done.folder))
    once, on_use = load(done.folder).model, load(done.folder, decode="on-use").model
    assert once.lm_head.weight is once.model.embed_tokens.weight
    assert on_use.lm_head.palettes is on_use.model.embed_tokens.palettes
    assert on_use.lm_head.indices is on_use.model.embed_tokens.indices


def test_weights_that_are_not_clustered_can_be_stored_in_fp16(own_folder, tiny):
    settings = ClusterSettings(embeddings=False, rest_dtype=torch.float16)
    done = cluster(classifier(tiny), own_folder / "out", settings)
    weights = dict(read_weights(done.folder))
    assert weights["bert.embeddings.word_embeddings.weight"].dtype == torch.float16
    assert load(done.folder).model.dtype == torch.float32


def test_many_files(tmp_path):
    writer = ClusteredWriter(tmp_path, file_bytes=100)
    for number in range(5):
        writer.add(f"weight{number}", torch.full((20,), float(number)))
    writer.flush()
    assert len(list(tmp_path.glob("clustered-*.safetensors"))) == 3
    (tmp_path / FACTS).write_text(json.dumps({"clustered": {"files": weight_checksums(tmp_path)}}))
    assert {name: weight[0].item() for name, weight in read_weights(tmp_path)} == {f"weight{n}": n for n in range(5)}


def test_files_of_version_1_are_read(own_folder, tiny):
    """Their scales are in fp16."""
    done = cluster(classifier(tiny), own_folder / "out", ClusterSettings())
    wanted = logits_of(load(done.folder))

    def to_version_1(tensors):
        for name in [name for name in tensors if name.endswith(".scales")]:
            of = name.removesuffix("scales")
            tensors[name] = (tensors[name].float() / 128).half()  # exact, as a product with a power of 2 is
            tensors[f"{of}palettes"] = tensors[f"{of}palettes"].float() * 128

    with safe_open(done.folder / "clustered-00001.safetensors", "pt") as file:
        about = json.loads(file.metadata()["trimtab_clustered"])
    assert about["version"] == 2
    metadata = {"format": "pt", "trimtab_clustered": json.dumps(about | {"version": 1})}
    _rewrite(done.folder, metadata=metadata, change=to_version_1)
    assert {
        weight.scales_OS.dtype for _, weight in read_weights(done.folder) if isinstance(weight, ClusteredWeight)
    } == {torch.float16}
    for decode in ("once", "on-use"):
        assert torch.equal(logits_of(load(done.folder, decode=decode)), wanted)


def test_transformers_refuses_the_folder(own_folder, tiny):
    """Instead of a model with random weights."""
    from transformers import AutoModelForSequenceClassification

    done = cluster(classifier(tiny), own_folder / "out", ClusterSettings())
    assert is_clustered(done.folder)
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForSequenceClassification.from_pretrained(done.folder)


def _rewrite(folder, *, metadata=None, change=None):
    """Change the file of weights, and its checksum."""
    path = folder / "clustered-00001.safetensors"
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    if change is not None:
        change(tensors)
    save_file(tensors, path, metadata=about if metadata is None else metadata)
    facts = read_facts(folder)
    facts["clustered"]["files"] = weight_checksums(folder)
    (folder / FACTS).write_text(json.dumps(facts))


_INDICES = "bert.embeddings.word_embeddings.weight.indices"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: _flip_byte(folder / "clustered-00001.safetensors"), "checksum"),
        (lambda folder: (folder / "clustered-00001.safetensors").write_bytes(b"no"), "damaged"),
        (lambda folder: (folder / FACTS).write_text("{}"), "does not list"),
        (lambda folder: _rewrite(folder, metadata={"format": "pt"}), "no description"),
        (
            lambda folder: _rewrite(folder, metadata={"trimtab_clustered": '{"version": 9, "tensors": {}}'}),
            "version 9",
        ),
        (lambda folder: _rewrite(folder, change=lambda tensors: tensors.pop(_INDICES)), "no tensor"),
        (
            lambda folder: _rewrite(folder, change=lambda tensors: tensors.update({_INDICES: tensors[_INDICES][1:]})),
            "cannot be decoded",
        ),
        (lambda folder: _rewrite(folder, change=lambda tensors: tensors.pop("classifier.bias")), "no weights for"),
        (
            lambda folder: _rewrite(folder, change=lambda tensors: tensors.update(other=torch.zeros(1))),
            "which its model does not have",
        ),
    ],
)
def test_damaged_and_foreign_files_are_refused(own_folder, clustered, damage, message):
    folder = shutil.copytree(clustered, own_folder / "out")
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load(folder)


def _flip_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_wrong_requests_are_refused(own_folder, tiny, data):
    source = classifier(tiny)
    with pytest.raises(RecipeError, match="--compensate needs data"):
        cluster(source, own_folder / "out", ClusterSettings(compensate=True))
    with pytest.raises(RecipeError, match="--train-steps needs data"):
        cluster(source, own_folder / "out", ClusterSettings(), train_steps=3)
    with pytest.raises(RecipeError, match="--bits 9"):
        ClusterSettings(bits=9)
    with pytest.raises(RecipeError, match="--scale-block 999999999 is not valid"):
        ClusterSettings(scale_block=999_999_999)
    done = cluster(source, own_folder / "out", ClusterSettings())
    with pytest.raises(ModelError, match="already clustered"):
        cluster(done.folder, own_folder / "again", ClusterSettings())
    with pytest.raises(RecipeError, match="decode='never'"):
        load(done.folder, decode="never")


def test_steps_of_training_are_no_negative_number(own_folder, tiny, data):
    with pytest.raises(RecipeError, match="--train-steps -5 is not valid"):
        cluster(classifier(tiny), own_folder / "out", ClusterSettings(), calibration=str(data), train_steps=-5)


def test_quantized_weights_are_refused(own_folder, tiny):
    """Their integers would be clustered without their scales."""
    source = tiny.folder("llama", **WIDE)
    config = json.loads((Path(source) / "config.json").read_text())
    shutil.copytree(source, own_folder / "quantized")
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (own_folder / "quantized" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is already quantized"):
        cluster(own_folder / "quantized", own_folder / "out", ClusterSettings())
    assert not (own_folder / "out").exists()


def test_only_files_of_the_model_are_read(own_folder, tiny):
    source = tiny.folder("llama", **WIDE)
    shutil.copytree(source, own_folder / "mixed")
    stale = {name: torch.full_like(value, 7) for name, value in load_file(Path(source) / "model.safetensors").items()}
    save_file(stale, own_folder / "mixed" / "model_old.safetensors")
    found = [
        cluster(place, own_folder / f"of-{number}", ClusterSettings())
        for number, place in enumerate((source, own_folder / "mixed"))
    ]
    assert torch.equal(*(logits_of(load(done.folder)) for done in found))


def test_values_that_are_not_finite_are_refused(own_folder, tiny):
    source = tiny.folder("llama", **WIDE)
    shutil.copytree(source, own_folder / "broken")
    path = own_folder / "broken" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="q_proj.weight contains values that are not finite"):
        cluster(own_folder / "broken", own_folder / "out", ClusterSettings())


def test_a_folder_that_contains_the_model_is_not_replaced(own_folder, tiny):
    outer = own_folder / "outer"
    shutil.copytree(tiny.folder("llama", **WIDE), outer / "inner")
    (outer / FACTS).write_text("{}")
    with pytest.raises(RecipeError, match="contains the model"):
        cluster(outer / "inner", outer, ClusterSettings())
    assert (outer / "inner" / "model.safetensors").is_file()
