"""The best model on a server: MLflow loads and serves what was trained, once, and `best` moves to what is better."""

import json
import urllib.request
from pathlib import Path

import pytest
import torch
from mlflow_servers import Background, free_port
from tracked_models import CAUSAL, CLASSIFIER, TEXTS, THREE, TrackedModels, contents, exported, loud

from tiny_adapters import adapted, export_run, nf4
from trimtab.inference.classify import classify_texts, regress_texts
from trimtab.inference.generate import generate_texts
from trimtab.inference.load import load
from trimtab.model.hub import quiet_transformers
from trimtab.tracking.mlflow.best_model import NOTE
from trimtab.tracking.mlflow.model_folder import inspect_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow and its dependencies


@pytest.fixture
def models(store, monkeypatch):
    uri = f"sqlite:///{store}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # where MLflow's own loaders look
    return TrackedModels(uri, store.parent / "mlartifacts")


@pytest.fixture
def classifier(tmp_path, tiny):
    return exported(tmp_path / "best", loud(tiny), CLASSIFIER, "classify")


def pipeline_of(address):
    import mlflow.transformers

    with quiet_transformers():
        return mlflow.transformers.load_model(address)


def answers_of(address, asked):
    import mlflow.pyfunc

    with quiet_transformers():
        return mlflow.pyfunc.load_model(address).predict(asked)


def note_of(models, address):
    return models.client.get_logged_model(address.removeprefix("models:/")).tags.get(NOTE)


def near(scores):
    return pytest.approx(list(scores), abs=1e-4)


def test_a_classifier(models, classifier):
    run_id = models.run("imdb", "001")
    address = models.log(run_id, classifier, value=0.75, register="reviews")
    expected = classify_texts(load(classifier, device="cpu"), TEXTS)
    by_name = pipeline_of("models:/reviews@best")(TEXTS)
    assert [one["label"] for one in by_name] == [one.label for one in expected]
    assert [one["score"] for one in by_name] == near(one.score for one in expected)
    served = answers_of(address, TEXTS)
    assert list(served["label"]) == [one.label for one in expected]
    assert list(served["score"]) == near(one.score for one in expected)
    assert len(answers_of(address, ["word " * 500])) == 1  # cut as in training

    files = models.files(address)
    assert contents(files / "model") == contents(classifier)
    assert not any(path.is_symlink() for path in files.rglob("*"))
    assert note_of(models, address) is None
    said = (files / "MLmodel").read_text()
    assert run_id in said
    assert address.removeprefix("models:/") in said
    assert f"source_model_name: {classifier}" in said
    import transformers

    assert f"transformers=={transformers.__version__}" in (files / "requirements.txt").read_text()
    assert json.loads((files / "input_example.json").read_text()) == ["a short text"]
    outputs = models.client.get_run(run_id).outputs.model_outputs
    assert [(output.model_id, output.step) for output in outputs] == [(address.removeprefix("models:/"), 3)]


def test_pairs_of_texts(models, tmp_path, tiny):
    folder = exported(tmp_path / "best", loud(tiny), CLASSIFIER, "classify", columns={"text": ["one", "other"]})
    address = models.log(models.run("imdb", "001"), folder)
    served = answers_of(address, [{"text": TEXTS[0], "text_pair": TEXTS[1]}])
    expected = classify_texts(load(folder, device="cpu"), [(TEXTS[0], TEXTS[1])])
    assert list(served["score"]) == near(one.score for one in expected)
    alone = classify_texts(load(folder, device="cpu"), [TEXTS[0]])
    assert list(served["score"]) != near(one.score for one in alone)


def test_a_number(models, tmp_path, tiny):
    head = {"num_labels": 1, "problem_type": "regression"}
    folder = exported(tmp_path / "best", loud(tiny, head), CLASSIFIER, "regress")
    address = models.log(models.run("imdb", "001"), folder)
    assert list(answers_of(address, TEXTS)["score"]) == near(regress_texts(load(folder, device="cpu"), TEXTS))


def test_a_model_that_writes(models, tmp_path, tiny):
    folder = exported(tmp_path / "best", tiny.folder("gpt2"), CAUSAL, "causal-lm")
    address = models.log(models.run("stories", "001"), folder)
    written = pipeline_of(address)(TEXTS[0], max_new_tokens=4, do_sample=False, return_full_text=False)
    assert written[0]["generated_text"] == generate_texts(load(folder, device="cpu"), TEXTS[:1], 4)[0]
    assert answers_of(address, TEXTS[:1])[0].startswith(TEXTS[0])


