"""A loaded model in Python: predict, generate with its options, evaluate, save."""

import threading
from pathlib import Path

import pytest
import torch

from tiny_adapters import LABELS, adapted, export_run
from tiny_models import TEXTS, config_of, tokenizer
from tiny_runs import reviews, write_csv
from trimtab.errors import DataError, ModelError, RecipeError
from trimtab.inference.classify import classify_texts
from trimtab.inference.generate import generate_texts
from trimtab.inference.load import LoadedModel, load
from trimtab.model.load import load_model

pytestmark = pytest.mark.usefixtures("own_folder")
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
KINDS = {"bert": "sequence-classification", "t5": "seq2seq-lm", "bart": "seq2seq-lm"}


def loaded_of(name, task, **head):
    tok = tokenizer()
    if task == "chat":
        tok.chat_template = TEMPLATE
    model = load_model(config_of(name), KINDS.get(name, "causal-lm"), head, tok)
    for parameter in model.parameters():
        parameter.data *= 4
    return LoadedModel(model.eval(), tok, task, {"max_length": 20})


def classifier(*names, several=False):
    kind = "multi_label_classification" if several else "single_label_classification"
    names_by_id = dict(enumerate(names))
    head = {"num_labels": len(names), "id2label": names_by_id, "label2id": {n: i for i, n in names_by_id.items()}}
    return loaded_of("bert", "classify", problem_type=kind, **head)


def test_predict():
    loaded = classifier("bad", "good", "new")
    found = classify_texts(loaded, TEXTS)
    assert loaded.predict(TEXTS) == [each.label for each in found]
    shares = loaded.predict_proba(TEXTS)
    assert shares.shape == (5, 3)
    assert [loaded.labels[index] for index in shares.argmax(-1).tolist()] == loaded.predict(TEXTS)
    torch.testing.assert_close(shares.sum(-1), torch.ones(5))
    assert loaded.predict([]) == []
    assert loaded.predict_proba([]).shape == (0, 3)
    assert all(isinstance(labels, tuple) for labels in classifier("bad", "good", several=True).predict(TEXTS))
    numbers = loaded_of("bert", "regress", num_labels=1, problem_type="regression").predict(TEXTS)
    assert len(numbers) == 5
    assert all(isinstance(number, float) for number in numbers)
    with pytest.raises(ModelError, match="not a classifier"):
        loaded_of("gpt2", "causal-lm").predict(TEXTS)
    assert loaded_of("gpt2", "causal-lm").labels == []


def test_evaluate_and_save():
    loaded = classifier("good", "bad")
    data = write_csv(Path("reviews.csv"), reviews(12))
    found = loaded.evaluate(data, num_rows=10)
    assert found.num_rows == 10
    again = load(loaded.save("kept"), device="cpu")
    assert (again.task_name, again.labels, again.max_length) == ("classify", ["good", "bad"], 20)
    assert torch.equal(again.predict_proba(TEXTS), loaded.predict_proba(TEXTS))
    assert again.evaluate(data, num_rows=10).metrics == found.metrics
    loaded.save("kept")  # replaces what it wrote


def test_an_adapter_is_saved_alone(tiny):
    model, tok = adapted(tiny.folder("bert"), "sequence-classification", LABELS)
    loaded = load(export_run("run", model, tok, "classify"), device="cpu")
    again = load(loaded.save("kept"), device="cpu")
    assert not (Path("kept") / "model.safetensors").exists()
    torch.testing.assert_close(again.predict_proba(TEXTS), loaded.predict_proba(TEXTS), rtol=0, atol=0)


WRITERS = [("gpt2", "causal-lm"), ("llama", "chat"), ("t5", "seq2seq"), ("bart", "seq2seq")]


