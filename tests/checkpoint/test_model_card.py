"""The model card: what it says, what it keeps to itself, and that the code in it runs."""

import re

import pytest
import torch
import yaml

from tiny_adapters import LABELS, adapted
from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.checkpoint.export import export_model
from trimtab.checkpoint.model_card import CardSubject, model_card, public_text
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model

FACTS = {
    "trimtab": "1.2",
    "task": "classify",
    "step": 1200,
    "metrics": {"loss": 0.25, "accuracy": 0.9125, "auc": "nan"},
    "data": {"training": {"name": "/home/ann/secret project/reviews.csv", "num_rows": 12345, "fingerprint": "ab12"}},
    "recipe": {
        "model": "google-bert/bert-base-uncased",
        "data": {"train": "/home/ann/secret project/reviews.csv", "eval": None, "text": "text"},
        "train": {"lr": 3e-05, "epochs": 2},
        "track": {"uri": "sqlite:////home/ann/mlflow.db"},
        "out": "/home/ann/runs/1",
        "checkpoint": {"mirror": "/mnt/drive"},
    },
}


def front_matter(text):
    return yaml.safe_load(text.split("---\n")[1])


def code_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_what_a_card_says_and_leaves_out():
    text = model_card(FACTS, CardSubject("sequence-classification"))
    assert front_matter(text) == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "base_model": "google-bert/bert-base-uncased",
        "tags": ["trimtab"],
    }
    assert "| accuracy | 0.9125 |" in text
    assert "| auc | nan |" in text
    assert "at step 1,200" in text
    assert "| training | reviews.csv | 12,345 | `ab12` |" in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["train"] == {"lr": 3e-05, "epochs": 2}
    assert recipe["data"] == {"train": "reviews.csv", "text": "text"}
    assert not {"track", "out", "checkpoint"} & recipe.keys()
    assert "ann" not in text
    assert "/mnt" not in text
    assert "| trimtab | 1.2 |" in text
    assert f"| torch | {torch.__version__} |" in text
    assert text == model_card(FACTS, CardSubject("sequence-classification")), "the same facts give the same text"


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/home/ann/reviews.csv", "reviews.csv"),
        ("~/data/*.csv", "*.csv"),
        ("../data/rows.jsonl", "rows.jsonl"),
        ("C:\\Users\\ann\\rows.csv", "rows.csv"),
        ("/home/ann/runs/7/best", "7"),
        ("https://ann:pw@host/rows.csv", "https://host/rows.csv"),
        ("stanfordnlp/imdb[train]", "stanfordnlp/imdb[train]"),
        ("/", "/"),
    ],
)
def test_paths_become_names(text, public):
    assert public_text(text) == public


def test_a_local_base_is_no_name_on_the_hub():
    text = model_card({}, CardSubject("causal-lm", "peft", "/home/ann/llama"))
    assert "base_model" not in front_matter(text)
    assert front_matter(text)["library_name"] == "peft"
    assert "ann" not in text
    assert 'AutoModelForCausalLM.from_pretrained("llama")' in text


def test_a_pipe_does_not_break_a_table():
    facts = {"data": {"training": {"name": "a|b", "num_rows": 1, "fingerprint": "c"}}}
    assert "| training | a/b | 1 | `c` |" in model_card(facts, CardSubject("masked-lm"))


def test_the_code_in_the_card_of_a_model_runs(tmp_path):
    model = load_model(config_of("bert"), "sequence-classification", LABELS, tokenizer())
    export_model(tmp_path / "best", model, tokenizer(), card={"task": "classify"})
    blocks = code_blocks((tmp_path / "best" / "README.md").read_text())
    assert len(blocks) == 2
    for code in blocks:
        found = {}
        with quiet_transformers():
            exec(code.replace("FOLDER", str(tmp_path / "best")), found)
        loaded = found["model"] if "model" in found else found["loaded"].model
        batch = batch_of(TEXTS)
        assert torch.equal(loaded.cpu()(**batch).logits, model(**batch).logits)


def test_the_code_in_the_card_of_an_adapter_runs(tmp_path):
    base = str(tmp_path / "base")
    export_model(base, load_model(config_of("bert"), "masked-lm", {}, tokenizer()), tokenizer(), card={})
    model, tok = adapted(base, "sequence-classification", LABELS)
    export_model(tmp_path / "best", model, tok, card={"task": "classify"})
    text = (tmp_path / "best" / "README.md").read_text()
    assert str(tmp_path) not in text
    found = {}
    code = code_blocks(text)[1].replace('"FOLDER"', f'"{tmp_path / "best"}"').replace('"base"', f'"{base}"')
    with quiet_transformers():
        exec(code, found)
    batch = batch_of(TEXTS, tok)
    with torch.no_grad():
        torch.testing.assert_close(found["model"].eval()(**batch).logits, model(**batch).logits)


HOSTILE = "<img src=x onerror=alert(1)>\n\n```\n# [click](javascript:alert(1)) | `x` \x1b[2J.csv"


@pytest.mark.parametrize("form", ["transformers", "peft"])
def test_names_cannot_become_markdown_or_html(form):
    recipe = {"model": HOSTILE, "data": {"train": HOSTILE}}
    facts = {"task": HOSTILE, "recipe": recipe, "data": {HOSTILE: {"name": HOSTILE, "num_rows": 1}}}
    text = model_card(facts | {"metrics": {HOSTILE: HOSTILE}}, CardSubject("causal-lm", form))
    fence = re.search("^(`{4,})yaml$", text, re.MULTILINE)[1]
    prose, inside, end = text.partition(f"{fence}yaml\n")[0], *text.partition(f"{fence}yaml\n")[2].split(f"\n{fence}\n")
    assert yaml.safe_load(inside)["model"] == HOSTILE
    outside = re.sub(r"^```python\n.*?^```$", "", prose, flags=re.DOTALL | re.MULTILINE) + end
    assert "<img" not in outside
    assert not re.search(r"(?<!\\)\[click", outside)
    assert [line for line in outside.splitlines() if line.startswith("```") or "\x1b" in line] == []
    assert sum(line.startswith("# ") for line in outside.splitlines()) == 1
    for block in re.findall(r"^```python\n(.*?)^```$", prose, re.DOTALL | re.MULTILINE):
        compile(block, "card", "exec")