def test_a_chat(models, tmp_path, tiny):
    folder = exported(tmp_path / "best", tiny.folder("llama", chat=True), CAUSAL, "chat")
    address = models.log(models.run("chats", "001"), folder)
    answer = answers_of(
        address, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0.001}
    )[0]
    assert answer["choices"][0]["message"]["role"] == "assistant"
    written = generate_texts(load(folder, device="cpu"), ["hi"], 4)
    assert answer["choices"][0]["message"]["content"].strip() == written[0]


def test_hidden_words(models, tmp_path, tiny):
    folder = exported(tmp_path / "best", tiny.folder("bert"), "masked-lm", "masked-lm")
    address = models.log(models.run("words", "001"), folder)
    pipeline = pipeline_of(address)
    found = pipeline(f"the {pipeline.tokenizer.mask_token} was good")
    assert answers_of(address, [f"the {pipeline.tokenizer.mask_token} was good"]) == [found[0]["token_str"]]


def test_what_no_pipeline_can_do_is_served_by_trimtab(models, tmp_path, tiny):
    import mlflow.exceptions

    folder = exported(tmp_path / "pair", tiny.folder("t5"), "seq2seq-lm", "seq2seq")
    address = models.log(models.run("translations", "001"), folder)
    assert answers_of(address, TEXTS) == generate_texts(load(folder, device="cpu"), TEXTS)
    assert "no pipeline for seq2seq" in note_of(models, address)
    with pytest.raises(mlflow.exceptions.MlflowException, match="transformers"):
        pipeline_of(address)

    several = THREE | {"problem_type": "multi_label_classification"}
    folder = exported(tmp_path / "several", loud(tiny, several), CLASSIFIER, "classify")
    address = models.log(models.run("topics", "001"), folder)
    expected = classify_texts(load(folder, device="cpu"), TEXTS)
    assert list(answers_of(address, TEXTS)["label"]) == ["; ".join(one.label) for one in expected]
    assert "model has several" in note_of(models, address)