@pytest.mark.parametrize(("name", "task"), WRITERS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_p": 0.9, "seed": 3}])
def test_pieces_are_the_text(name, task, options):
    loaded = loaded_of(name, task)
    texts = loaded.generate(TEXTS[:2], 12, **options)
    before = torch.get_rng_state()
    for prompt in TEXTS[:2]:
        text = loaded.generate(prompt, 12, **options)  # by itself: a batch draws its numbers together
        pieces = []
        for piece in loaded.generate(prompt, 12, stream=True, **options):
            pieces.append(piece)
            torch.rand(3)  # of the caller, between two tokens
        assert "".join(pieces) == text
        assert not options or len(set(texts)) == 2
        if len(text) > 8:
            assert len(pieces) > 1
        torch.set_rng_state(before)
    if not options:
        assert [loaded.generate(prompt, 12) for prompt in TEXTS[:2]] == texts


def test_sampling_is_seeded():
    loaded = loaded_of("gpt2", "causal-lm")
    one, same, other = (loaded.generate(TEXTS[0], 12, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert loaded.generate(TEXTS[0], 12, temperature=2.0, top_p=1e-6) == loaded.generate(TEXTS[0], 12)  # the likeliest
    for wrong in (0, 1.5):
        with pytest.raises(RecipeError, match="top_p is"):
            loaded.generate(TEXTS[0], 4, temperature=1.0, top_p=wrong)


@pytest.mark.parametrize(("name", "task"), WRITERS)
def test_a_stop_text_ends_the_output(name, task):
    loaded = loaded_of(name, task)
    whole = loaded.generate(TEXTS, 16)
    long = [(prompt, text) for prompt, text in zip(TEXTS, whole, strict=True) if len(text) > 6]
    assert long
    for prompt, text in long:
        stop = text[4:7]
        wanted = text[: text.find(stop)]
        wanted = wanted if task == "causal-lm" else wanted.strip()
        assert loaded.generate(prompt, 16, stop=stop) == wanted
        assert loaded.generate(prompt, 16, stop=["never", stop]) == wanted
        assert "".join(loaded.generate(prompt, 16, stop=[stop], stream=True)) == wanted
    stops = [text[4:7] for _, text in long]
    first = [min((text.find(stop) for stop in stops if stop in text), default=len(text)) for text in whole]
    cut = [text[:end] if task == "causal-lm" else text[:end].strip() for text, end in zip(whole, first, strict=True)]
    assert loaded.generate(TEXTS, 16, stop=stops) == cut  # rows of a batch end one by one


def test_generation_ends_at_a_stop_text():
    loaded = loaded_of("gpt2", "causal-lm")
    text = loaded.generate(TEXTS[0], 30)
    calls = []
    loaded.model.register_forward_hook(lambda *_: calls.append(1))
    loaded.generate(TEXTS[0], 30, stop=text[:2])
    assert 0 < len(calls) < 15


def test_prompts_and_conversations():
    loaded = loaded_of("llama", "chat")
    messages = [{"role": "user", "content": TEXTS[0]}]
    text = loaded.generate(messages, 8)
    assert isinstance(text, str)
    assert text == loaded.generate({"messages": messages}, 8) == loaded.generate(TEXTS[0], 8)
    assert loaded.generate([messages, TEXTS[1]], 8) == generate_texts(loaded, [messages, TEXTS[1]], 8)
    assert loaded.generate([], 8) == []
    with pytest.raises(DataError, match="with 2 prompts"):
        loaded.generate(TEXTS[:2], 8, stream=True)
    with pytest.raises(RecipeError, match="stop is"):
        loaded.generate(TEXTS[0], 8, stop=[""])
    with pytest.raises(ModelError, match="does not generate"):
        classifier("bad", "good").generate(TEXTS[0], stream=True)


def test_a_stream_that_is_not_read_to_its_end():
    loaded = loaded_of("gpt2", "causal-lm")
    num_threads = threading.active_count()
    stream = loaded.generate(TEXTS[0], 30, stream=True)
    assert next(stream)
    stream.close()
    assert threading.active_count() == num_threads
    never_read = loaded.generate(TEXTS[0], 30, stream=True)
    del never_read
    assert threading.active_count() == num_threads


def test_errors_while_streaming_reach_the_caller():
    loaded = loaded_of("gpt2", "causal-lm")
    num_threads = threading.active_count()

    def fail(*_):
        raise ValueError("out of order")

    loaded.model.register_forward_hook(fail)
    with pytest.raises(ModelError, match="cannot be used: out of order"):
        list(loaded.generate(TEXTS[0], 30, stream=True))
    assert threading.active_count() == num_threads
