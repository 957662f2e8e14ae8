"""Sequence to sequence: what the decoder reads is what it is to write, one step later."""

import importlib
import inspect
import json

import pytest
import torch
from task_tokenizers import CORPUS, make_rows
from transformers import MBart50Tokenizer, MBartTokenizer, T5Config
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from tiny_models import config_of
from tiny_runs import write_csv
from trimtab import Recipe, fit, load
from trimtab.data.tasks.build import build_task
from trimtab.data.tasks.decoder_start import generation_start, starts_with_last_token
from trimtab.errors import DataError
from trimtab.inference.generate import generate_texts
from trimtab.model.load import load_model
from trimtab.model.losses import build_loss

COLUMNS = {"document": ["a good film with a great cast", "dull plot"], "summary": ["good", "a dull film"]}


def test_the_config_says_how_the_decoder_starts(bert):
    rows = make_rows(**COLUMNS)
    task = build_task("seq2seq", rows)
    dataset = task.encode(rows, bert, 32)
    batch = task.collate([dataset[0], dataset[1]])
    assert batch["labels"].tolist()[0] == [*bert("good")["input_ids"], -100, -100]
    assert batch["decoder_input_ids"][0, 0] == bert.pad_token_id
    task.bind(bert, T5Config(decoder_start_token_id=2))
    assert task.collate([dataset[0]])["decoder_input_ids"][0, 0] == 2
    task.bind(bert)
    assert task.collate([dataset[0]])["decoder_input_ids"][0, 0] == 2


def of_many_languages(tokenizer_class=MBartTokenizer, **languages):
    words = sorted({word for line in CORPUS for word in line.split()})
    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    return tokenizer_class(vocab=[*special, ("▁", -9.0), *((f"▁{word}", -1.0) for word in words)], **languages)


@pytest.mark.parametrize("tokenizer_class", [MBartTokenizer, MBart50Tokenizer])
@pytest.mark.parametrize("model_type", ["mbart", "plbart", "bart", "marian", "t5"])
def test_the_loss_is_that_of_the_model_given_labels_alone(model_type, tokenizer_class):
    tokenizer = of_many_languages(tokenizer_class, src_lang="en_XX", tgt_lang="fr_XX")
    config = config_of("bart" if "bart" in model_type else model_type) | {"model_type": model_type}
    model = load_model(config, "seq2seq-lm", {}, tokenizer).eval()
    rows = make_rows(**COLUMNS)
    task = build_task("seq2seq", rows)
    dataset = task.encode(rows, tokenizer, 32)
    task.bind(tokenizer, model.config)
    batch = task.collate([dataset[0], dataset[1]])
    theirs = model(**{key: batch[key] for key in ("input_ids", "attention_mask", "labels")})
    ours = build_loss("token-cross-entropy")(model, batch)
    torch.testing.assert_close(ours.value, theirs.loss, rtol=16 * torch.finfo().eps, atol=0)
    torch.testing.assert_close(ours.logits, theirs.logits.detach())
    if "bart" in model_type and model_type != "bart":
        language, end = tokenizer.convert_tokens_to_ids("fr_XX"), tokenizer.eos_token_id
        start = end if tokenizer_class is MBart50Tokenizer else language
        assert batch["decoder_input_ids"][:, 0].tolist() == [start, start]
        assert model.generation_config.decoder_start_token_id == start
        if tokenizer_class is MBart50Tokenizer:
            assert model.generation_config.forced_bos_token_id == language


def test_which_models_start_with_the_last_token_is_what_transformers_does():
    """Their function that shifts labels has no argument for a start token."""
    found = {}
    for model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        folder = model_type.replace("-", "_")
        try:
            module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        except ModuleNotFoundError:  # a model of another name's module, none of those that read text
            continue
        if hasattr(module, "shift_tokens_right"):
            parameters = inspect.signature(module.shift_tokens_right).parameters
            found[model_type] = "decoder_start_token_id" not in parameters
    assert len(found) > 10
    assert {name: starts_with_last_token(name) for name in found} == found


def test_a_trained_model_generates_from_the_language_it_was_trained_on(tmp_path, own_folder):
    """Also one whose published settings name another language."""
    tokenizer = of_many_languages(src_lang="en_XX", tgt_lang="fr_XX")
    model = load_model(config_of("bart") | {"model_type": "mbart"}, "seq2seq-lm", {}, tokenizer)
    model.generation_config.decoder_start_token_id = tokenizer.convert_tokens_to_ids("ro_RO")
    base = tmp_path / "base"
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    rows = [{"source": text, "target": "a good film"} for text in CORPUS]
    data = {"train": str(write_csv(tmp_path / "rows.csv", rows)), "eval_share": 0}
    recipe = Recipe(model=str(base), data=data, task="seq2seq", train={"max_steps": 60, "lr": 1e-2}, track="none")
    best = fit(recipe).best
    truncation, before = (json.loads((f / "tokenizer.json").read_text())["truncation"] for f in (best, base))
    assert truncation is before is None  # the one of the run is not exported
    loaded = load(best, device="cpu")
    french = loaded.tokenizer.convert_tokens_to_ids("fr_XX")
    assert loaded.model.generation_config.decoder_start_token_id == french
    assert generation_start(loaded.tokenizer, "mbart") == {"decoder_start_token_id": french}
    assert generate_texts(loaded, ["a bad film"], max_new_tokens=8) == ["a good film"]


def test_cut_rows_count_once(bert):
    long = "one two three four five six"
    rows = make_rows(source=[long, "one", "one", long], target=["one", long, "one", long])
    dataset = build_task("seq2seq", rows).encode(rows, bert, 5)
    assert dataset.num_truncated == 3
    assert dataset.lengths == [5, 3, 3, 5]
    assert [len(dataset[i]["labels"]) for i in range(4)] == [3, 5, 3, 5]


def test_unclear_columns():
    with pytest.raises(DataError, match="cannot tell source and target; the columns are 'a', 'b'"):
        build_task("seq2seq", make_rows(a=["x"], b=["y"]))
    task = build_task(None, make_rows(a=["x"], b=["y"]), text="a", target="b")
    assert task.columns == {"text": "a", "target": "b"}


def test_example_text(bert):
    rows = make_rows(**COLUMNS)
    task = build_task(None, rows)
    assert task.example_text(task.encode(rows, bert, 32)[1], bert) == "[CLS] dull plot [SEP] → [CLS] a dull film [SEP]"