def num_weight_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def logits_of(model, tokenizer):
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@pytest.mark.parametrize(
    ("family", "kind", "task", "head"),
    [
        ("llama", CAUSAL, "causal-lm", {}),
        pytest.param("bert", CLASSIFIER, "classify", THREE, marks=pytest.mark.slow),
        pytest.param("gpt2", CLASSIFIER, "classify", THREE, marks=pytest.mark.slow),
    ],
)
def test_an_adapter_goes_alone_and_mlflow_finds_its_base(models, tmp_path, tiny, family, kind, task, head):
    base = tiny.folder(family)
    model, tokenizer = adapted(base, kind, head)
    best = export_run(tmp_path / "run", model, tokenizer, "reviews.csv", task) / "best"
    address = models.log(models.run("imdb", "001"), best)
    files = models.files(address)
    assert num_weight_bytes(files) == num_weight_bytes(best) < num_weight_bytes(Path(base))
    assert json.loads((files / "model" / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    assert note_of(models, address) is None
    pipeline = pipeline_of(address)
    torch.testing.assert_close(logits_of(pipeline.model, tokenizer), logits_of(model, tokenizer))
    if head:
        assert pipeline.model.config.id2label == THREE["id2label"]
        expected = classify_texts(load(files / "model", device="cpu"), TEXTS)
        assert list(answers_of(address, TEXTS)["label"]) == [one.label for one in expected]
    else:
        assert answers_of(address, TEXTS[:1])[0].startswith(TEXTS[0])


def test_adapters_that_mlflow_would_load_otherwise(models, tmp_path, tiny):
    base = tiny.folder("llama")
    model, tokenizer = adapted(base, CAUSAL, **nf4())
    best = export_run(tmp_path / "quantized", model, tokenizer, "reviews.csv", "causal-lm") / "best"
    assert "not quantized" in inspect_model(best).obstacle

    model, tokenizer = adapted(base, CAUSAL)
    tokenizer.add_tokens([f"<new-{number}>" for number in range(50)])
    best = export_run(tmp_path / "grown", model, tokenizer, "reviews.csv", "causal-lm") / "best"
    assert "more tokens than its base" in inspect_model(best).obstacle

    settings = json.loads((best / "adapter_config.json").read_text())
    (best / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": str(tmp_path / "gone")})
    )
    address = models.log(models.run("imdb", "001"), best)
    assert "the base cannot be read" in note_of(models, address)


def test_a_model_that_cannot_be_understood_is_kept_as_files(models, tmp_path, classifier):
    config = json.loads((classifier / "config.json").read_text())
    (classifier / "config.json").write_text(json.dumps(config | {"model_type": "of-tomorrow"}))
    (classifier / "trimtab.json").unlink()
    address = models.log(models.run("imdb", "001"), classifier, register="reviews")
    assert "its plain files are logged" in note_of(models, address)
    assert contents(models.files(address) / "model") == contents(classifier)
    assert best_of(models, "reviews") == address
    assert models.log(models.run("imdb", "002"), tmp_path) is None, "there is no model"


def best_of(models, name):
    return f"models:/{models.client.get_model_version_by_alias(name, 'best').tags['trimtab.model_id']}"


def logged(models, run_id):
    found = models.client.search_logged_models([models.client.get_run(run_id).info.experiment_id])
    return [(model.model_id, str(model.status)) for model in found if model.source_run_id == run_id]


def test_what_is_there_is_not_sent_again(models, classifier, monkeypatch):
    run_id = models.run("imdb", "001")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(models.client, "log_model_artifacts", full)
        with pytest.raises(OSError, match="No space left"):
            models.log(run_id, classifier, register="reviews")
    assert [status for _, status in logged(models, run_id)] == ["PENDING"]
    address = models.log(run_id, classifier, register="reviews")
    with monkeypatch.context() as patch:
        patch.setattr(models.client, "log_model_artifacts", full)
        assert models.log(run_id, classifier, register="reviews") == address
    assert logged(models, run_id) == [(address.removeprefix("models:/"), "READY")]
    assert len(models.client.search_model_versions("name = 'reviews'")) == 1
    assert len(models.client.get_run(run_id).outputs.model_outputs) == 1

    card = json.loads((classifier / "trimtab.json").read_text())
    (classifier / "trimtab.json").write_text(json.dumps(card | {"step": 7}))  # the run has found a better one
    later = models.log(run_id, classifier, register="reviews", value=0.6)
    assert later != address
    assert best_of(models, "reviews") == later


@pytest.mark.slow
def test_best_moves_to_what_is_better(models, classifier, caplog):
    caplog.set_level("INFO", "trimtab")

    def best_after(**options):
        caplog.clear()
        name = options.pop("register", "reviews")
        models.log(models.run("imdb", "run"), classifier, register=name, **options)
        found = models.client.get_registered_model(name).aliases.get("best")
        return None if found is None else int(found)

    assert best_after(value=None) is None
    assert "nothing was evaluated" in caplog.text
    assert best_after(value=0.8) == 2
    assert "version 2 is best (accuracy 0.8)" in caplog.text
    assert best_after(value=0.7) == 2
    assert "the alias best stays with version 2 (accuracy 0.8, here 0.7)" in caplog.text
    assert best_after(value=0.8) == 2, "the same is not better"
    assert best_after(value=0.9) == 5
    assert best_after(value=0.99, metric="f1") == 5
    assert "selected by accuracy and not by f1" in caplog.text
    assert best_after(value=float("nan")) == 5

    assert best_after(register="stories", value=2.0, metric="loss", rises=False) == 1
    assert best_after(register="stories", value=2.5, metric="loss", rises=False) == 1
    assert best_after(register="stories", value=1.5, metric="loss", rises=False) == 3
    tags = models.client.get_model_version("stories", "3").tags
    assert tags.pop("trimtab.model_id").startswith("m-")
    assert tags == {"trimtab.metric": "loss", "trimtab.value": "1.5", "trimtab.higher_is_better": "false"}

    assert best_after(register="stories", value=1.0, metric="joy", rises=None) == 3
    assert "it is unknown whether a higher joy is better" in caplog.text

    models.client.set_registered_model_alias("reviews", "best", "1")  # set by a user, to a version without a value
    assert best_after(value=0.95) == 1
    assert "whose accuracy is unknown" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "adapter", "seq2seq"])
def test_mlflow_serves_it(models, tmp_path, tiny, classifier, form):
    best = classifier
    if form == "adapter":
        model, tokenizer = adapted(tiny.folder("bert"), CLASSIFIER, THREE)
        best = export_run(tmp_path / "run", model, tokenizer, "reviews.csv") / "best"
    elif form == "seq2seq":
        best = exported(tmp_path / "pair", tiny.folder("t5"), "seq2seq-lm", "seq2seq")
    models.log(models.run("imdb", "001"), best, register="reviews")
    port = str(free_port())
    arguments = ["models", "serve", "-m", "models:/reviews@best", "--env-manager", "local", "--host", "127.0.0.1"]
    server = Background([*arguments, "--port", port, "--workers", "1"], tmp_path / "server.log")
    url, body = f"http://127.0.0.1:{port}/invocations", json.dumps({"inputs": TEXTS}).encode()
    try:
        answer = json.loads(server.wait_for(urllib.request.Request(url, body, {"Content-Type": "application/json"})))
    finally:
        server.kill()
    loaded = load(best, device="cpu")
    if form == "seq2seq":
        assert answer["predictions"] == generate_texts(loaded, TEXTS)
    else:
        expected = classify_texts(loaded, TEXTS)
        assert [one["label"] for one in answer["predictions"]] == [one.label for one in expected]
        assert [one["score"] for one in answer["predictions"]] == near(one.score for one in expected)
